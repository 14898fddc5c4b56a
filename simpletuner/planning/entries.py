"""The cache entries of a plan, and the source pictures of its previews."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from simpletuner.caching.catalogue import (
    AnyEntry,
    Catalogue,
    DatasetCaches,
    Entries,
    FeatureEntry,
    FeatureKind,
    LatentEntry,
    Storage,
    TextEntry,
    missing,
)
from simpletuner.caching.keys import EncoderIdentity, checkpoint_identity
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.precision import text_encoder_dtype, text_encoder_storage, vae_dtype
from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.preservation import PreservationConfig
from simpletuner.config.types import Size
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import Collect, DataContext, text_entry_of
from simpletuner.data.sample import Sample
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import PICTURE_TASKS, FamilySpec, Task
from simpletuner.planning.environment import driver
from simpletuner.planning.plans import SamplePlan
from simpletuner.planning.prompts import ValidationPrompt

TEXT_ROLES = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def make_catalogue(plan: SamplePlan) -> Catalogue | None:
    """The cache entries of a plan; None while a part of the checkpoint is not on this machine.

    Keys depend on the content of the encoders, so they are unknown before a download.
    """
    # Only encoders: keys do not depend on the transformer, so every transformer can use the caches.
    vae = _identity(plan.source, ["vae"])
    text_encoder = _identity(plan.source, TEXT_ROLES)
    # Vision encoders of techniques, such as CREPA's DINOv2.
    visions = [kind.encoder for kind in feature_kinds(plan) if kind.encoder]
    if vae is None or text_encoder is None or not all(vision.local() for vision in visions):
        return None
    config = plan.config
    family = plan.spec.name
    dtype = vae_dtype(config.precision, config.caching)
    # By content, so that the same files at another path have the same keys.
    return Catalogue(
        datasets={dataset.id: _caches(plan, dataset) for dataset in plan.datasets},
        prompts=text_folder(plan),
        compress=config.caching.compress_disk_cache,
        vae=EncoderIdentity(
            family,
            vae,
            dtype,
            tiling=config.caching.vae_enable_tiling,
            # On a GPU only: a float32 VAE runs without TF32; older entries, computed with TF32, do
            # not match.
            tf32=False if dtype == "fp32" and driver() else None,
        ),
        text_encoder=EncoderIdentity(
            family,
            text_encoder,
            text_encoder_dtype(config.precision),
            text_encoder_storage(config.precision, plan.spec.text_encoders),
        ),
        template=plan.spec.captions.fingerprint(config.family, plan.flavour),
        max_length=plan.spec.captions.length(config.text),
        bare_template=plan.spec.captions.bare_fingerprint,
        clean=plan.spec.captions.clean,
        prompt_holds_picture=plan.flavour.task in plan.spec.captions.picture_tasks,
    )


def _identity(source: ModelSource, roles: Iterable[str]) -> str | None:
    """Identity of the parts that the checkpoint has; None unless all of them are local."""
    folders = [source[role].local_folder() for role in roles if role in source.parts]
    return checkpoint_identity(*filter(None, folders)) if all(folders) else None


def _caches(plan: SamplePlan, dataset: Dataset) -> DatasetCaches:
    config = dataset.config
    preservation = plan.config.techniques.of(PreservationConfig)
    # The target of regularisation data is already the base model.
    preserves = preservation.is_on and config.is_trained and not config.is_regularisation_data
    return DatasetCaches(
        latents=dataset.latent_dir,
        texts=text_folder(plan, dataset),
        compress=bool(config.compress_cache),
        storage=latent_storage(plan, dataset),
        complete=partial(plan.spec.captions.apply_dataset_keys, config),
        preserve=preservation.other_caption if preserves else None,
    )


def latent_storage(plan: SamplePlan, dataset: Dataset) -> Storage:
    """When the latents of a dataset are encoded."""
    if dataset.config.vae_cache_disable:
        return "never"
    return "ondemand" if plan.config.caching.vae_cache_ondemand else "ahead"


def data_context(
    config: RunConfig, spec: FamilySpec, task: Task, collect: Collect | None = None
) -> DataContext:
    """The settings of a run that concern datasets."""
    run = config.run
    cache = Path(run.cache_dir or f"{run.output_dir}/cache")
    frame_rate = None
    if spec.media == "video":
        frame_rate = config.validation.framerate or spec.frame_rate
    return DataContext(
        defaults=config.datasets,
        spec=spec,
        task=task,
        latent_root=Path(run.cache_dir_vae or cache / "vae").expanduser() / spec.name,
        text_root=Path(run.cache_dir_text or cache / "text").expanduser() / spec.name,
        download_root=cache.expanduser(),
        output_dir=Path(run.output_dir).expanduser(),
        frame_rate=frame_rate,
        train_batch_size=config.schedule.train_batch_size,
        gradient_accumulation_steps=config.schedule.gradient_accumulation_steps,
        num_processes=config.launch.data_processes,
        collect=collect,
        # 0 and -1 request a new seed in every run, see `DataContext.seed`.
        seed=run.seed if run.seed is not None and run.seed > 0 else None,
        caching=config.caching,
    )


def text_folder(plan: SamplePlan, dataset: Dataset | None = None) -> Path:
    """The text cache of a dataset, or of the prompts (None)."""
    config = dataset.config if dataset else DatasetConfig(id="prompts")
    entry = text_entry_of(config, plan.text_caches)
    if entry is not None and entry.cache_dir:
        return Path(entry.cache_dir).expanduser()
    return data_context(plan.config, plan.spec, plan.flavour.task).text_root


def machine_folder(plan: SamplePlan) -> Path:
    """The folder of machine-specific data for all runs: compiled code, measured densities."""
    return Path(plan.config.run.cache_dir or "cache").expanduser()


def cache_folders(plan: SamplePlan) -> list[Path]:
    """Every existing cache folder of a plan, without duplicates."""
    folders = [text_folder(plan)]
    for dataset in plan.datasets:
        folders += [text_folder(plan, dataset), dataset.latent_dir]
    # Without duplicates, since datasets may share a folder.
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


@dataclass(frozen=True)
class Listing:
    """Every cache entry that a run reads in an epoch.

    Attributes:
        texts: embeddings of captions and prompts.
        features: features of techniques.
    """

    plan: SamplePlan
    epoch: int
    catalogue: Catalogue
    texts: Entries[TextEntry]
    latents: Entries[LatentEntry]
    features: Entries[FeatureEntry]

    def holds_for(self, plan: SamplePlan, epoch: int) -> bool:
        """Whether a plan certainly reads the same entries; if not, they must be listed again."""
        # New random crops have different latents.
        changes = any(dataset.changes_each_epoch for dataset in plan.datasets)
        if changes and epoch != self.epoch:
            return False
        return plan.config == self.plan.config and plan.datasets == self.plan.datasets

    def keys(self) -> set[str]:
        """The keys of all entries."""
        entries: list[Iterable[AnyEntry]] = [self.texts, self.latents, self.features]
        return {entry.key.digest() for entry in chain.from_iterable(entries)}

    @cached_property
    def ahead(self) -> Entries[LatentEntry]:
        """The latents that are encoded before training."""
        return Entries(lambda: (entry for entry in self.latents.make() if entry.storage == "ahead"))

    @cached_property
    def encoded_in_training(self) -> list[LatentEntry]:
        """The latents that training encodes, without those cached at the first access."""
        if all(caches.storage == "ahead" for caches in self.catalogue.datasets.values()):
            return []
        later = [entry for entry in self.latents if entry.storage != "ahead"]
        uncached = missing(entry for entry in later if entry.storage == "ondemand")
        return uncached + [entry for entry in later if entry.storage == "never"]


def list_entries(plan: SamplePlan, catalogue: Catalogue, epoch: int = 1) -> Listing:
    """The entries that the run reads in an epoch; a text with several uses is listed once."""
    dropout = plan.config.text.caption_dropout_probability > 0
    trained = [dataset.at_epoch(epoch) for dataset in plan.trained]
    held_out = evaluated(plan)
    kinds = feature_kinds(plan)

    def texts() -> Iterator[TextEntry]:
        yield from catalogue.texts_of(trained, with_empty=dropout)
        yield from catalogue.texts_of(held_out, with_empty=False)
        yield from prompt_entries(plan, catalogue)

    return Listing(
        plan,
        epoch,
        catalogue,
        texts=Entries(texts),
        latents=Entries(lambda: catalogue.latents_of([*trained, *held_out])),
        features=Entries(lambda: catalogue.features_of(trained, kinds)),
    )


def feature_kinds(plan: SamplePlan) -> list[FeatureKind]:
    """The features that the techniques of a run cache for every sample."""
    return [kind for technique in plan.techniques for kind in technique.features if kind.is_cached]


def evaluated(plan: SamplePlan) -> list[Dataset]:
    """The eval datasets of the evaluation loss, cut to the evaluated samples."""
    if not plan.config.evaluation.measures_loss:
        return []
    # The first samples, so that every evaluation is comparable.
    most = plan.config.validation.num_eval_images
    datasets = []
    for dataset in plan.datasets:
        if dataset.config.dataset_type == "eval" and dataset.samples:
            datasets.append(replace(dataset, samples=dataset.samples[:most]))
    return datasets


def prompt_entries(plan: SamplePlan, catalogue: Catalogue) -> list[TextEntry]:
    """The embeddings that validation needs, including the negative prompt."""
    if not plan.prompts:
        return []
    entries = []
    all_pictures: list[Sample | None] = []
    for prompt, sources in prompts_with_sources(plan):
        pictures: list[Sample | None] = [None]
        if catalogue.prompt_holds_picture:
            pictures = _fitted(sources, prompt.sizes_among(plan.sizes))
        for picture in pictures:
            title = f"validation prompt {prompt.prompt!r}"
            entries.append(catalogue.text(None, prompt.prompt, picture, title, negative=False))
        all_pictures += pictures
    negative = plan.config.validation.validation_negative_prompt or ""
    for picture in dict.fromkeys(all_pictures):
        title = f"validation prompt {negative!r}"
        entries.append(catalogue.text(None, negative, picture, title, negative=True))
    return entries


def _fitted(sources: Sequence[Sample | None], sizes: Sequence[Size]) -> list[Sample | None]:
    """Source pictures at all sizes, each of which has another embedding."""
    fitted: list[Sample | None] = []
    for source in sources:
        if source is not None:
            fitted += [source.fitted(size) for size in sizes]
    return fitted


def prompts_with_sources(
    plan: SamplePlan,
) -> list[tuple[ValidationPrompt, list[Sample | None]]]:
    """The prompts with what their previews start from: their own picture, or those of the run."""
    of_run = preview_sources(plan)
    has_sources = plan.flavour.task in PICTURE_TASKS
    pairs: list[tuple[ValidationPrompt, list[Sample | None]]] = []
    for prompt in plan.prompts:
        # Pictures on the command line replace those of prompts.
        is_own = has_sources and prompt.picture is not None and not plan.pictures
        pairs.append((prompt, [prompt.picture] if is_own else of_run))
    return pairs


def preview_sources(plan: SamplePlan) -> list[Sample | None]:
    """The sources of previews: none (None), source pictures (i2i), or first frames (i2v).

    They come from `eval_dataset_id`, else from the trained datasets.
    """
    if plan.flavour.task not in PICTURE_TASKS:
        return [None]
    if plan.pictures:
        return [*plan.pictures]
    chosen = plan.config.validation.eval_dataset_id
    sources: list[Sample | None] = []
    for dataset in plan.datasets:
        is_source = dataset.id in chosen if chosen else dataset.config.is_trained
        if is_source and not dataset.config.disable_validation:
            # The source of an edited picture (i2i), else the clip, for its first frame.
            sources += [sample.partner or sample for sample in dataset.samples]
    return sources[: plan.config.validation.num_eval_images]


def previews_of_a_round(plan: SamplePlan) -> tuple[int, int]:
    """(previews per round, previews per size and seed)."""
    config = plan.config
    sets_of_weights = 1
    if config.ema.use_ema and config.ema.ema_validation == "comparison":
        sets_of_weights = 2  # with and without the average
    per_prompt = config.validation.num_validation_images
    previews = 0
    subjects = 0
    for prompt, sources in prompts_with_sources(plan):
        of_prompt = len(sources) * sets_of_weights
        subjects += of_prompt
        previews += of_prompt * len(prompt.sizes_among(plan.sizes)) * per_prompt
    return previews, subjects
