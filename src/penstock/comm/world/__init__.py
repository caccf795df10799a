"""The world of ranks: the rendezvous at the start, and collectives of a few bytes."""
