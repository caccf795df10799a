"""The ranks of a run: how they find each other, and small messages between all of them."""
