"""Encode what is missing, once.

    decode threads ─► bounded queue ─► encoder (this thread) ─► writer threads

One encoder is on the device at a time, and none is loaded when nothing is missing. An entry is written when it is
done, so a killed run loses at most the batch under way, and the next one goes on behind it.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletuner.caching.catalogue import LatentEntry, TextEntry
from simpletuner.caching.keys import provenance_of
from simpletuner.caching.store import CacheStore
from simpletuner.config.schema import CachingConfig
from simpletuner.data import media
from simpletuner.data.dataset import Sample
from simpletuner.models.adapter import LatentEncoder, TextEncoder, TextRequest

logger = logging.getLogger(__name__)

WRITERS = 2


class Phase(Protocol):
    """A progress bar."""

    def advance(self, count: int = 1, note: str = "") -> None: ...


def fill_texts(
    entries: Sequence[TextEntry], load: Callable[[], TextEncoder], config: CachingConfig, phase: Phase
) -> list[str]:
    """Encode captions; returns notes about captions that were too long.

    Args:
        entries: what is missing; when there is nothing, `load` is not called.
    """
    if not entries:
        return []
    encoder = load()
    notes = []
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS) as writers:
        for group in _chunks(entries, config.text_encoder_batch_size):
            requests = [TextRequest(entry.caption, _picture(entry.picture)) for entry in group]
            for entry, embeds in zip(group, encoder.encode(requests), strict=True):
                writes.append(writers.submit(_write, entry, embeds, config.compress_disk_cache))
                cut = encoder.truncated(entry.caption)
                if cut is not None:
                    notes.append(f"{entry.source}: the caption is too long, this is not read: {cut!r}")
            writes = _settle(writes)
            phase.advance(len(group), group[-1].source)
    _settle(writes, wait=True)
    return notes


def fill_latents(
    entries: Sequence[LatentEntry], load: Callable[[], LatentEncoder], config: CachingConfig, phase: Phase
) -> dict[tuple[str, str], str]:
    """Encode pictures; returns the files that could not be decoded, (dataset id, name) to reason.

    Pictures of one size are encoded together. `vae_batch_size`, threads and order never change a latent.
    """
    if not entries:
        return {}
    encoder = load()
    failures: dict[tuple[str, str], str] = {}
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(_decoders(config)) as decoders, ThreadPoolExecutor(WRITERS) as writers:
        for group in _batches(entries, config.vae_batch_size, config.image_processing_batch_size, decoders, failures):
            pixels = torch.stack([to_pixels(array) for _, array in group])
            latents = encoder.encode(pixels, [entry.key.seed() for entry, _ in group])
            for (entry, _), latent in zip(group, latents, strict=True):
                writes.append(writers.submit(_write, entry, {"latents": latent}, config.compress_disk_cache))
            writes = _settle(writes)
            phase.advance(len(group), group[-1][0].sample.name)
    _settle(writes, wait=True)
    return failures


def to_pixels(picture: np.ndarray) -> Tensor:
    """A picture `H W 3` of 0..255 as one frame `3 1 H W` in [-1, 1], float32, rounded as the pipelines do."""
    return (2.0 * (torch.tensor(picture).float() / 255.0) - 1.0).permute(2, 0, 1).unsqueeze(1)


def prepared_picture(sample: Sample) -> Image.Image:
    """A sample's picture, resized and cropped as its geometry says."""
    return Image.fromarray(media.fit(media.decode(sample.path), sample.geometry))


def _batches(
    entries: Sequence[LatentEntry],
    size: int,
    ahead: int,
    decoders: ThreadPoolExecutor,
    failures: dict[tuple[str, str], str],
) -> Iterator[list[tuple[LatentEntry, np.ndarray]]]:
    """Decoded pictures in groups of one size, decoded a few groups ahead."""
    by_size: dict[tuple[int, int], list[LatentEntry]] = defaultdict(list)
    for entry in entries:
        by_size[entry.sample.geometry.size].append(entry)
    ordered = iter([entry for group in by_size.values() for entry in group])
    decoding = [(entry, decoders.submit(_decode, entry.sample)) for entry in islice(ordered, max(ahead, size))]
    group: list[tuple[LatentEntry, np.ndarray]] = []
    while decoding:
        entry, decoded = decoding.pop(0)
        decoding.extend((following, decoders.submit(_decode, following.sample)) for following in islice(ordered, 1))
        try:
            array = decoded.result()
        except media.MediaError as error:
            failures[(entry.sample.dataset_id, entry.sample.name)] = str(error)
            continue
        if group and group[0][1].shape != array.shape:
            yield group
            group = []
        group.append((entry, array))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _decode(sample: Sample) -> np.ndarray:
    return media.fit(media.decode(sample.path), sample.geometry)


def _picture(sample: Sample | None) -> Image.Image | None:
    return None if sample is None else prepared_picture(sample)


def _write(entry: LatentEntry | TextEntry, tensors: dict[str, Tensor], compress: bool) -> None:
    source = entry.source if isinstance(entry, TextEntry) else entry.sample.full_name
    CacheStore(entry.folder, compress).write(entry.key.digest(), tensors, provenance_of(entry.key, source))


def _settle(writes: list[Future[None]], *, wait: bool = False) -> list[Future[None]]:
    """Raise the error of a write that failed (a full disk) as soon as it is known; returns those under way."""
    for write in writes:
        if wait or write.done():
            write.result()
    return [write for write in writes if not write.done()]


def _chunks(entries: Sequence[TextEntry], size: int) -> Iterator[Sequence[TextEntry]]:
    return (entries[start : start + size] for start in range(0, len(entries), size))


def _decoders(config: CachingConfig) -> int:
    return min(config.max_workers, os.cpu_count() or 1)
