"""Training state in files, which any layout of stages can load."""
