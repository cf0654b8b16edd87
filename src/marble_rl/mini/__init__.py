"""The embedded world: rendered scenes with captions, small enough for a laptop CPU."""

from pathlib import Path

from marble_rl.section import MINI

__all__ = ["MINI", "WEIGHTS", "embedded"]

WEIGHTS = Path(__file__).parent / "weights"


def embedded(path: str, part: str) -> str:
    """A model's path. For `mini`, the folder of that part inside the package."""
    return str(WEIGHTS / part) if path == MINI else path
