"""Models for examples, benchmarks and first runs: plain torch, which know nothing of pipelines."""
