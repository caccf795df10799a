"""The laws of a schedule, one file each, which `check` applies."""
