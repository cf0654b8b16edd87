"""Updates that are left out because a loss or gradient is not finite (`optimizer.non_finite: skip`)."""

from __future__ import annotations

from marble_rl.errors import NonFiniteGradient


class Skips:
    """Updates that were left out because a loss or gradient was not finite. They changed nothing and count as none.

    The rollout of such an update is dropped with it. ``total`` belongs to the number of a rollout, so that the next
    attempt draws other prompts and noise; it is saved, so that a resumed run draws the same ones.
    """

    MOST = 10
    """In a row; more of them are no accident."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.total = 0
        self._in_a_row = 0

    def skip(self, bad: NonFiniteGradient) -> None:
        """Count one, or raise it."""
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
        """For the log: how many were left out before this update."""
        return {"guard/skipped": float(self._in_a_row)} if self.allowed else {}
