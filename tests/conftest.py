"""Puts this folder on the path, so that tests can share `symbolic`, `published` and `mutate`."""
