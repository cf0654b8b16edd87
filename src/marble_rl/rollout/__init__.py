"""Sampling: ODE solvers, and rollouts of the old policy."""
