"""What every model family has to do, written once: models/test_flux.py and its like apply it,
invariant/test_families.py drives every family through the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, QwenImagePipeline, UniPCMultistepScheduler
from torch import Tensor

from marble_rl.config import load_config
from marble_rl.inference.export import export_lora
from marble_rl.inference.opening import Opened, sample_images
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.models import load_model
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rollout.rollout import roll_out, sample
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.training.batch import training_batch
from runs import write_config
from stages import policy_gradients

PROMPTS = ["a cup", "two red hats"]
STEPS = 3
HEIGHT, WIDTH = 16, 32
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Family:
    """How to speak to plain diffusers' pipeline of a family."""

    text_length: int
    pack: Callable[[Tensor], Tensor] = lambda latents: latents
    """Latents as the pipeline's ``latents`` argument wants them."""
    frames: int | None = None
    prepare: Callable[[Any, DiffusionModel], None] = lambda pipeline, model: None
    """What has to be changed before plain diffusers takes Euler steps."""

    @property
    def size(self) -> dict[str, int]:
        return {"height": HEIGHT, "width": WIDTH, **({} if self.frames is None else {"frames": self.frames})}

    def load(self, folder: Path, **settings: Any) -> Any:
        return load_model(str(folder), CPU, self.text_length, **settings)

    def noise(self, model: DiffusionModel) -> Tensor:
        shape = (len(PROMPTS), *model.latent_shape(**self.size))
        return torch.randn(shape, generator=torch.Generator().manual_seed(3))

    def ours(self, model: DiffusionModel) -> tuple[Tensor, Tensor]:
        noise = self.noise(model)
        sigmas = model.sigmas(STEPS, tuple(noise.shape[1:]))
        return sample(model, noise, PromptCache(model).encode(PROMPTS), sigmas, "euler")

    def plain(self, folder: Path, model: Any) -> Any:
        """The same folder, opened by diffusers alone."""
        pipeline = model.diffusers_class().from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        self.prepare(pipeline, model)
        return pipeline

    def theirs(self, pipeline: Any, model: DiffusionModel, output_type: str, **arguments: Any) -> Any:
        """Samples of plain diffusers for the prompts, called as the README of an export says."""
        _, plain_arguments = model.plain_call()
        frames = {} if self.frames is None else {"num_frames": self.frames}
        inputs = {"prompt": PROMPTS, "latents": self.pack(self.noise(model))} | arguments
        size = {"height": HEIGHT, "width": WIDTH, **frames}
        output = pipeline(
            num_inference_steps=STEPS, output_type=output_type, return_dict=False, **inputs, **size, **plain_arguments
        )
        return output[0]


class EulerAlong(FlowMatchEulerDiscreteScheduler):
    """Euler steps through given levels, in a pipeline that has no argument for them."""

    def set_timesteps(self, steps: int, device: Any = None) -> None:
        super().set_timesteps(sigmas=self.levels, device=device)
        assert steps == len(self.timesteps)


def take_euler_steps(pipeline: Any, model: DiffusionModel) -> None:
    """Wan's published scheduler takes other steps (UniPC) and rounds timesteps; its noise levels stay."""
    levels = UniPCMultistepScheduler.from_config(pipeline.scheduler.config)
    levels.set_timesteps(STEPS)
    pipeline.scheduler = EulerAlong()
    pipeline.scheduler.levels = levels.sigmas[:-1].numpy()


SD3 = Family(text_length=16)
FLUX = Family(text_length=16, pack=lambda latents: FluxPipeline._pack_latents(latents, *latents.shape))
QWEN = Family(text_length=24, pack=lambda latents: QwenImagePipeline._pack_latents(latents, *latents.shape))
WAN = Family(text_length=16, frames=5, prepare=take_euler_steps)


def assert_samples_are_those_of_plain_diffusers(family: Family, folder: Path) -> None:
    model = family.load(folder)
    pipeline = family.plain(folder, model)
    x0, images = family.ours(model)
    assert images.dtype == torch.uint8
    assert images.shape == (2, *([] if family.frames is None else [family.frames]), HEIGHT, WIDTH, 3)
    assert images.float().std() > 5  # something to see
    assert not torch.allclose(x0[0], x0[1], atol=0.1)
    latents = family.theirs(pipeline, model, "latent")
    torch.testing.assert_close(family.pack(x0), latents, atol=1e-4, rtol=0)
    assert_same_pixels(images, family.theirs(pipeline, model, "np"))


def assert_a_seed_gives_the_image_of_plain_diffusers(family: Family, folder: Path) -> None:
    """Also where diffusers draws the noise."""
    model = family.load(folder)
    pipeline = family.plain(folder, model)
    opened = Opened(model, None, None, None)
    images = list(sample_images(opened, "a kite", seed=7, images=2, steps=STEPS, solver="euler", **family.size))
    assert len(images) == 2
    for i, image in enumerate(images):
        draw = torch.Generator().manual_seed(7 + i)
        theirs = family.theirs(pipeline, model, "np", prompt="a kite", latents=None, generator=draw)
        assert_same_pixels(image[None], theirs)


