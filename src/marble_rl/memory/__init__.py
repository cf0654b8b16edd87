"""How much memory a run needs, and what happens when there is not enough."""
