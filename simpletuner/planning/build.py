"""From layers of settings to a plan: what is trained, on what data, for how long; all problems.

Nothing here loads a weight. Only files of remote datasets are written, and those only if the
arguments allow it. Problems are collected and reported together. Each kind of plan (`plans.py`) has
a function that can be read from top to bottom; what they share are the stages below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from simpletuner.config.datasets import DatasetConfig, read_datasets
from simpletuner.config.load import Layer, canonical, resolve
from simpletuner.config.paths import home_path
from simpletuner.config.schema import FAMILY_DEFAULT, RunConfig, ValidationConfig
from simpletuner.config.sources import Arguments, dataset_file
from simpletuner.config.types import Size
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import Sample
from simpletuner.data.schedule import Origin
from simpletuner.errors import ConfigError, Problems, did_you_mean
from simpletuner.models.adapter_kinds import trained_layers
from simpletuner.models.other_models import why_not_trained
from simpletuner.models.registry import FAMILIES, canonical_family_name
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.planning import checks, dataset_checks, effects
from simpletuner.planning.checkpoint_folder import Checkpoint, select_checkpoint
from simpletuner.planning.entries import data_context
from simpletuner.planning.environment import as_launched, as_rendered, check_environment
from simpletuner.planning.kept_defaults import with_defaults_of
from simpletuner.planning.length import check_schedule, data_origin, plan_length
from simpletuner.planning.plans import Length, Model, Plan, PreviewPlan, Survey, make_sampler
from simpletuner.planning.prompt_checks import (
    check_guidance_of_prompts,
    check_pictures_of_prompts,
    check_preview_sizes,
)
from simpletuner.planning.prompts import (
    ValidationPrompt,
    collect_prompts,
    fit_prompts,
    fit_sizes,
    like_those_of_run,
)
from simpletuner.planning.resume import check_resume, decide_seed, has_same_data
from simpletuner.weights.part import Part


def resolve_layers(
    layers: Sequence[Layer], report: Problems
) -> tuple[RunConfig, FamilySpec | None]:
    """The settings with their family's defaults, and the family; None if it is unknown."""
    spec = find_family(layers, report)
    if spec is None:
        return resolve(layers, report), None
    return resolve(layers, report, spec.defaults, spec.fixed), spec


def find_family(layers: Sequence[Layer], report: Problems) -> FamilySpec | None:
    """The family that the settings name, with the facts of their flavour; None if it is unknown."""
    # Family and flavour may come from different layers; the last layer wins.
    named: dict[str, str] = {}
    for layer in layers:
        # `resolve` reports the problems of layers, and a missing family.
        for key, value in canonical(layer, Problems()).items():
            if value is not None:
                named[key] = str(value)
    if "model_family" not in named:
        return None
    name = canonical_family_name(named["model_family"])
    if name in FAMILIES:
        return FAMILIES[name].for_flavour(named.get("model_flavour"))
    why = why_not_trained(name)
    if not why:
        why = f"is not one of: {', '.join(FAMILIES)}.{did_you_mean(name, FAMILIES)}"
    report.error("model_family", f"{named['model_family']!r} {why}")
    return None


def find_flavour(config: RunConfig, spec: FamilySpec, report: Problems) -> Flavour:
    """The flavour that the settings name; the default one in place of an unknown name."""
    name = config.model.model_flavour
    names = spec.flavour_names
    if name is None or name in names:
        return spec.flavour(name)
    families = [family for family, known in FAMILIES.items() if name in known.flavour_names]
    why = why_not_trained(name)
    if why:
        message = f"{name!r} {why}"
    elif families:
        message = f"{name!r} belongs to {families[0]}; {spec.name} has: {', '.join(names)}."
    else:
        # A suggestion keeps the task: i2v-lite-pretrain-5s looks most like a flavour of t2v.
        same_task = [known for known in names if known[:4] == name[:4]]
        message = (
            f"{name!r} is not one of: {', '.join(names)}.{did_you_mean(name, same_task or names)} "
            "For another checkpoint set pretrained_model_name_or_path."
        )
    report.error("model_flavour", message)
    return spec.flavours[0]


