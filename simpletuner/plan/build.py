"""From typed settings to a plan: what will be trained, on what, for how long, and what stands in the way.

Nothing here loads a weight, imports torch or writes a file. Every problem is collected before the first complaint.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.caching.catalogue import Catalogue, Encoders, LatentEntry, TextEntry
from simpletuner.caching.checkpoint import checkpoint_identity
from simpletuner.caching.keys import EncoderIdentity
from simpletuner.config.arguments import Arguments
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.load import Layer, RunConfig, raise_if_fatal, resolve
from simpletuner.config.load_datasets import read_datasets
from simpletuner.config.locate import dataset_file, locate
from simpletuner.config.precision import text_encoder_dtype, vae_dtype
from simpletuner.data.build import build_datasets
from simpletuner.data.cache_folders import text_entry_of
from simpletuner.data.context import DataContext
from simpletuner.data.dataset import Dataset
from simpletuner.data.sampler import Sampler
from simpletuner.errors import Problem, did_you_mean
from simpletuner.models.lora_targets import Targets, check_targets, linear_modules, matching_modules, resolve_targets
from simpletuner.models.registry import FAMILIES, PLANNED_FAMILIES, canonical_family_name
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.plan.checks import check_config, check_family, check_total
from simpletuner.training.manifest import Checkpoint, select_checkpoint
from simpletuner.validation.prompts import ValidationPrompt, collect_prompts, parse_resolutions

FAMILY_DEFAULT = "family default"
TEXT_ROLES = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    total_steps: int
    batches_per_epoch: int
    epochs: int


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check that needs no weights.

    Attributes:
        seed: decided, also where the user left it open.
        text_caches: the text_embeds entries of the dataset file.
        resume: the checkpoint to continue from, None for a fresh run.
        warnings: what the user should know and need not mend.
    """

    config: RunConfig
    spec: FamilySpec
    flavour: Flavour
    source: ModelSource
    seed: int
    dataset_file: Path
    datasets: list[Dataset]
    text_caches: list[DatasetConfig]
    lora_targets: Targets
    prompts: list[ValidationPrompt]
    sizes: list[tuple[int, int]]
    length: Length
    resume: Checkpoint | None
    warnings: list[Problem]

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir).expanduser()

    @property
    def trained(self) -> list[Dataset]:
        """The datasets whose samples are drawn in training."""
        return [dataset for dataset in self.datasets if dataset.config.is_trained]

    @property
    def is_finished(self) -> bool:
        """Whether a checkpoint of the last step and the result are there already."""
        result = "pytorch_lora_weights.safetensors" if self.config.model.model_type == "lora" else "pipeline"
        done = self.resume is not None and self.resume.step >= self.length.total_steps
        return done and (self.output_dir / result).exists()

    def sampler(self) -> Sampler:
        """The order of samples, from the beginning."""
        return make_sampler(self.trained, self.config, self.seed)


def make_plan(arguments: Arguments, problems: list[Problem]) -> Plan:
    """Check everything that can be checked and decide everything that can be decided.

    Raises:
        ConfigError: with every problem at once.
    """
    located = locate(arguments.selectors, problems)
    layers = [*located.layers, arguments.layer()]
    spec = find_family(layers, problems)
    family_layer = Layer(FAMILY_DEFAULT, list(spec.defaults.items()) if spec else [])
    config = resolve([family_layer, *layers], problems)
    if config is None:
        raise_if_fatal(problems)
        raise RuntimeError("a config that cannot be built has a fatal problem")
    problems.extend(check_config(config))
    path = dataset_file(config.run.data_backend_config, located.folder, problems)
    placeholders = {"model_family": spec.name if spec else "", "output_dir": config.run.output_dir}
    entries = read_datasets(path, problems, placeholders=placeholders)
    if spec is None:
        raise_if_fatal(problems)
        raise RuntimeError("an unknown family is a fatal problem")
    return _plan_family(config, spec, path, entries, problems)


def find_family(layers: Sequence[Layer], problems: list[Problem]) -> FamilySpec | None:
    """The family that the strongest layer names."""
    named = [value for layer in layers for key, value in layer.values if _plain(key) == "model_family" and value]
    if not named:
        return None  # resolve() says that the key is required
    name = canonical_family_name(str(named[-1]))
    if name in FAMILIES:
        return FAMILIES[name]
    known = [*FAMILIES, *PLANNED_FAMILIES]
    if name in PLANNED_FAMILIES:
        message = f"{name!r} is not available yet; available: {', '.join(FAMILIES)}."
    else:
        message = f"{named[-1]!r} is not one of: {', '.join(known)}.{did_you_mean(name, known)}"
    problems.append(Problem("model_family", message))
    return None


def make_sampler(trained: Sequence[Dataset], config: RunConfig, seed: int, rank: int = 0) -> Sampler:
    """The sampler of a run. `rank` is that of the process among `num_processes`."""
    return Sampler(
        trained,
        seed=seed,
        sampling=config.datasets.data_backend_sampling,
        accumulation=config.schedule.gradient_accumulation_steps,
        rank=rank,
        world=config.launch.num_processes,
    )


