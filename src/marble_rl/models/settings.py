"""Settings of the pipeline and its adapter."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from marble_rl.section import FilePath, ModelPath, Section

ExpertChoice = Literal["both", "high", "low"]


class ModelConfig(Section):
    """The pipeline to fine-tune."""

    path: ModelPath
    """Folder in diffusers' format, a hub id such as `stabilityai/stable-diffusion-3.5-medium`, or `mini`: the small
    pipeline inside the package."""
    text_length: PositiveInt | None = None
    """Tokens of the prompt that the T5 or Qwen text encoder sees (diffusers' `max_sequence_length`); null takes 256
    for Stable Diffusion 3, 512 for other families, or as many as the tokenizer was built for if that is less."""
    guidance: NonNegativeFloat | None = None
    """Guidance scale that is an input of the transformer, in sampling and training, for families distilled to follow
    one (FLUX.1-dev); null takes 3.5. Other families refuse it."""
    device: str = "auto"
    """`auto` (the accelerator that torch finds, else the CPU), `cpu`, `cuda`, `cuda:1`, `xpu`, `mps`, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the frozen transformer and text encoders, and of the passes through them; `auto` is float32 on
    the CPU, elsewhere bfloat16, or float16 if the device lacks it. Adapters, latents and losses are always float32."""
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The same for the autoencoder. Many overflow in float16."""
    quantize: Literal["int8", "nf4"] | None = None
    """Store the transformer's weights in 8 bits (torchao) or 4 (bitsandbytes, CUDA only) and compute in `dtype`; needs
    the extra `quant`. null stores them in `dtype`."""
    gradient_checkpointing: bool = False
    """Save only the inputs of the transformer's blocks for the backward pass and recompute the rest: much less memory,
    about a third more time for gradients. The gradients are the same."""
    attention: str | None = None
    """diffusers' attention backend for the transformer, such as `native` or `flash`; most need a package and a kind of
    GPU. One without a backward pass, such as `sage`, is refused for training. null takes torch's attention."""
    decoding: Literal["whole", "sliced", "tiled"] | None = None
    """How latents become images: eight at a time (`whole`), one at a time (`sliced`), or each in overlapping tiles
    (`tiled`), whose seams are blended: images differ a little. null: `sliced` for videos, else `whole`."""


class LoraConfig(Section):
    """The trained adapter. Three copies exist: the current policy, the old policy that samples, and the EMA."""

    rank: PositiveInt = 32
    """Rank of the two factors."""
    alpha: PositiveFloat = 64.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    targets: list[str] | None = None
    """Module names to adapt; null takes the model family's attention projections."""
    experts: ExpertChoice = "both"
    """Of a model with two transformers (Wan 2.2 A14B), which to adapt: the one for high noise levels, for low ones, or
    both. The other stays as it is: it samples, but its noise levels are not trained on."""
    init: FilePath | None = None
    """LoRA to start from: a file or folder that diffusers' `save_lora_weights` wrote, such as the `lora/` of a run.
    Rank and layers must be the same; another alpha is converted. The KL term still pulls towards the model without
    adapter. Relative to the config file."""
