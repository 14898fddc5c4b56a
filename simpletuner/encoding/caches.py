"""Fills the caches of a run: text first, then latents, with one encoder on the device at a time."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from simpletuner.caching.catalogue import (
    AnyEntry,
    Catalogue,
    FeatureEntry,
    LatentEntry,
    Share,
    TextEntry,
    missing,
)
from simpletuner.caching.entry import DamagedEntryError, entry_path, read_entry
from simpletuner.config.precision import quantisation, text_encoder_dtype, vae_dtype
from simpletuner.config.schema import RunConfig
from simpletuner.data.dataset import Dataset, Failures, check_amount, summarise_rejected, without_failures
from simpletuner.data.entries import DataContext, ProgressBar
from simpletuner.distributed.world import Value, World
from simpletuner.encoding.fill import ChangedFileError, encode_now, fill_features, fill_latents, fill_texts, write_entry
from simpletuner.encoding.quarantine import quarantine
from simpletuner.encoding.read import read_or_restore
from simpletuner.encoding.sharing import share_work
from simpletuner.errors import Problems, UserError
from simpletuner.memory.heap import trim_heap
from simpletuner.memory.offload.attach import LayerQuantiser, Offload
from simpletuner.memory.precision import DTYPES
from simpletuner.memory.quantisation.layers import quantise
from simpletuner.models.adapter import (
    Encoder,
    EncoderQuantiser,
    FamilyAdapter,
    LatentEncoder,
    TextEncoder,
    load_adapter,
)
from simpletuner.models.loading import check_shapes
from simpletuner.models.lora_checks import check_init_lora
from simpletuner.models.lora_layers import linear_modules
from simpletuner.planning.checks import check_block_numbers, check_parts
from simpletuner.planning.entries import Listing, list_entries, make_catalogue
from simpletuner.planning.length import check_schedule, plan_length
from simpletuner.planning.plans import AnyPlan, Plan, PreviewPlan, SamplePlan
from simpletuner.reporting.events import CACHING, EventStream, PhaseStarted
from simpletuner.techniques.base import FeatureEncoder, Technique
from simpletuner.techniques.load import technique_class
from simpletuner.training.assemble import make_accelerator
from simpletuner.training.loader import in_loop
from simpletuner.weights.part import Part
from simpletuner.weights.published_lora import find_lora, is_on_hub

logger = logging.getLogger(__name__)

AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)

# How long files written by another machine may take to appear on a network disk.
SECONDS_TO_APPEAR = 120.0


@dataclass
class Encoding(Generic[AnyPlan]):
    """Encodes entries into their caches; one encoder is on the device at a time.

    Attributes:
        plan: selects the encoders and their precision.
    """

    plan: AnyPlan
    adapter: FamilyAdapter
    device: torch.device
    events: EventStream
    _vae: LatentEncoder | None = field(default=None, init=False)  # stays loaded once training has used it
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False)

    def texts(self, entries: list[TextEntry], world: World) -> None:
        """Encode captions; every process of `world` has a different share."""
        config = self.plan.config
        size = config.caching.captions_at_once(self.device.type, streamed=config.offload.group_offload_text_encoder)

        def work(bar: ProgressBar) -> list[str]:
            # In turn, since weights pass through host memory while they are cast or quantised. Processes without
            # entries take a turn too: `in_turn` is collective.
            encoder = world.in_turn(self.load_text_encoder if entries else lambda: None)
            return fill_texts(entries, encoder, size, bar) if encoder else []

        shares = self._share(len(entries), world, "captions", "captions", "init_text_embed_cache", work)
        for warning in dict.fromkeys(chain.from_iterable(shares)):
            logger.warning(warning)

    def latents(self, entries: list[LatentEntry], world: World) -> Failures:
        """Encode pictures and clips; returns the files that cannot be decoded, with the reason."""
        work = partial(fill_latents, entries, self._load_latent_encoder, self.plan.config.caching)
        noun = self.plan.spec.media_noun
        shares = self._share(len(entries), world, noun, noun, "init_vae_cache", work)
        failures = {key: reason for share in shares for key, reason in share.items()}
        if len(shares) > 1:  # equal for any number of processes
            failures = dict(sorted(failures.items()))
        return failures

    def features(self, entries: list[FeatureEntry], world: World) -> None:
        """Encode the features that techniques need, from cached latents."""
        classes: dict[str, type[Technique]] = {}
        for spec in self.plan.techniques:
            for kind in spec.features:
                classes[kind.name] = technique_class(type(spec))

        def read(entry: LatentEntry) -> Tensor:
            is_cached = entry.storage != "never"
            latents = read_or_restore(entry, self.restore)["latents"] if is_cached else self.encode(entry)
            return latents.to(self.device)

        def load(entry: FeatureEntry) -> FeatureEncoder:
            load_vae = self._load_latent_encoder
            return classes[entry.kind.name].load_encoder(entry.kind, self.adapter, load_vae, self.device)

        def work(bar: ProgressBar) -> None:
            fill_features(entries, load, read, bar)

        self._share(len(entries), world, "features", self.plan.spec.media_noun, "init_feature_cache", work)

    def _share(
        self, count: int, world: World, what: str, unit: str, stage: str, work: Callable[[ProgressBar], Value]
    ) -> list[Value]:
        """Encode this process's `count` entries; returns what `work` returned in each process. Collective."""
        # By the total, so that no process skips a phase in which another one waits for it.
        total = sum(world.gather(count))
        if not total:
            return []
        phase = PhaseStarted(f"Encoding {what}", total, unit, CACHING, stage)
        results = share_work(world, self.events, phase, work)
        # Free the memory of this encoder before the next one is loaded.
        gc.collect()
        trim_heap()
        torch.cuda.empty_cache()
        return results

    def encode(self, entry: LatentEntry) -> Tensor:
        """Encode latents during training; the VAE stays on the device after the first call.

        Raises:
            UserError: the latents cannot be encoded.
        """
        # Libraries patch torch while they load a model, so this must happen in the loop's thread.
        encoder = self._vae or in_loop(self._kept_latent_encoder)
        with self._turn:  # the prefetch thread and evaluation share the VAE
            return encode_now(entry, encoder, self.plan.config.caching)

    def _kept_latent_encoder(self) -> LatentEncoder:
        self._vae = self._vae or self._load_latent_encoder()
        return self._vae

    def restore(self, entry: AnyEntry) -> None:
        """Encode an entry during a run because it is damaged, or on its first use."""
        if isinstance(entry, LatentEntry) and entry.storage == "ondemand":
            write_entry(entry, {"latents": self.encode(entry)})
        else:
            in_loop(partial(self._restore_damaged, entry))

    def _restore_damaged(self, entry: AnyEntry) -> None:
        logger.warning("The cache entry of %s was damaged and is encoded again.", entry.key.digest())
        if isinstance(entry, TextEntry):
            # `World()` is this process alone: other processes have not seen the damage and would not take part.
            self.texts([entry], World())
        elif isinstance(entry, FeatureEntry):
            self.features([entry], World())
        elif self.latents([entry], World()):
            raise UserError(f"{entry.source}: its cache entry is damaged and so is the file itself.")

    def load_text_encoder(self) -> TextEncoder:
        """Load the text encoder in the configured precision, onto the device or streamed to it."""
        return load_encoder(self.adapter.load_text_encoder, self.plan.config, self.device)

    def _load_latent_encoder(self) -> LatentEncoder:
        config = self.plan.config
        encoder = self.adapter.load_latent_encoder(self.device, DTYPES[vae_dtype(config.precision, config.caching)])
        if config.offload.group_offload_vae:
            Offload(config.offload, self.device).attach_to_stacks(encoder.vae)
        return encoder


