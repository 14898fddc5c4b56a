"""The kinds of plan, in stages: each has everything of the stage before, and nothing is left open.

| stage         | what is known                             | for                              |
|---------------|-------------------------------------------|----------------------------------|
| `Model`       | the settings and the model that they name | everything                       |
| `Survey`      | and its datasets, with their problems     | a look at the datasets, captions |
| `PreviewPlan` | a model and what previews render          | drafts on the page, `configure`  |
| `SamplePlan`  | and the seed                              | samples from a result            |
| `Plan`        | and datasets, checkpoint and length       | a run and its caches             |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from typing_extensions import TypeVar

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import RunConfig
from simpletuner.config.types import Size
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import Sample
from simpletuner.data.sampler import Sampler
from simpletuner.data.schedule import Origin
from simpletuner.distributed.world import World
from simpletuner.errors import Problem
from simpletuner.models.lora_layers import Targets
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.planning.checkpoint_folder import Checkpoint, result_step
from simpletuner.planning.prompts import ValidationPrompt
from simpletuner.planning.techniques.spec import TechniqueSpec, TrainedData
from simpletuner.planning.techniques.table import chosen_techniques


@dataclass(frozen=True, kw_only=True)
class Model:
    """Settings, and the model that they name.

    Attributes:
        config: the settings, with those that the checkpoint decides.
        source: the parts of the model.
    """

    config: RunConfig
    spec: FamilySpec
    flavour: Flavour
    source: ModelSource

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir).expanduser()

    @property
    def title(self) -> str:
        """The name of the run, by default that of its output folder."""
        if self.config.is_explicit("tracker_run_name"):
            return self.config.tracking.tracker_run_name
        return self.output_dir.resolve().name

    @property
    def frame_rate(self) -> float | None:
        """Frames per second of preview clips; None for families of pictures."""
        if not self.spec.frame_rate:
            return None
        return self.config.validation.framerate or self.spec.frame_rate


@dataclass(frozen=True, kw_only=True)
class Survey(Model):
    """A model and the datasets for it, whether or not they can be trained on.

    Attributes:
        warnings: what is wrong with the files of the datasets.
    """

    datasets: list[Dataset]
    warnings: list[Problem]


@dataclass(frozen=True, kw_only=True)
class PreviewPlan(Model):
    """A model, and what its previews render.

    Attributes:
        sizes: (width, height) in pixels. Known without previews too: Kandinsky fits its rope scale
            to them.
        pictures: what previews start from, if not from pictures of the datasets.
    """

    prompts: list[ValidationPrompt]
    sizes: list[Size]
    pictures: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class SamplePlan(PreviewPlan):
    """What rendering needs.

    Attributes:
        seed: resolved, even if the user did not set one.
        warnings: problems that do not prevent the run.
        datasets: samples have none.
        text_caches: the text_embeds entries of the dataset file; samples have none.
        lora_bytes: size of the LoRAs that are applied to the transformer at the same time.
    """

    seed: int
    warnings: list[Problem]
    datasets: list[Dataset]
    text_caches: list[DatasetConfig]
    lora_bytes: int = 0

    @property
    def trained(self) -> list[Dataset]:
        """The datasets whose samples are drawn in training."""
        return [dataset for dataset in self.datasets if dataset.config.is_trained]

    @property
    def techniques(self) -> tuple[TechniqueSpec, ...]:
        """The techniques that change the computation of a step; samples take none."""
        return ()


@dataclass(frozen=True)
class Length:
    """How long a run is.

    Attributes:
        total_steps: optimizer steps of the whole run, with those done by earlier sessions.
        batches_per_epoch: batches of each process in the first epoch of the session.
        epochs: number of the last epoch.
    """

    total_steps: int
    batches_per_epoch: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Plan(SamplePlan):
    """A run: settings that have passed every check without weights, and what they apply to.

    Attributes:
        purpose: to train, or only to fill the caches, also of a finished run.
        dataset_file: the file with the entries of the datasets.
        lora_targets: the layers that a LoRA trains.
        resume: the checkpoint to continue from; None for a fresh run.
        same_data: the checkpoint has the datasets and batch size of this plan, so the sample order
            continues too.
        origin: where in the run the data of this session begins.
    """

    purpose: Literal["train", "caches"]
    dataset_file: Path
    lora_targets: Targets
    resume: Checkpoint | None
    same_data: bool
    origin: Origin
    length: Length

    @property
    def steps_done(self) -> int:
        """Steps of the run before this session."""
        return steps_before(self.config, self.resume)

    @property
    def is_finished(self) -> bool:
        """Whether the last step has a checkpoint, and the published result is of that step."""
        if self.resume is None or self.resume.step < self.length.total_steps:
            return False
        return result_step(self.output_dir, self.config.model.model_type) == self.resume.step

    @cached_property
    def techniques(self) -> tuple[TechniqueSpec, ...]:
        """The techniques that change the computation of a step."""
        # Expected micro-batches per epoch; only their proportion matters.
        batches = {}
        for dataset in self.trained:
            samples = len(dataset.samples) * (dataset.repeats + 1)
            batches[dataset.id] = samples / dataset.batch_size
        total = sum(batches.values())

        regularised = {}
        strengths = {}
        masked = 0.0
        for dataset in self.trained:
            share = batches[dataset.id] / total
            if dataset.config.is_regularisation_data:
                regularised[dataset.id] = share
            if dataset.config.slider_strength:
                strengths[dataset.id] = dataset.config.slider_strength
            if dataset.masks:
                masked += share
        data = TrainedData(self.length.total_steps, regularised, strengths, masked)
        return chosen_techniques(self.config, data)

    def sampler(self, world: World | None = None) -> Sampler:
        """The sample order from the beginning, for one process (default: the first)."""
        return make_sampler(self.config, self.trained, self.seed, self.origin, world)


# `Budget` is that of a run, `Budget[SamplePlan]` that of a run or of samples.
AnyPlan = TypeVar("AnyPlan", bound=SamplePlan, default=Plan)
AnyPlan_co = TypeVar("AnyPlan_co", bound=SamplePlan, default=Plan, covariant=True)


def make_sampler(
    config: RunConfig, trained: list[Dataset], seed: int, origin: Origin, world: World | None = None
) -> Sampler:
    """The order in which samples are drawn, for one process (default: the first)."""
    if world is None:
        world = World(size=config.launch.num_processes)
    return Sampler(
        trained,
        seed=seed,
        sampling=config.datasets.data_backend_sampling,
        accumulation=config.schedule.gradient_accumulation_steps,
        origin=origin,
        world=world.data_parallel(config.launch.sequence_parallel_size),
    )


def steps_before(config: RunConfig, resume: Checkpoint | None) -> int:
    """Steps of a run before this session: of its checkpoint, or of the LoRA that it starts from."""
    if resume is not None:
        return resume.step
    if config.lora.init_lora is not None:
        return config.lora.init_lora_step
    return 0