def assert_same_pixels(images: Tensor, theirs: Any) -> None:
    """Within one of 255 levels."""
    assert images.shape == theirs.shape
    assert np.abs(images.numpy() - 255.0 * np.asarray(theirs)).max() <= 1.0


def assert_exported_lora_is_that_of_plain_diffusers(family: Family, folder: Path, out: Path) -> None:
    model = family.load(folder)
    policy = adapted(model)
    model.write_lora(out, "ema")
    x0 = assert_plain_diffusers_with_the_lora_samples_as_we_do(family, folder, model, policy, out)
    again = family.load(folder)
    again.read_lora(out)
    torch.testing.assert_close(family.ours(again)[0], x0, atol=1e-5, rtol=0)


def assert_plain_diffusers_with_the_lora_samples_as_we_do(
    family: Family, folder: Path, model: DiffusionModel, policy: LoraPolicy, lora: Path
) -> Tensor:
    """Within 1e-4, and unlike the bare model. Returns our latents."""
    with policy.acting_as("ema"):
        x0, _ = family.ours(model)
    pipeline = family.plain(folder, model)
    bare = family.theirs(pipeline, model, "latent")
    assert (family.pack(x0) - bare).abs().max() > 0.05
    load_lora(pipeline, lora)
    torch.testing.assert_close(family.pack(x0), family.theirs(pipeline, model, "latent"), atol=1e-4, rtol=0)
    return x0


def load_lora(pipeline: Any, folder: Path, **arguments: Any) -> None:
    """Into plain diffusers: one file, or one for each of two transformers."""
    second = {"load_into_transformer_2": True}
    for part, where in {"": {}, "_high_noise": {}, "_low_noise": second}.items():
        name = f"pytorch_lora_weights{part}.safetensors"
        if (folder / name).exists():
            pipeline.load_lora_weights(folder, weight_name=name, **where, **arguments)


def assert_the_readme_of_an_export_runs(family: Family, folder: Path, tmp_path: Path) -> None:
    """In plain diffusers, as it stands."""
    model = family.load(folder)
    config = load_config(write_config(tmp_path / "run.yaml", folder, rollout=family.size))
    export_lora(Opened(model, adapted(model), config, 4), "ema", tmp_path / "lora")
    readme = (tmp_path / "lora" / "README.md").read_text()
    assert "(`balance: marble`, 4 steps, ema weights)" in readme
    code = readme.split("```")[1].removeprefix("python").replace("THIS_FOLDER", str(tmp_path / "lora"))
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    if family.frames is None:
        assert names["image"].size == (WIDTH, HEIGHT)
    else:
        assert names["video"].shape == (family.frames, HEIGHT, WIDTH, 3)


def assert_fused_gradients_are_those_of_one_pass_each(
    family: Family, folder: Path, checkpointing: bool, levels: int = 1
) -> None:
    """In micro-batches that hold different prompts, at noise levels of each row's own."""
    model = family.load(folder)
    policy = adapted(model)
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    model.transformer.train()
    prompts = load_prompts([PromptSourceConfig(name="a", texts=[*PROMPTS, "a kite in the sky", "an ox"])], "prompts")
    config = RolloutConfig(groups=4, group_size=2, steps=STEPS, **family.size)
    rollout = roll_out(model, policy, PromptCache(model), prompts.draw(0, 0, 4), config, seed=0, index=0)
    assert rollout.images.shape[1:] == (*([] if family.frames is None else [family.frames]), HEIGHT, WIDTH, 3)
    loss = Nft(NftSettings(timesteps_per_sample=levels))
    batch = training_batch(rollout, 0, loss, seed=5, step=9, expert_of=model.experts)
    columns = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))

    def gradients(method: Any) -> Any:
        settings = {"per_column": True, "micro_batch": 3, "method": method, "verify": method == "fused"}
        return policy_gradients(model, policy, batch, columns, NftSettings(kl_weight=0.1), **settings).gradients

    fused, passes = gradients("fused"), gradients("passes")
    assert fused.by_passes == ()
    if levels > 1:  # enough for each of two transformers to have one
        assert len(fused.reached) == len(policy.parameters)
    for row, wanted in [*zip(fused.g, passes.g, strict=True), (fused.shared, passes.shared)]:
        assert wanted.norm() > 0
        assert (row - wanted).norm() <= 1e-5 * wanted.norm()


def adapted(model: DiffusionModel, **settings: Any) -> LoraPolicy:
    """Three adapters with different weights; alpha is not the rank."""
    policy = LoraPolicy(model.transformer, LoraConfig(rank=2, alpha=6, **settings), model.lora_targets, seed=0)
    draw = torch.Generator().manual_seed(1)
    for adapter in ADAPTERS:
        tensors = policy.tensors(adapter)
        policy.load_tensors(adapter, {n: 0.2 * torch.randn(t.shape, generator=draw) for n, t in tensors.items()})
    return policy
