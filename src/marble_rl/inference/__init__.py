"""Using a run: opening, sampling, exporting."""
