"""Observers of a run: times, peak memory, bytes of activations."""
