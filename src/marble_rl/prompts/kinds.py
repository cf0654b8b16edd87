"""A kind of generated prompts: a finite number of them, each written from its number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from marble_rl.prompts.files import Row


@dataclass(frozen=True)
class Kind:
    """Different numbers give different prompts."""

    weight: float
    size: int
    write: Callable[[int], Row]
    """From a number below ``size`` to its prompt"""


def deal(weights: Mapping[str, float], count: int) -> Iterator[str]:
    """``count`` names in turn: always the one that is furthest behind its weight, so every stretch has the mix."""
    total = sum(weights.values())
    dealt = dict.fromkeys((name for name, weight in weights.items() if weight > 0), 0)
    for n in range(1, count + 1):
        name = max(dealt, key=lambda name: n * weights[name] / total - dealt[name])
        dealt[name] += 1
        yield name


def shuffled(size: int, dice: random.Random) -> Iterator[int]:
    """The numbers below ``size`` in random order, one at a time: Fisher and Yates on a list that is never written out.

    ``moved`` holds the places of that list whose number is no longer their own.
    """
    moved: dict[int, int] = {}
    for last in range(size - 1, -1, -1):
        place = dice.randrange(last + 1)
        yield moved.get(place, place)
        moved[place] = moved.pop(last, last)


def digits(number: int, *sizes: int) -> list[int]:
    """One choice for each size: the digits of ``number``, whose i-th digit counts to sizes[i], the last one first."""
    chosen = []
    for size in sizes:
        number, digit = divmod(number, size)
        chosen.append(digit)
    return chosen


def different(choices: list[int]) -> list[int]:
    """Choices without replacement: the i-th counts among the places that those before it have left."""
    places: list[int] = []
    for choice in choices:
        for taken in sorted(places):
            choice += choice >= taken
        places.append(choice)
    return places
