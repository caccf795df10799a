"""`penstock plan`: find a plan and explain it."""
