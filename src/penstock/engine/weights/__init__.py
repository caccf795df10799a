"""Versions of the weights: their selection, forecasts, and weights that stages share."""
