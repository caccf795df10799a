"""Status of every rank, and failures told to all: no rank waits for one that will never answer."""
