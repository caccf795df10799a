"""The `auto` schedule: a search over named, greedy and periodic orders, then local improvement; see build.py."""
