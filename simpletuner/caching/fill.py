"""Encode what is missing, once.

    decode threads ─► bounded queue ─► encoder (this thread) ─► writer threads

One encoder is on the device at a time, and none is loaded when nothing is missing. An entry is written when it is
done, so a killed run loses at most the batch under way, and the next one goes on behind it. Where memory does not
suffice, batches become smaller (`shrink`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletuner.caching.catalogue import FeatureEncoder, FeatureEntry, LatentEntry, TextEntry
from simpletuner.caching.keys import provenance_of
from simpletuner.caching.shrink import ShrinkingEncoder
from simpletuner.caching.store import CacheStore
from simpletuner.config.schema import CachingConfig
from simpletuner.data import clips, files, media
from simpletuner.data.clips import ClipFacts
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.errors import UserError, shorten
from simpletuner.models.adapter import LatentEncoder, TextEncoder, TextRequest

logger = logging.getLogger(__name__)

WRITERS = 2
FEATURES = "features"  # the tensor in an entry of features
Decoded = tuple[LatentEntry, np.ndarray]

# What decoded pictures and clips that wait for the encoder may take, beside the one that each thread works on.
WAITING_BYTES = 1 << 30


class ChangedFileError(UserError):
    """A file changed after it was planned."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(f"{sample.path} was changed after the plan had looked at it; start again.")
        self.sample = sample


class ProgressBar(Protocol):
    """Receives the progress of encoding."""

    def advance(self, count: int = 1, note: str = "") -> None: ...


def fill_texts(
    entries: Sequence[TextEntry], load: Callable[[], TextEncoder], config: CachingConfig, bar: ProgressBar
) -> list[str]:
    """Encode captions; returns notes about captions that were too long.

    Args:
        entries: what is missing; when there is nothing, `load` is not called.

    Raises:
        UserError: one does not fit into memory, or the encoder's values are not finite.
    """
    if not entries:
        return []
    encoder = load()
    encode = ShrinkingEncoder(_text_batch(encoder), lambda: False, lambda entry: entry.source, _text_advice())
    notes = []
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS) as writers:
        for group in _chunks(_long_ones_first(entries), config.text_encoder_batch_size):
            for entry, embeds in zip(group, encode(group), strict=True):
                writes.append(writers.submit(_write, entry, embeds, encode.at_once(group)))
                cut = encoder.truncated(entry.caption)
                if cut is not None:
                    notes.append(f"{entry.source}: the caption is too long, this is not read: {cut!r}")
            writes = _settle(writes)
            bar.advance(len(group), group[-1].source)
    _settle(writes, wait=True)
    return notes


def fill_latents(
    entries: Sequence[LatentEntry], load: Callable[[], LatentEncoder], config: CachingConfig, bar: ProgressBar
) -> dict[tuple[str, str], str]:
    """Encode pictures and clips; returns the files that could not be decoded, (dataset id, name) to reason.

    Threads and order never change a latent. Where `vae_batch_size` is above 1, those of one size and length are encoded
    together, and which of them are changes their rounding; the entry then says with how many it was encoded.

    Raises:
        UserError: one does not fit into memory, or the VAE's values are not finite.
    """
    if not entries:
        return {}
    encoder = load()
    encode = ShrinkingEncoder(_latent_batch(encoder), encoder.use_less_memory, _described, _latent_advice(config))
    failures: dict[tuple[str, str], str] = {}
    writes: list[Future[None]] = []
    with _decoding_threads(config) as decoders, ThreadPoolExecutor(WRITERS) as writers:
        ahead = max(config.image_processing_batch_size, config.vae_batch_size)
        decoding = _decode_ahead(entries, ahead, decoders)
        for group in _batches(decoding, config.vae_batch_size, failures):
            for (entry, _), latent in zip(group, encode(group), strict=True):
                writes.append(writers.submit(_write, entry, {"latents": latent}, encode.at_once(group)))
            writes = _settle(writes)
            bar.advance(len(group), group[-1][0].sample.name)
    _settle(writes, wait=True)
    return failures


def fill_features(
    entries: Sequence[FeatureEntry],
    load: Callable[[FeatureEntry], FeatureEncoder],
    read: Callable[[LatentEntry], Tensor],
    bar: ProgressBar,
) -> None:
    """Make the features that techniques cache, from latents that are there.

    Args:
        entries: what is missing, those of one kind behind each other.
        load: the encoder of an entry's kind; called once a kind.
        read: the latents of a sample, on the encoder's device.

    Raises:
        UserError: an encoder's values are not finite.
    """
    encoder = None
    for number, entry in enumerate(entries):
        if encoder is None or entry.kind != entries[number - 1].kind:
            encoder = None  # the last one goes before the next one comes
            encoder = load(entry)
        name = entry.latents.sample.full_name
        with torch.no_grad():
            features = encoder.encode(read(entry.latents))
        if not bool(features.isfinite().all()):
            raise UserError(f"{entry.kind.name}: the encoder gave values that are not finite for {name}.")
        store = CacheStore(entry.folder, entry.latents.compress)
        store.write(entry.key.digest(), {FEATURES: features}, provenance_of(entry.key, name))
        bar.advance(1, name)


