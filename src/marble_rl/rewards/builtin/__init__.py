"""One file a reward."""
