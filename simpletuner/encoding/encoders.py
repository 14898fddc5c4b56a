"""The encoders of a run: loaded in the configured precision, and one on the device at a time."""

from __future__ import annotations

import gc
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from simpletuner.caching.catalogue import (
    AnyEntry,
    FeatureEntry,
    LatentEntry,
    TextEntry,
)
from simpletuner.config.precision import quantisation, text_encoder_dtype, vae_dtype
from simpletuner.config.schema import OffloadConfig, PrecisionConfig
from simpletuner.data.dataset import Failures
from simpletuner.data.entries import ProgressBar
from simpletuner.distributed.world import Value, World
from simpletuner.encoding.fill import (
    encode_now,
    fill_features,
    fill_latents,
    fill_texts,
    write_entry,
)
from simpletuner.encoding.read import read_or_restore
from simpletuner.encoding.sharing import share_work
from simpletuner.errors import UserError
from simpletuner.memory.heap import trim_heap
from simpletuner.memory.offload.attach import LayerQuantiser, Offload
from simpletuner.memory.precision import DTYPES
from simpletuner.memory.quantisation.layers import quantise
from simpletuner.models.adapter import (
    AdapterSettings,
    Encoder,
    EncoderQuantiser,
    FamilyAdapter,
    LatentEncoder,
    TextEncoder,
    load_adapter,
)
from simpletuner.models.placement import place
from simpletuner.planning.plans import AnyPlan, PreviewPlan
from simpletuner.reporting.events import CACHING, EventStream, PhaseStarted
from simpletuner.techniques.base import FeatureEncoder, Technique
from simpletuner.techniques.load import technique_class
from simpletuner.training.loader import in_loop

logger = logging.getLogger(__name__)

AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)


@dataclass
class Encoding(Generic[AnyPlan]):
    """Encodes entries into their caches; one encoder is on the device at a time.

    Attributes:
        plan: selects the encoders and their precision.
        adapter: loads the encoders of the family.
        device: runs the encoders.
        events: receives the progress.
    """

    plan: AnyPlan
    adapter: FamilyAdapter
    device: torch.device
    events: EventStream
    # Stays loaded once training has used it.
    _vae: LatentEncoder | None = field(default=None, init=False)
    # The prefetch thread and evaluation share the VAE.
    _vae_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def texts(self, entries: list[TextEntry], world: World) -> None:
        """Encode captions; every process of `world` has a different share."""
        shares = self._share(TextJob(self, entries, world), world)
        for warning in dict.fromkeys(chain.from_iterable(shares)):
            logger.warning(warning)

    def latents(self, entries: list[LatentEntry], world: World) -> Failures:
        """Encode pictures and clips; returns the files that cannot be decoded, with the reason."""
        shares = self._share(LatentJob(self, entries), world)
        failures: dict[tuple[str, str], tuple[str, str]] = {}
        for share in shares:
            failures |= share
        if len(shares) > 1:  # in one order for any number of processes
            failures = dict(sorted(failures.items()))
        return failures

    def features(self, entries: list[FeatureEntry], world: World) -> None:
        """Encode the features that techniques need, from cached latents."""
        self._share(FeatureJob(self, entries), world)

    def _share(self, job: EncodingJob[Value], world: World) -> list[Value]:
        """Do this process's job; returns what the job returned in each process. Collective."""
        # By the total, so that no process skips a phase in which another one waits for it.
        total = sum(world.gather(len(job.entries)))
        if not total:
            return []
        phase = PhaseStarted(f"Encoding {job.what}", total, job.unit, CACHING, job.stage)
        results = share_work(world, self.events, phase, job.fill)
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
        with self._vae_lock:
            return encode_now(entry, encoder, self.plan.config.caching)

    def _kept_latent_encoder(self) -> LatentEncoder:
        if self._vae is None:
            self._vae = self.load_latent_encoder()
        return self._vae

    def restore(self, entry: AnyEntry) -> None:
        """Encode an entry during a run because it is damaged, or on its first use."""
        if isinstance(entry, LatentEntry) and entry.storage == "ondemand":
            write_entry(entry, {"latents": self.encode(entry)})
        else:
            in_loop(partial(self._restore_damaged, entry))

    def _restore_damaged(self, entry: AnyEntry) -> None:
        digest = entry.key.digest()
        logger.warning("The cache entry of %s was damaged and is encoded again.", digest)
        # This process alone: other processes have not seen the damage and would not take part.
        world = World()
        if isinstance(entry, TextEntry):
            self.texts([entry], world)
        elif isinstance(entry, FeatureEntry):
            self.features([entry], world)
        elif self.latents([entry], world):
            raise UserError(
                f"{entry.source}: its cache entry is damaged and so is the file itself."
            )

    def load_text_encoder(self) -> TextEncoder:
        """Load the text encoder in the configured precision, onto the device or streamed to it."""
        config = self.plan.config
        return load_encoder(
            self.adapter.load_text_encoder, config.precision, config.offload, self.device
        )

    def load_latent_encoder(self) -> LatentEncoder:
        """Load the VAE's encoder in the configured precision, onto the device or streamed to it."""
        config = self.plan.config
        dtype = DTYPES[vae_dtype(config.precision, config.caching)]
        encoder = self.adapter.load_latent_encoder(self.device, dtype)
        if config.offload.group_offload_vae:
            Offload(config.offload, self.device).attach_to_stacks(encoder.vae)
        return encoder


