"""The `auto` schedule: named methods, a greedy builder and local improvement, kept apart; build.py joins them."""
