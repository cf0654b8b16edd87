"""Stage 1: prompts, where they come from, their groups, and which rewards apply."""

from marble_rl.prompts.drawing import PromptSet
from marble_rl.prompts.sources import load_prompts, read_prompt_file

__all__ = ["PromptSet", "load_prompts", "read_prompt_file"]
