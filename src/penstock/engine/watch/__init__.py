"""Who is alive, what each rank is doing, and why one failed: so that no rank waits for one that will never answer."""
