"""Execute schedules: run the rows of a schedule on the stages of a model."""
