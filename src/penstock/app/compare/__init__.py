"""`penstock compare`: train by several methods and compare them."""
