"""Observers that measure times, peak memory and activation bytes."""
