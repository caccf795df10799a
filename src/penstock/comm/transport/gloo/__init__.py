"""Lanes over gloo: between hosts, and wherever shared memory cannot be had."""