def make_catalogue(plan: Plan) -> Catalogue | None:
    """The cache entries of a plan, or None while a part of the checkpoint is not on this machine."""
    folders = {role: plan.source[role].local_folder() for role in ("vae", *TEXT_ROLES) if role in plan.source.parts}
    present = {role: folder for role, folder in folders.items() if folder is not None}
    if len(present) < len(folders):
        return None
    config, family = plan.config, plan.spec.name
    text_folders = [present[role] for role in TEXT_ROLES if role in present]
    encoders = Encoders(
        vae=EncoderIdentity(
            family,
            checkpoint_identity(present["vae"]),
            vae_dtype(config.precision, config.caching),
            tiling=config.caching.vae_enable_tiling,
        ),
        text=EncoderIdentity(family, checkpoint_identity(*text_folders), text_encoder_dtype(config.precision)),
        template=plan.spec.text_fingerprint(config.text, plan.flavour),
        max_length=min(config.text.tokenizer_max_length or plan.spec.text_length_cap, plan.spec.text_length_cap),
        clean=plan.spec.clean_caption,
        prompt_holds_picture=plan.flavour.task in plan.spec.prompt_holds_picture,
    )
    return Catalogue(
        encoders,
        latent_folders={dataset.id: dataset.latent_dir for dataset in plan.datasets},
        text_folders={dataset.id: text_folder(plan, dataset) for dataset in plan.datasets},
        default_text_folder=text_folder(plan),
    )


def text_folder(plan: Plan, dataset: Dataset | None = None) -> Path:
    """The text cache of a dataset, or of prompts that belong to none: its entry's folder, else the family's own."""
    entry = text_entry_of(dataset.config if dataset else DatasetConfig(id="prompts"), plan.text_caches)
    if entry is not None and entry.cache_dir:
        return Path(entry.cache_dir).expanduser()
    return DataContext.of(plan.config, plan.spec, plan.flavour.task).text_root


def wanted_entries(plan: Plan, catalogue: Catalogue, epoch: int) -> tuple[list[TextEntry], list[LatentEntry]]:
    """Every entry that the run reads in an epoch: captions, prompts, latents."""
    dropout = plan.config.text.caption_dropout_probability > 0
    texts = catalogue.texts_of(plan.trained, epoch, with_empty=dropout)
    return texts + prompt_entries(plan, catalogue), catalogue.latents_of(plan.trained, epoch)


def prompt_entries(plan: Plan, catalogue: Catalogue) -> list[TextEntry]:
    """The embeddings that validation needs, the negative prompt among them."""
    negative = plan.config.validation.validation_negative_prompt or ""
    pictures: Sequence[Any] = preview_sources(plan) if catalogue.encoders.prompt_holds_picture else [None]
    texts = [*(prompt.prompt for prompt in plan.prompts), negative] if plan.prompts else []
    return [
        catalogue.text(None, text, picture, f"validation prompt {text!r}") for text in texts for picture in pictures
    ]


def preview_sources(plan: Plan) -> list[Any]:
    """The source pictures of i2i previews: of `eval_dataset_id`, else of the first trained dataset."""
    chosen = plan.config.validation.eval_dataset_id
    datasets = [each for each in plan.datasets if chosen is None or each.config.id in chosen]
    samples = [sample for each in datasets for sample in each.samples if not each.config.disable_validation]
    sources = [sample.partner or sample for sample in samples if sample.partner is not None or chosen is not None]
    return sources[: plan.config.validation.num_eval_images]


def _plan_family(
    config: RunConfig, spec: FamilySpec, path: Path, entries: list[DatasetConfig], problems: list[Problem]
) -> Plan:
    flavour = _find_flavour(config, spec, problems)
    source = ModelSource.from_config(spec, flavour, config.model)
    problems.extend(check_family(config, spec))
    problems.extend(spec.check(config, flavour))
    model_problems = source.problems()
    problems.extend(model_problems or spec.check_checkpoint(flavour, source))
    targets = _check_lora(config, spec, source, problems)
    prompts = collect_prompts(config.validation, problems)
    sizes = _sizes(config, spec, problems)
    seed = decide_seed(config.run.seed)
    context = DataContext.of(config, spec, flavour.task)
    datasets = build_datasets(entries, context, problems) if entries else []
    trained = [dataset for dataset in datasets if dataset.config.is_trained]
    _check_datasets(config, datasets, trained, problems)
    resume = _check_resume(config, spec, flavour, problems)
    raise_if_fatal(problems)
    length = plan_length(config, make_sampler(trained, config, seed))
    problems.extend(check_total(config, length.total_steps))
    return Plan(
        config=config,
        spec=spec,
        flavour=flavour,
        source=source,
        seed=seed,
        dataset_file=path,
        datasets=datasets,
        text_caches=[entry for entry in entries if entry.is_text_embeds],
        lora_targets=targets,
        prompts=prompts,
        sizes=sizes,
        length=length,
        resume=resume,
        warnings=list(dict.fromkeys(problem for problem in problems if not problem.fatal)),
    )


