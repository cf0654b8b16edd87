"""The study behind docs/results.md: the paper's claims, one by one, against the results of `marble compare`."""
