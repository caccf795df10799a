"""Lanes over gloo, between hosts and wherever shared memory is not available."""
