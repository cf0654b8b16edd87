"""The base class of all sections of the config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Weights = dict[str, NonNegativeFloat]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class Section(BaseModel):
    """Unknown keys are refused. So are NaN and infinity, which the config.json of a run could not hold. The docstring
    under a field is its description in docs/config.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
