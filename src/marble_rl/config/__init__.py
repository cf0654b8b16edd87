"""Settings of a run: their schema, and how they are read."""

from marble_rl.config.loading import dump_config, load_config, load_scoring_config, to_yaml
from marble_rl.config.run import RunConfig
from marble_rl.errors import require_name, suggestion

__all__ = [
    "RunConfig",
    "dump_config",
    "load_config",
    "load_scoring_config",
    "require_name",
    "suggestion",
    "to_yaml",
]
