"""A run's folder, its checkpoints, log, images and trackers."""
