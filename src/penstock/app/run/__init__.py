"""Run a config: in this process or on workers started here, with its progress, outcome and checkpoints."""
