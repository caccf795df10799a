"""The user's model as stages that run forward, backward, or input and weight gradient apart."""
