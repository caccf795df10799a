"""How tensors get from one rank to another: one small interface (lane.py), and a file for each way."""