class EncodingJob(ABC, Generic[Value]):
    """Entries of one kind that this process encodes, and the phase in which all processes do.

    Attributes:
        entries: the missing entries of this process.
        what: what is encoded, in the title of the phase.
        unit: what the phase counts.
        stage: the name of the phase in events.
    """

    entries: Sequence[AnyEntry]
    what: str
    unit: str
    stage: str

    @abstractmethod
    def fill(self, bar: ProgressBar) -> Value:
        """Encode the entries."""


@dataclass
class TextJob(EncodingJob[list[str]]):
    """Encodes captions; returns notes about those that are cut off."""

    encoding: Encoding[Any]
    entries: list[TextEntry]
    world: World
    what = "captions"
    unit = "captions"
    stage = "init_text_embed_cache"

    def fill(self, bar: ProgressBar) -> list[str]:
        # In turn, since weights pass through host memory while they are cast or quantised.
        # Processes without entries take a turn too: `in_turn` is collective.
        encoder = self.world.in_turn(self._load)
        if encoder is None:
            return []
        config = self.encoding.plan.config
        streams = config.offload.group_offload_text_encoder
        size = config.caching.captions_at_once(self.encoding.device.type, streamed=streams)
        return fill_texts(self.entries, encoder, size, bar)

    def _load(self) -> TextEncoder | None:
        if not self.entries:
            return None
        return self.encoding.load_text_encoder()


@dataclass
class LatentJob(EncodingJob[Failures]):
    """Encodes pictures and clips; returns the files that cannot be decoded."""

    encoding: Encoding[Any]
    entries: list[LatentEntry]
    stage = "init_vae_cache"

    def __post_init__(self) -> None:
        self.what = self.encoding.plan.spec.media_noun
        self.unit = self.what

    def fill(self, bar: ProgressBar) -> Failures:
        caching = self.encoding.plan.config.caching
        return fill_latents(self.entries, self.encoding.load_latent_encoder, caching, bar)


@dataclass
class FeatureJob(EncodingJob[None]):
    """Encodes the features that techniques need, from cached latents."""

    encoding: Encoding[Any]
    entries: list[FeatureEntry]
    what = "features"
    stage = "init_feature_cache"

    def __post_init__(self) -> None:
        self.unit = self.encoding.plan.spec.media_noun
        self.classes: dict[str, type[Technique]] = {}
        for spec in self.encoding.plan.techniques:
            for kind in spec.features:
                self.classes[kind.name] = technique_class(type(spec))

    def fill(self, bar: ProgressBar) -> None:
        fill_features(self.entries, self.load, self.read, bar)

    def load(self, entry: FeatureEntry) -> FeatureEncoder:
        """Load the encoder of an entry's kind."""
        encoding = self.encoding
        technique = self.classes[entry.kind.name]
        return technique.load_encoder(
            entry.kind, encoding.adapter, encoding.load_latent_encoder, encoding.device
        )

    def read(self, entry: LatentEntry) -> Tensor:
        """Read the latents that an entry's features are computed from, onto the device."""
        encoding = self.encoding
        if entry.storage == "never":
            return encoding.encode(entry).to(encoding.device)
        return read_or_restore(entry, encoding.restore)["latents"].to(encoding.device)


def load_encoder(
    load: Callable[[torch.device, torch.dtype, EncoderQuantiser], AnyEncoder],
    precision: PrecisionConfig,
    offload: OffloadConfig,
    device: torch.device,
) -> AnyEncoder:
    """Load a text encoder in the configured precision, onto the device or streamed to it."""
    dtype = DTYPES[text_encoder_dtype(precision)]
    streams = offload.group_offload_text_encoder
    quantisers: dict[nn.Module, LayerQuantiser] = {}

    def quantise_encoder(model: nn.Module, layers: str, *, encoder: int) -> None:
        name = precision.text_encoder_2_precision
        if encoder == 1:
            name = precision.text_encoder_1_precision
        stored = quantisation(name)
        if stored is None:
            return
        quantisers[model] = partial(
            quantise, model, layers, stored, via=precision.quantize_via, accelerator=device
        )
        if not streams:
            quantisers[model](within=[model])

    if not streams:
        encoder = load(device, dtype, quantise_encoder)
        for model in encoder.models:
            place(model, device)
        return encoder
    # Loaded on the CPU, since it may not fit on the device; quantised during packing.
    encoder = load(torch.device("cpu"), dtype, quantise_encoder)
    for model in encoder.models:
        Offload(offload, device).attach_to_stacks(model, quantisers.get(model))
    encoder.device = device
    return encoder


def build_adapter(plan: PreviewPlan) -> FamilyAdapter:
    """The family adapter for the plan's checkpoint."""
    config = plan.config
    settings = AdapterSettings(
        text=config.text,
        caching=config.caching,
        options=config.family,
        solver=config.validation.validation_noise_scheduler,
    )
    use_size = plan.sizes[0] if plan.sizes else None
    return load_adapter(plan.spec)(settings, plan.flavour, plan.source, use_size)
