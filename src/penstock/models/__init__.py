"""Models for examples, benchmarks and first runs: plain torch modules, independent of pipelines."""
