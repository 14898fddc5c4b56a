"""Our optimizer step against a plain loop of diffusers and peft.

Both have the same model, LoRA, optimizer, checkpointing and batch. With block-sparse attention
(NABLA), the loop uses our kernel, since that of diffusers has no backward pass on a CPU.

`reference` runs diffusers' blocks as the loop does, `eager` runs ours, and `compiled` runs ours
through torch.compile. `compiled` has a second rival: the same loop after
`transformer.compile_repeated_blocks()`.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from benchmarks.models import (
    SHAPES,
    SIZES,
    RandomAdapter,
    build_transformer,
    clock_of,
    lora_targets,
    make_accelerator,
    make_batch,
    transformer_class,
)
from benchmarks.models import make_config as config_of
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from simpletuner.annexes.display.progress import PlainDisplay
from simpletuner.config.schema import RunConfig
from simpletuner.diffusion.batch import Batch
from simpletuner.models.kandinsky5 import nabla
from simpletuner.models.kandinsky5.blocks import Kernel, replace_attention
from simpletuner.models.kandinsky5.cost import attention_heads, head_width
from simpletuner.models.kandinsky5.tile_attention import choose_attend
from simpletuner.models.registry import FAMILIES
from simpletuner.reporting.events import EventStream
from simpletuner.reporting.record import RunRecord
from simpletuner.run.settings import assembly_settings
from simpletuner.training.assemble import assemble
from simpletuner.training.recorder import Recorder
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import TrainState
from simpletuner.training.step import optimizer_step
from simpletuner.training.update import build_optimizer

RATE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {"speed": "reference", "dynamo_backend": "no"},
    "eager": {"speed": "auto", "dynamo_backend": "no"},
    "compiled": {"speed": "auto", "dynamo_backend": "inductor"},
}
BARS = {"reference": 1.05, "eager": 0.95, "compiled": 0.75}
RIVAL = "plain loop with compile_repeated_blocks"
RIVAL_BAR = 0.9
# Bars of `compiled` on one H100.
GPU_BARS = {"lite": 0.65, "image": 0.55, "sana": 0.70}


class _Memory:
    """Stands in for the loader: the same batch without end."""

    epoch = 1
    epochs_done = 0

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __next__(self) -> Batch:
        return self.batch


def ours(
    size: str, device: str, config: RunConfig, batch: Batch, record: Path | None = None
) -> Callable[[], None]:
    """One `optimizer_step`; with the folder `record`, also its record and its display."""
    intent = TrainingSpec(
        lora_targets=lora_targets(size), seed=0, total_steps=100_000, learning_rate=RATE
    )
    assembly = assemble(
        assembly_settings(config, intent),
        RandomAdapter(config, size, device),
        [],
        make_accelerator(device),
    )
    assembly.transformer.train()
    loader: Any = _Memory(batch)
    state = TrainState()
    recorder = None
    if record is not None:
        events = EventStream(
            PlainDisplay(io.StringIO()), RunRecord(record / str(len(batch.names)), 0)
        )
        recorder = Recorder(events, epochs=1)
        recorder.on_train_start(assembly, state)

    def step() -> None:
        report = optimizer_step(assembly, loader, state.global_step)
        state.global_step = report.step
        if recorder is not None:
            recorder.on_step_end(assembly, state, report)

    return step


def plain(
    size: str, device: str, config: RunConfig, batch: Batch, *, repeated: bool = False
) -> Callable[[], None]:
    """The loop that a notebook would have.

    Args:
        repeated: let diffusers compile its blocks.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = build_transformer(size, device, dtype)
    if SHAPES[size].settings.get("attention_type") == "nabla":
        attend_to_tiles(model, device, dtype)
    model.requires_grad_(False)
    rank = config.lora.lora_rank
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=lora_targets(size)))
    model.enable_gradient_checkpointing()
    if repeated:
        model.compile_repeated_blocks()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    precision = config.precision.mixed_precision
    optimizer = build_optimizer(
        trained, config.optimizer, mixed_precision=precision, learning_rate=RATE
    )
    predict = _sana_velocity if config.model.model_family == "sanavideo" else _kandinsky_velocity

    def step() -> None:
        latents = batch.latents.to(device)
        embeds = {
            name: torch.stack([embed[name] for embed in batch.embeds]).to(device, dtype)
            for name in batch.embeds[0]
        }
        noise = torch.randn(latents.shape, device=device)
        sigmas = torch.sigmoid(torch.randn(len(latents), device=device))
        share = sigmas.view(-1, 1, 1, 1, 1)
        noisy = (1 - share) * latents + share * noise
        velocity = predict(model, noisy.to(dtype), 1000 * sigmas, embeds)
        loss = torch.nn.functional.mse_loss(velocity.float(), noise - latents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def attend_to_tiles(model: Any, device: str, dtype: torch.dtype) -> None:
    """Use our kernel for NABLA's tiles, as a function of its inputs alone.

    `TileAttention` counts tiles from call to call. A block that is compiled whole would be traced
    again for every count, and a checkpoint would recompute by another graph than it ran.
    """
    settings = dict(model.config)
    attend = choose_attend(
        torch.device(device), dtype, head_width(settings), attention_heads(settings)
    )

    def attend_chosen(query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            tiles = nabla.tile_mask(query, key, params["sta_mask"], params["P"])
        return attend(query, key, value, tiles)

    def kernel(params: dict[str, Any]) -> Kernel:
        return partial(attend_chosen, params=params)

    replace_attention(model, kernel, nabla.is_visual)


def _kandinsky_velocity(
    model: Any, noisy: Tensor, timesteps: Tensor, embeds: dict[str, Tensor]
) -> Tensor:
    frames, height, width = noisy.shape[2:]
    hidden_states = noisy.permute(0, 2, 3, 4, 1)
    if model.config.visual_cond:
        no_first_frame = torch.zeros_like(hidden_states)
        no_mask = torch.zeros_like(hidden_states[..., :1])
        hidden_states = torch.cat([hidden_states, no_first_frame, no_mask], dim=-1)
    sparse_params = None
    if model.config.attention_type == "nabla":
        sparse_params = nabla.sparse_params(hidden_states.shape, model.config, noisy.device)
    positions = [
        torch.arange(count, device=noisy.device) for count in (frames, height // 2, width // 2)
    ]
    velocity: Tensor = model(
        hidden_states=hidden_states,
        encoder_hidden_states=embeds["prompt_embeds"],
        pooled_projections=embeds["pooled_prompt_embeds"],
        timestep=timesteps,
        visual_rope_pos=positions,
        text_rope_pos=torch.arange(embeds["prompt_embeds"].shape[1], device=noisy.device),
        scale_factor=(1.0, 1.0, 1.0) if frames == 1 else (1.0, 2.0, 2.0),
        sparse_params=sparse_params,
        return_dict=False,
    )
    return velocity.permute(0, 4, 1, 2, 3)


def _sana_velocity(
    model: Any, noisy: Tensor, timesteps: Tensor, embeds: dict[str, Tensor]
) -> Tensor:
    text = embeds["prompt_embeds"]
    mask = torch.ones(text.shape[:2], dtype=torch.long, device=text.device)
    velocity: Tensor = model(
        hidden_states=noisy,
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        timestep=timesteps.floor(),
        return_dict=False,
    )[0]
    return velocity


def main() -> None:
    parser = arguments(__doc__, SIZES)
    parser.add_argument("--batches", type=int, nargs="+", help="samples per step")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=["reference", "eager"])
    parser.add_argument(
        "--steps", type=int, help="steps per round; by default as many as a size needs"
    )
    parser.add_argument(
        "--latents", type=int, nargs=3, metavar=("F", "H", "W"), help="instead of those of the size"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.steps or {"tiny": 20, "image": 5}.get(options.size, 1)
    batches = options.batches or ([1] if is_real(options.size) else [1, 4])
    latents = tuple(options.latents) if options.latents else None
    bars = bars_of(options.size, options.device)
    ratios: list[Ratio] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in batches:
            batch = make_batch(options.size, count, latents)
            variants = make_variants(options, batch, steps, record=Path(folder))
            seconds = interleave(variants, options.rounds, clock_of(options.device))
            ratios += ratios_of(seconds, f"batch {count}", options.variants, bars)
            del variants  # the next batch has models of its own
    title = f"Training step, {options.size} model on {options.device}, {steps} step(s) a round"
    show(title, ratios, options)


def is_real(size: str) -> bool:
    return SHAPES[size].gigabytes is not None


def bars_of(size: str, device: str) -> dict[str, float]:
    """The largest ratio to the plain loop that is good enough, by variant."""
    bars = dict(BARS)
    if device == "cuda":
        bars["compiled"] = GPU_BARS.get(size, 0.75)
    if not FAMILIES[SHAPES[size].family].fast_blocks:
        bars["eager"] = BARS["reference"]  # its blocks are those of diffusers
    return bars


def make_variants(
    options: argparse.Namespace, batch: Batch, steps: int, record: Path
) -> dict[str, Callable[[], None]]:
    """What is timed, by name: `steps` steps of each variant and of its rivals."""
    size = options.size
    device = options.device
    common = {
        "mixed_precision": "no" if device == "cpu" else "bf16",
        "gradient_checkpointing": True,
        "lora_rank": 16,
        "learning_rate": RATE,
    }
    configs = {name: config_of(size, **common, **settings) for name, settings in VARIANTS.items()}
    eager = configs["eager"]

    variants = {"plain": plain(size, device, eager, batch)}
    for name in options.variants:
        variants[name] = ours(size, device, configs[name], batch)
    if "compiled" in options.variants and transformer_class(size)._repeated_blocks:
        variants[RIVAL] = plain(size, device, eager, batch, repeated=True)
    if not is_real(size):  # one more copy of a real model would prove nothing
        variants["recorded"] = ours(size, device, eager, batch, record)
    return {name: _repeat(step, steps) for name, step in variants.items()}


def ratios_of(
    seconds: dict[str, list[float]], batch: str, names: list[str], bars: dict[str, float]
) -> list[Ratio]:
    """Every variant in units of the plain loop, and of its other rivals."""
    ratios = []
    for name in names:
        title = f"step, {name} / plain loop, {batch}"
        ratios.append(compare(title, seconds, name, "plain", bars[name]))
    if RIVAL in seconds:
        title = f"step, compiled / {RIVAL}, {batch}"
        ratios.append(compare(title, seconds, "compiled", RIVAL, RIVAL_BAR))
    if "recorded" in seconds:
        title = f"step and its record / plain loop, {batch}"
        ratios.append(compare(title, seconds, "recorded", "plain", 1.05))
    return ratios


def _repeat(step: Callable[[], None], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run


if __name__ == "__main__":
    main()
