"""The record of a diagnosis, `diagnosis.json`. Intervals are those of diagnose/intervals.py, None where unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from marble_rl.intervals import Interval
from marble_rl.storage import Maybe, Record, Text

DIAGNOSIS = "diagnosis.json"
Figures = dict[str, Interval]
"""`min_cos`, `mean_cos`, `var_cos` and `conflict` of a direction; empty where no cosine is defined."""


@dataclass(frozen=True)
class DirectionFigures:
    """How one way to combine the rewards serves each of them. diagnose/analysis.py says what is measured."""

    in_batch: Figures
    """With the gradients of the batch that the direction was made from."""
    independent: Figures
    """With those of another batch."""
    rest: Figures
    """With the mean gradient of all other batches."""
    each: list[Interval | None]
    """[K] cosine with each reward's mean gradient of the other batches."""


@dataclass(frozen=True)
class AppliedFigures:
    """Of the step that AdamW takes, on independent batches."""

    min_cos: Interval | None
    conflict: Interval | None


@dataclass(frozen=True)
class QpFacts:
    """Of the plain QP on unit gradients, over the batches in which some reward has a gradient."""

    norm: list[NonNegativeFloat]
    """Length of the min-norm point: the cosine that it guarantees every reward in its own batch."""
    near_zero: float
    """Share of batches with a min-norm point shorter than 0.05."""


@dataclass(frozen=True)
class AdvantageFacts:
    """Are the cosines between gradients those of parameters, or only the correlations of the rewards' advantages?

    g_k = mean_i A_ki s_i. Where the samples' s_i have nothing in common, as in noise, g_k.g_l is
    mean_i A_ki A_li |s_i|^2 / N: the products of gradients are those of advantages, and the min-norm point is the mix
    of advantages with the smallest variance. It could be computed without any gradient, and says nothing of what the
    parameters can do for a reward.
    """

    correlations: list[list[Maybe]]
    """[K, K] between the rewards' advantages, mean over the batches where both have any; None where there are none."""
    agreement: Interval | None
    """Correlation, over pairs of rewards, of gradients' cosines with advantages' correlations in the same batch; None
    for less than three rewards."""
    alpha: list[Interval | None]
    """[K] of the min-norm point of the gradients, over the batches that have any."""
    alpha_of_advantages: list[Interval | None]
    """[K] of the advantages."""


@dataclass(frozen=True)
class Sample:
    """One image of the first batch."""

    source: str
    prompt: Text
    advantages: list[float | None]
    """[K]; None where a reward does not apply."""


@dataclass(frozen=True)
class Answer:
    """A question in words, and what the batches say to it."""

    question: str
    answer: str


class Diagnosis(Record):
    """Gradients of one checkpoint on fresh mini-batches."""

    kind: ClassVar[str] = "a diagnosis"
    fix: ClassVar[str] = "Run marble diagnose again, or delete the file"

    names: tuple[str, ...]
    """[K] rewards."""
    step: int | None
    batches: int
    images: int
    """In each batch."""
    answers: list[Answer] = Field(default_factory=list)
    """Empty in diagnoses of older versions."""
    directions: dict[str, DirectionFigures]
    larger: dict[PositiveInt, dict[str, DirectionFigures]] = Field(default_factory=dict)
    """The same for batches so many times as large, as far as there are enough."""
    applied: dict[str, AppliedFigures] = Field(default_factory=dict)
    signal: dict[PositiveFloat, list[Maybe]]
    """By batch size relative to the run's: [K]."""
    signal_intervals: list[Interval | None] = Field(default_factory=list)
    """[K] at the run's batch size; None for a reward without a gradient. Empty in diagnoses of older versions."""
    cosines: list[list[Maybe]]
    """[K, K] between the rewards' true gradients; None where the signal of one may be 0."""
    advantages: AdvantageFacts | None = None
    """None in diagnoses of older versions."""
    qp: QpFacts
    samples: list[Sample] = Field(default_factory=list)
    """Of the first batch; results that are kept in a repository are without them."""
    meanings: dict[str, str] = Field(default_factory=dict)
    """What each direction is."""

    @model_validator(mode="after")
    def _one_value_for_each_reward(self) -> Diagnosis:
        k = len(self.names)
        correlations = self.advantages.correlations if self.advantages else []
        rows = [*self.signal.values(), *self.cosines, *correlations, *(sample.advantages for sample in self.samples)]
        if any(len(row) != k for row in rows) or len(self.cosines) != k or len(correlations) not in (0, k):
            raise ValueError(f"expected one value for each of {k} rewards")
        if not (k and self.directions and self.qp.norm):
            raise ValueError("expected rewards, directions and lengths, got none of one of them")
        return self

    def by_size(self, direction: str) -> dict[int, Interval]:
        """Smallest cosine with the mean gradient of all other images, by batch size relative to the run's."""
        sizes = {1: self.directions, **self.larger}
        figures = {size: of[direction].rest for size, of in sorted(sizes.items()) if direction in of}
        return {size: rest["min_cos"] for size, rest in figures.items() if "min_cos" in rest}
