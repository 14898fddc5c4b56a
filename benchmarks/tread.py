"""A step with token routes against one without, beside what the saved arithmetic alone allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import Kandinsky5Transformer3DModel
from torch import nn

from benchmarks.models import clock_of, make_accelerator
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from simpletuner.config.load import Layer, RunConfig, resolve
from simpletuner.config.tread import Route
from simpletuner.diffusion.batch import Batch
from simpletuner.models.kandinsky5 import attention
from simpletuner.models.kandinsky5.video import Kandinsky5VideoAdapter
from simpletuner.models.kandinsky5.video_spec import KANDINSKY5_VIDEO
from simpletuner.models.source import ModelSource
from simpletuner.techniques.base import Technique
from simpletuner.techniques.tread import Tread
from simpletuner.training.assemble import Intent, assemble
from simpletuner.training.step import optimizer_step
from tests.tiny import fill_zeros

RATE, FLAVOUR = 1e-4, "t2v-lite-sft-5s"
ROUTES = [Route(0.5, 2, -2)]
CAPTION = 128  # tokens

# deep: as many blocks and tokens as a CPU gets through. The others are the published architectures.
MODELS: dict[str, dict[str, Any]] = {
    "deep": {"model_dim": 384, "ff_dim": 1536, "time_dim": 128, "num_visual_blocks": 16, "axes_dims": (16, 24, 24)},
    "lite": {"model_dim": 1792, "ff_dim": 7168, "time_dim": 512, "num_visual_blocks": 32, "axes_dims": (16, 24, 24)},
    "image": {"model_dim": 2560, "ff_dim": 10240, "time_dim": 512, "num_visual_blocks": 50, "axes_dims": (32, 48, 48)},
    "pro": {"model_dim": 4096, "ff_dim": 16384, "time_dim": 1024, "num_visual_blocks": 60, "axes_dims": (32, 48, 48)},
}
# Frames, height and width of the latents: lite 768 x 512 with 61 frames, image 1024 x 1024, pro with 121 frames.
LATENTS = {"deep": (4, 32, 32), "lite": (16, 64, 96), "image": (1, 128, 128), "pro": (31, 64, 96)}

# How often a LoRA step does the arithmetic of the forward pass: in it, in the recomputation, and backward. There
# frozen weights take one product for each of theirs, attention five for its two.
LINEAR_PASSES, ATTENTION_PASSES = 3.0, 4.5


class _RandomAdapter(Kandinsky5VideoAdapter):
    """The family's adapter, with a transformer of random weights made on the device."""

    def __init__(self, config: RunConfig, size: str, device: str) -> None:
        flavour = KANDINSKY5_VIDEO.flavour(FLAVOUR)
        source = ModelSource.from_config(KANDINSKY5_VIDEO, flavour, config.model)
        super().__init__(flavour, source, config.model, config.text, config.caching)
        self.size, self.device = size, device

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        with torch.device(self.device):
            torch.manual_seed(0)
            model = Kandinsky5Transformer3DModel(
                in_visual_dim=16, out_visual_dim=16, in_text_dim=64, in_text_dim2=64, visual_cond=True,
                **MODELS[self.size],
            )  # fmt: skip
            fill_zeros(model)
        for name, parameter in model.named_parameters():
            if not any(each in name for each in model._keep_in_fp32_modules or ()):
                parameter.data = parameter.data.to(dtype)
        self.dtype, self._settings = dtype, dict(model.config)
        self._padding = attention.install(model)
        return model


class _Memory:
    """Stands in for the loader: the same batch without end."""

    epoch, epochs_done = 1, 0

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __next__(self) -> Batch:
        return self.batch