def plan_length(config: RunConfig, sampler: Sampler) -> Length:
    """Steps and epochs of a run: `max_train_steps`, else so many epochs (1 unless set)."""
    accumulation = config.schedule.gradient_accumulation_steps
    per_epoch = sampler.batches_per_epoch(1)
    steps = config.schedule.max_train_steps or 0
    if steps > 0:
        return Length(steps, per_epoch, -(-steps * accumulation // max(per_epoch, 1)))
    epochs = config.schedule.num_train_epochs or 1
    batches = sum(sampler.batches_per_epoch(epoch) for epoch in range(1, epochs + 1))
    return Length(-(-batches // accumulation), per_epoch, epochs)


def decide_seed(configured: int | None) -> int:
    """The seed of a run: 0 comes from the clock, -1 and None from the system's random source."""
    if configured is None or configured == -1:
        return secrets.randbelow(2**31)
    return int(time.time()) if configured == 0 else configured


def _find_flavour(config: RunConfig, spec: FamilySpec, problems: list[Problem]) -> Flavour:
    name = config.model.model_flavour
    try:
        return spec.flavour(name)
    except KeyError:
        names = list(spec.flavour_names)
        message = f"{name!r} is not one of: {', '.join(names)}.{did_you_mean(str(name), names)}"
        hint = " For another checkpoint set pretrained_model_name_or_path."
        problems.append(Problem("model_flavour", message + hint))
        return spec.flavours[0]


def _check_lora(config: RunConfig, spec: FamilySpec, source: ModelSource, problems: list[Problem]) -> Targets:
    targets = resolve_targets(config.lora.peft_lora_target_modules, spec, problems)
    folder = source["transformer"].local_folder()
    if config.model.model_type != "lora" or folder is None:
        return targets
    modules = linear_modules(folder)
    if not modules:
        return targets  # weights in another format than safetensors show their names only when loaded
    problems.extend(check_targets(modules, targets))
    narrowest = min((min(modules[name]) for name in matching_modules(modules, targets)), default=None)
    if narrowest is not None and config.lora.lora_rank > narrowest:
        message = f"{config.lora.lora_rank} is more than the narrowest layer is wide ({narrowest})."
        problems.append(Problem("lora_rank", message, fatal=False))
    return targets


def _sizes(config: RunConfig, spec: FamilySpec, problems: list[Problem]) -> list[tuple[int, int]]:
    value = config.validation.validation_resolution
    if config.validation.validation_disable or value is None:
        return []
    return parse_resolutions(value, spec, lenient=config.run.i_know_what_i_am_doing, problems=problems)


def _check_datasets(
    config: RunConfig, datasets: Sequence[Dataset], trained: Sequence[Dataset], problems: list[Problem]
) -> None:
    if not trained and not any(problem.fatal for problem in problems):
        problems.append(Problem("data_backend_config", "names no dataset to train on."))
    regularised = [each.config.id for each in trained if each.config.is_regularisation_data]
    if regularised and config.model.model_type == "full":
        message = "needs model_type lora: the base model's prediction is the one without the LoRA."
        problems.append(Problem(f"{regularised[0]}.is_regularisation_data", message))
    ids = [each.config.id for each in datasets]
    for chosen in config.validation.eval_dataset_id or []:
        if chosen not in ids:
            message = f"{chosen!r} is not the id of a dataset ({', '.join(ids)}).{did_you_mean(chosen, ids)}"
            problems.append(Problem("eval_dataset_id", message))


def _check_resume(config: RunConfig, spec: FamilySpec, flavour: Flavour, problems: list[Problem]) -> Checkpoint | None:
    output_dir = Path(config.run.output_dir).expanduser()
    checkpoint = select_checkpoint(config.run.resume_from_checkpoint, output_dir, problems)
    if checkpoint is None:
        return None
    manifest, key = checkpoint.manifest, "resume_from_checkpoint"
    for what, old, new in (
        ("model_family", manifest.model_family, spec.name),
        ("model_flavour", manifest.model_flavour, flavour.name),
        ("model_type", manifest.model_type, config.model.model_type),
    ):
        if old != new:
            message = f"{checkpoint.path} was trained with {what} {old}, not {new}; choose another output_dir."
            problems.append(Problem(key, message))
    size = config.schedule.train_batch_size
    if manifest.train_batch_size != size:
        allowed = config.run.i_know_what_i_am_doing or _allows_other_batch_size()
        message = f"{checkpoint.path} was trained with train_batch_size {manifest.train_batch_size}, not {size}."
        hint = "" if allowed else " i_know_what_i_am_doing allows it; data order then starts anew."
        problems.append(Problem(key, message + hint, fatal=not allowed))
    return checkpoint


def _allows_other_batch_size() -> bool:

    return os.environ.get("SIMPLETUNER_ALLOW_MODIFYING_BSZ", "0") == "1"


def _plain(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")
