"""Attention backends, and those that cut gradients."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models import load_model
from marble_rl.models.precision import MemorySettings, memory_settings
from marble_rl.models.settings import ModelConfig
from runs import marble, write_config
from tools.tiny import BUILDERS

CPU = torch.device("cpu")


def test_attention_backends(config_file: Path, tmp_path: Path) -> None:
    BUILDERS["flux"](tmp_path / "flux")
    for name, says in (("native", None), ("telepathy", "'telepathy' cannot be used here.*native")):
        settings = memory_settings(ModelConfig(path="x", attention=name), torch.device("cpu"))
        expected = nullcontext() if says is None else pytest.raises(InputError, match=f"model.attention: {says}")
        with expected:
            load_model(str(tmp_path / "flux"), torch.device("cpu"), memory=settings)
    outcome = marble("train", config_file, "--out", tmp_path / "run", "--set", "model.attention=native")
    assert outcome.code == 2
    assert "'native' given, but in diffusers Stable Diffusion 3 has no choice of backends" in outcome.err


class Detaching(torch.autograd.Function):
    """Attention that goes forward only, as kernels of other packages do: no gradient, or one of zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda plain, q, k, v: plain(q, k, v).detach(), "gives no gradient for queries, keys, values"),
        (lambda plain, q, k, v: plain(q, k.detach(), v), "gives no gradient for keys: it can sample, but not train"),
        (lambda plain, q, k, v: Detaching.apply(plain(q, k, v)), "gives no gradient for queries, keys, values"),
        (lambda plain, q, k, v: plain(q, k, v[..., :3]).expand(7), "cannot be trained with in float32 on cpu: "),
    ],
    ids=["no gradient", "one input cut", "zeros", "an error of its own"],
)
def test_attention_that_cuts_gradients_is_refused_for_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, says: str
) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    BUILDERS["flux"](tmp_path / "flux")
    model = load_model(str(tmp_path / "flux"), CPU, memory=MemorySettings(attention="native"))
    model.check_trainable()
    backends: dict[Any, Any] = _AttentionBackendRegistry._backends
    native = backends[AttentionBackendName.NATIVE]

    def broken(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Any:
        return changed(lambda *tensors: native(*tensors, **settings), query, key, value)

    monkeypatch.setitem(backends, AttentionBackendName.NATIVE, broken)
    config = write_config(tmp_path / "c.yaml", tmp_path / "flux")
    small = ("--set", "rollout.height=16", "--set", "rollout.width=16", "--set", "trainer.steps=1")
    outcome = marble("train", config, "--out", tmp_path / "run", "--set", "model.attention=native", *small)
    assert outcome.code == 2
    assert f"model.attention: 'native' {says}" in outcome.err
    assert not (tmp_path / "run").exists()
    load_model(str(tmp_path / "flux"), CPU, memory=MemorySettings(attention="native"))  # as sampling does


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_queries_and_keys_stay_narrow_on_cuda(family: str, tmp_path: Path) -> None:
    """Its autocast, unlike the CPU's, widens torch's RMSNorm. Tensors without numbers show it without a card."""
    from torch._subclasses import FakeTensorMode

    BUILDERS[family](tmp_path)
    model = load_model(str(tmp_path), CPU, memory=MemorySettings(dtype=torch.bfloat16))
    norms = [module for module in model.transformer.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert norms
    plain = torch.nn.RMSNorm(norms[0].normalized_shape, eps=norms[0].eps, dtype=torch.bfloat16)
    plain.load_state_dict(norms[0].state_dict())
    x = torch.randn(3, norms[0].normalized_shape[0], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norms[0](x), plain(x))
    before = torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            there = torch.empty(3, *norms[0].normalized_shape, dtype=torch.bfloat16, device="cuda")
            for norm in (plain, *norms):
                norm.weight = torch.nn.Parameter(torch.empty_like(norm.weight, device="cuda"), requires_grad=False)
            assert plain(there).dtype == torch.float32
            assert {norm(there).dtype for norm in norms} == {torch.bfloat16}
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
