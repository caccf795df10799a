"""Train from a config, in this process or on workers."""
