"""Transfers of tensors between ranks: one interface (interface.py), and a module for each transport."""
