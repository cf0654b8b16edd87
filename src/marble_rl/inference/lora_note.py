"""The record beside an exported LoRA, `marble.json`: the model that it belongs to, for `marble` itself."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeFloat, PositiveInt

from marble_rl.section import ModelPath
from marble_rl.storage import Record

NOTE = "marble.json"


class LoraNote(Record):
    kind: ClassVar[str] = "a note on an exported LoRA"
    fix: ClassVar[str] = "Export the LoRA again, fix the file or delete it, and then give --model"

    base_model: ModelPath | None = None
    text_length: PositiveInt | None = None
    guidance: NonNegativeFloat | None = None
    step: int | None = None
    weights: str = ""
    rewards: list[str] = Field(default_factory=list)
    balance: str = ""
