"""`marble rate`: people rate pictures of several models, blind."""
