"""Renders pictures and clips for `simpletuner sample` and `sweep`, as previews are rendered.

plan ─► fetch ─► prompts ─► transformer ─► for each LoRA, for each prompt: render
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.fitting.ready import weigh
from simpletuner.annexes.report.contact_sheet import write_sheet
from simpletuner.annexes.report.samples import ROW_KEYS
from simpletuner.annexes.report.sheet import Sheet, SheetCell, StrengthLosses
from simpletuner.annexes.sampling import Sampled, plan_evaluation
from simpletuner.atomic import unused_path, write_json
from simpletuner.caching.catalogue import Catalogue
from simpletuner.config.optimizers import trained_precision
from simpletuner.config.schema import RunConfig
from simpletuner.config.sources import Arguments
from simpletuner.config.types import Size
from simpletuner.data.sample import Sample
from simpletuner.encoding.caches import CacheFiller, complete_catalogue
from simpletuner.encoding.download import fetch
from simpletuner.encoding.encoders import Encoding, build_adapter
from simpletuner.encoding.read import BatchReader
from simpletuner.errors import Problems, UserError
from simpletuner.hashing import hash_json
from simpletuner.memory.precision import DTYPES, check_device
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.planning.entries import evaluated, list_entries
from simpletuner.planning.plans import AnyPlan, Plan, SamplePlan
from simpletuner.planning.resume import package_versions
from simpletuner.reporting.events import EVALUATION, PREVIEWS, EventStream, RunningPhase
from simpletuner.reporting.metrics import METRICS_FILE, file_dimensions, read_rows
from simpletuner.run.session import encoded_prompts
from simpletuner.run.settings import render_settings, transformer_settings
from simpletuner.run.train import prepare_machine
from simpletuner.speed.attention import activate_attention
from simpletuner.training.assemble import load_for_sampling, make_accelerator
from simpletuner.training.lora_hooks import applied_loras
from simpletuner.validation.encoded_prompt import EncodedPrompt
from simpletuner.validation.eval_loss import even_sigmas, sample_losses
from simpletuner.validation.renderer import Renderer

CELLS = "cells"  # folder of a sweep's renders
# Settings that determine a render, besides prompt, size and seed.
SETTINGS = (
    "validation_seed_source",
    "validation_num_inference_steps",
    "validation_guidance",
    "validation_negative_prompt",
    "base_model_precision",
    "mixed_precision",
    "text_encoder_1_precision",
    "vae_dtype",
    "validation_decoding",
)
# Keys of a recipe that cause no new render: `content` identifies a LoRA regardless of its path, and
# upgrades of packages are not reason enough.
UNIMPORTANT = ("lora", "versions")


@dataclass(frozen=True)
class RenderJob:
    """A picture or clip to render.

    Attributes:
        recipe: everything that determines the render; written to a JSON file beside it.
        number: row number in a sheet.
    """

    prompt: EncodedPrompt
    weights: Sampled
    recipe: dict[str, Any]
    number: int

    @property
    def digest(self) -> str:
        """A hash of the recipe, without its unimportant parts."""
        important = {key: value for key, value in self.recipe.items() if key not in UNIMPORTANT}
        return hash_json(important)[:20]


@dataclass
class SweepRenderer:
    """The model of a plan on its device, and what to render with it.

    Attributes:
        transformer: without a LoRA; loaded when first needed.
        loaded: the weights that the transformer was loaded for.
    """

    plan: SamplePlan
    device: torch.device
    prompts: Sequence[EncodedPrompt]
    renderer: Renderer
    adapter: FamilyAdapter
    transformer: nn.Module | None = None
    loaded: Sampled | None = None

    @classmethod
    def open(cls, plan: SamplePlan, events: EventStream) -> SweepRenderer:
        """Download the model and encode the prompts.

        The text encoders are freed before the transformer is loaded.
        """
        prepare_machine(plan)
        adapter = build_adapter(plan)
        device = make_accelerator().device
        check_device(plan.config.precision, device)
        activate_attention(plan.config.precision, device)
        fetch(plan, events)
        _, catalogue, reader = read_caches(Encoding(plan, adapter, device, events))
        prompts = encoded_prompts(plan, catalogue, reader)
        return cls(plan, device, prompts, Renderer(render_settings(plan)), adapter)

    @property
    def suffix(self) -> str:
        """File suffix of what is rendered."""
        return self.renderer.settings.suffix

    def jobs(self, weights: Sequence[Sampled], strengths: Sequence[float]) -> list[RenderJob]:
        """Every prompt at every size with all weights and strengths, from the same seeds."""
        indices = range(self.plan.config.validation.num_validation_images)
        rows: list[tuple[EncodedPrompt, Size, int]] = []
        for prompt in self.prompts:
            sizes = prompt.prompt.sizes_among(self.plan.sizes)
            rows += itertools.product([prompt], sizes, indices)
        jobs: list[RenderJob] = []
        for sampled, strength in itertools.product(weights, strengths):
            for number, (prompt, size, index) in enumerate(rows):
                values = recipe(self.plan, prompt, size, index, sampled, strength)
                jobs.append(RenderJob(prompt, sampled, values, number))
        return jobs

    def render(
        self,
        jobs: Sequence[RenderJob],
        name: Callable[[RenderJob], Path],
        events: EventStream,
        title: str,
    ) -> list[Path]:
        """Render every job into the file that `name` returns for it, with its recipe beside it."""
        paths: list[Path] = []
        with (
            events.phase(title, len(jobs), self.plan.spec.media_noun, PREVIEWS) as phase,
            torch.no_grad(),
        ):
            # Jobs are ordered by weights and strength, so a LoRA is applied once for its jobs.
            groups = itertools.groupby(jobs, lambda job: (job.weights, job.recipe["strength"]))
            for (sampled, strength), group in groups:
                with self._with(sampled, strength) as transformer:
                    for job in group:
                        paths.append(self._render(transformer, job, name(job), phase))
        return paths

    def held_out(
        self, run: Path, arguments: Arguments, events: EventStream
    ) -> tuple[Plan, BatchReader] | None:
        """Encode the evaluation data of a run, before the transformer takes the memory.

        Args:
            arguments: their `collect` lists remote datasets.

        Returns:
            The plan and the reader of its caches; None after a warning.
        """
        problems = Problems()
        try:
            plan = plan_evaluation(run, arguments)
            as_loaded = replace(plan, config=self._as_loaded(plan), lora_bytes=self.plan.lora_bytes)
            weigh(as_loaded, problems)
            problems.raise_if_fatal()
            plan, _, reader = read_caches(Encoding(plan, self.adapter, self.device, events))
        except UserError as error:
            events.notify(
                f"The evaluation loss at each strength is not measured: {error}", warning=True
            )
            return None
        return plan, reader

    def _as_loaded(self, plan: Plan) -> RunConfig:
        """The settings of an evaluation, with those that the transformer is loaded with."""
        loaded = self.plan.config
        # The settings that `auto` chose for rendering.
        offload = loaded.offload.model_copy(update={"offload": "manual"})
        return replace(plan.config, model=loaded.model, precision=loaded.precision, offload=offload)

    def measure(
        self,
        plan: Plan,
        reader: BatchReader,
        weights: Sampled,
        strengths: Sequence[float],
        events: EventStream,
    ) -> dict[str, float]:
        """The evaluation loss of a LoRA by strength: the mean over the datasets, as in its run.

        Args:
            plan, reader: the result of `held_out`.
        """
        datasets = evaluated(plan)
        sigmas = even_sigmas(plan.config.evaluation.eval_timesteps)
        loss = plan.config.loss
        total = len(strengths) * sum(len(dataset.samples) for dataset in datasets)
        losses: dict[str, float] = {}
        with (
            events.phase("Measuring strengths", total, "samples", EVALUATION) as phase,
            torch.no_grad(),
        ):
            for strength in strengths:
                with self._with(weights, strength) as transformer:

                    def measure(sample: Sample) -> float:
                        batch = reader.read_sample(sample).to(self.device)
                        phase.advance(1, sample.name)
                        parts = sample_losses(
                            self.adapter, transformer, batch, sigmas, plan.seed, loss
                        )
                        return torch.cat([*parts]).mean().item()

                    means = [fmean(map(measure, dataset.samples)) for dataset in datasets]
                    losses[f"{strength:g}"] = fmean(means)
        return losses

    @contextmanager
    def _with(self, weights: Sampled, strength: float) -> Iterator[nn.Module]:
        """The transformer with weights applied; a LoRA at a strength."""
        transformer = self._load(weights)
        # Not applied at 0: strength does not scale a DoRA's magnitudes.
        loras = []
        if weights.lora is not None and strength:
            loras.append((weights.lora, strength))
        dtype = DTYPES[trained_precision(self.plan.config.optimizer, self.plan.config.precision)]
        with applied_loras(transformer, loras, dtype, self.device):
            yield transformer

    def _render(
        self, transformer: nn.Module, job: RenderJob, path: Path, phase: RunningPhase
    ) -> Path:
        """Render a job into a file, with its recipe beside it."""
        title = f"{job.weights.name}, {job.prompt.prompt.short_name}"
        size = Size(job.recipe["width"], job.recipe["height"])
        request = self.renderer.request(job.prompt, size, job.recipe["seed"])
        request = replace(request, between_steps=lambda: phase.advance(0, title))
        frames = self.renderer.open(self.adapter, transformer, self.device).render(request)
        # The picture is written last: a sweep takes its existence as proof of both files.
        write_json(path.with_suffix(".json"), job.recipe)
        self.renderer.write(frames, path)
        phase.advance(1, title)
        return path

    def _load(self, weights: Sampled) -> nn.Module:
        """The transformer for these weights: every full fine-tune has one, LoRAs share one."""
        is_other_fine_tune = weights.transformer is not None and weights != self.loaded
        if self.transformer is not None and not is_other_fine_tune:
            return self.transformer
        # Free the old transformer and its pipeline first, since two would not fit.
        self.transformer = None
        self.renderer = Renderer(self.renderer.settings)
        gc.collect()
        source = self.plan.source.with_transformer(weights.transformer)
        self.adapter = build_adapter(replace(self.plan, source=source))
        settings = transformer_settings(self.plan.config)
        self.transformer = load_for_sampling(settings, self.adapter, self.device)
        self.loaded = weights
        return self.transformer


def read_caches(encoding: Encoding[AnyPlan]) -> tuple[AnyPlan, Catalogue, BatchReader]:
    """Fill the caches of a plan.

    Returns:
        The plan without damaged files, the catalogue, and a reader.
    """
    entries = list_entries(encoding.plan, complete_catalogue(encoding.plan))
    filler = CacheFiller(encoding, entries)
    filler.fill()
    reader = BatchReader(filler.catalogue, 0.0, filler.plan.seed, encoding.restore, encoding.encode)
    return filler.plan, filler.catalogue, reader


def recipe(
    plan: SamplePlan,
    prompt: EncodedPrompt,
    size: Size,
    index: int,
    weights: Sampled,
    strength: float,
) -> dict[str, Any]:
    """Everything that determines a render, as JSON values."""
    validation = plan.config.validation
    values = plan.config.flat
    settings = {key: values[key] for key in SETTINGS}
    if prompt.prompt.guidance is not None:
        settings["validation_guidance"] = prompt.prompt.guidance
    seed = plan.seed if validation.validation_seed is None else validation.validation_seed
    if prompt.prompt.seed is not None:
        seed = prompt.prompt.seed
    frames = validation.validation_num_video_frames if plan.frame_rate else 1
    return {
        "prompt": prompt.prompt.prompt,
        "source_image": prompt.picture_hash,
        "width": size[0],
        "height": size[1],
        "frames": frames,
        "frame_rate": plan.frame_rate,
        "seed": seed + index,
        "index": index,
        **settings,
        "shift": plan.config.sampling_shift,
        "model": f"{plan.spec.name}/{plan.flavour.name}",
        "base_model": None if weights.transformer else plan.source["transformer"].location,
        "weights": weights.name,
        "step": weights.step,
        "lora": weights.lora and str(weights.lora),
        "content": weights.content,
        "strength": strength,
        "versions": package_versions(),
    }


def render_samples(
    plan: SamplePlan, weights: Sampled, strengths: Sequence[float], events: EventStream
) -> list[Path]:
    """Render the previews of a plan into its output folder; returns the new files.

    Nothing is overwritten.
    """
    renderer = SweepRenderer.open(plan, events)

    def name(job: RenderJob) -> Path:
        values = job.recipe
        frames = values["frames"] if plan.frame_rate else None
        dimensions = file_dimensions(values["width"], values["height"], frames)
        stem = f"{job.prompt.prompt.short_name}_{values['seed']}_{dimensions}"
        if len(strengths) > 1:
            stem += f"_strength-{values['strength']:g}"
        return unused_path(plan.output_dir / f"{stem}{renderer.suffix}")

    jobs = renderer.jobs([weights], strengths)
    return renderer.render(jobs, name, events, f"Sampling {weights.name}")


def render_sweep(
    plan: SamplePlan,
    weights: Sequence[Sampled],
    strengths: Sequence[float],
    run: Path,
    arguments: Arguments,
    events: EventStream,
) -> Sheet:
    """Render every prompt with all weights at all strengths, and write the contact sheet.

    Renders of an earlier call are reused. With several strengths, the evaluation loss of the best
    checkpoint is measured at all of them.

    Args:
        run: the output folder of the run, for its losses.
        arguments: arguments of the command line.
    """
    renderer = SweepRenderer.open(plan, events)
    jobs = [*_untrained_jobs(renderer, weights), *renderer.jobs(weights, _trained(strengths))]

    def name(job: RenderJob) -> Path:
        return plan.output_dir / CELLS / f"{job.digest}{renderer.suffix}"

    cells = []
    for job in sorted(jobs, key=lambda job: (job.number, job.recipe["strength"])):
        cells.append(_cell(job, name(job).relative_to(plan.output_dir).as_posix()))
    metrics = Columns.of(read_rows(run / METRICS_FILE))
    sheet = Sheet(run.resolve().name, plan.output_dir, cells, metrics)
    sheet.begin()
    # A cell is named after the digest of its recipe: changed settings make new files, and old
    # files stay valid.
    missing = [job for job in jobs if not name(job).exists()]
    if len(missing) < len(jobs):
        events.notify(f"{len(jobs) - len(missing)} of {len(jobs)} cells exist already.")
    held_out = None
    if len(strengths) > 1 and sheet.best is not None:
        held_out = renderer.held_out(run, arguments, events)
    renderer.render(missing, name, events, "Sweeping")
    if held_out and sheet.best is not None:
        evaluation, reader = held_out
        best = next(sampled for sampled in weights if sampled.step == sheet.best)
        losses = renderer.measure(evaluation, reader, best, strengths, events)
        sheet = replace(sheet, measured=StrengthLosses(sheet.best, losses))
        sheet.keep_losses()
    write_sheet(sheet)
    return sheet


def _trained(strengths: Sequence[float]) -> list[float]:
    """The strengths without 0, at which all checkpoints are the untrained model."""
    return [strength for strength in strengths if strength != 0]


def _untrained_jobs(renderer: SweepRenderer, weights: Sequence[Sampled]) -> list[RenderJob]:
    """Every prompt with the untrained model; none beside full fine-tunes, which replace it."""
    if any(sampled.transformer is not None for sampled in weights):
        return []
    return renderer.jobs([Sampled("untrained", 0)], [0.0])


def _cell(job: RenderJob, path: str) -> SheetCell:
    """The cell of a render in a sheet."""
    values = {key: job.recipe[key] for key in ROW_KEYS}
    return SheetCell(
        step=job.recipe["step"] or 0,
        short_name=job.prompt.prompt.short_name,
        path=path,
        strength=job.recipe["strength"],
        ema=job.weights.ema,
        **values,
    )
