"""Encodes missing entries, each once.

    decode threads ─► bounded queue ─► encoder (this thread) ─► writer threads

One encoder is on the device at a time; without missing entries, none is loaded. Each entry is
written as soon as it is encoded, so a killed run loses at most the current batch, and the next run
continues after it.

If memory runs out, the same work is retried in smaller pieces, or the run stops with advice.
Smaller pieces do not change an entry, so no key depends on free memory. Tiling would change
latents, so the message only suggests it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from simpletuner.budget.advice import LESS_FOR_TEXTS, less_for_latents
from simpletuner.caching.catalogue import FEATURES, AnyEntry, FeatureEntry, LatentEntry, TextEntry
from simpletuner.caching.keys import provenance_of
from simpletuner.config.schema import CachingConfig
from simpletuner.data import files
from simpletuner.data.dataset import Failures
from simpletuner.data.entries import ProgressBar
from simpletuner.diffusion.batch import TextEmbeds, upload
from simpletuner.encoding.decoding import (
    Decoded,
    NewFailures,
    batches_of_one_shape,
    decode_ahead,
    decode_sample,
    name_and_shape,
    prompt_picture,
)
from simpletuner.encoding.read import CacheStore
from simpletuner.encoding.shrinking import ShrinkingEncoder
from simpletuner.errors import UserError, shorten
from simpletuner.models.adapter import LatentEncoder, TextEncoder, TextRequest
from simpletuner.techniques.base import FeatureEncoder

CPU = torch.device("cpu")
WRITERS = 2


def fill_texts(
    entries: Sequence[TextEntry], encoder: TextEncoder, size: int, bar: ProgressBar
) -> list[str]:
    """Encode missing captions in batches of `size`; returns notes about truncated captions.

    Raises:
        UserError: a caption does not fit into memory, or the encoder's output is not finite.
    """
    encode = TextBatches(encoder)
    notes: list[str] = []
    with _writing() as write:
        for group in _groups_of_one_length(entries, encoder, size):
            # Padded to a fixed batch size: kernels round differently by batch size, and an entry
            # must not depend on the rest of its batch, so that an interrupted fill continues with
            # the same bytes.
            filled = group + group[-1:] * (size - len(group))
            for entry, embeds in zip(group, encode(filled), strict=False):
                write(entry, embeds, encode.most or size)
                cut = encoder.truncated(entry.caption)
                if cut is not None:
                    note = f"the caption is too long; this part is cut off: {cut!r}"
                    notes.append(f"{entry.source}: {note}")
            bar.advance(len(group), group[-1].source)
    return notes


def fill_latents(
    entries: Sequence[LatentEntry],
    load: Callable[[], LatentEncoder],
    config: CachingConfig,
    bar: ProgressBar,
) -> Failures:
    """Encode pictures and clips; returns the files that could not be decoded.

    Threads and order never change a latent. With `vae_batch_size` above 1, samples of one size and
    length are batched, which changes the rounding, so an entry records its batch size.

    Raises:
        UserError: a sample does not fit into memory, or the VAE's output is not finite.
    """
    if not entries:
        return {}
    encode = LatentBatches(load(), config)
    failures = NewFailures()
    with ExitStack() as stack, _writing() as write:
        decoders = ThreadPoolExecutor(min(config.max_workers, os.cpu_count() or 1))
        stack.callback(decoders.shutdown, cancel_futures=True)  # also after an error or Ctrl-C
        # At least one batch, since the encoder waits for a full batch.
        ahead = max(config.image_processing_batch_size, config.vae_batch_size)
        decoding = decode_ahead(entries, ahead, decoders)
        for group in batches_of_one_shape(decoding, config.vae_batch_size, failures):
            for (entry, _), latent in zip(group, encode(group), strict=True):
                write(entry, {"latents": latent}, encode.at_once(group))
            last, _ = group[-1]
            bar.advance(len(group), last.sample.name)
    return failures


def encode_now(entry: LatentEntry, encoder: LatentEncoder, config: CachingConfig) -> Tensor:
    """Decode and encode one sample: the latents of `fill_latents` with a `vae_batch_size` of 1.

    Raises:
        UserError: the sample cannot be decoded or does not fit into memory, or the VAE's output is
            not finite.
    """
    try:
        pixels = decode_sample(entry.sample)
    except files.MediaError as error:
        advice = "or let the caches be filled before training, which leaves such files out"
        raise UserError(f"{entry.sample.path} {error}; remove it, {advice}.") from error
    return LatentBatches(encoder, config)([(entry, pixels)])[0]


def fill_features(
    entries: Sequence[FeatureEntry],
    load: Callable[[FeatureEntry], FeatureEncoder],
    read: Callable[[LatentEntry], Tensor],
    bar: ProgressBar,
) -> None:
    """Compute the features that techniques cache, from cached latents.

    Args:
        entries: the missing entries, grouped by kind.
        load: loads the encoder of an entry's kind; called once per kind.
        read: reads the latents of a sample onto the encoder's device.

    Raises:
        UserError: an encoder's output is not finite.
    """
    encoder = None
    for number, entry in enumerate(entries):
        if encoder is None or entry.kind != entries[number - 1].kind:
            encoder = None  # free the last encoder before loading the next
            encoder = load(entry)
        with torch.no_grad():
            features = encoder.encode(read(entry.latents))
        if not bool(features.isfinite().all()):
            raise UserError(
                f"{entry.kind.name}: the encoder's output is not finite for {entry.source}."
            )
        write_entry(entry, {FEATURES: features})
        bar.advance(1, entry.source)


class TextBatches(ShrinkingEncoder[TextEntry, TextEmbeds]):
    """Encodes captions in batches that fit into memory."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__(LESS_FOR_TEXTS)
        self.encoder = encoder

    def name(self, item: TextEntry) -> str:
        return item.source

    def encode(self, items: Sequence[TextEntry]) -> list[TextEmbeds]:
        # Without the duplicates that pad a batch, so that their picture is decoded once.
        requests = {
            entry: TextRequest(entry.caption, prompt_picture(entry.picture), entry.bare)
            for entry in dict.fromkeys(items)
        }
        embeds = self.encoder.encode([requests[entry] for entry in items])
        tensors = [embedding.values() for embedding in embeds]
        _stop_if_not_finite("text encoder", tensors, items, "text_encoder_1_precision fp32")
        return embeds


