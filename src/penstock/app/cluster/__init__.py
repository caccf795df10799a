"""`penstock cluster`."""
