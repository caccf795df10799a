"""`penstock compare`."""
