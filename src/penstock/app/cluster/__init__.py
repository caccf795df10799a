"""`penstock cluster`: measure a cluster."""
