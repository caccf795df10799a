"""`penstock verify`."""