def make_step(size: str, device: str, techniques: Sequence[Technique]) -> Callable[[], None]:
    """One optimizer step after the other, batch 1, with activation checkpointing."""
    precision = "no" if device == "cpu" else "bf16"
    settings = {"model_type": "lora", "model_family": KANDINSKY5_VIDEO.name, "model_flavour": FLAVOUR,
                "mixed_precision": precision, "gradient_checkpointing": True, "learning_rate": RATE}  # fmt: skip
    config = resolve([Layer("benchmark", list(settings.items()))], [])
    if config is None:
        raise ValueError(settings)
    targets = list(KANDINSKY5_VIDEO.lora_targets)
    intent = Intent(lora_targets=targets, seed=0, total_steps=100_000, learning_rate=RATE)
    adapter = _RandomAdapter(config, size, device)
    assembly = assemble(config, intent, adapter, techniques, make_accelerator(device))
    assembly.transformer.train()
    embeds = {"prompt_embeds": torch.randn(CAPTION, 64), "pooled_prompt_embeds": torch.randn(64)}
    loader: Any = _Memory(Batch(torch.randn(1, 16, *LATENTS[size]), [embeds], ["memory"]))
    steps = iter(range(100_000))
    return lambda: (optimizer_step(assembly, loader, next(steps)), None)[1]


def flops(model: dict[str, Any], tokens: int) -> float:
    """Arithmetic of one visual block in a step, with so many tokens in it.

    Text blocks, embeddings and the output, which routes leave alone, come to less than a hundredth and are left out.
    """
    width = model["model_dim"]
    per_token = 2 * (6 * width**2 + 2 * width * model["ff_dim"])
    of_text = CAPTION * 2 * 2 * width**2  # keys and values of the cross-attention
    attending = 4 * width * tokens * (tokens + CAPTION)
    return LINEAR_PASSES * (tokens * per_token + of_text) + ATTENTION_PASSES * attending


def share_of_arithmetic(size: str, routes: Sequence[Route]) -> float:
    """Arithmetic of a step with routes in units of one without."""
    model, (frames, height, width) = MODELS[size], LATENTS[size]
    tokens, blocks = frames * height * width // 4, model["num_visual_blocks"]
    counts = [tokens] * blocks
    for route in (route.among(blocks) for route in routes):
        for block in range(route.first, route.last + 1):
            counts[block] = round((1 - route.ratio) * tokens)
    return sum(flops(model, count) for count in counts) / (blocks * flops(model, tokens))


def main() -> None:
    options = arguments(__doc__, tuple(MODELS), rounds=5).parse_args()
    torch.set_num_threads(1)
    techniques: dict[str, list[Technique]] = {"plain": [], "routed": [Tread(ROUTES)]}
    variants = {name: make_step(options.size, options.device, given) for name, given in techniques.items()}
    seconds = interleave(variants, options.rounds, clock_of(options.device))
    limit, bar = share_of_arithmetic(options.size, ROUTES), 0.85 if options.device == "cpu" else 0.9
    time = compare("time of a step, with routes / without", seconds, "routed", "plain")
    beside = Ratio(
        "the same / its arithmetic", [each / limit for each in time.rounds], 1 / bar,
        f"speed-up {1 / time.median:.2f} of {1 / limit:.2f}: {limit / time.median:.0%}, at least {bar:.0%} wanted",
    )  # fmt: skip
    title = f"Token routes, {ROUTES[0].ratio:.0%} left out of blocks 2 to -2, {options.size} model on {options.device}"
    show(title, [time, beside], options)
    print("\nSpeed-up that the arithmetic of the published models allows, by the share that is left out:")
    for row in speed_up_table():
        print("".join(f"{cell:>8}" for cell in row))


def speed_up_table() -> list[list[str]]:
    """What can be gained from blocks 2 to -2 of the published models, by the share of tokens that is left out."""
    models, ratios = ("image", "lite", "pro"), (0.25, 0.5, 0.75)
    rows = [[1 / share_of_arithmetic(size, [Route(ratio, 2, -2)]) for size in models] for ratio in ratios]
    return [
        ["", *models],
        *([f"{ratio:g}", *(f"{each:.2f}" for each in row)] for ratio, row in zip(ratios, rows, strict=True)),
    ]


if __name__ == "__main__":
    main()
