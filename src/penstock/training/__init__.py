"""Train a model from a user's script: the Pipeline, its options, data, updates and checkpoints."""
