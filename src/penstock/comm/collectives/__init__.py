"""Sums over the replicas of a stage: all-reduce, reduce-scatter and all-gather within a group of ranks."""
