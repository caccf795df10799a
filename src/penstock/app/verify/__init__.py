"""`penstock verify`: compare a pipeline with one plain process."""
