"""`simpletuner sample` and `simpletuner sweep`: render from a result with the code and the memory of previews.

plan ─► fetch ─► prompts ─► transformer ─► LoRA after LoRA, prompt after prompt
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.fitting.ready import weigh
from simpletuner.annexes.report.sheet import Sheet, cell
from simpletuner.annexes.sampling import Sampled, plan_evaluation
from simpletuner.atomic import free_path, write_json
from simpletuner.caching.catalogue import Catalogue
from simpletuner.caching.keys import digest
from simpletuner.caching.read import BatchReader
from simpletuner.config.optimizers import trained_precision
from simpletuner.config.schema import RunConfig
from simpletuner.config.sources import Arguments
from simpletuner.config.values import Size
from simpletuner.data.sample import Sample
from simpletuner.errors import Problems, UserError
from simpletuner.memory.precision import DTYPES, check_device
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.blocks import KERNELS
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import evaluated, list_entries
from simpletuner.plan.resume import package_versions
from simpletuner.reporting.events import EVALUATION, PREVIEWS, EventStream, RunningPhase
from simpletuner.reporting.metrics import METRICS_FILE, read_rows
from simpletuner.run.caches import CacheFiller, Encoding, build_adapter, complete_catalogue, fetch
from simpletuner.run.session import build_subjects
from simpletuner.run.train import prepare_machine
from simpletuner.training.assemble import load_for_sampling, make_accelerator
from simpletuner.training.lora_files import applied_loras
from simpletuner.validation.eval_loss import even_sigmas, sample_losses
from simpletuner.validation.runner import Renderer, Subject

CELLS = "cells"  # folder of what a sweep renders
# Settings that decide what is rendered, besides prompt, size and seed.
SETTINGS = (
    "validation_seed_source", "validation_num_inference_steps", "validation_guidance", "validation_negative_prompt",
    "base_model_precision", "mixed_precision", "text_encoder_1_precision", "vae_dtype", "validation_decoding",
)  # fmt: skip
# `content` identifies the LoRA wherever it is, and an upgrade alone renders nothing again.
UNIMPORTANT = ("lora", "versions")


@dataclass(frozen=True)
class StudioShot:
    """One picture or clip.

    Attributes:
        recipe: how it is made: the content of the JSON file beside it.
        number: of its row in a sheet.
    """

    subject: Subject
    weights: Sampled
    recipe: dict[str, Any]
    number: int

    @property
    def digest(self) -> str:
        """Equal where nothing that matters differs."""
        return digest({key: value for key, value in self.recipe.items() if key not in UNIMPORTANT})[:20]


@dataclass
class Studio:
    """The model of a plan on its device, and what to render with it.

    Attributes:
        transformer: without a LoRA; loaded when it is first needed, for `loaded`.
    """

    plan: Plan
    device: torch.device
    subjects: Sequence[Subject]
    renderer: Renderer
    adapter: FamilyAdapter
    transformer: nn.Module | None = None
    loaded: Sampled | None = None

    @classmethod
    def open(cls, plan: Plan, events: EventStream) -> Studio:
        """Download the model and embed the prompts; the text encoders are gone before the transformer comes."""
        prepare_machine(plan)
        adapter, device = build_adapter(plan), make_accelerator().device
        check_device(plan.config.precision, device)
        fetch(plan, events)
        _, catalogue, reader = read_caches(Encoding(plan, adapter, device, events))
        subjects = build_subjects(plan, catalogue, reader)
        return cls(plan, device, subjects, Renderer(plan.config, plan.frame_rate), adapter)

    def shots(self, weights: Sequence[Sampled], strengths: Sequence[float]) -> list[StudioShot]:
        """Every subject at every size, from the same seeds with all weights and strengths."""
        indices = range(self.plan.config.validation.num_validation_images)
        rows = list(itertools.product(self.subjects, self.plan.sizes, indices))
        return [
            StudioShot(subject, own, recipe(self.plan, subject, size, index, own, strength), number)
            for own, strength in itertools.product(weights, strengths)
            for number, (subject, size, index) in enumerate(rows)
        ]

    def render(
        self, shots: Iterable[StudioShot], name: Callable[[StudioShot], Path], events: EventStream, title: str
    ) -> list[Path]:
        """Render each shot into the file that `name` gives it, with its recipe beside it."""
        shots, paths = list(shots), list[Path]()
        with events.phase(title, len(shots), self.plan.spec.media_noun, PREVIEWS) as phase, torch.no_grad():
            for (own, strength), group in itertools.groupby(
                shots, lambda shot: (shot.weights, shot.recipe["strength"])
            ):
                # Shots come ordered by weights and strength, so a LoRA is applied once for all of its pictures.
                with self._with(own, strength) as transformer:
                    paths += [self._render(transformer, shot, name(shot), phase) for shot in group]
        return paths

    def held_out(self, run: Path, arguments: Arguments, events: EventStream) -> tuple[Plan, BatchReader] | None:
        """The evaluation of a run, encoded before the transformer takes the memory; None after a warning.

        Args:
            arguments: have the door to remote datasets.
        """
        problems = Problems()
        try:
            plan = plan_evaluation(run, arguments)
            problems.take(weigh(replace(plan, config=self._loaded_for(plan.config), lora_bytes=self.plan.lora_bytes)))
            problems.raise_if_fatal()
            plan, _, reader = read_caches(Encoding(plan, self.adapter, self.device, events))
        except UserError as error:
            events.say(f"The evaluation loss at each strength is not measured: {error}", warning=True)
            return None
        return plan, reader

    def _loaded_for(self, config: RunConfig) -> RunConfig:
        """The settings of an evaluation with the transformer as the studio loads it."""
        mine = self.plan.config
        offload = mine.offload.model_copy(update={"offload": "manual"})  # it was chosen for rendering
        return replace(config, model=mine.model, precision=mine.precision, offload=offload)

    def measure(
        self, plan: Plan, reader: BatchReader, weights: Sampled, strengths: Sequence[float], events: EventStream
    ) -> dict[str, float]:
        """The evaluation loss of a LoRA by strength, as its run measures it: the mean over the datasets.

        Args:
            plan, reader: of `held_out`.
        """
        datasets, sigmas, loss = evaluated(plan), even_sigmas(plan.config.evaluation.eval_timesteps), plan.config.loss
        total, losses = len(strengths) * sum(len(each.samples) for each in datasets), dict[str, float]()
        with events.phase("Measuring strengths", total, "samples", EVALUATION) as phase, torch.no_grad():
            for strength in strengths:
                with self._with(weights, strength) as transformer:

                    def measure(sample: Sample) -> float:
                        batch = reader.read_sample(sample).to(self.device)
                        phase.advance(1, sample.name)
                        each = sample_losses(self.adapter, transformer, batch, sigmas, plan.seed, loss)
                        return torch.cat([*each]).mean().item()

                    losses[f"{strength:g}"] = fmean(fmean(map(measure, each.samples)) for each in datasets)
        return losses

    @contextmanager
    def _with(self, weights: Sampled, strength: float) -> Iterator[nn.Module]:
        """The transformer with weights, at a strength if they are a LoRA."""
        transformer = self._load(weights)
        # A DoRA's magnitudes have no strength, so at 0 it would not be the base model.
        loras = [(weights.lora, strength)] if weights.lora is not None and strength else []
        dtype = DTYPES[trained_precision(self.plan.config.optimizer, self.plan.config.precision)]
        with applied_loras(transformer, loras, dtype, self.device):
            yield transformer

    def _render(self, transformer: nn.Module, shot: StudioShot, path: Path, phase: RunningPhase) -> Path:
        title, made = f"{shot.weights.name}, {shot.subject.prompt.short_name}", shot.recipe
        request = self.renderer.request(shot.subject, (made["width"], made["height"]), made["seed"])
        request = replace(request, between_steps=lambda: phase.advance(0, title))
        frames = self.renderer.open(self.adapter, transformer, self.device).render(request)
        # The picture comes last: a sweep takes its presence for that of both.
        write_json(path.with_suffix(".json"), made)
        self.renderer.write(frames, path)
        phase.advance(1, title)
        return path

    def _load(self, weights: Sampled) -> nn.Module:
        """The transformer for these weights: a full fine-tune has its own, LoRAs share one."""
        if self.transformer is None or (weights.transformer is not None and weights != self.loaded):
            # The old transformer and the pipeline that holds it go first: two would not fit.
            self.transformer, self.renderer = None, Renderer(self.plan.config, self.plan.frame_rate)
            gc.collect()
            source = self.plan.source.with_transformer(weights.transformer)
            self.adapter = build_adapter(replace(self.plan, source=source))
            KERNELS.open(self.plan.output_dir, *weights.folders)
            self.transformer, self.loaded = load_for_sampling(self.plan.config, self.adapter, self.device), weights
        return self.transformer


def read_caches(encoding: Encoding) -> tuple[Plan, Catalogue, BatchReader]:
    """Fill the caches of a plan; returns the plan without damaged files, the entries and their reader."""
    filler = CacheFiller(encoding, list_entries(encoding.plan, complete_catalogue(encoding.plan)))
    filler.fill()
    reader = BatchReader(filler.catalogue, 0.0, filler.plan.seed, encoding.restore, encoding.encode)
    return filler.plan, filler.catalogue, reader


def recipe(plan: Plan, subject: Subject, size: Size, index: int, weights: Sampled, strength: float) -> dict[str, Any]:
    """Everything that decides a picture, in words and numbers."""
    validation, values = plan.config.validation, plan.config.flat
    seed = plan.seed if validation.validation_seed is None else validation.validation_seed
    frames = validation.validation_num_video_frames if plan.frame_rate else 1
    return {
        "prompt": subject.prompt.prompt, "source_image": subject.picture, "width": size[0], "height": size[1],
        "frames": frames, "frame_rate": plan.frame_rate, "seed": seed + index, "index": index,
        **{key: values[key] for key in SETTINGS}, "shift": plan.config.sampling_shift,
        "model": f"{plan.spec.name}/{plan.flavour.name}",
        "base_model": None if weights.transformer else plan.source["transformer"].location,
        "weights": weights.name, "step": weights.step, "lora": weights.lora and str(weights.lora),
        "content": weights.content, "strength": strength, "versions": package_versions(),
    }  # fmt: skip


def render_samples(plan: Plan, weights: Sampled, strengths: Sequence[float], events: EventStream) -> list[Path]:
    """Render what a plan asks for into its output folder; returns the new files. Nothing is overwritten."""
    studio = Studio.open(plan, events)

    def name(shot: StudioShot) -> Path:
        made = shot.recipe
        frames = f"@{made['frames']}" if plan.frame_rate else ""
        stem = f"{shot.subject.prompt.short_name}_{made['seed']}_{made['width']}x{made['height']}{frames}"
        stem += f"_strength-{made['strength']:g}" if len(strengths) > 1 else ""
        return free_path(plan.output_dir / f"{stem}{studio.renderer.suffix}")

    return studio.render(studio.shots([weights], strengths), name, events, f"Sampling {weights.name}")


def render_sweep(
    plan: Plan, weights: Sequence[Sampled], strengths: Sequence[float], run: Path, arguments: Arguments,
    events: EventStream,
) -> Sheet:  # fmt: skip
    """Render every prompt with all weights at all strengths, and write the contact sheet.

    What an earlier call has rendered is used again. Of several strengths, the evaluation loss is measured with the best
    checkpoint.

    Args:
        run: the output folder of the run, for its losses.
        arguments: of the command line.
    """
    studio = Studio.open(plan, events)
    shots = studio.shots(weights, strengths)

    def name(shot: StudioShot) -> Path:
        return plan.output_dir / CELLS / f"{shot.digest}{studio.renderer.suffix}"

    records = []
    for shot in sorted(shots, key=lambda shot: (shot.number, shot.recipe["strength"])):
        made, row = shot.recipe, shot.subject.prompt.short_name
        if len(strengths) > 1:
            # A strength per row, since the columns are checkpoints.
            row += f" at {made['strength']:g}"
        records.append(cell(made, row, name(shot).relative_to(plan.output_dir).as_posix()))
    sheet = Sheet(run.resolve().name, plan.output_dir, records, Columns.of(read_rows(run / METRICS_FILE)))
    sheet.begin()
    absent = [shot for shot in shots if not name(shot).exists()]
    if len(absent) < len(shots):
        events.say(f"{len(shots) - len(absent)} of {len(shots)} cells are there already.")
    measures = len(strengths) > 1 and sheet.best is not None
    held_out = studio.held_out(run, arguments, events) if measures else None
    # A cell's name is the digest of its recipe, so a changed setting renders a new file and an old one stays valid.
    studio.render(absent, name, events, "Sweeping")
    if held_out:
        best = next(each for each in weights if each.step == sheet.best)
        sheet = replace(sheet, losses=studio.measure(*held_out, best, strengths, events))
    sheet.write()
    return sheet
