"""Versions of the weights: which one an action uses, forecasts, and weights that stages share."""
