"""`marble report`: one HTML file that shows how a run went, with nothing to load beside it."""

from marble_rl.report.writing import watch_report, write_report

__all__ = ["watch_report", "write_report"]
