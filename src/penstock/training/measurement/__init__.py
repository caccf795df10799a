"""Measurements of all ranks in one place, as timelines and as costs of a simulation."""
