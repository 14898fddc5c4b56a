"""Our optimizer step against a plain diffusers + peft loop: same model, LoRA, optimizer, checkpointing, batch.

`reference` runs diffusers' blocks as the loop does, `eager` ours, `compiled` ours through torch.compile.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.models import SIZES, RandomAdapter, build_transformer, clock_of, make_accelerator, make_batch
from benchmarks.models import make_config as config_of
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from simpletuner.config.load import RunConfig
from simpletuner.diffusion.batch import Batch
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.reporting.metrics import MetricsFile
from simpletuner.reporting.plain import PlainProgress
from simpletuner.training.assemble import Intent, assemble
from simpletuner.training.optimizers import build_optimizer
from simpletuner.training.recorder import Recorder
from simpletuner.training.state import TrainState
from simpletuner.training.step import optimizer_step

RATE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {"speed": "reference", "dynamo_backend": "no"},
    "eager": {"speed": "auto", "dynamo_backend": "no"},
    "compiled": {"speed": "auto", "dynamo_backend": "inductor"},
}
BARS = {"reference": 1.05, "eager": 0.95, "compiled": 0.75}
TARGETS = list(KANDINSKY5_IMAGE.lora_targets)


class _Memory:
    """Stands in for the loader: the same batch without end."""

    epoch, epochs_done = 1, 0

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __next__(self) -> Batch:
        return self.batch


def ours(size: str, device: str, config: RunConfig, batch: Batch, record: Path | None = None) -> Callable[[], None]:
    """One `optimizer_step`; with a folder to `record` in also what is written and shown of it."""
    intent = Intent(lora_targets=TARGETS, seed=0, total_steps=100_000, learning_rate=RATE)
    assembly = assemble(config, intent, RandomAdapter(config, size, device), [], make_accelerator(device))
    assembly.transformer.train()
    loader: Any = _Memory(batch)
    state = TrainState()
    recorder = None
    if record is not None:
        metrics = MetricsFile(record / f"{len(batch.names)}.jsonl")
        recorder = Recorder(metrics, PlainProgress(io.StringIO()), trackers=[], ema=None, epochs=1)
        recorder.on_train_start(assembly, state)

    def step() -> None:
        report = optimizer_step(assembly, loader, state.global_step)
        state.global_step = report.step
        if recorder is not None:
            recorder.on_step_end(assembly, state, report)

    return step


def plain(size: str, device: str, config: RunConfig, batch: Batch) -> Callable[[], None]:
    """The loop that one would write in a notebook."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = build_transformer(size, device, dtype)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=config.lora.lora_rank, lora_alpha=config.lora.lora_rank, target_modules=TARGETS))
    model.enable_gradient_checkpointing()
    trained = [each for each in model.parameters() if each.requires_grad]
    precision = config.precision.mixed_precision
    optimizer = build_optimizer(trained, config.optimizer, mixed_precision=precision, learning_rate=RATE)
    side = batch.latents.shape[-1] // 2
    length = len(batch.embeds[0]["prompt_embeds"])

    def step() -> None:
        latents = batch.latents.to(device)
        text = torch.stack([one["prompt_embeds"] for one in batch.embeds]).to(device, dtype)
        pooled = torch.stack([one["pooled_prompt_embeds"] for one in batch.embeds]).to(device, dtype)
        noise = torch.randn(latents.shape, device=device)
        sigmas = torch.sigmoid(torch.randn(len(latents), device=device))
        share = sigmas.view(-1, 1, 1, 1, 1)
        noisy = (1 - share) * latents + share * noise
        velocity = model(
            hidden_states=noisy.permute(0, 2, 3, 4, 1).to(dtype),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=1000 * sigmas,
            visual_rope_pos=[torch.arange(count, device=device) for count in (1, side, side)],
            text_rope_pos=torch.arange(length, device=device),
            scale_factor=(1.0, 1.0, 1.0),
            return_dict=False,
        )
        velocity = velocity[0] if isinstance(velocity, tuple) else velocity
        target = (noise - latents).permute(0, 2, 3, 4, 1)
        loss = torch.nn.functional.mse_loss(velocity.float(), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def main() -> None:
    parser = arguments(__doc__, SIZES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="samples per step")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=["reference", "eager"])
    parser.add_argument("--steps", type=int, help="steps per round; by default as many as a size needs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.steps or {"tiny": 20, "medium": 1, "image": 5}[options.size]
    precision = "no" if options.device == "cpu" else "bf16"
    common = {"mixed_precision": precision, "gradient_checkpointing": True, "lora_rank": 16, "learning_rate": RATE}
    configs = {name: config_of(**common, **settings) for name, settings in VARIANTS.items()}
    config = configs["eager"]
    ratios: list[Ratio] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in options.batches:
            batch = make_batch(options.size, count)
            makers: dict[str, Callable[[], Callable[[], None]]] = {
                "plain": lambda batch=batch: plain(options.size, options.device, config, batch),
            }
            for name in options.variants:
                makers[name] = lambda batch=batch, name=name: ours(options.size, options.device, configs[name], batch)
            if options.size != "image":  # another copy of 13 GB would prove nothing
                makers["recorded"] = lambda batch=batch: ours(
                    options.size, options.device, configs["eager"], batch, Path(folder)
                )
            variants = {name: _repeat(make(), steps) for name, make in makers.items()}
            seconds = interleave(variants, options.rounds, clock_of(options.device))
            for name in options.variants:
                title = f"step, {name} / plain loop, batch {count}"
                ratios.append(compare(title, seconds, name, "plain", BARS[name]))
            if "recorded" in seconds:
                name = f"step and its record / plain loop, batch {count}"
                ratios.append(compare(name, seconds, "recorded", "plain", 1.05))
            del variants, makers
    show(f"Training step, {options.size} model on {options.device}, {steps} step(s) a round", ratios, options)


def _repeat(step: Callable[[], None], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run


if __name__ == "__main__":
    main()
