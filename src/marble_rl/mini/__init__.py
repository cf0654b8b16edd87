"""The embedded world: rendered scenes with captions, small enough for a laptop CPU."""
