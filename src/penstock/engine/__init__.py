"""Schedule × Stages → trained weights: the same actions, run for real."""
