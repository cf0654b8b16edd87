"""`marble bench`: what one gradient per reward costs beside a weighted sum, measured on this machine."""
