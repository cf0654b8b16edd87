"""Several ranks: which share of the work each has, collectives, and errors that stop all ranks together."""
