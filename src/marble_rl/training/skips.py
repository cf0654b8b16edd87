"""Updates that are left out because a loss or gradient is not finite (`optimizer.non_finite: skip`)."""

from __future__ import annotations

from marble_rl.errors import NonFiniteGradient


class Skips:
    """Counts the updates that were skipped. A skipped update changes nothing and does not count as a step.

    Its rollout is dropped with it. ``total`` is added to the number of a rollout, so that the next attempt draws other
    prompts and noise; it is saved, so that a resumed run draws the same ones.
    """

    MOST = 10
    """Limit of skipped updates in a row: more of them mean that training has diverged."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.total = 0
        self._in_a_row = 0

    def skip(self, bad: NonFiniteGradient) -> None:
        """Count one, or raise the error where skipping is not allowed or not sensible any more."""
        if not self.allowed:
            raise bad
        if self._in_a_row == self.MOST:
            raise NonFiniteGradient(f"{self.MOST} updates in a row were skipped, and now {bad}") from bad
        self._in_a_row += 1
        self.total += 1

    def update_done(self) -> None:
        self._in_a_row = 0

    @property
    def figures(self) -> dict[str, float]:
        """For the log: how many updates were skipped before this one."""
        return {"guard/skipped": float(self._in_a_row)} if self.allowed else {}
