"""Rewards on other machines."""
