"""The nouns and their laws. Nothing here imports torch, and nothing here imports another room."""
