"""Plan × micro-batches → Schedule: one small file a method."""
