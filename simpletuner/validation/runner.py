"""Previews: what the model draws now, with the family's stock pipeline and cached embeddings.

Rendering happens between steps, without gradients, and leaves no trace in training: each step seeds its own random
numbers, and the weights that the moving average replaces come back bit for bit. The VAE and the transformer take turns
on the device where both together would not fit.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import nn

from simpletuner.atomic import open_atomically
from simpletuner.config.load import RunConfig
from simpletuner.config.option import Size
from simpletuner.config.schema import OffloadConfig
from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.diffusion.flow import sampling_shift
from simpletuner.diffusion.seeds import step_seed
from simpletuner.memory.offload.attach import offload_layers
from simpletuner.models.adapter import PreviewPipeline, PreviewRequest
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.reporting.progress import Phase
from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly, TrainState, random_states, restore_random_states
from simpletuner.training.step import StepReport
from simpletuner.validation.clip_writer import write_mp4
from simpletuner.validation.prompts import ValidationPrompt


def place_vae(vae: nn.Module, transformer: nn.Module, config: OffloadConfig, device: torch.device) -> None:
    """Put a loaded VAE where the configuration wants it; by default it stays whole on the device."""
    if config.group_offload_vae:
        offload_layers(vae, config, device)
    elif config.enable_model_cpu_offload:
        take_turns(transformer, vae, device)


def take_turns(transformer: nn.Module, vae: nn.Module, device: torch.device) -> None:
    """Let the VAE come to the device for encoding and decoding only, and the transformer leave meanwhile.

    Parameters stay the same objects, so training goes on behind a preview as if nothing had moved.
    """
    vae.to("cpu")
    for name in ("encode", "decode"):
        inner = getattr(vae, name)

        @functools.wraps(inner)
        def alone(*inputs: Any, inner: Any = inner, **settings: Any) -> Any:
            transformer.to("cpu")
            vae.to(device)
            try:
                return inner(*inputs, **settings)
            finally:
                vae.to("cpu")
                transformer.to(device)

        setattr(vae, name, alone)


REHEARSED_STEPS = 2
FORMATS = {"png": ("PNG", "png"), "webp": ("WEBP", "webp"), "jpeg": ("JPEG", "jpg")}


@dataclass(frozen=True)
class Subject:
    """One thing to render: a prompt with its embeddings, and for i2i and i2v the picture it starts from.

    All are asked for with the size of the preview, since a prompt may hold the picture.
    """

    prompt: ValidationPrompt
    embeds: Callable[[Size], TextEmbeds]
    negative: Callable[[Size], TextEmbeds]
    source: Callable[[Size], Image] | None = None


Listener = Callable[[Sequence[MediaRecord]], None]


@dataclass
class ValidationRunner:
    """Callback that renders at step 0, at the configured intervals and at the end.

    Attributes:
        seed: of the run; used where `validation_seed` is unset.
        phase: opens a progress bar.
        listener: told about what was written.
        frame_rate: of preview clips; None for families of pictures.
    """

    config: RunConfig
    subjects: Sequence[Subject]
    sizes: Sequence[tuple[int, int]]
    output_dir: Path
    seed: int
    ema: Ema | None
    phase: Callable[[str, int], AbstractContextManager[Phase]]
    listener: Listener
    frame_rate: float | None = None
    _pipeline: PreviewPipeline | None = field(default=None, init=False)
    _rendered_at: int | None = field(default=None, init=False)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        if state.global_step == 0 and not self.config.validation.disable_benchmark:
            self.render(assembly, state, benchmark=True)
        elif self.config.validation.validation_on_startup:
            self.render(assembly, state)
        else:
            # A step that a run resumed at was rendered before.
            self._rendered_at = state.global_step

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        validation = self.config.validation
        by_epoch = state.passed(validation.validation_epoch_interval, report.epochs_done)
        due = state.global_step % validation.validation_step_interval == 0 or by_epoch
        if due and state.global_step >= validation.validate_after_step:
            self.render(assembly, state)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        finished = state.global_step >= assembly.settings.total_steps
        if finished and self._rendered_at != state.global_step:
            self.render(assembly, state)

    def render(self, assembly: Assembly, state: TrainState, *, benchmark: bool = False) -> list[MediaRecord]:
        """Render every prompt at every size now.

        Args:
            benchmark: the model is untrained; the files go to `benchmarks/base_model`.
        """
        if not self.subjects or not assembly.world.is_main:
            return []
        weights = [False] if benchmark else weights_to_use(self.ema, self.config.ema.ema_validation)
        images = self.config.validation.num_validation_images
        total = len(self.subjects) * len(self.sizes) * len(weights) * images
        previews = []
        with self.phase(f"Rendering previews at step {state.global_step}", total) as phase, quiet(assembly):
            for use_ema in weights:
                with self.ema.applied() if use_ema and self.ema else nullcontext():
                    for preview in self._render_all(assembly, state.global_step, images, use_ema, benchmark):
                        previews.append(preview)
                        phase.advance(1, preview.short_name)
        self._rendered_at = state.global_step
        self._release()
        self.listener(previews)
        return previews

    def rehearse(self, assembly: Assembly) -> None:
        """Render the first subject at the largest size in as few steps as samplers take, and throw it away."""
        width, height = max(self.sizes, key=lambda size: size[0] * size[1])
        with quiet(assembly):
            request = self._request(self.subjects[0], width, height, self._seed(0, 0))
            self._load_pipeline(assembly).render(replace(request, num_inference_steps=REHEARSED_STEPS))
        self._release()

    def _render_all(
        self, assembly: Assembly, step: int, images: int, use_ema: bool, benchmark: bool
    ) -> Iterator[MediaRecord]:
        for subject in self.subjects:
            for width, height in self.sizes:
                for index in range(images):
                    seed = self._seed(step, index)
                    frames = self._load_pipeline(assembly).render(self._request(subject, width, height, seed))
                    path = self._path(subject.prompt, step, index, frames, use_ema, benchmark)
                    self._write(frames, path)
                    relative = path.relative_to(self.output_dir).as_posix()
                    name, text, size = subject.prompt.short_name, subject.prompt.prompt, frames[0].size
                    yield MediaRecord(step, name, text, relative, *size, seed=seed, ema=use_ema, index=index)

    def _request(self, subject: Subject, width: int, height: int, seed: int) -> PreviewRequest:
        validation = self.config.validation
        on_gpu = validation.validation_seed_source == "gpu" and torch.cuda.is_available()
        return PreviewRequest(
            embeds=subject.embeds((width, height)),
            negative=subject.negative((width, height)),
            width=width,
            height=height,
            num_inference_steps=_given(validation.validation_num_inference_steps),
            guidance_scale=float(_given(validation.validation_guidance)),
            seed=seed,
            seed_device=torch.device("cuda" if on_gpu else "cpu"),
            source=subject.source((width, height)) if subject.source else None,
            num_frames=1 if self.frame_rate is None else _given(validation.validation_num_video_frames),
        )

    def _seed(self, step: int, index: int) -> int:
        if self.config.validation.validation_randomize:
            return step_seed(self.seed, step, index, 0, "preview") % 2**32
        configured = self.config.validation.validation_seed
        return (self.seed if configured is None else configured) + index

    def _path(
        self, prompt: ValidationPrompt, step: int, index: int, frames: list[Image], use_ema: bool, benchmark: bool
    ) -> Path:
        """File names tell the true size, of clips also the true number of frames (`768x512@61`)."""
        is_clip = self.frame_rate is not None
        suffix = "mp4" if is_clip else FORMATS[self.config.validation.validation_image_format][1]
        dimensions = f"{frames[0].width}x{frames[0].height}" + (f"@{len(frames)}" if is_clip else "")
        if benchmark:
            number = f"_{index}" if index or is_clip else ""
            return self.output_dir / "benchmarks" / "base_model" / f"{prompt.short_name}_{dimensions}{number}.{suffix}"
        name = f"step_{step}_{prompt.short_name}_{index}_{dimensions}{'_ema' if use_ema else ''}.{suffix}"
        return self.output_dir / "validation_images" / name

    def _write(self, frames: list[Image], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.frame_rate is not None:
            write_mp4(path, frames, self.frame_rate)
            return
        with open_atomically(path) as file:
            frames[0].convert("RGB").save(file, FORMATS[self.config.validation.validation_image_format][0])

    def _load_pipeline(self, assembly: Assembly) -> PreviewPipeline:
        if self._pipeline is None:
            transformer = assembly.accelerator.unwrap_model(assembly.transformer)
            device = assembly.accelerator.device
            self._pipeline = assembly.adapter.load_preview_pipeline(transformer, device, sampling_shift(self.config))
            place_vae(self._pipeline.vae, transformer, self.config.offload, device)
        return self._pipeline

    def _release(self) -> None:
        """Free the VAE on a GPU, where memory is scarce; on a CPU it stays for the next time.

        Nobody else may hold the pipeline by now: what is still in use is neither collected nor given back.
        """
        if torch.cuda.is_available() and not self.config.caching.keep_vae_loaded:
            self._pipeline = None
            gc.collect()
            torch.cuda.empty_cache()


def weights_to_use(ema: Ema | None, ema_validation: str) -> list[bool]:
    """Whether to validate with the moving average: never, only, or beside the trained weights."""
    if ema is None:
        return [False]
    return {"none": [False], "ema_only": [True], "comparison": [False, True]}[ema_validation]


@contextmanager
def quiet(assembly: Assembly) -> Iterator[None]:
    """Evaluation mode without gradients, and the global random states put back afterwards."""
    states = random_states()
    assembly.transformer.eval()
    try:
        with torch.no_grad(), assembly.sampling_weights():
            yield
    finally:
        assembly.transformer.train()
        restore_random_states(states)


def _given(value: float | None) -> Any:
    if value is None:
        raise RuntimeError("the plan fills in the family's defaults before a run starts")
    return value