@dataclass
class CacheFiller(Generic[AnyPlan]):
    """Keeps the caches of a run complete.

    Attributes:
        listing: the entries of the epoch filled last.
        world: the processes that fill the caches together.
        share: the part of the entries to encode.
        plan: the plan without files found to be damaged.
    """

    encoding: Encoding[AnyPlan]
    listing: Listing
    world: World = field(default_factory=World)
    share: Share = field(default_factory=Share)
    plan: AnyPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.encoding.plan

    @property
    def catalogue(self) -> Catalogue:
        return self.listing.catalogue

    def fill(self) -> None:
        """Encode all missing entries of the listing, and remove damaged files from the plan.

        Raises:
            UserError: too few samples are left, or an entry could not be encoded.
        """
        if remove_damaged(self.plan, self.listing, self.share):
            self.listing = replace(self.listing)  # drops `ahead`, which lists the removed entries as cached
        try:  # one encoder at a time in memory
            self.encoding.texts(self._texts_here(), self.world)
            failures = self.encoding.latents(self.share.of(self.listing.ahead.missing), self.world)
        except ChangedFileError as error:
            for dataset in self.plan.datasets:  # makes the next start read the file even if size and time are unchanged
                if dataset.id == error.sample.dataset_id:
                    dataset.save_index(except_for={error.sample.name})
            raise
        if failures:
            self.plan = without_undecodable(self.plan, failures, self.world)
            # Relist, so that nothing waits for pairs and features of removed files.
            self.listing = list_entries(self.plan, self.catalogue, self.listing.epoch)
        # Last, since features are computed from cached latents.
        self.encoding.features(self.share.of(self.listing.features.missing), self.world)
        self._check_complete()

    def _texts_here(self) -> list[TextEntry]:
        """The missing texts that this process encodes.

        Streamed text encoders stay in host memory, so only one process per machine loads them.
        """
        if not (self.plan.config.offload.group_offload_text_encoder and self.world.size > 1):
            return self.share.of(self.listing.texts.missing)
        place = self.world.place_among_leaders()
        return Share(*place).of(self.listing.texts.missing) if place else []

    def _check_complete(self) -> None:
        """Check that no entry is missing: of all entries, or of a share that is encoded alone."""
        listing, together = self.listing, self.world.size > 1
        holes: list[AnyEntry] = [*listing.texts.missing, *listing.ahead.missing, *listing.features.missing]
        end = time.monotonic() + (SECONDS_TO_APPEAR if together else 0)
        # A share that is encoded alone leaves gaps for other shares.
        while holes := [entry for entry in missing(holes) if together or self.share.holds(entry)]:
            if time.monotonic() >= end:
                advice = " All machines must use the same folders." if together else ""
                first = holes[0].key.digest()
                raise UserError(f"{len(holes)} cache entries are still missing, the first is {first}.{advice}")
            time.sleep(1)

    def follow(self, epoch: int) -> None:
        """Encode missing entries of an epoch; only datasets with random crops have new ones."""
        if not self.listing.holds_for(self.plan, epoch):
            self.listing = list_entries(self.plan, self.catalogue, epoch)
            self.fill()


