"""Weights for other tools, and from them."""