def choose_task(
    flavour: Flavour, entries: Sequence[DatasetConfig], *, has_picture: bool = False
) -> tuple[Flavour, list[DatasetConfig]]:
    """The flavour with the task that the datasets select, and the datasets with `is_i2v` resolved.

    Only a flavour with a `dataset_task` has a choice: it takes that task as soon as one trained
    dataset sets `video.is_i2v`, or a sample starts from a picture. The run's remaining datasets are
    still trained from noise alone.
    """
    if flavour.dataset_task is None:
        return flavour, list(entries)
    selects_it = any(entry.is_trained and entry.video.is_i2v for entry in entries)
    if has_picture or selects_it:
        flavour = replace(flavour, task=flavour.dataset_task)
    return flavour, [_resolve_i2v(entry) for entry in entries]


def _resolve_i2v(entry: DatasetConfig) -> DatasetConfig:
    if not entry.holds_clips:
        return entry
    # With a `dataset_task`, clips are trained from noise unless is_i2v is set.
    video = entry.video.model_copy(update={"is_i2v": bool(entry.video.is_i2v)})
    return entry.model_copy(update={"video": video})


@dataclass(frozen=True)
class Rendering:
    """What samples are rendered from, besides the settings.

    Attributes:
        folder: for what is rendered.
        prompts: in place of those that the settings name, if there are any.
        pictures: that samples start from.
        transformer: of a full fine-tune, in place of the base model's.
        compares: prompts that are a run's have its settings of them, as its previews had.
        run: a checkpoint of the run that trained the weights.
    """

    folder: str = ""
    prompts: Sequence[ValidationPrompt] = ()
    pictures: tuple[Sample, ...] = ()
    transformer: Part | None = None
    compares: bool = False
    run: Checkpoint | None = None


@dataclass(frozen=True)
class Launched:
    """Settings as a run or a survey is started with them.

    Attributes:
        config: with the processes that were started.
        family: None if the settings name none that exists.
        dataset_file, entries: the dataset file, and its entries.
    """

    config: RunConfig
    family: FamilySpec | None
    dataset_file: Path
    entries: list[DatasetConfig]


def plan_training(arguments: Arguments, purpose: Literal["train", "caches"] = "train") -> Plan:
    """Resolve every setting, and report every problem that can be found without weights.

    Args:
        arguments: their `problems` receive whatever is wrong or worth knowing.
        purpose: a run refuses to start if no step is left; its caches can be looked at with any
            number of steps.

    Raises:
        ConfigError: with every problem at once.
    """
    report = arguments.problems
    launched = read_settings(arguments, report)
    run = launched.config.run
    resume = select_checkpoint(run.resume_from_checkpoint, home_path(run.output_dir), report)
    if resume is not None:
        # Before the model is found, which some keys change.
        launched = replace(launched, config=with_defaults_of(resume, launched.config))
    model, entries = find_model(launched, purpose, report)
    problems = checks.find_problems(model, purpose)
    report.extend(checks.worth_reporting(problems, model.config))
    previews = plan_previews(model, Rendering(), report)

    # So far, settings and headers of weights were read; from here on, files that the settings name.
    targets = trained_layers(model.config, model.spec, model.flavour, model.source, report)
    if resume is not None:
        check_resume(model, resume, targets, report)
    seed = decide_seed(model.config.run.seed, resume)
    datasets = list_datasets(model, entries, arguments, report)
    # What follows needs complete datasets; after an error it would only report consequences.
    report.raise_if_fatal()

    check_use_of_data(previews, datasets, entries, report)
    same_data, origin, length = plan_schedule(model.config, datasets, resume, seed, report)
    plan = Plan(
        **vars(previews),
        purpose=purpose,
        dataset_file=launched.dataset_file,
        text_caches=[entry for entry in entries if entry.is_text_embeds],
        lora_targets=targets,
        resume=resume,
        seed=seed,
        datasets=datasets,
        same_data=same_data,
        origin=origin,
        length=length,
        warnings=[],
    )
    check_schedule(plan, report)
    report.raise_if_fatal()
    warnings = [problem for problem in report if not problem.fatal]
    # Several checks may give the same warning.
    return replace(plan, warnings=list(dict.fromkeys(warnings)))


