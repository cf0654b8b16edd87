"""One reward, called with the settings of its config entry: device, batch size, timeout, retries.

The trainer and the server call rewards through this module, so that both check and count in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from marble_rl.devices import parse_device, pick_device
from marble_rl.errors import InputError, RewardFailed, described
from marble_rl.plugins import user_code
from marble_rl.rewards.core.base import Reward, RewardBatch, Scores, Traits, traits_of
from marble_rl.rewards.core.call_thread import call_within
from marble_rl.rewards.core.handing import handed
from marble_rl.rewards.core.retries import AllAttemptsFailed, RetryPolicy
from marble_rl.rewards.core.returned import checked
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Media, Prompt


@dataclass
class Counts:
    """Counts of a reward's calls so far."""

    calls: int = 0
    """Attempts at a batch, including those that failed or are in flight."""
    images: int = 0
    """Images scored."""
    failures: int = 0
    """Attempts that returned no usable scores."""
    retries: int = 0
    """Attempts made because the one before failed."""
    seconds: float = 0.0
    """Seconds spent in calls."""

    def since(self, earlier: Counts) -> Counts:
        return Counts(**{name: value - getattr(earlier, name) for name, value in vars(self).items()})


class CalledReward:
    """A reward with the settings of its config entry."""

    def __init__(self, config: RewardConfig, reward: Reward) -> None:
        self.name = config.name
        self.config = config
        self.reward = reward
        self.device = torch.device("cpu")
        """Where it was loaded."""
        self._loaded = False
        self._counts = Counts()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counts:
        """Counts so far, including retries that the reward made itself (`RewardBase.repeats`)."""
        repeats = getattr(self.reward, "repeats", 0)
        with self._lock:
            return replace(
                self._counts, failures=self._counts.failures + repeats, retries=self._counts.retries + repeats
            )

    @property
    def traits(self) -> Traits:
        """As the reward declares them. `load` may change them: a remote reward learns them from its server."""
        return traits_of(self.reward)

    @property
    def _timeout(self) -> float | None:
        """Seconds for one call. Time in which the reward waits for a server that restarts does not count."""
        timeout = self.config.timeout
        return None if timeout is None else timeout + getattr(self.reward, "patience", 0.0)

    @property
    def retries(self) -> int:
        return self.traits.retries if self.config.retries is None else self.config.retries

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether both the prompt file and the reward itself (`suits`) say so."""
        return (prompt.rewards is None or self.name in prompt.rewards) and self.suits(prompt)

    def suits(self, prompt: Prompt) -> bool:
        """The reward's own `applies_to`. Its errors become an InputError before the reward is loaded, a RewardFailed
        after."""

        def failed(error: BaseException) -> Exception:
            if isinstance(error, InputError):
                return InputError(f"rewards ({self.name}): {error}")
            return (RewardFailed if self._loaded else InputError)(
                f"reward {self.name!r} failed to say whether it applies to prompt {prompt.index} ({prompt.text!r}): "
                f"{described(error)}"
            )

        with user_code(failed, passing=(RewardFailed,)):
            return bool(self.reward.applies_to(prompt))

    def load(self, device: torch.device) -> None:
        """Load its weights on the device that its config names, else its traits, else the caller. Raises
        InputError."""

        def failed(error: BaseException) -> InputError:
            return InputError(f"rewards: {self.name!r} cannot be loaded: {described(error)}")

        with user_code(failed, passing=()):
            wanted = self._wanted_device
            named = device if wanted is None else pick_device(wanted, self._device_key)
            # `cuda` without a number is the card of this rank, in whichever thread it is said.
            self.device = device if named.type == device.type and named.index is None else named
            self.reward.load(self.device)
        self._loaded = True

    def check_device(self, ranks: int = 1) -> None:
        """Raise InputError unless the device that the config names exists, and is not one GPU for several ranks."""
        wanted = self._wanted_device
        if ranks > 1 and wanted not in (None, "auto"):
            device = parse_device(wanted, self._device_key)
            if device.type != "cpu" and device.index is not None:
                raise InputError(
                    f"{self._device_key}: {wanted!r} is the same for every rank of a machine, and there are {ranks} "
                    "ranks: each would load a copy of the reward there. Leave device out, so that each rank scores on "
                    "its own GPU, or set cpu; or load the reward once, in a server, and give `type: remote` "
                    "(docs/rewards/remote.md)"
                )
        if self.config.device is not None:
            pick_device(self.config.device, self._device_key)

    @property
    def _wanted_device(self) -> str | None:
        """By name; None: that of the trained model."""
        return self.config.device or self.traits.device

    @property
    def _device_key(self) -> str:
        return f"rewards ({self.name}).device"

    def score(self, batch: RewardBatch) -> list[float | None]:
        """Signed so that higher is better; None where the reward cannot judge. Raises RewardFailed."""
        scores = self.score_unsigned(batch)
        return scores if self.traits.higher_is_better else [None if score is None else -score for score in scores]

    def score_unsigned(self, batch: RewardBatch) -> list[float | None]:
        """Scores with the sign that the reward returned."""
        self._check_media(batch)
        size = self.config.batch_size or self.traits.batch_size or len(batch.prompts)
        return [score for part in _split(batch, size) for score in self._attempts(part)]

    def score_fresh(self, batch: RewardBatch) -> list[float | None]:
        """One call without retries; raises what the reward raises (see `call_within`)."""
        self._check_media(batch)
        return self._attempt(batch)

    def _attempt(self, batch: RewardBatch) -> list[float | None]:
        """One call, checked and counted."""
        began = time.perf_counter()
        self._count(calls=1)
        scores: list[float | None] = []
        try:
            scores = call_within(lambda: self._call(batch), self._timeout, self.name)
        finally:
            seconds = time.perf_counter() - began
            self._count(images=len(scores), failures=int(not scores), seconds=seconds)
        return scores

    def _call(self, batch: RewardBatch) -> list[float | None]:
        with handed(batch, self.traits) as given, self._autocast():
            return checked(self.reward.score(given), len(batch.prompts), self.traits.range)

    def _attempts(self, batch: RewardBatch) -> Scores:
        policy = RetryPolicy(
            self.retries,
            self.config.backoff,
            on_retry=lambda: self._count(retries=1),
            errors=Exception,
        )
        try:
            return policy.call(lambda _: self._attempt(batch))
        except AllAttemptsFailed as error:
            raise RewardFailed(self._explained(error, batch)) from error.failures[-1]

    def _explained(self, error: AllAttemptsFailed, batch: RewardBatch) -> str:
        row = getattr(error.failures[-1], "row", 0)
        known = isinstance(row, int) and 0 <= row < len(batch.prompts)  # another library's exception may have a `row`
        prompt = batch.prompts[row if known else 0]
        attempts = f" after {error.attempts}" if len(error.failures) > 1 else ""
        return (
            f"reward {self.name!r} failed{attempts} on an image of prompt {prompt.index} ({prompt.text!r}): "
            f"{error.reasons(described)}"
        )

    def _check_media(self, batch: RewardBatch) -> None:
        self.check_media("video" if batch.images.ndim == 5 else "image")

    def check_media(self, media: Media) -> None:
        """Raise InputError unless it scores what the model makes, images or videos."""
        if media != self.traits.media:
            fix = "wrap it in `type: frames`" if media == "video" else "use it with a model that makes videos"
            raise InputError(f"rewards ({self.name}): scores {self.traits.media}s, but was given {media}s; {fix}")

    def _autocast(self) -> AbstractContextManager[object]:
        precision = self.config.precision or self.traits.precision
        if precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, precision))

    def _count(self, **more: float) -> None:
        with self._lock:  # several threads may call one reward
            for name, value in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + value)


def _split(batch: RewardBatch, size: int) -> Iterator[RewardBatch]:
    for start in range(0, len(batch.prompts), size):
        rows = slice(start, start + size)
        yield RewardBatch(batch.images[rows], batch.prompts[rows])
