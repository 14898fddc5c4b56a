"""Fills the caches of a run: text first, then latents, with one encoder on the device at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, cast

from simpletuner.caching.catalogue import (
    AnyEntry,
    Catalogue,
    Share,
    TextEntry,
    missing,
)
from simpletuner.caching.entry import DamagedEntryError, entry_path, read_entry
from simpletuner.data.dataset import (
    Dataset,
    Failures,
    check_amount,
    summarise_rejected,
    without_failures,
)
from simpletuner.distributed.world import World
from simpletuner.encoding.decoding import ChangedFileError
from simpletuner.encoding.download import fetch
from simpletuner.encoding.encoders import Encoding, build_adapter
from simpletuner.encoding.quarantine import quarantine
from simpletuner.errors import Problems, UserError
from simpletuner.planning.entries import Listing, data_context, list_entries, make_catalogue
from simpletuner.planning.length import check_schedule, plan_length
from simpletuner.planning.plans import AnyPlan, Plan, SamplePlan
from simpletuner.reporting.events import EventStream
from simpletuner.training.assemble import make_accelerator

logger = logging.getLogger(__name__)

# How long files written by another machine may take to appear on a network disk.
SECONDS_TO_APPEAR = 120.0


@dataclass
class CacheFiller(Generic[AnyPlan]):
    """Keeps the caches of a run complete.

    Attributes:
        encoding: encodes the entries.
        listing: the entries of the epoch filled last.
        world: the processes that fill the caches together.
        share: the part of the entries to encode.
        plan: the plan without files whose decoding failed.
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
            # A new object drops `ahead`, which lists the removed entries as cached.
            self.listing = replace(self.listing)
        try:
            # One after the other: only one encoder fits into memory.
            self.encoding.texts(self._texts_to_encode(), self.world)
            failures = self.encoding.latents(self.share.of(self.listing.ahead.missing), self.world)
        except ChangedFileError as error:
            # Makes the next start read the file, even if its size and time are unchanged.
            for dataset in self.plan.datasets:
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

    def _texts_to_encode(self) -> list[TextEntry]:
        """The missing texts that this process encodes.

        Streamed text encoders stay in host memory, so only one process per machine loads them.
        """
        texts = self.listing.texts.missing
        is_streamed = self.plan.config.offload.group_offload_text_encoder
        if not is_streamed or self.world.size == 1:
            return self.share.of(texts)
        place = self.world.place_among_leaders()
        if place is None:
            return []
        return Share(*place).of(texts)

    def _check_complete(self) -> None:
        """Check that no entry is missing: of all entries, or of a share that is encoded alone."""
        is_shared = self.world.size > 1
        entries: list[AnyEntry] = [
            *self.listing.texts.missing,
            *self.listing.ahead.missing,
            *self.listing.features.missing,
        ]
        if not is_shared:  # the other shares are encoded by other runs
            entries = self.share.of(entries)
        end = time.monotonic()
        if is_shared:
            end += SECONDS_TO_APPEAR
        while True:
            entries = missing(entries)
            if not entries:
                return
            if time.monotonic() >= end:
                advice = " All machines must use the same folders." if is_shared else ""
                first = entries[0].key.digest()
                raise UserError(
                    f"{len(entries)} cache entries are still missing, the first is {first}.{advice}"
                )
            time.sleep(1)

    def follow(self, epoch: int) -> None:
        """Encode missing entries of an epoch; only datasets with random crops have new ones."""
        if not self.listing.holds_for(self.plan, epoch):
            self.listing = list_entries(self.plan, self.catalogue, epoch)
            self.fill()


def remove_damaged(plan: SamplePlan, listing: Listing, share: Share) -> int:
    """Remove the damaged entries of datasets with `scan_for_errors`; returns their number."""
    scanned = {dataset.id for dataset in plan.datasets if dataset.config.scan_for_errors}
    if not scanned:
        return 0
    removed = 0
    for entry in listing.latents:
        if entry.sample.dataset_id not in scanned or not share.holds(entry):
            continue
        digest = entry.key.digest()
        try:
            read_entry(entry.folder, digest)
        except FileNotFoundError:
            continue
        except DamagedEntryError as error:
            logger.warning("%s: %s It is encoded again.", entry.source, error)
            entry_path(entry.folder, digest).unlink(missing_ok=True)
            removed += 1
    return removed


def fill_caches(plan: Plan, events: EventStream, share: Share) -> None:
    """Download the model and fill a share of the caches."""
    encoding = Encoding(plan, build_adapter(plan), make_accelerator().device, events)
    filler = prepare_caches(encoding, epoch=1, share=share)
    for dataset in filler.plan.datasets:
        left_out = Problems()
        summarise_rejected(dataset, left_out)
        for problem in left_out:
            events.notify(str(problem), warning=True)
    if share.count == 1:
        events.notify("The caches are complete.")
        return
    listing = filler.listing
    entries: list[AnyEntry] = [*listing.texts, *listing.ahead, *listing.features]
    part = f"{len(share.of(entries))} of {len(entries)} entries"
    events.notify(f"Share {share.index + 1} of {share.count} is complete: {part}.")


def prepare_caches(
    encoding: Encoding,
    epoch: int,
    listing: Listing | None = None,
    world: World = World(),
    share: Share | None = None,
) -> CacheFiller:
    """Download the model and fill the caches for an epoch; the returned plan lacks damaged files.

    Args:
        listing: listing of the plan's estimate; reused if it is for this plan and epoch.
        world: the processes that take part.
        share: the share to encode; None encodes everything, split among the processes.
    """
    plan = encoding.plan
    share = share or Share(*world.place)
    # Only one process may move files.
    if share.index == 0:
        quarantine(plan.datasets, plan.output_dir)
    # One download per machine, into the shared cache.
    world.leader_first(lambda: fetch(plan, encoding.events))
    if listing is None or not listing.holds_for(plan, epoch):
        listing = list_entries(plan, complete_catalogue(plan), epoch)
    filler = CacheFiller(encoding, listing, world, share)
    # Now, so that an interrupted start need not read the files again.
    world.main_only(lambda: save_indexes(plan.datasets))
    filler.fill()
    return filler


def save_indexes(datasets: Sequence[Dataset]) -> None:
    """Save the file facts of all datasets for the next start."""
    for dataset in datasets:
        dataset.save_index()


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
    context = data_context(plan.config, plan.spec, plan.flavour.task)
    datasets = [check_amount(dataset, context, problems) for dataset in datasets]
    reduced = replace(plan, datasets=datasets)
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
    # Fewer samples shorten epochs: a run counted in epochs has fewer steps, and windows of epochs
    # end earlier.
    plan = replace(plan, length=plan_length(plan.config.schedule, plan.sampler().schedule))
    report = Problems()
    check_schedule(plan, report)
    report.raise_if_fatal()
    return plan
