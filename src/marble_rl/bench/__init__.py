"""`marble bench`: what one gradient per reward costs compared with a weighted sum, measured on this machine."""
