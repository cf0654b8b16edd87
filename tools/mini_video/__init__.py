"""The world of the mini video pipeline: clips with captions, their prompts, their flaws. Not in the wheel."""
