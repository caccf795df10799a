"""Layers → Profile: measured here, or estimated for hardware that is not."""
