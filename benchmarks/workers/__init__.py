"""Real processes, one a rank: our pipeline beside `torch.distributed.pipelining` and the ideal, in one run."""
