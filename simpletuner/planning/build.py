"""From layers of settings to a plan: what will be trained, on which data, for how long, and every problem found.

Nothing here loads a weight or imports torch, and nothing is written but files of remote datasets, and those only if the
arguments allow it. Problems are collected and reported together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from simpletuner.config.datasets import DatasetConfig, read_datasets
from simpletuner.config.load import Layer, canonical, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.config.sources import Arguments, dataset_file
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import DataContext
from simpletuner.data.sample import Sample
from simpletuner.data.sampler import Sampler
from simpletuner.data.schedule import Origin
from simpletuner.distributed.world import World
from simpletuner.errors import ConfigError, Problem, Problems, did_you_mean
from simpletuner.models.adapter_kinds import trained_layers
from simpletuner.models.lora_layers import Targets
from simpletuner.models.registry import FAMILIES, canonical_family_name
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.planning import checks, effects
from simpletuner.planning.checkpoint_folder import Checkpoint, result_step
from simpletuner.planning.environment import as_launched, as_rendered, check_environment
from simpletuner.planning.length import Length, check_schedule, data_origin, plan_length
from simpletuner.planning.prompts import ValidationPrompt, collect_prompts, fit_sizes
from simpletuner.planning.resume import check_resume, decide_seed, has_same_data
from simpletuner.planning.techniques.spec import TechniqueSpec, TrainedData
from simpletuner.planning.techniques.table import chosen_techniques
from simpletuner.weights.part import Part

# What a plan is for: a run, its caches, pictures from its result, a look at the datasets, or a form that is being
# filled in.
Purpose = Literal["train", "caches", "sample", "survey", "draft"]


def resolve_layers(layers: Sequence[Layer], purpose: Purpose, report: Problems) -> tuple[RunConfig, FamilySpec | None]:
    """The settings with the defaults of the family that they name; None if it is unknown, in a draft the first one."""
    spec = find_family(layers, report)
    if spec is None and purpose == "draft":
        spec = next(iter(FAMILIES.values()))
    return (resolve(layers, report, spec.defaults, spec.fixed) if spec else resolve(layers, report)), spec


def find_family(layers: Sequence[Layer], report: Problems) -> FamilySpec | None:
    """The family named by the layer with the highest precedence, which is the last one, as its flavour has it."""
    # Family and flavour may come from different layers.
    named: dict[str, str] = {}
    for layer in layers:
        # resolve() reports the problems, and a missing family.
        named |= {key: str(value) for key, value in canonical(layer, Problems()).items() if value is not None}
    if "model_family" not in named:
        return None
    name = canonical_family_name(named["model_family"])
    if name in FAMILIES:
        return FAMILIES[name].for_flavour(named.get("model_flavour"))
    message = f"{named['model_family']!r} is not one of: {', '.join(FAMILIES)}.{did_you_mean(name, FAMILIES)}"
    report.error("model_family", message)
    return None


def find_flavour(config: RunConfig, spec: FamilySpec, report: Problems) -> Flavour:
    """The flavour that the settings name; the default one in place of an unknown name."""
    name, names = config.model.model_flavour, spec.flavour_names
    if name is None or name in names:
        return spec.flavour(name)
    if elsewhere := [family for family, each in FAMILIES.items() if name in each.flavour_names]:
        message = f"{name!r} belongs to {elsewhere[0]}; {spec.name} has: {', '.join(names)}."
    else:
        # i2v-lite-pretrain-5s looks most like a flavour of another task.
        same_task = [known for known in names if known[:4] == name[:4]]
        message = f"{name!r} is not one of: {', '.join(names)}.{did_you_mean(name, same_task or names)}"
        message += " For another checkpoint set pretrained_model_name_or_path."
    report.error("model_flavour", message)
    return spec.flavours[0]


def settle_task(
    flavour: Flavour, entries: Sequence[DatasetConfig], *, has_picture: bool = False
) -> tuple[Flavour, list[DatasetConfig]]:
    """The flavour with the task that the datasets select, and the datasets with `is_i2v` resolved.

    Only a flavour with a `dataset_task` has a choice: it takes that task as soon as one trained dataset sets
    `video.is_i2v`, or a sample starts from a picture. The other datasets of the run are still trained from noise alone.
    """
    if flavour.dataset_task is None:
        return flavour, list(entries)
    if has_picture or any(entry.is_trained and entry.video.is_i2v for entry in entries):
        flavour = replace(flavour, task=flavour.dataset_task)
    return flavour, [_resolve_i2v(entry) for entry in entries]


def _resolve_i2v(entry: DatasetConfig) -> DatasetConfig:
    if not entry.holds_clips:
        return entry
    # Unset becomes false: with a `dataset_task`, clips are trained from noise unless they say otherwise.
    video = entry.video.model_copy(update={"is_i2v": bool(entry.video.is_i2v)})
    return entry.model_copy(update={"video": video})


@dataclass(frozen=True)
class Plan:
    """Settings that have passed every check that needs no weights, and what they are applied to.

    Attributes:
        source: the parts of the model.
        purpose: what the plan is for, see `make_plan`.
        without_effect: keys that have no effect with these settings, set or not, and why.
        seed: resolved, even if the user did not set one.
        text_caches: the text_embeds entries of the dataset file.
        resume: the checkpoint to continue from, None for a fresh run.
        same_data: the checkpoint has the datasets and batch size of this plan, so the sample order continues too.
        origin: where in the run the data of this session begins.
        warnings: problems that do not prevent the run.
        pictures: what previews start from, if not from pictures of the datasets.
        lora_bytes: of the LoRA files that samples are rendered with at a time.
    """

    config: RunConfig
    spec: FamilySpec
    flavour: Flavour
    source: ModelSource
    purpose: Purpose = "train"
    # Purposes that train nothing keep these defaults.
    without_effect: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    dataset_file: Path = Path()
    datasets: list[Dataset] = field(default_factory=list)
    text_caches: list[DatasetConfig] = field(default_factory=list)
    lora_targets: Targets = field(default_factory=list)
    prompts: list[ValidationPrompt] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    length: Length = field(default_factory=lambda: Length(0, 0, 0))
    origin: Origin = field(default_factory=Origin)
    resume: Checkpoint | None = None
    same_data: bool = True
    warnings: list[Problem] = field(default_factory=list)
    pictures: tuple[Sample, ...] = ()
    lora_bytes: int = 0

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir).expanduser()

    @property
    def title(self) -> str:
        """The name of the run; that of its output folder if the user gave none."""
        is_named = self.config.is_explicit("tracker_run_name")
        return self.config.tracking.tracker_run_name if is_named else self.output_dir.resolve().name

    @property
    def frame_rate(self) -> float | None:
        """Frames per second of preview clips; None for families of pictures."""
        return self.spec.frame_rate and (self.config.validation.framerate or self.spec.frame_rate)

    @property
    def trained(self) -> list[Dataset]:
        """The datasets whose samples are drawn in training."""
        return [dataset for dataset in self.datasets if dataset.config.is_trained]

    @property
    def steps_done(self) -> int:
        """Steps of the run before this session."""
        if self.resume is not None:
            return self.resume.step
        lora = self.config.lora
        return 0 if lora.init_lora is None else lora.init_lora_step

    @property
    def is_finished(self) -> bool:
        """Whether the last step has a checkpoint, and the published result is of that step."""
        if self.resume is None or self.resume.step < self.length.total_steps:
            return False
        return result_step(self.output_dir, self.config.model.model_type) == self.resume.step

    @cached_property
    def techniques(self) -> tuple[TechniqueSpec, ...]:
        """The techniques that change the computation of a step."""
        # Expected micro-batches per epoch: what matters is their proportion.
        batches = {each.id: len(each.samples) * (each.repeats + 1) / each.batch_size for each in self.trained}
        shares = {name: count / sum(batches.values()) for name, count in batches.items()}
        regularised = {each.id: shares[each.id] for each in self.trained if each.config.is_regularisation_data}
        masked = sum(shares[each.id] for each in self.trained if each.masks)
        strengths = {each.id: each.config.slider_strength for each in self.trained if each.config.slider_strength}
        return chosen_techniques(self.config, TrainedData(self.length.total_steps, regularised, strengths, masked))

    def sampler(self, world: World | None = None) -> Sampler:
        """The sample order from the beginning, for one process (default: the first)."""
        config = self.config
        if world is None:
            world = World(size=config.launch.num_processes)
        return Sampler(
            self.trained,
            seed=self.seed,
            sampling=config.datasets.data_backend_sampling,
            accumulation=config.schedule.gradient_accumulation_steps,
            origin=self.origin,
            world=world.data_parallel(config.launch.sequence_parallel_size),
        )


@dataclass(frozen=True)
class Rendering:
    """What samples are rendered from, besides the settings.

    Attributes:
        folder: for what is rendered.
        prompts: in place of those that the settings name, if there are any.
        pictures: that samples start from.
        transformer: of a full fine-tune, in place of the base model's.
    """

    folder: str = ""
    prompts: Sequence[ValidationPrompt] = ()
    pictures: tuple[Sample, ...] = ()
    transformer: Part | None = None


def make_plan(arguments: Arguments, purpose: Purpose = "train", rendering: Rendering = Rendering()) -> Plan:
    """The road from arguments to a plan, on which every open setting is resolved, and every problem found that shows
    without weights. The purposes differ in the steps that they take:

    | step                                                         | train | caches | survey | sample | draft |
    |--------------------------------------------------------------|-------|--------|--------|--------|-------|
    | read the settings, with the defaults of their family         | x     | x      | x      | x      | x     |
    | launch: environment, processes, entries of the dataset file  | x     | x      | x      |        |       |
    | find the model: flavour, task, parts, grid of pixels         | x     | x      | x      | x      | x     |
    | judge the settings by the rules (`checks.findings`)          | x     | x      | x      | x      | x     |
    | collect what previews render: prompts and sizes              | x     | x      |        | x      | x     |
    | compare with the layers, and with the checkpoint to continue | x     | x      |        |        |       |
    | list and measure the files of the datasets                   | x     | x      | x      |        |       |
    | count the steps                                              | x     | x      |        |        |       |
    | refuse to train if no step is left                           | x     |        |        |        |       |

    Args:
        arguments: their `problems` receive whatever is wrong or worth knowing.
        purpose: of a survey, datasets need not have captions, or enough samples; what is wrong with their files is in
            the plan's warnings. The problems of samples and drafts are left to the caller, who may know of more.
        rendering: of samples.

    Raises:
        ConfigError: with every problem at once.
    """
    problems, file, entries = arguments.problems, Path(), list[DatasetConfig]()
    layers, folder = arguments.layers(problems)
    config, spec = resolve_layers(layers, purpose, problems)
    if purpose == "sample":
        config = as_rendered(config, rendering.folder)
    elif purpose != "draft":
        config, file, entries = _launch(config, spec.name if spec else "", folder, problems)
    # Without a family, only the rules for all families can add to the list.
    if spec is None:
        raise ConfigError([*problems, *checks.check_config(config, purpose)])
    plan, entries = _find_model(config, spec, entries, rendering, problems)
    found = checks.findings(plan, purpose)
    # Of samples, the run has given its warnings; those of the command line are new.
    origins, known = plan.config.origins, purpose == "sample"
    reported = checks.worth_reporting(found, plan.config)
    problems.extend(each for each in reported if each.fatal or not known or origins.get(each.where) == arguments.label)
    texts = [entry for entry in entries if entry.is_text_embeds]
    plan = replace(plan, purpose=purpose, dataset_file=file, text_caches=texts)
    plan = replace(plan, without_effect=checks.without_effect(found))
    # So far, settings and headers of weights; from here on, files that the settings name.
    context = DataContext.of(plan.config, plan.spec, plan.flavour.task, arguments.collect)
    if purpose == "survey":
        return _survey(plan, entries, context, problems)
    plan = _collect_previews(plan, rendering, problems)
    return _plan_run(plan, entries, context, problems) if purpose in ("train", "caches") else plan


def _launch(
    config: RunConfig, family: str, folder: Path, report: Problems
) -> tuple[RunConfig, Path, list[DatasetConfig]]:
    """The settings with the processes that were started, the dataset file, and its entries."""
    check_environment(report)
    config = as_launched(config, report)
    file = dataset_file(config.run.data_backend_config, folder, report)
    names = {"model_family": family, "output_dir": config.run.output_dir}
    entries = read_datasets(file, report, placeholders=names)
    checks.check_cache_folders(entries, report)
    return config, file, entries


def _find_model(
    config: RunConfig, spec: FamilySpec, entries: list[DatasetConfig], rendering: Rendering, report: Problems
) -> tuple[Plan, list[DatasetConfig]]:
    """The model that the settings name, with the pixel grid that its checkpoint needs unless the user set one."""
    flavour = find_flavour(config, spec, report)
    flavour, entries = settle_task(flavour, entries, has_picture=bool(rendering.pictures))
    source = ModelSource.from_config(spec, flavour, config).with_transformer(rendering.transformer)
    spec = spec.for_checkpoint(flavour, source)
    if not config.is_explicit("aspect_bucket_alignment"):
        # Written into the config, since datasets take what they leave unset from it.
        grid = {"aspect_bucket_alignment": spec.defaults["aspect_bucket_alignment"]}
        config = replace(config, datasets=config.datasets.model_copy(update=grid))
    return Plan(config, spec, flavour, source), entries


def _survey(plan: Plan, entries: list[DatasetConfig], context: DataContext, problems: Problems) -> Plan:
    found = Problems()
    datasets = build_datasets(entries, context, found)
    ids = {dataset.id for dataset in datasets}
    # A problem of a dataset as a whole, and not of one of its keys, is about its files.
    problems.extend(problem for problem in found if problem.where not in ids)
    problems.raise_if_fatal()
    return replace(plan, datasets=datasets, warnings=[replace(each, fatal=False) for each in found])


def _collect_previews(plan: Plan, rendering: Rendering, report: Problems) -> Plan:
    """The prompts, and the sizes. These are needed without previews too: Kandinsky fits its rope scale to them."""
    config = plan.config
    prompts = [*rendering.prompts] or collect_prompts(config.validation, report)
    checks.check_prompts(config, prompts, report)
    wanted, lenient = config.validation.validation_resolution or (), config.run.i_know_what_i_am_doing
    sizes = fit_sizes(wanted, plan.spec, report, lenient=lenient)
    return replace(plan, prompts=prompts, sizes=sizes, pictures=rendering.pictures)


def _plan_run(plan: Plan, entries: list[DatasetConfig], context: DataContext, problems: Problems) -> Plan:
    """The rest of the road for training: its layers, what it continues, its datasets and its length."""
    config = plan.config
    plan = replace(plan, lora_targets=trained_layers(config, plan.spec, plan.source, problems))
    # Before the seed, which a continued run takes from its checkpoint.
    resume = check_resume(plan, problems)
    plan = replace(plan, resume=resume, seed=decide_seed(config.run.seed, resume))
    # The datasets, with all their files listed and measured.
    plan = replace(plan, datasets=build_datasets(entries, context, problems) if entries else [])
    if not plan.trained and not problems.are_fatal:
        problems.append(Problem("data_backend_config", "names no dataset to train on."))
    checks.check_datasets(plan, problems)
    # What follows needs whole datasets: with problems so far it would only report their consequences.
    problems.raise_if_fatal()
    unused = Problems()
    effects.by_data(plan, entries, unused)
    problems.extend(checks.worth_reporting(unused, config))
    buckets = {each.id: sorted({sample.geometry.size for sample in each.samples}) for each in plan.trained}
    plan.spec.checks.sizes(config, plan.flavour, plan.sizes, buckets, problems)
    # The length needs the order of samples, and that the buckets and the place from which the data continues.
    plan = replace(plan, same_data=has_same_data(plan, problems))
    plan = replace(plan, origin=data_origin(plan))
    plan = replace(plan, length=plan_length(plan))
    checks.check_total(config, plan.length.total_steps, problems)
    check_schedule(plan, problems)
    problems.raise_if_fatal()
    # Several checks may warn of the same.
    return replace(plan, warnings=list(dict.fromkeys(problem for problem in problems if not problem.fatal)))
