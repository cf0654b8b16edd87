"""`harmonizer.backward`: in place of `loss.backward()` in a training loop that is not ours (docs/harmonizer.md).

It leaves sum_k w_k g_k (+ what is shared by all rewards) in ``.grad``, nothing else: neither momenta nor clipped
gradients. The optimizer, which has a momentum of its own, is the caller's.

    g_k = grad L_k                      of K losses, whatever they are
    g_k = grad mean_i A_ki slope_i      of a loss that is affine in the advantage: losses/base.py

In a step for which the rule asks for no gradients, one backward pass gives sum_k c_k g_k with its coefficients c.

``.grad`` is written once, with the last micro-batch of an update: before it, the weights are not known. Gradients come
from `torch.autograd.grad`, so the hooks of DistributedDataParallel do not run. Where torch.distributed is initialised,
the gradients are averaged over its ranks here, with one all-reduce; averaging them again changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from marble_rl.distributed.callers_group import callers_world
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.gradients.scalar_losses import LossAccumulator
from marble_rl.losses.base import AffineLoss

Losses = Sequence[Tensor] | Mapping[str, Tensor] | Tensor | AffineLoss


class OwnLoop(ABC):
    """Base class of the harmonizers: `backward`, and the count of updates that it needs."""

    rewards: tuple[str, ...]
    adv_clip: float
    updates = 0
    """Updates that `backward` has completed"""
    _sums: LossAccumulator | None = None
    """Gradients of the micro-batches of the current update"""
    _verified: set[int] | None = None
    """Sizes of micro-batches whose fused gradients were compared with separate ones"""

    def backward(
        self,
        losses: Losses,
        params: Iterable[Tensor],
        advantages: Tensor | None = None,
        *,
        shared: Tensor | None = None,
        through: Tensor | None = None,
        last: bool = True,
    ) -> Tensor | None:
        """Add the balanced gradient of K losses to the ``.grad`` of ``params``; returns the weights [K] of the losses.

        ``losses``: K scalars in the order of the rewards, or by name. Or an `AffineLoss` of N samples, with
        ``advantages`` [N, K]: then the gradients of all rewards cost one backward pass (call `fuse(model)` first).
        ``shared``: a scalar that all rewards share and that is not balanced, such as a KL term.
        ``through``: per-sample numbers [N], such as log-probabilities, that each loss is a function of. After
        `fuse(model)` the gradients of all losses then cost one backward pass through the model.
        ``last``: False for all micro-batches of an update but the last one. They add up, as with `loss.backward()`:
        divide each loss by their number. (An `AffineLoss` is averaged over the samples of all micro-batches.) Before
        the last one nothing is in ``.grad``, and None is returned.
        """
        try:
            return self._backward(losses, list(params), advantages, shared, through, last)
        except BaseException:  # a caller may retry, with a smaller micro-batch for example
            self._sums = None
            raise

    @abstractmethod
    def _coefficients(self) -> Tensor | None:
        """[K]: of the losses in an ordinary step; None where the next update needs one gradient per reward."""

    @abstractmethod
    def _weigh(self, gradients: RewardGradients) -> Tensor:
        """[K]: weights of the gradients; the rule remembers the batch."""

    def _backward(
        self,
        losses: Losses,
        params: list[Tensor],
        advantages: Tensor | None,
        shared: Tensor | None,
        through: Tensor | None,
        last: bool,
    ) -> Tensor | None:
        k = len(self.rewards)
        coefficients = torch.ones(1, dtype=torch.float64) if k == 1 else self._coefficients()
        if self._sums is None:
            trained = [p for p in params if p.requires_grad]
            columns = k if coefficients is None else 0
            self._verified = set() if self._verified is None else self._verified
            self._sums = LossAccumulator(
                columns, trained, verified=self._verified, computed_in=torch.bfloat16, halves_on=0
            )  # the loop may use autocast: bfloat16 sets the tolerance
        if isinstance(losses, AffineLoss):
            _only_for_scalars(shared=shared, through=through)
            self._add_affine(self._sums, losses, advantages, coefficients)
        else:
            if advantages is not None:
                raise ValueError("advantages belong to an AffineLoss; K losses hold theirs already")
            self._add_scalars(self._sums, self._in_order(losses), shared, through, coefficients)
        return self._finish(coefficients) if last else None

    def _add_affine(
        self, sums: LossAccumulator, loss: AffineLoss, advantages: Tensor | None, coefficients: Tensor | None
    ) -> None:
        k = len(self.rewards)
        if advantages is None or tuple(advantages.shape) != (len(loss.slope), k):
            got = None if advantages is None else list(advantages.shape)
            raise ValueError(f"advantages must be [{len(loss.slope)}, {k}], one column per reward, got {got}")
        clamped = advantages.detach().clamp(-self.adv_clip, self.adv_clip).to(loss.slope)
        if coefficients is None:
            sums.add(loss.slope, loss.base if loss.base.requires_grad else None, clamped)
        else:
            sums.add(None, loss.base + (clamped @ coefficients.to(clamped)) * loss.slope, None)

    def _add_scalars(
        self,
        sums: LossAccumulator,
        losses: list[Tensor],
        shared: Tensor | None,
        through: Tensor | None,
        coefficients: Tensor | None,
    ) -> None:
        if not any(loss.requires_grad for loss in (*losses, *([] if shared is None else [shared]))):
            raise ValueError("no loss requires a gradient: was the forward pass made under torch.no_grad()?")
        if coefficients is None:
            sums.add_losses(losses, shared, through)
            return
        pairs = zip(coefficients.tolist(), losses, strict=True)
        terms = [loss if c == 1.0 else c * loss for c, loss in pairs if loss.requires_grad]
        terms += [] if shared is None else [shared]
        sums.add_losses([], sum(terms[1:], terms[0]) if terms else None)

    def _finish(self, coefficients: Tensor | None) -> Tensor:
        """Average over ranks, weigh, and write ``.grad``."""
        sums, self._sums = self._sums, None
        assert sums is not None
        sums.sum_over(callers_world(), torch.zeros(0))
        gradients = sums.finish()
        if not gradients.reached:
            raise ValueError(
                "no loss depends on any of params: give the parameters that the forward pass used (parameters that "
                "FSDP shards are not supported)"
            )
        self.updates += 1
        if coefficients is not None:
            weights, update = coefficients, gradients.shared
        else:
            finite = bool(torch.isfinite(gradients.gram).all())
            # An overflow reaches .grad, where a GradScaler finds it and skips the step. The rule does not remember it.
            weights = self._weigh(gradients) if finite else torch.full((len(self.rewards),), 1 / len(self.rewards))
            update = weights.to(gradients.g) @ gradients.g + gradients.shared
        _write(sums.params, update, gradients.reached)
        return weights

    def _in_order(self, losses: Sequence[Tensor] | Mapping[str, Tensor] | Tensor) -> list[Tensor]:
        names = list(self.rewards)
        if isinstance(losses, Mapping):
            if set(losses) != set(names):
                raise ValueError(f"losses must be those of the rewards {names}, got {list(losses)}")
            losses = [losses[name] for name in names]
        if len(losses) != len(names):
            raise ValueError(f"losses must be {len(names)}, one for each of {names}, got {len(losses)}")
        for name, loss in zip(names, losses, strict=True):
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss of {name} must be one number, got the shape {list(loss.shape)}; take a mean"
                )
        return [loss.reshape(()) for loss in losses]


def _only_for_scalars(**given: Tensor | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} belongs to K losses; add it to the base of an AffineLoss")


@torch.no_grad()
def _write(params: Sequence[Tensor], update: Tensor, reached: Sequence[int]) -> None:
    """Add the update [P] to ``.grad``. Parameters that no loss depends on keep theirs: None is not zero to AdamW, which
    decays the weights of the latter."""
    parts = update.split([p.numel() for p in params])
    for i in reached:
        part = parts[i].view_as(params[i]).to(params[i].dtype)
        if params[i].grad is None:
            params[i].grad = part.clone()
        else:
            params[i].grad += part