def remove_damaged(plan: SamplePlan, listing: Listing, share: Share) -> int:
    """Verify the entries of datasets with `scan_for_errors`; removes damaged entries and returns their number."""
    scanned = {dataset.id for dataset in plan.datasets if dataset.config.scan_for_errors}
    removed = 0
    for entry in listing.latents if scanned else ():
        if entry.sample.dataset_id in scanned and share.holds(entry):
            try:
                read_entry(entry.folder, entry.key.digest())
            except FileNotFoundError:
                continue
            except DamagedEntryError as error:
                logger.warning("%s: %s It is encoded again.", entry.source, error)
                entry_path(entry.folder, entry.key.digest()).unlink(missing_ok=True)
                removed += 1
    return removed


def load_encoder(
    load: Callable[[torch.device, torch.dtype, EncoderQuantiser], AnyEncoder], config: RunConfig, device: torch.device
) -> AnyEncoder:
    """Load a text encoder in the configured precision, onto the device or streamed to it."""
    precision, dtype = config.precision, DTYPES[text_encoder_dtype(config.precision)]
    streams, waiting = config.offload.group_offload_text_encoder, dict[nn.Module, LayerQuantiser]()

    def quantise_encoder(model: nn.Module, layers: str, *, encoder: int) -> None:
        name = precision.text_encoder_1_precision if encoder == 1 else precision.text_encoder_2_precision
        stored = quantisation(name)
        if stored is not None:
            waiting[model] = partial(quantise, model, layers, stored, via=precision.quantize_via, accelerator=device)
            if not streams:
                waiting[model](within=[model])

    if not streams:
        return load(device, dtype, quantise_encoder)
    # Loaded on the CPU, since it may not fit on the device; quantised during packing.
    encoder = load(torch.device("cpu"), dtype, quantise_encoder)
    for model in encoder.models:
        Offload(config.offload, device).attach_to_stacks(model, waiting.get(model))
    encoder.device = device
    return encoder


def build_adapter(plan: PreviewPlan) -> FamilyAdapter:
    """The family adapter for the plan's checkpoint."""
    return load_adapter(plan.spec)(plan.config, plan.flavour, plan.source, plan.sizes[0] if plan.sizes else None)


def fill_caches(plan: Plan, events: EventStream, share: Share) -> None:
    """Download the model and fill a share of the caches."""
    filler = prepare_caches(Encoding(plan, build_adapter(plan), make_accelerator().device, events), 1, share=share)
    for dataset in filler.plan.datasets:
        left_out = Problems()
        summarise_rejected(dataset, left_out)
        for problem in left_out:
            events.say(str(problem), warning=True)
    if share.count == 1:
        events.say("The caches are complete.")
        return
    listing = filler.listing
    whole: list[AnyEntry] = [*listing.texts, *listing.ahead, *listing.features]
    part = f"{len(share.of(whole))} of {len(whole)} entries"
    events.say(f"Share {share.index + 1} of {share.count} is complete: {part}.")


