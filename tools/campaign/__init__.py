"""Trainings that are killed, or whose disk fails, at a chosen file operation. See kill.py."""
