"""`penstock plan`."""
