"""Rewards that are constant: all images of a prompt get the same score, all advantages are 0, nothing is learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marble_rl.advantages import Scored

GROUPS = 20
"""Groups in a row, of those that a reward applies to, after which it is said, once in a run."""


class ConstantRewards:
    """Counts for each trained reward how many groups in a row it was constant in."""

    def __init__(self, names: Sequence[str]) -> None:
        self._in_a_row = dict.fromkeys(names, 0)
        self._said: list[str] = []

    def observe(self, scored: Scored) -> Iterator[str]:
        """Take in a rollout, with scores after `clip`. Yields a message for each reward that reached `GROUPS`."""
        for column, name in enumerate(scored.table.names):
            for group in scored.group_ids.unique():
                rows = (scored.group_ids == group) & scored.table.applicable[:, column]
                scores = scored.table.values[rows, column]
                if len(scores):
                    self._in_a_row[name] = self._in_a_row[name] + 1 if bool((scores == scores[0]).all()) else 0
            if self._in_a_row[name] >= GROUPS and name not in self._said:
                self._said.append(name)
                yield (
                    f"reward {name!r} was constant in the last {GROUPS} groups that it applies to: all images of a "
                    "prompt had the same score, so it teaches nothing. Try it with marble rewards check, on pictures "
                    "that it should tell apart (or look at its `clip`)"
                )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self._in_a_row), "said": list(self._said)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checkpoints of older versions have none."""
        self._in_a_row |= {name: count for name, count in state.get("in_a_row", {}).items() if name in self._in_a_row}
        self._said = list(state.get("said", []))
