"""The embedded worlds: rendered scenes and clips with captions, small enough for a laptop CPU."""

from pathlib import Path

from marble_rl.section import MINI, MINI_VIDEO

__all__ = ["MINI", "MINI_VIDEO", "PIPELINE", "WEIGHTS", "embedded"]

WEIGHTS = Path(__file__).parent / "weights"
PIPELINE, VIDEO_PIPELINE = "pipeline", "video_pipeline"


def embedded(path: str, part: str) -> str:
    """A model's path. For `mini`, the folder of that part inside the package; `mini-video` is a pipeline only."""
    if path == MINI:
        return str(WEIGHTS / part)
    return str(WEIGHTS / VIDEO_PIPELINE) if (path, part) == (MINI_VIDEO, PIPELINE) else path
