"""Several processes: who has which share of the work, and exchanges that fail together."""
