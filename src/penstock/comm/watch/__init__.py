"""The status of every rank, and the propagation of failures, so that no rank waits for one that has failed."""
