"""`penstock profile` and `penstock estimate`."""
