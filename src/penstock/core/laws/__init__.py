"""The laws of a schedule, one file each: `check` asks them all."""
