"""Tensors from one rank to another: one interface (interface.py), and a file for each transport."""
