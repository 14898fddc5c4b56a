"""Renders previews with the family's stock pipeline and cached embeddings.

Previews are rendered between steps, without gradients, and do not affect training: a step seeds its random numbers, and
weights replaced by the moving average are restored bit for bit. If VAE and transformer do not fit together, they take
turns on the device.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import nn

from simpletuner.atomic import open_atomically
from simpletuner.config.schema import OffloadConfig, RunConfig
from simpletuner.config.types import Size
from simpletuner.data.entries import ProgressBar
from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.diffusion.seeds import step_seed
from simpletuner.encoding.sharing import share_items
from simpletuner.memory.offload.attach import Offload
from simpletuner.models.adapter import FamilyAdapter, PreviewPipeline, PreviewRequest
from simpletuner.models.decoding import decode_in
from simpletuner.planning.prompts import ValidationPrompt
from simpletuner.reporting.events import PREVIEWS, EventStream, MediaRendered, PhaseStarted, StepReport
from simpletuner.reporting.intervals import Interval
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.training.guard import stop_if_result_not_finite
from simpletuner.training.loop import Callback
from simpletuner.training.state import Assembly, TrainState, random_states, restore_random_states
from simpletuner.validation.sketch import ColourMap, GrowingPreview, discard_unfinished

if TYPE_CHECKING:
    from simpletuner.validation.background import DecodingThread

logger = logging.getLogger(__name__)

REHEARSED_STEPS = 2  # the minimum for every sampler
IMAGE_FOLDER, BENCHMARK_FOLDER = "validation_images", "benchmarks/base_model"
PREVIEW_FOLDERS = (IMAGE_FOLDER, BENCHMARK_FOLDER)


@dataclass(frozen=True)
class Subject:
    """A prompt with its embeddings, and the source picture for i2i and i2v.

    Embeddings and picture are functions of the preview's size, since the source picture is fitted to it and may be part
    of the prompt. `picture` is the SHA-256 of the source picture.
    """

    prompt: ValidationPrompt
    embeds: Callable[[Size], TextEmbeds]
    negative: Callable[[Size], TextEmbeds]
    source: Callable[[Size], Image] | None = None
    picture: str = ""


@dataclass
class Renderer:
    """Keeps the stock pipeline between validations, and writes previews.

    Attributes:
        frame_rate: frames per second of clips; None for picture families.
    """

    config: RunConfig
    frame_rate: float | None = None
    _pipeline: PreviewPipeline | None = field(default=None, init=False)

    def open(self, adapter: FamilyAdapter, transformer: nn.Module, device: torch.device) -> PreviewPipeline:
        """The pipeline around a transformer, with its VAE placed and configured."""
        if self._pipeline is None:
            self._pipeline = adapter.load_preview_pipeline(transformer, device, self.config.sampling_shift)
            decode_in(self.config.validation.validation_decoding, self._pipeline.vae, adapter.spec.vae_stride)
            place_vae(self._pipeline.vae, transformer, self.config.offload, device)
        return self._pipeline

    def release(self) -> None:
        """Free the VAE on a GPU, where memory is scarce; a CPU keeps it for the next previews.

        Requires that no other reference to the pipeline exists; otherwise its memory would not be freed.
        """
        if torch.cuda.is_available() and not self.config.caching.keep_vae_loaded:
            self._pipeline = None
            gc.collect()
            torch.cuda.empty_cache()

    def request(self, subject: Subject, size: Size, seed: int) -> PreviewRequest:
        """The preview request of a subject at a size."""
        validation: Any = self.config.validation  # with the family's defaults
        # CPU and GPU generators draw different noise for the same seed.
        on_gpu = validation.validation_seed_source == "gpu" and torch.cuda.is_available()
        return PreviewRequest(
            embeds=subject.embeds(size),
            negative=subject.negative(size),
            width=size[0],
            height=size[1],
            num_inference_steps=validation.validation_num_inference_steps,
            guidance_scale=float(validation.validation_guidance),
            seed=seed,
            seed_device=torch.device("cuda" if on_gpu else "cpu"),
            source=subject.source(size) if subject.source else None,
            num_frames=1 if self.frame_rate is None else validation.validation_num_video_frames,
            batched=bool(validation.validation_batched_guidance),
        )

    @property
    def suffix(self) -> str:
        """File suffix of previews."""
        kind = self.config.validation.validation_image_format if self.frame_rate is None else "mp4"
        return ".jpg" if kind == "jpeg" else f".{kind}"

    def dimensions(self, frames: list[Image]) -> str:
        """The actual size, and for clips the actual number of frames, for file names (`768x512@61`)."""
        return f"{frames[0].width}x{frames[0].height}" + (f"@{len(frames)}" if self.frame_rate is not None else "")

    def write(self, frames: list[Image], path: Path) -> None:
        """Write a picture or a clip, atomically; its folder is created if missing."""
        warn_of_one_colour(frames, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.frame_rate is not None:
            from simpletuner.data.clip_writer import write_mp4  # loads FFmpeg, which pictures do not need

            write_mp4(path, frames, self.frame_rate)
            return
        with open_atomically(path) as file:
            frames[0].convert("RGB").save(file, self.config.validation.validation_image_format)


def warn_of_one_colour(frames: Sequence[Image], path: Path) -> None:
    """Log a warning if every frame of a preview has a single colour; NaN is rendered black."""
    ranges: Any = (each for frame in frames for each in frame.convert("RGB").getextrema())  # per channel
    # A difference of one level is rounding.
    if all(high - low <= 1 for low, high in ranges):
        logger.warning(
            "%s shows one colour only: the weights have diverged, or the VAE is broken or needs vae_dtype fp32.", path
        )


def place_vae(vae: nn.Module, transformer: nn.Module, config: OffloadConfig, device: torch.device) -> None:
    """Apply the configured offloading to a loaded VAE; by default it stays on the device."""
    if config.group_offload_vae:
        Offload(config, device).attach_to_stacks(vae)
    elif config.enable_model_cpu_offload:
        take_turns(transformer, vae, device)


def take_turns(transformer: nn.Module, vae: nn.Module, device: torch.device) -> None:
    """Move the VAE to the device only while it encodes or decodes, and the transformer to the CPU meanwhile.

    Parameters remain the same objects, so the optimizer's references stay valid.
    """
    vae.to("cpu")
    # The VAE encodes in previews with a source picture.
    for name in ("encode", "decode"):
        inner = getattr(vae, name)

        @wraps(inner)
        def alone(*inputs: Any, inner: Any = inner, **settings: Any) -> Any:
            transformer.to("cpu")
            vae.to(device)
            try:
                return inner(*inputs, **settings)
            finally:
                vae.to("cpu")
                transformer.to(device)

        setattr(vae, name, alone)


@dataclass(frozen=True)
class Shot:
    """One preview: a subject at one size, with one seed and one set of weights.

    Attributes:
        benchmark: a preview of the untrained model, in `benchmarks/base_model`.
    """

    step: int
    subject: Subject
    size: Size
    index: int
    seed: int
    ema: bool
    benchmark: bool

    @property
    def name(self) -> str:
        """The short name of the prompt."""
        return self.subject.prompt.short_name

    def record(self, path: str = "") -> MediaRecord:
        """The record of this preview."""
        prompt = self.subject.prompt.prompt
        return MediaRecord(self.step, self.name, prompt, path, *self.size, self.seed, self.ema, self.index)


@dataclass
class ValidationRunner(Callback):
    """Callback that renders previews at step 0, at the configured intervals and at the end.

    Attributes:
        frame_rate: frames per second of preview clips; None for picture families.
        recorded: previews of the step from which the session resumes; they are not rendered again.
        lacking: previews were due at that step; if a kill lost them, they are rendered at the start.
        decoding: decodes while training continues; None decodes immediately.
    """

    config: RunConfig
    subjects: Sequence[Subject]
    sizes: Sequence[tuple[int, int]]
    output_dir: Path
    events: EventStream
    frame_rate: float | None = None
    recorded: Sequence[MediaRecord] = ()
    lacking: bool = False
    decoding: DecodingThread | None = None
    renderer: Renderer = field(init=False)
    _rendered_at: int | None = field(default=None, init=False)
    _colours: ColourMap | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.renderer = Renderer(self.config, self.frame_rate)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        validation = self.config.validation
        if state.global_step == 0 and not validation.disable_benchmark:
            self.render(assembly, state, benchmark=True)
        elif validation.validation_on_startup or self.lacking:
            self.recorded = () if validation.validation_on_startup else self.recorded
            self.render(assembly, state)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        self.settle(wait=False)
        if self.is_due(state, report.epochs_done):
            self.render(assembly, state)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        try:
            if state.global_step >= assembly.settings.total_steps:
                self.render(assembly, state)
        finally:
            self.settle()

    def settle(self, *, wait: bool = True) -> None:
        """Publish previews decoded in the background; `wait` waits for all of them."""
        if self.decoding is not None and not self.decoding.is_idle:
            for record in self.decoding.finished(wait=wait):
                self.events.publish(MediaRendered(record))
            self._release()

    def _release(self) -> None:
        if self.decoding is None or self.decoding.is_idle:
            self.renderer.release()

    def is_due(self, state: TrainState, epochs_done: int) -> bool:
        """Whether an interval ends with this step; `state.epochs_done` does not include it yet."""
        config = self.config.validation
        if state.global_step < config.validate_after_step:
            return False
        interval = Interval(config.validation_step_interval, config.validation_epoch_interval)
        return interval.is_due(state.global_step, state.epochs_done, epochs_done)

    def render(self, assembly: Assembly, state: TrainState, *, benchmark: bool = False) -> None:
        """Render every prompt at every size now, except for recorded previews; at most once per step.

        Args:
            benchmark: the model is untrained; files are written to `benchmarks/base_model`.

        Raises:
            Interrupted: a stop was requested; previews rendered so far are recorded.
            NonFiniteError: a weight is NaN or infinite.
        """
        step, world = state.global_step, assembly.world
        # Compared without paths, which contain the actual number of frames (`768x512@61`).
        recorded = {replace(record, path="") for record in self.recorded}
        shots = [shot for shot in self._shots(assembly, step, benchmark) if shot.record() not in recorded]
        # A request, or the end of the run, may follow an interval in the same step.
        if not shots or self._rendered_at == step:
            return
        self.settle()
        world.main_only(lambda: discard_unfinished(self.output_dir))
        # Machine-readable names, listed in docs/WEBHOOKS.md.
        stage = "final_validation" if step >= assembly.settings.total_steps else "validation"
        stage = "benchmark_base_model" if benchmark else stage
        unit = "clips" if self.frame_rate else "pictures"
        phase = PhaseStarted(f"Rendering previews at step {step}", len(shots), unit, PREVIEWS, stage)
        render = partial(self._render_all, assembly)
        # With FSDP2, all processes take part in every forward pass.
        rendered = share_items(world, self.events, phase, shots, render, in_lockstep=assembly.is_sharded)
        try:
            with closing(rendered):  # restores the model's weights even if a record cannot be written
                for record in rendered:
                    if record is not None:
                        self.events.publish(MediaRendered(record))
            self._rendered_at = step
        finally:
            self._release()

    def _shots(self, assembly: Assembly, step: int, benchmark: bool) -> Iterator[Shot]:
        """All previews of one round."""
        weights = [False] if benchmark else weights_to_use(assembly, self.config.ema.ema_validation)
        indices = range(self.config.validation.num_validation_images)
        for use_ema, subject, size, index in itertools.product(weights, self.subjects, self.sizes, indices):
            yield Shot(step, subject, size, index, self._seed(assembly, step, index), use_ema, benchmark)

    def _render_all(self, assembly: Assembly, shots: Sequence[Shot], bar: ProgressBar) -> Iterator[MediaRecord | None]:
        """Render shots; yields the record of each, or None for a shot that is decoded in the background."""
        with quiet(assembly):
            stop_if_result_not_finite(assembly.all_parameters, assembly.trained.ema)
            # Grouped, because switching to the average and back copies all weights.
            for use_ema, group in itertools.groupby(shots, key=lambda shot: shot.ema):
                with assembly.averaged(use_ema):
                    for shot in group:
                        yield self._render(assembly, shot, bar)
                        bar.advance(1, shot.name)

    def rehearse(self, assembly: Assembly) -> None:
        """Render the first subject at the largest size in `REHEARSED_STEPS`, and discard the result."""
        size = max(self.sizes, key=lambda size: size[0] * size[1])
        with quiet(assembly):
            request = self.renderer.request(self.subjects[0], size, self._seed(assembly, 0, 0))
            self._pipeline(assembly).render(replace(request, num_inference_steps=REHEARSED_STEPS))
        self.renderer.release()

    def _render(self, assembly: Assembly, shot: Shot, bar: ProgressBar) -> MediaRecord | None:
        """Sample one preview, and write it now or in the background."""
        request = self.renderer.request(shot.subject, shot.size, shot.seed)
        # Advancing by 0 checks for a stop request, so that a long clip can be interrupted between sampling steps.
        request = replace(request, between_steps=lambda: bar.advance(0, shot.name))
        if self.config.validation.validation_preview and assembly.world.is_main:
            request = replace(request, watch=self._growing(assembly, shot, request))
        pipeline, write = self._pipeline(assembly), partial(self._write, assembly, shot)
        # Not with a source picture, which the same VAE encodes.
        if self.decoding is not None and request.source is None:
            self.decoding.submit(f"{shot.name} of step {shot.step}", pipeline.sample(request), write)
            return None
        return write(pipeline.render(request))

    def _write(self, assembly: Assembly, shot: Shot, frames: list[Image]) -> MediaRecord:
        path = self._path(shot, frames)
        # Sharded processes render every preview together, and the main process writes it.
        if assembly.world.is_main or not assembly.is_sharded:
            self.renderer.write(frames, path)
        record = shot.record(path.relative_to(self.output_dir).as_posix())
        return replace(record, width=frames[0].width, height=frames[0].height)

    def _growing(self, assembly: Assembly, shot: Shot, request: PreviewRequest) -> GrowingPreview:
        """The writer of sketches during sampling."""
        # Fitted on first use, since it takes several passes of the VAE.
        if self._colours is None:
            self._colours = ColourMap.fit(self._pipeline(assembly).encoder, assembly.adapter.spec)
        every, total = self.config.validation.validation_preview_steps, request.num_inference_steps
        seconds = request.num_frames / (self.frame_rate or 1)
        return GrowingPreview(self._colours, every, total, shot.record(), seconds, self.output_dir, self.events.publish)

    def _path(self, shot: Shot, frames: list[Image]) -> Path:
        dimensions, suffix = self.renderer.dimensions(frames), self.renderer.suffix
        if shot.benchmark:
            number = f"_{shot.index}" if shot.index or self.frame_rate is not None else ""
            return self.output_dir / BENCHMARK_FOLDER / f"{shot.name}_{dimensions}{number}{suffix}"
        name = f"step_{shot.step}_{shot.name}_{shot.index}_{dimensions}{'_ema' if shot.ema else ''}{suffix}"
        return self.output_dir / IMAGE_FOLDER / name

    def _seed(self, assembly: Assembly, step: int, index: int) -> int:
        if self.config.validation.validation_randomize:
            return step_seed(assembly.settings.seed, step, index, 0, "preview") % 2**32
        configured = self.config.validation.validation_seed
        return (assembly.settings.seed if configured is None else configured) + index

    def _pipeline(self, assembly: Assembly) -> PreviewPipeline:
        transformer = assembly.accelerator.unwrap_model(assembly.transformer)
        return self.renderer.open(assembly.adapter, transformer, assembly.accelerator.device)


def weights_to_use(assembly: Assembly, ema_validation: str) -> list[bool]:
    """The weights to validate with; True means the moving average."""
    if assembly.trained.ema is None:
        return [False]
    return {"none": [False], "ema_only": [True], "comparison": [False, True]}[ema_validation]


@contextmanager
def quiet(assembly: Assembly) -> Iterator[None]:
    """Evaluation mode without gradients; global random states are restored afterwards."""
    # Library code may draw from the global generators.
    states = random_states()
    assembly.transformer.eval()
    try:
        with torch.no_grad(), assembly.sampling_weights():
            yield
    finally:
        assembly.transformer.train()
        restore_random_states(states)
