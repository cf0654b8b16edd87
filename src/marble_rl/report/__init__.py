"""`marble report`: one HTML file that shows how a run went, with nothing to load beside it."""

from marble_rl.report.writing import watch_report, write_report, write_side_by_side

__all__ = ["watch_report", "write_report", "write_side_by_side"]