def _text_batch(encoder: TextEncoder) -> Callable[[Sequence[TextEntry]], list[TextEmbeds]]:
    def encode(group: Sequence[TextEntry]) -> list[TextEmbeds]:
        embeds = encoder.encode([TextRequest(each.caption, _picture(each.picture), each.bare) for each in group])
        stop_if_not_finite("text encoder", embeds, [each.source for each in group], "text_encoder_1_precision fp32")
        return embeds

    return encode


def _latent_batch(encoder: LatentEncoder) -> Callable[[Sequence[Decoded]], list[Tensor]]:
    def encode(group: Sequence[Decoded]) -> list[Tensor]:
        pixels = torch.stack([to_pixels(array) for _, array in group])
        latents = encoder.encode(pixels, [entry.key.seed() for entry, _ in group])
        names = [entry.sample.full_name for entry, _ in group]
        stop_if_not_finite("VAE", [{"latents": each} for each in latents], names, "vae_dtype fp32")
        return list(latents)

    return encode


def _described(decoded: Decoded) -> str:
    return _described_sample(decoded[0].sample)


def _described_sample(sample: Sample) -> str:
    width, height = sample.geometry.size
    length = f"@{sample.frames}" if sample.frames > 1 else ""
    return f"{sample.full_name} ({width}x{height}{length})"


def _text_advice() -> str:
    return "These need less: group_offload_text_encoder, tokenizer_max_length."


def _latent_advice(config: CachingConfig) -> str:
    tiles = "" if config.vae_enable_tiling else ", vae_enable_tiling (tiles change latents a little at their seams)"
    less = f"These need less for the same: group_offload_vae{tiles}."
    return f"A smaller resolution helps, and fewer frames of a clip (video.num_frames). {less}"


def stop_if_not_finite(
    encoder: str, encoded: Sequence[Mapping[str, Tensor]], names: Sequence[str], remedy: str
) -> None:
    """Keep the output of an encoder that overflows out of the cache.

    Args:
        encoder: what to call it in the message.
        encoded: the tensors of each entry.
        names: of the entries' sources.
        remedy: key and value that may help.

    Raises:
        UserError: a tensor holds NaN or infinity.
    """
    pairs = zip(names, encoded, strict=True)
    bad = [name for name, tensors in pairs if not all(bool(each.isfinite().all()) for each in tensors.values())]
    if bad:
        raise UserError(f"The {encoder} gave values that are not finite for {shorten(bad)}; try {remedy}.")


def to_pixels(frames: np.ndarray) -> Tensor:
    """Frames `F H W 3` (or one, `H W 3`) of 0..255 as `3 F H W` in [-1, 1], float32, rounded as the pipelines do."""
    clip = frames if frames.ndim == 4 else frames[None]
    # In place: a clip of 10 seconds is a gigabyte in float32.
    return torch.tensor(clip).float().div_(255.0).mul_(2.0).sub_(1.0).permute(3, 0, 1, 2)


def prepared_picture(sample: Sample) -> Image.Image:
    """A sample's picture, or frame 0 of its clip, resized and cropped as its geometry says."""
    if sample.clip is None:
        return Image.fromarray(media.fit(media.decode(sample.path), sample.geometry))
    return Image.fromarray(_frames(sample.first_frame, sample.clip)[0])