def plan_rendering(arguments: Arguments, rendering: Rendering) -> PreviewPlan:
    """What samples render. Raising the problems is left to the caller, who may find more.

    Raises:
        ConfigError: the family is unknown.
    """
    report = arguments.problems
    layers, _ = arguments.layers(report)
    config, family = resolve_layers(layers, report)
    config = as_rendered(config, rendering.folder)
    if rendering.run is not None:
        config = with_defaults_of(rendering.run, config)
    if family is None:
        raise ConfigError([*report, *checks.check_config(config, "sample")])
    model, _ = _model(config, family, [], rendering, report)
    problems = checks.find_problems(model, "sample")
    for problem in checks.worth_reporting(problems, model.config):
        # The run has given its warnings; only those about the command line are new.
        is_new = model.config.origins.get(problem.where) == arguments.label
        if problem.fatal or is_new:
            report.append(problem)
    return plan_previews(model, rendering, report)


def plan_draft(arguments: Arguments) -> tuple[PreviewPlan, dict[str, str]]:
    """The plan of unfinished settings, and all keys without effect, set or not, with the reasons.

    An unknown family counts as the first one. Raising the problems is left to the caller, who may
    find more.
    """
    report = arguments.problems
    layers, _ = arguments.layers(report)
    family = find_family(layers, report) or next(iter(FAMILIES.values()))
    config = resolve(layers, report, family.defaults, family.fixed)
    model, _ = _model(config, family, [], Rendering(), report)
    problems = checks.find_problems(model, "draft")
    report.extend(checks.worth_reporting(problems, model.config))
    return plan_previews(model, Rendering(), report), checks.without_effect(problems)


def survey_datasets(arguments: Arguments) -> Survey:
    """A look at the datasets, which need not have captions, or enough samples.

    Raises:
        ConfigError: with every problem of the settings. Problems of files are warnings of the
            survey.
    """
    report = arguments.problems
    launched = read_settings(arguments, report)
    model, entries = find_model(launched, "survey", report)
    report.extend(checks.worth_reporting(checks.find_problems(model, "survey"), model.config))
    context = data_context(model.config, model.spec, model.flavour.task, arguments.collect)
    of_datasets = Problems()
    datasets = build_datasets(entries, context, of_datasets)
    ids = {dataset.id for dataset in datasets}
    # A problem of a dataset as a whole is about its files; the others are about keys.
    report.extend(problem for problem in of_datasets if problem.where not in ids)
    report.raise_if_fatal()
    warnings = [replace(problem, fatal=False) for problem in of_datasets]
    return Survey(**vars(model), datasets=datasets, warnings=warnings)


def read_settings(arguments: Arguments, report: Problems) -> Launched:
    """The settings with the processes that were started, the dataset file, and its entries."""
    layers, folder = arguments.layers(report)
    config, family = resolve_layers(layers, report)
    check_environment(report)
    config = as_launched(config, report)
    file = dataset_file(config.run.data_backend_config, folder, report)
    names = {"model_family": family.name if family else "", "output_dir": config.run.output_dir}
    entries = read_datasets(file, report, placeholders=names)
    dataset_checks.check_cache_folders(entries, report)
    return Launched(config, family, file, entries)


def find_model(
    launched: Launched, purpose: checks.Purpose, report: Problems
) -> tuple[Model, list[DatasetConfig]]:
    """The model that the settings name, and the entries of the datasets for its task.

    Raises:
        ConfigError: the family is unknown, so only the rules for all families can add to the
            report.
    """
    if launched.family is None:
        raise ConfigError([*report, *checks.check_config(launched.config, purpose)])
    return _model(launched.config, launched.family, launched.entries, Rendering(), report)


