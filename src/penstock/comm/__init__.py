"""Communication between ranks: the world of ranks, transports of tensors, and the watch over failures."""
