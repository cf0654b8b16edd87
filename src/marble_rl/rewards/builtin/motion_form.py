"""The metadata `motion` of a prompt: what shall move in a video, and how.

    {"motion": {"kind": "move", "objects": [{"class": "marble", "color": "red"}], "direction": "left", "speed": "slow"}}

`move` and `stop` (move, and stand still half-way) have a direction; `fall` is down, faster and faster; `bounce` is down
and up again, with a direction also sideways; `meet` and `part` are about two objects.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from marble_rl.errors import InputError
from marble_rl.section import shown
from marble_rl.types import Prompt

DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
"""(across, down)"""
PAIRS = ("meet", "part")


class Thing(BaseModel):
    """An object, as in GenEval's metadata."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(alias="class", min_length=1)
    color: str | None = None


class WantedMotion(BaseModel):
    """What a prompt's `motion` asks for."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["move", "stop", "fall", "bounce", "meet", "part"]
    objects: list[Thing]
    direction: Literal["left", "right", "up", "down"] | None = None
    speed: Literal["slow", "fast"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> WantedMotion:
        wanted = 2 if self.kind in PAIRS else 1
        if len(self.objects) != wanted:
            raise ValueError(f"`{self.kind}` needs {wanted} in `objects`")
        if (self.direction is None) == (self.kind in ("move", "stop")):
            if self.direction is None:
                raise ValueError(f"`{self.kind}` needs a `direction`")
            if self.kind != "bounce":
                raise ValueError(f"`{self.kind}` takes no `direction`")
        if self.kind == "bounce" and self.direction in ("up", "down"):
            raise ValueError("`bounce` takes the `direction` left or right, or none")
        if self.speed is not None and self.kind not in ("move", "stop"):
            raise ValueError(f"`{self.kind}` takes no `speed`")
        return self

    def include(self) -> dict[str, Any]:
        """Its objects in GenEval's form."""
        things = [thing.model_dump(by_alias=True, exclude_none=True) for thing in self.objects]
        return {"include": [{**thing, "count": 1} for thing in things]}


def wanted_motion(prompt: Prompt) -> WantedMotion | None:
    """None where the prompt has no `motion`; InputError where it is in another form."""
    given = prompt.metadata.get("motion")
    if given is None:
        return None
    try:
        return WantedMotion.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("motion", *first["loc"])))
        raise InputError(
            f"metadata of the prompt {prompt.text!r} (source {prompt.source!r}): {place}: got {shown(first['input'])}; "
            f"{first['msg'].removeprefix('Value error, ')}. See the form in docs/rewards/trajectory.md"
        ) from None