def _batches(
    decoding: Iterable[tuple[LatentEntry, Future[np.ndarray]]], size: int, failures: dict[tuple[str, str], str]
) -> Iterator[list[Decoded]]:
    """Groups of one shape; what cannot be decoded goes to the failures."""
    group: list[Decoded] = []
    for entry, decoded in decoding:
        try:
            array = decoded.result()
        except files.UnreadableError as error:
            raise UserError(
                f"{entry.sample.path} {error}. It could be read when the run was planned; start again."
            ) from error
        except files.MediaError as error:
            failures[(entry.sample.dataset_id, entry.sample.name)] = str(error)
            continue
        except MemoryError as error:
            less = "lower max_workers and image_processing_batch_size"
            raise UserError(f"{_described_sample(entry.sample)}: too little memory to decode it; {less}.") from error
        if group and group[0][1].shape != array.shape:
            yield group
            group = []
        group.append((entry, array))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _decode_ahead(
    entries: Sequence[LatentEntry], most: int, decoders: ThreadPoolExecutor
) -> Iterator[tuple[LatentEntry, Future[np.ndarray]]]:
    """Entries sorted by shape, each with its pixels to come; so many are decoded ahead, or as many as memory allows."""
    waiting: deque[tuple[LatentEntry, Future[np.ndarray]]] = deque()
    held = 0
    for entry in _by_shape(entries):
        # Never fewer than two: while one is encoded the next is decoded, however large they are.
        while len(waiting) > 1 and (len(waiting) >= most or held + _bytes(entry.sample) > WAITING_BYTES):
            held -= _bytes(waiting[0][0].sample)
            yield waiting.popleft()
        waiting.append((entry, decoders.submit(_decode, entry.sample)))
        held += _bytes(entry.sample)
    yield from waiting


def _by_shape(entries: Sequence[LatentEntry]) -> list[LatentEntry]:
    """Those of one shape behind each other, in the order in which the shapes first appear."""
    groups: dict[tuple[tuple[int, int], int], list[LatentEntry]] = defaultdict(list)
    for entry in entries:
        groups[entry.sample.geometry.size, entry.sample.frames].append(entry)
    return [entry for group in groups.values() for entry in group]


def _bytes(sample: Sample) -> int:
    """Of its decoded pixels."""
    width, height = sample.geometry.size
    return 3 * width * height * sample.frames


def _decode(sample: Sample) -> np.ndarray:
    """Its pixels 0..255, `F H W 3`.

    Raises:
        MediaError: what is in the file is damaged.
        UserError: the file is not the one that the key is of, or cannot be read.
    """
    clip = sample.clip
    if clip is None:
        data = files.read(sample.path, files.LARGEST_PICTURE)
        _check_same(sample, hashlib.sha256(data).hexdigest())
        return media.fit(media.decode(data), sample.geometry)[None]
    try:
        return clips.surely(lambda: _frames(sample, clip))
    finally:  # afterwards: readers open a clip by its name
        _check_same(sample, files.content_hash(sample.path))


def _frames(sample: Sample, clip: ClipFacts) -> np.ndarray:
    return clips.fit_clip(clips.frames_of(sample.path, sample.frames, sample.frame_rate or 1, clip), sample.geometry)


def _check_same(sample: Sample, content: str) -> None:
    """Latents must not be stored under the hash of what was there before."""
    if content != sample.content:
        raise ChangedFileError(sample)


def _picture(sample: Sample | None) -> Image.Image | None:
    """What a prompt holds."""
    if sample is None:
        return None
    try:
        return Image.fromarray(_decode(sample.first_frame)[0])
    except files.MediaError as error:
        raise UserError(f"{sample.path} {error}. It is part of a prompt; replace it or take its pair out.") from error


def _write(entry: LatentEntry | TextEntry, tensors: dict[str, Tensor], together: int) -> None:
    source = entry.source if isinstance(entry, TextEntry) else entry.sample.full_name
    provenance = provenance_of(entry.key, source)
    if together > 1:
        provenance["encoded_together"] = str(together)
    CacheStore(entry.folder, entry.compress).write(entry.key.digest(), tensors, provenance)


def _settle(writes: list[Future[None]], *, wait: bool = False) -> list[Future[None]]:
    """Raise the error of a write that failed (a full disk) as soon as it is known; returns those under way."""
    for write in writes:
        if wait or write.done():
            write.result()
    return [write for write in writes if not write.done()]


def _long_ones_first(entries: Sequence[TextEntry]) -> list[TextEntry]:
    """Captions of about one length behind each other, so that a batch holds little padding.

    The longest come first: what does not fit into memory is found out at once. Prompts with pictures of one size stay
    together, since only those can share a batch.
    """

    def order(entry: TextEntry) -> tuple[int, int, int]:
        width, height = (0, 0) if entry.picture is None else entry.picture.geometry.size
        return -width, -height, -len(entry.caption)

    return sorted(entries, key=order)


def _chunks(entries: Sequence[TextEntry], size: int) -> Iterator[Sequence[TextEntry]]:
    return (entries[start : start + size] for start in range(0, len(entries), size))


@contextmanager
def _decoding_threads(config: CachingConfig) -> Iterator[ThreadPoolExecutor]:
    """Threads that give up what waits for them when an error or Ctrl-C ends the filling."""
    threads = ThreadPoolExecutor(min(config.max_workers, os.cpu_count() or 1))
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)
