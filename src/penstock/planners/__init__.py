"""Profile × Cluster → Plan: one small file a method. None knows the simulator; who wants it hands in a function."""
