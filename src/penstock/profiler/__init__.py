"""Profiles of layers, measured on this device or estimated for another."""