def _model(
    config: RunConfig,
    spec: FamilySpec,
    entries: list[DatasetConfig],
    rendering: Rendering,
    report: Problems,
) -> tuple[Model, list[DatasetConfig]]:
    """The model of a family, and the entries of the datasets for its task."""
    flavour = find_flavour(config, spec, report)
    flavour, entries = choose_task(flavour, entries, has_picture=bool(rendering.pictures))
    source = ModelSource.from_settings(spec, flavour, config.flat)
    source = source.with_transformer(rendering.transformer)
    spec = spec.for_checkpoint(flavour, source)
    if not config.is_explicit("aspect_bucket_alignment"):
        # The pixel grid that the checkpoint needs. It is written into the config, since datasets
        # take what they leave unset from there.
        grid = {"aspect_bucket_alignment": spec.defaults["aspect_bucket_alignment"]}
        config = config.with_values(grid, FAMILY_DEFAULT)
    return Model(config=config, spec=spec, flavour=flavour, source=source), entries


def plan_previews(model: Model, rendering: Rendering, report: Problems) -> PreviewPlan:
    """The prompts and the sizes of previews."""
    config = model.config
    validation = config.validation
    lenient = config.run.i_know_what_i_am_doing
    prompts = _prompts(validation, rendering, report)
    checks.check_prompts(config, prompts, report)
    sizes = fit_sizes(validation.validation_resolution or (), model.spec, report, lenient=lenient)
    library = validation.user_prompt_library
    prompts = fit_prompts(prompts, library, model.spec, report, lenient=lenient)
    check_guidance_of_prompts(model, prompts, report)
    return PreviewPlan(**vars(model), prompts=prompts, sizes=sizes, pictures=rendering.pictures)


def _prompts(
    validation: ValidationConfig, rendering: Rendering, report: Problems
) -> list[ValidationPrompt]:
    """The prompts of the command line, else those of the settings."""
    if not rendering.prompts:
        return collect_prompts(validation, report)
    if not rendering.compares:
        return [*rendering.prompts]
    return like_those_of_run(rendering.prompts, collect_prompts(validation, Problems()))


def list_datasets(
    model: Model, entries: list[DatasetConfig], arguments: Arguments, report: Problems
) -> list[Dataset]:
    """The datasets, with all their files listed and measured."""
    context = data_context(model.config, model.spec, model.flavour.task, arguments.collect)
    datasets = build_datasets(entries, context, report) if entries else []
    if not any(dataset.config.is_trained for dataset in datasets) and not report.are_fatal:
        report.error("data_backend_config", "names no dataset to train on.")
    dataset_checks.check_datasets(model, datasets, report)
    return datasets


def check_use_of_data(
    previews: PreviewPlan, datasets: list[Dataset], entries: list[DatasetConfig], report: Problems
) -> None:
    """Report keys that cannot act on the datasets, and sizes of previews that were not trained."""
    unused = Problems()
    effects.by_data(previews.config, datasets, entries, unused)
    report.extend(checks.worth_reporting(unused, previews.config))
    trained: dict[str, list[Size]] = {}
    for dataset in datasets:
        if dataset.config.is_trained:
            trained[dataset.id] = sorted({sample.geometry.size for sample in dataset.samples})
    check_preview_sizes(previews, trained, report)
    check_pictures_of_prompts(previews, report)


def plan_schedule(
    config: RunConfig,
    datasets: list[Dataset],
    resume: Checkpoint | None,
    seed: int,
    report: Problems,
) -> tuple[bool, Origin, Length]:
    """(whether the sample order continues, where the session's data begin, length of the run)."""
    trained = [dataset for dataset in datasets if dataset.config.is_trained]
    same_data = resume is None or has_same_data(config, trained, resume, seed, report)
    origin = data_origin(config, resume, same_data=same_data)
    length = plan_length(config.schedule, make_sampler(config, trained, seed, origin).schedule)
    checks.check_total(config, length.total_steps, report)
    return same_data, origin, length
