"""Renders previews during training.

Previews are rendered between steps, without gradients, and do not affect training: a step seeds its
random numbers, and weights replaced by the moving average are restored bit for bit. If VAE and
transformer do not fit together, they take turns on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PIL.Image import Image

from simpletuner.config.schema import ValidationConfig
from simpletuner.config.types import Size
from simpletuner.data.entries import ProgressBar
from simpletuner.diffusion.seeds import step_seed
from simpletuner.encoding.sharing import share_items
from simpletuner.models.adapter import PreviewPipeline, PreviewRequest
from simpletuner.planning.prompts import ValidationPrompt
from simpletuner.reporting.events import (
    PREVIEWS,
    EventStream,
    MediaRendered,
    PhaseStarted,
    StepReport,
)
from simpletuner.reporting.intervals import Interval
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.training.ema import Ema
from simpletuner.training.guard import stop_if_result_not_finite
from simpletuner.training.loop import Callback
from simpletuner.training.state import Assembly, TrainState
from simpletuner.validation.encoded_prompt import EncodedPrompt
from simpletuner.validation.quiet import quiet, weights_to_use
from simpletuner.validation.renderer import Renderer, RenderSettings
from simpletuner.validation.sketch import ColourMap, GrowingPreview, discard_unfinished

if TYPE_CHECKING:
    from simpletuner.validation.background import DecodingThread

REHEARSED_STEPS = 2  # the minimum for every sampler
IMAGE_FOLDER = "validation_images"
BENCHMARK_FOLDER = "benchmarks/base_model"
PREVIEW_FOLDERS = (IMAGE_FOLDER, BENCHMARK_FOLDER)

# Listed in docs/WEBHOOKS.md.
Stage = Literal["benchmark_base_model", "validation", "final_validation"]


@dataclass(frozen=True)
class Preview:
    """One preview: a prompt at one size, with one seed and one set of weights.

    Attributes:
        stage: the untrained model's previews are kept apart from those of the run.
    """

    step: int
    stage: Stage
    prompt: EncodedPrompt
    size: Size
    index: int
    seed: int
    ema: bool

    @property
    def name(self) -> str:
        """The short name of the prompt."""
        return self.prompt.prompt.short_name

    @property
    def record(self) -> MediaRecord:
        """The record of this preview, without its path."""
        width, height = self.size
        return MediaRecord(
            step=self.step,
            short_name=self.name,
            prompt=self.prompt.prompt.prompt,
            path="",
            width=width,
            height=height,
            seed=self.seed,
            ema=self.ema,
            index=self.index,
        )

    def finished(self, frames: Sequence[Image], settings: RenderSettings) -> MediaRecord:
        """The record with the actual size, and the path relative to the output folder."""
        record = replace(self.record, width=frames[0].width, height=frames[0].height)
        clip_frames = len(frames) if settings.frame_rate is not None else None
        if self.stage == "benchmark_base_model":
            path = f"{BENCHMARK_FOLDER}/{record.benchmark_stem(clip_frames)}"
        else:
            path = f"{IMAGE_FOLDER}/{record.file_stem(clip_frames)}"
        return replace(record, path=path + settings.suffix)


def previews_are_due(
    config: ValidationConfig, step: int, epochs_before: int, epochs_done: int
) -> bool:
    """Whether an interval of previews ends with this step.

    Args:
        epochs_before: epochs that were complete before this step.
        epochs_done: epochs that are complete after it.
    """
    if step < config.validate_after_step:
        return False
    interval = Interval(config.validation_step_interval, config.validation_epoch_interval)
    return interval.is_due(step, epochs_before, epochs_done)


@dataclass
class ValidationRunner(Callback):
    """Callback that renders previews at step 0, at the configured intervals and at the end.

    Attributes:
        ema_validation: weights of the previews; see `EmaConfig`.
        already_rendered: previews of the step from which the session resumes; they are not rendered
            again.
        were_due: previews were due at that step. A kill may have lost some of them; they are
            rendered at the start.
        decoding: decodes while training continues; None decodes immediately.
    """

    settings: RenderSettings
    ema_validation: str
    prompts: Sequence[EncodedPrompt]
    sizes: Sequence[Size]
    output_dir: Path
    events: EventStream
    already_rendered: Sequence[MediaRecord] = ()
    were_due: bool = False
    decoding: DecodingThread | None = None
    config: ValidationConfig = field(init=False)
    renderer: Renderer = field(init=False)
    _rendered_at: int | None = field(default=None, init=False)
    _colours: ColourMap | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.config = self.settings.validation
        self.renderer = Renderer(self.settings)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        if state.global_step == 0 and not self.config.disable_benchmark:
            self._render_round(assembly, state.global_step, "benchmark_base_model")
        elif self.config.validation_on_startup:
            self.already_rendered = ()
            self.render(assembly, state)
        elif self.were_due:
            self.render(assembly, state)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        self.publish_finished(wait=False)
        if previews_are_due(self.config, state.global_step, state.epochs_done, report.epochs_done):
            self.render(assembly, state)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        try:
            if state.global_step >= assembly.settings.total_steps:
                self.render(assembly, state)
        finally:
            self.publish_finished()

    def publish_finished(self, *, wait: bool = True) -> None:
        """Publish previews decoded in the background; `wait` waits for all of them."""
        if self.decoding is not None and not self.decoding.is_idle:
            for record in self.decoding.finished(wait=wait):
                self.events.publish(MediaRendered(record))
            self._release()

    def _release(self) -> None:
        """Free the VAE, unless the background still decodes with it."""
        if self.decoding is None or self.decoding.is_idle:
            self.renderer.release()

    def render(self, assembly: Assembly, state: TrainState) -> None:
        """Render every prompt at every size now, except for previews that exist already.

        A second call in the same step does nothing.

        Raises:
            Interrupted: a stop was requested; previews rendered so far are recorded.
            NonFiniteError: a weight is NaN or infinite.
        """
        is_last = state.global_step >= assembly.settings.total_steps
        stage: Stage = "final_validation" if is_last else "validation"
        self._render_round(assembly, state.global_step, stage)

    def _render_round(self, assembly: Assembly, step: int, stage: Stage) -> None:
        """Render the previews of a step that do not exist already."""
        world = assembly.world
        # Compared without paths, which contain the actual number of frames (`768x512@61`).
        rendered_before = {replace(record, path="") for record in self.already_rendered}
        seed = assembly.settings.seed
        previews: list[Preview] = []
        for preview in self._previews(assembly.trained.ema, seed, step, stage):
            if preview.record not in rendered_before:
                previews.append(preview)
        # A request, or the end of the run, may follow an interval in the same step.
        if not previews or self._rendered_at == step:
            return
        self.publish_finished()  # the background decodes with the same VAE
        world.main_only(lambda: discard_unfinished(self.output_dir))
        unit = "clips" if self.settings.frame_rate else "pictures"
        phase = PhaseStarted(
            f"Rendering previews at step {step}", len(previews), unit, PREVIEWS, stage
        )
        render = partial(self._render_all, assembly)
        # With FSDP2, all processes take part in every forward pass. Otherwise they divide the
        # previews.
        rendered = share_items(
            world, self.events, phase, previews, render, in_lockstep=assembly.is_sharded
        )
        try:
            # Closing the generator restores the model's weights, even if a record cannot be
            # written.
            with closing(rendered):
                for record in rendered:
                    if record is not None:
                        self.events.publish(MediaRendered(record))
            self._rendered_at = step
        finally:
            self._release()

    def _previews(
        self, average: Ema | None, run_seed: int, step: int, stage: Stage
    ) -> Iterator[Preview]:
        """All previews of one round."""
        averaged = [False]  # an untrained model has no other weights
        if stage != "benchmark_base_model":
            averaged = weights_to_use(average, self.ema_validation)
        indices = range(self.config.num_validation_images)
        for ema, prompt in itertools.product(averaged, self.prompts):
            sizes = prompt.prompt.sizes_among(self.sizes)
            for size, index in itertools.product(sizes, indices):
                seed = self._seed(prompt.prompt, run_seed, step, index)
                yield Preview(step, stage, prompt, size, index, seed, ema)

    def _render_all(
        self, assembly: Assembly, previews: Sequence[Preview], bar: ProgressBar
    ) -> Iterator[MediaRecord | None]:
        """Render previews; yields their records, None for one that is decoded in the background."""
        with quiet(assembly):
            stop_if_result_not_finite(assembly.all_parameters, assembly.trained.ema)
            # Grouped, because switching to the average and back copies all weights.
            by_weights = itertools.groupby(previews, key=lambda preview: preview.ema)
            for ema, group in by_weights:
                with assembly.averaged(ema):
                    for preview in group:
                        yield self._render(assembly, preview, bar)
                        bar.advance(1, preview.name)

    @property
    def decodes_in_background(self) -> bool:
        """Whether previews are decoded while training continues."""
        # Not with a source picture, which the same VAE encodes.
        return self.decoding is not None and any(prompt.picture is None for prompt in self.prompts)

    def rehearse(
        self, assembly: Assembly, beside: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Render a preview in few steps, and discard the result.

        It is the largest or, if some are decoded in the background, the largest of those.

        Args:
            beside: a context in which it is decoded in the background.
        """
        previews = list(self._previews(None, assembly.settings.seed, 0, "benchmark_base_model"))
        if self.decodes_in_background:
            previews = [preview for preview in previews if preview.prompt.picture is None]
        largest = max(previews, key=lambda preview: preview.size[0] * preview.size[1])
        request = self.renderer.request(largest.prompt, largest.size, largest.seed)
        with quiet(assembly):
            self._rehearse(assembly, replace(request, num_inference_steps=REHEARSED_STEPS), beside)
        self.renderer.release()

    def _rehearse(
        self,
        assembly: Assembly,
        request: PreviewRequest,
        beside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        pipeline = self._pipeline(assembly)
        if self.decoding is None or request.source is not None:
            pipeline.render(request)
            return
        decode = pipeline.sample(request)
        with beside():
            self.decoding.decode(decode)

    def _render(self, assembly: Assembly, preview: Preview, bar: ProgressBar) -> MediaRecord | None:
        """Sample one preview, and write it now or in the background."""
        request = self.renderer.request(preview.prompt, preview.size, preview.seed)
        # Advancing by 0 checks for a stop request, so that a long clip can be interrupted between
        # sampling steps.
        request = replace(request, between_steps=lambda: bar.advance(0, preview.name))
        pipeline = self._pipeline(assembly)
        if self.config.validation_preview and assembly.world.is_main:
            # Fitted on first use, since it takes several passes of the VAE.
            if self._colours is None:
                self._colours = ColourMap.fit(pipeline.encoder, assembly.adapter.spec)
            request = replace(request, watch=self._growing(self._colours, preview, request))
        # Sharded processes render every preview together, and the main process writes it.
        is_writer = assembly.world.is_main or not assembly.is_sharded
        write = partial(self._write, preview, is_writer)
        # Not with a source picture, which the same VAE encodes.
        if self.decoding is not None and request.source is None:
            name = f"{preview.name} of step {preview.step}"
            self.decoding.submit(name, pipeline.sample(request), write)
            return None
        return write(pipeline.render(request))

    def _write(self, preview: Preview, is_writer: bool, frames: list[Image]) -> MediaRecord:
        """The record of a rendered preview, which one process writes."""
        record = preview.finished(frames, self.settings)
        if is_writer:
            self.renderer.write(frames, self.output_dir / record.path)
        return record

    def _growing(
        self, colours: ColourMap, preview: Preview, request: PreviewRequest
    ) -> GrowingPreview:
        """The writer of sketches during sampling."""
        return GrowingPreview(
            colours=colours,
            every=self.config.validation_preview_steps,
            total=request.num_inference_steps,
            media=preview.record,
            seconds=request.num_frames / (self.settings.frame_rate or 1),
            output_dir=self.output_dir,
            publish=self.events.publish,
        )

    def _seed(self, prompt: ValidationPrompt, run_seed: int, step: int, index: int) -> int:
        """The seed of the index-th preview of a prompt, at one size."""
        if prompt.seed is not None:
            return prompt.seed + index
        if self.config.validation_randomize:
            seed = step_seed(run_seed, step, micro_step=index, slot=0, purpose="preview")
            return seed % 2**32
        first = self.config.validation_seed
        if first is None:
            first = run_seed
        return first + index

    def _pipeline(self, assembly: Assembly) -> PreviewPipeline:
        """The stock pipeline around the transformer in training."""
        transformer = assembly.accelerator.unwrap_model(assembly.transformer)
        return self.renderer.open(assembly.adapter, transformer, assembly.accelerator.device)
