"""The kit for people with a GPU: `python -m tools.gpu_check`."""
