"""Processes that find each other, move tensors, and notice failures."""
