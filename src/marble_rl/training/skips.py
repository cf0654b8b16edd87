"""Updates that are skipped because a loss or gradient is not finite (`optimizer.non_finite: skip`)."""

from __future__ import annotations

from marble_rl.errors import NonFiniteGradient


class Skips:
    """Counts the updates that were skipped. A skipped update changes no weights and does not count as a step.

    Its rollout is dropped. ``total`` is added to the index of the next rollout, so that the next attempt draws other
    prompts and noise. It is saved in checkpoints, so that a resumed run draws the same ones.
    """

    MOST = 10
    """Most updates skipped in a row. More of them mean that training has diverged."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.total = 0
        self._in_a_row = 0

    def skip(self, bad: NonFiniteGradient) -> None:
        """Count a skipped update; raise the error if skipping is not allowed, or after `MOST` in a row."""
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
        """For the log: how many updates were skipped directly before this one."""
        return {"guard/skipped": float(self._in_a_row)} if self.allowed else {}