def prepare_caches(
    encoding: Encoding, epoch: int, listing: Listing | None = None, world: World = World(), share: Share | None = None
) -> CacheFiller:
    """Download the model and fill the caches for an epoch; the returned plan lacks damaged files.

    Args:
        listing: listing of the plan's estimate; reused if it is for this plan and epoch.
        world: the processes that take part.
        share: the share to encode; None encodes everything, split among the processes.
    """
    plan, share = encoding.plan, share or Share(*world.place)
    # Only one process may move files.
    if share.index == 0:
        quarantine(plan.datasets, plan.output_dir)
    # One download per machine, into the shared cache.
    world.leader_first(lambda: fetch(plan, encoding.events))
    if listing is None or not listing.holds_for(plan, epoch):
        listing = list_entries(plan, complete_catalogue(plan), epoch)
    filler = CacheFiller(encoding, listing, world, share)
    world.main_only(lambda: save_indexes(plan.datasets))  # an interrupted start need not read the files again
    filler.fill()
    return filler


def save_indexes(datasets: Sequence[Dataset]) -> None:
    """Save the file facts of all datasets for the next start."""
    for dataset in datasets:
        dataset.save_index()


def fetch(plan: SamplePlan, events: EventStream) -> None:
    """Download missing parts of the model.

    Raises:
        UserError: a part is not available, or the parts do not match.
    """
    absent = [part for part in plan.source.parts.values() if part.local_folder() is None]
    encoders = [kind.encoder for each in plan.techniques for kind in each.features if kind.encoder]
    absent += [encoder.part for encoder in encoders if encoder.local() is None]
    if absent:
        download(absent, events)
        # The plan could check only parts that were already on this machine.
        problems = Problems()
        check_parts(plan.spec, plan.flavour, plan.source, problems)
        check_block_numbers(plan.config, plan.spec, plan.source, problems)  # the number of blocks is known now
        for encoder in encoders:
            encoder.check(problems)
        problems.raise_if_fatal()
    for role in ("transformer", "vae"):
        check_shapes(plan.source[role])
    if isinstance(plan, Plan):
        fetch_lora(plan, check_again=bool(absent))


def fetch_lora(plan: Plan, *, check_again: bool) -> None:
    """Download the LoRA that the run starts from, and check what the plan could not.

    Args:
        check_again: the plan did not know the model's layers.

    Raises:
        UserError: the LoRA cannot be downloaded, or does not fit.
    """
    lora = plan.config.lora
    if lora.init_lora is not None and is_on_hub(lora.init_lora):
        find_lora(lora.init_lora, fetch=True)
        check_again = True  # with the file at hand
    if check_again:
        modules = linear_modules(plan.source["transformer"].weight_shapes())
        problems = Problems()
        check_init_lora(lora, modules, plan.lora_targets, plan.spec.name, problems)
        problems.raise_if_fatal()


def download(parts: Sequence[Part], events: EventStream) -> None:
    """Download parts of a model."""
    with events.phase("Downloading the model", len(parts), "parts", stage="init_download_model") as phase:
        for part in parts:
            part.fetch()
            phase.advance(1, f"{part.location}/{part.folder}")


def complete_catalogue(plan: SamplePlan) -> Catalogue:
    """The catalogue of a plan whose model is on this machine.

    Raises:
        UserError: a part of the model is missing.
    """
    catalogue = make_catalogue(plan)
    if catalogue is None:
        raise UserError(f"The checkpoint {plan.source['transformer'].location!r} is not complete.")
    return catalogue


def without_undecodable(plan: AnyPlan, failures: Failures, world: World) -> AnyPlan:
    """The plan without files that could not be decoded; the main process records them.

    Raises:
        UserError: a dataset has become too small.
    """
    for (dataset_id, name), (_, detail) in failures.items():
        logger.warning("%s/%s is left out: it %s", dataset_id, name, detail)
    datasets = without_failures(plan.datasets, failures)
    world.main_only(lambda: save_indexes(datasets))
    problems = Problems()
    context = DataContext.of(plan.config, plan.spec, plan.flavour.task)
    reduced = replace(plan, datasets=[check_amount(dataset, context, problems) for dataset in datasets])
    if problems.are_fatal:
        raise UserError("\n".join(str(problem) for problem in problems if problem.fatal))
    world.main_only(lambda: quarantine(reduced.datasets, plan.output_dir))
    if isinstance(reduced, Plan):
        return cast("AnyPlan", replanned(reduced))
    return reduced


def replanned(plan: Plan) -> Plan:
    """A plan whose datasets have become smaller, with the length that it has now.

    Raises:
        ConfigError: a step has no dataset any more.
    """
    # Fewer samples shorten epochs: a run counted in epochs has fewer steps, and windows of epochs end earlier.
    plan = replace(plan, length=plan_length(plan.config.schedule, plan.sampler().schedule))
    report = Problems()
    check_schedule(plan, report)
    report.raise_if_fatal()
    return plan