class LatentBatches(ShrinkingEncoder[Decoded, Tensor]):
    """Encodes decoded pictures and clips of one shape in batches that fit into memory."""

    def __init__(self, encoder: LatentEncoder, config: CachingConfig) -> None:
        super().__init__(less_for_latents(config))
        self.encoder = encoder

    def name(self, item: Decoded) -> str:
        entry, _ = item
        return name_and_shape(entry.sample)

    def relieve(self) -> bool:
        return self.encoder.use_less_memory()

    def encode(self, items: Sequence[Decoded]) -> list[Tensor]:
        entries = [entry for entry, _ in items]
        pixels = to_pixels(np.stack([array for _, array in items]), self.encoder.device)
        # One seed per entry, so that its draw from the posterior is independent of batch and order.
        latents = self.encoder.encode(pixels, [entry.key.seed() for entry in entries])
        _stop_if_not_finite("VAE", [[latent] for latent in latents], entries, "vae_dtype fp32")
        return list(latents)


def _stop_if_not_finite(
    encoder: str,
    encoded: Sequence[Iterable[Tensor]],
    entries: Sequence[LatentEntry | TextEntry],
    remedy: str,
) -> None:
    """Keep the output of an encoder that overflows out of the cache.

    Raises:
        UserError: a tensor holds NaN or infinity.
    """
    failed: list[str] = []
    for entry, tensors in zip(entries, encoded, strict=True):
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            failed.append(entry.source)
    if failed:
        names = shorten(list(dict.fromkeys(failed)))
        raise UserError(f"The {encoder}'s output is not finite for {names}; try {remedy}.")


def to_pixels(frames: np.ndarray, device: torch.device = CPU) -> Tensor:
    """Convert frames of 0..255 to float32 in [-1, 1], rounded as in the pipelines.

    Frames are uploaded as bytes.

    Args:
        frames: `... F H W 3`, or one frame, `H W 3`.

    Returns:
        `... 3 F H W`.
    """
    if frames.ndim == 3:
        frames = frames[None]
    pixels = upload(torch.tensor(frames), device).float()
    # A tensor, since CUDA divides by a number with its reciprocal, which rounds differently.
    levels = torch.full((), 255.0, device=device)
    # In place, since a clip of 10 seconds takes a gigabyte in float32; the operations are in the
    # pipelines' order.
    return pixels.div_(levels).mul_(2.0).sub_(1.0).movedim(-1, -4)


def write_entry(entry: AnyEntry, tensors: dict[str, Tensor], batch_size: int = 1) -> None:
    """Write the output of an encoder to the cache.

    Args:
        batch_size: of the encoding.
    """
    provenance = provenance_of(entry.key, entry.source)
    # Not part of the key, since another batch size changes only the rounding.
    if batch_size > 1:
        provenance["encoded_together"] = str(batch_size)
    CacheStore(entry.folder, entry.compress).write(entry.key.digest(), tensors, provenance)


@contextmanager
def _writing() -> Iterator[Callable[[AnyEntry, dict[str, Tensor], int], None]]:
    """`write_entry` in threads.

    The error of a failed write, such as a full disk, is raised by a later write or at the end.
    """
    pending = deque[Future[None]]()
    with ThreadPoolExecutor(WRITERS) as writers:

        def write(entry: AnyEntry, tensors: dict[str, Tensor], batch_size: int) -> None:
            pending.append(writers.submit(write_entry, entry, tensors, batch_size))
            while pending and pending[0].done():
                pending.popleft().result()

        yield write
    for written in pending:
        written.result()


def _groups_of_one_length(
    entries: Sequence[TextEntry], encoder: TextEncoder, size: int
) -> Iterator[list[TextEntry]]:
    """Groups of at most `size` prompts of one length, with pictures of one size.

    The longest prompts come first, so that running out of memory shows immediately.
    """

    def shape_of(entry: TextEntry) -> tuple[int, int, int, bool]:
        width = 0
        height = 0
        if entry.picture is not None:
            width, height = entry.picture.geometry.size
        length = encoder.padded_length(TextRequest(entry.caption, None, entry.bare))
        return width, height, length, entry.bare

    shapes = {entry: shape_of(entry) for entry in entries}
    ordered = sorted(entries, key=lambda entry: shapes[entry], reverse=True)
    for _, alike in groupby(ordered, key=lambda entry: shapes[entry]):
        group = list(alike)
        for start in range(0, len(group), size):
            yield group[start : start + size]
