"""Configs in TOML files: their schema, rules, data, and the task that they describe."""
