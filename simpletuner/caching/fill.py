"""Encode missing entries, once.

    decode threads ─► bounded queue ─► encoder (this thread) ─► writer threads

One encoder is on the device at a time; without missing entries, none is loaded. Each entry is written as soon as it is
encoded, so a killed run loses at most the current batch, and the next run continues after it. If memory runs out,
batches become smaller (`shrink`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletuner.caching.catalogue import FEATURES, FeatureEncoder, FeatureEntry, LatentEntry, TextEntry
from simpletuner.caching.keys import provenance_of
from simpletuner.caching.read import CacheStore
from simpletuner.caching.shrink import ShrinkingEncoder
from simpletuner.config.schema import CachingConfig
from simpletuner.data import clips, files, media
from simpletuner.data.context import ProgressBar
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import TextEmbeds, upload
from simpletuner.errors import UserError, shorten
from simpletuner.models.adapter import LatentEncoder, TextEncoder, TextRequest

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
WRITERS = 2
Decoded = tuple[LatentEntry, np.ndarray]

# Bytes of decoded pictures and clips in the queue, besides the ones being decoded.
WAITING_BYTES = 1 << 30


class ChangedFileError(UserError):
    """A file changed after the plan was made."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(f"{sample.path} has changed since the plan was made; start again.")
        self.sample = sample


def fill_texts(entries: Sequence[TextEntry], load: Callable[[], TextEncoder], size: int, bar: ProgressBar) -> list[str]:
    """Encode captions; returns notes about truncated captions.

    Args:
        entries: the missing ones; if empty, `load` is not called.
        size: batch size.

    Raises:
        UserError: a caption does not fit into memory, or the encoder's output is not finite.
    """
    if not entries:
        return []
    encoder = load()
    encode = ShrinkingEncoder(_text_batch(encoder), lambda entry: entry.source, TEXT_ADVICE)
    notes = []
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS) as writers:
        for group in _of_one_length(entries, encoder, size):
            # Padded to a fixed batch: kernels round differently by batch size, and an entry must not depend on the rest
            # of its batch, so that an interrupted fill continues with the same bytes.
            filled = group + group[-1:] * (size - len(group))
            for entry, embeds in zip(group, encode(filled), strict=False):
                writes.append(writers.submit(_write, entry, embeds, encode.most or size))
                cut = encoder.truncated(entry.caption)
                if cut is not None:
                    notes.append(f"{entry.source}: the caption is too long; this part is cut off: {cut!r}")
            writes = _settle(writes)
            bar.advance(len(group), group[-1].source)
    _settle(writes, wait=True)
    return notes


def fill_latents(
    entries: Sequence[LatentEntry], load: Callable[[], LatentEncoder], config: CachingConfig, bar: ProgressBar
) -> dict[tuple[str, str], str]:
    """Encode pictures and clips; returns the files that could not be decoded, (dataset id, name) to reason.

    Threads and order never change a latent. With `vae_batch_size` above 1, batches of samples of one size and length
    change the rounding, so an entry records its batch size.

    Raises:
        UserError: a sample does not fit into memory, or the VAE's output is not finite.
    """
    if not entries:
        return {}
    encode = _shrinking(load(), config)
    failures: dict[tuple[str, str], str] = {}
    writes: list[Future[None]] = []
    with _decoding_threads(config) as decoders, ThreadPoolExecutor(WRITERS) as writers:
        # At least one batch, since the encoder waits for a whole one.
        ahead = max(config.image_processing_batch_size, config.vae_batch_size)
        decoding = _decode_ahead(entries, ahead, decoders)
        for group in _batches(decoding, config.vae_batch_size, failures):
            for (entry, _), latent in zip(group, encode(group), strict=True):
                writes.append(writers.submit(_write, entry, {"latents": latent}, encode.at_once(group)))
            writes = _settle(writes)
            bar.advance(len(group), group[-1][0].sample.name)
    _settle(writes, wait=True)
    return failures


def _shrinking(encoder: LatentEncoder, config: CachingConfig) -> ShrinkingEncoder[Decoded, Tensor]:
    return ShrinkingEncoder(
        _latent_batch(encoder), lambda decoded: _describe(decoded[0].sample), _advice(config), encoder.use_less_memory
    )


def encode_now(entry: LatentEntry, encoder: LatentEncoder, config: CachingConfig) -> Tensor:
    """Decode and encode one sample; the same latents as `fill_latents` writes with a `vae_batch_size` of 1.

    Raises:
        UserError: it cannot be decoded, does not fit into memory, or the VAE's output is not finite.
    """
    try:
        pixels = _decode(entry.sample)
    except files.MediaError as error:
        remedy = "remove it, or let the caches be filled before training, which leaves such files out"
        raise UserError(f"{entry.sample.path} {error}; {remedy}.") from error
    return _shrinking(encoder, config)([(entry, pixels)])[0]


def write_latents(entry: LatentEntry, latents: Tensor) -> None:
    """Cache the latents of one sample."""
    _write(entry, {"latents": latents}, 1)


def fill_features(
    entries: Sequence[FeatureEntry],
    load: Callable[[FeatureEntry], FeatureEncoder],
    read: Callable[[LatentEntry], Tensor],
    bar: ProgressBar,
) -> None:
    """Compute the features that techniques cache, from latents that are already cached.

    Args:
        entries: the missing ones, grouped by kind.
        load: loads the encoder of an entry's kind; called once per kind.
        read: reads the latents of a sample onto the encoder's device.

    Raises:
        UserError: an encoder's output is not finite.
    """
    encoder = None
    for number, entry in enumerate(entries):
        if encoder is None or entry.kind != entries[number - 1].kind:
            encoder = None  # free the last one before loading the next
            encoder = load(entry)
        name = entry.latents.sample.full_name
        with torch.no_grad():
            features = encoder.encode(read(entry.latents))
        if not bool(features.isfinite().all()):
            raise UserError(f"{entry.kind.name}: the encoder's output is not finite for {name}.")
        store = CacheStore(entry.folder, entry.latents.compress)
        store.write(entry.key.digest(), {FEATURES: features}, provenance_of(entry.key, name))
        bar.advance(1, name)


def _text_batch(encoder: TextEncoder) -> Callable[[Sequence[TextEntry]], list[TextEmbeds]]:
    def encode(group: Sequence[TextEntry]) -> list[TextEmbeds]:
        requests = {each: _request(each, _picture(each.picture)) for each in dict.fromkeys(group)}
        embeds = encoder.encode([requests[each] for each in group])
        found = dict(zip((each.source for each in group), embeds, strict=True))
        stop_if_not_finite("text encoder", [*found.values()], [*found], "text_encoder_1_precision fp32")
        return embeds

    return encode


def _request(entry: TextEntry, picture: Image.Image | None = None) -> TextRequest:
    return TextRequest(entry.caption, picture, entry.bare)


def _latent_batch(encoder: LatentEncoder) -> Callable[[Sequence[Decoded]], list[Tensor]]:
    def encode(group: Sequence[Decoded]) -> list[Tensor]:
        pixels = np.stack([array for _, array in group])
        latents = encoder.encode(to_pixels(pixels, encoder.device), [entry.key.seed() for entry, _ in group])
        names = [entry.sample.full_name for entry, _ in group]
        stop_if_not_finite("VAE", [{"latents": each} for each in latents], names, "vae_dtype fp32")
        return list(latents)

    return encode


def _describe(sample: Sample) -> str:
    width, height = sample.geometry.size
    length = f"@{sample.frames}" if sample.frames > 1 else ""
    return f"{sample.full_name} ({width}x{height}{length})"


TEXT_ADVICE = "These need less memory: group_offload_text_encoder, tokenizer_max_length."


def _advice(config: CachingConfig) -> str:
    tiles = "" if config.vae_enable_tiling else ", vae_enable_tiling (tiles change latents slightly at their seams)"
    less = f"At the same size, these need less memory: group_offload_vae{tiles}."
    return f"A smaller resolution or fewer frames of a clip (video.num_frames) help. {less}"


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
    bad = [name for name, tensors in pairs if not all(bool(tensor.isfinite().all()) for tensor in tensors.values())]
    if bad:
        raise UserError(f"The {encoder}'s output is not finite for {shorten(bad)}; try {remedy}.")


def to_pixels(frames: np.ndarray, device: torch.device = CPU) -> Tensor:
    """Frames `... F H W 3` (or one, `H W 3`) of 0..255 as `... 3 F H W` in [-1, 1], float32, rounded as in the
    pipelines. They go to the device as bytes."""
    pixels = upload(torch.tensor(frames if frames.ndim > 3 else frames[None]), device).float()
    # In place, since a clip of 10 seconds takes a gigabyte in float32; the order of the operations is the pipelines'.
    # By a tensor: instead of dividing by a number, CUDA multiplies by its reciprocal, which rounds differently.
    return pixels.div_(torch.full((), 255.0, device=device)).mul_(2.0).sub_(1.0).movedim(-1, -4)


def prepared_picture(sample: Sample) -> Image.Image:
    """A sample's picture, or frame 0 of its clip, resized and cropped to its geometry."""
    return Image.fromarray(clips.fit_clip(sample.first_frame.images(), sample.geometry)[0])


def _batches(
    decoding: Iterable[tuple[LatentEntry, Future[np.ndarray]]], size: int, failures: dict[tuple[str, str], str]
) -> Iterator[list[Decoded]]:
    """Groups of the same shape; files that cannot be decoded are added to the failures."""
    group: list[Decoded] = []
    for entry, decoded in decoding:
        try:
            array = decoded.result()
        except files.UnreadableError as error:
            raise UserError(
                f"{entry.sample.path} {error}. It was readable when the run was planned; start again."
            ) from error
        except files.MediaError as error:
            failures[(entry.sample.dataset_id, entry.sample.name)] = str(error)
            continue
        except MemoryError as error:
            less = "lower max_workers and image_processing_batch_size"
            raise UserError(f"{_describe(entry.sample)}: not enough memory to decode it; {less}.") from error
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
    """Entries sorted by shape, each with the future of its pixels; decodes ahead up to `most` or `WAITING_BYTES`."""
    waiting: deque[tuple[LatentEntry, Future[np.ndarray]]] = deque()
    held = 0
    for entry in _by_shape(entries):
        # At least two, however large: while one is encoded, the next is decoded.
        while len(waiting) > 1 and (len(waiting) >= most or held + _bytes(entry.sample) > WAITING_BYTES):
            held -= _bytes(waiting[0][0].sample)
            yield waiting.popleft()
        waiting.append((entry, decoders.submit(_decode, entry.sample)))
        held += _bytes(entry.sample)
    yield from waiting


def _by_shape(entries: Sequence[LatentEntry]) -> list[LatentEntry]:
    """Entries grouped by shape, in the order in which the shapes first appear."""
    groups: dict[tuple[tuple[int, int], int], list[LatentEntry]] = defaultdict(list)
    for entry in entries:
        groups[entry.sample.geometry.size, entry.sample.frames].append(entry)
    return [entry for group in groups.values() for entry in group]


def _bytes(sample: Sample) -> int:
    """Size of its decoded pixels."""
    width, height = sample.geometry.size
    return 3 * width * height * sample.frames


def _decode(sample: Sample) -> np.ndarray:
    """Its pixels 0..255, `F H W 3`.

    Raises:
        MediaError: the file is damaged.
        UserError: the file is not the one that the key was computed from, or cannot be read.
    """
    if sample.clip is None:
        data = files.read(sample.path, files.LARGEST_PICTURE)
        _check_same(sample, hashlib.sha256(data).hexdigest())
        return media.fit(media.decode(data), sample.geometry)[None]
    try:
        return clips.retry_once(lambda: clips.fit_clip(sample.images(), sample.geometry))
    finally:  # afterwards, since readers open a clip by name: what was read must be what is hashed
        _check_same(sample, files.content_hash(sample.path))


def _check_same(sample: Sample, content: str) -> None:
    """Make sure that latents are not stored under the hash of an earlier version of the file."""
    if content != sample.content:
        raise ChangedFileError(sample)


def _picture(sample: Sample | None) -> Image.Image | None:
    """The picture that a prompt contains."""
    if sample is None:
        return None
    try:
        return Image.fromarray(_decode(sample.first_frame)[0])
    except files.MediaError as error:
        raise UserError(f"{sample.path} {error}. It is part of a prompt; replace it or remove the pair.") from error


def _write(entry: LatentEntry | TextEntry, tensors: dict[str, Tensor], together: int) -> None:
    source = entry.source if isinstance(entry, TextEntry) else entry.sample.full_name
    provenance = provenance_of(entry.key, source)
    if together > 1:
        provenance["encoded_together"] = str(together)
    CacheStore(entry.folder, entry.compress).write(entry.key.digest(), tensors, provenance)


def _settle(writes: list[Future[None]], *, wait: bool = False) -> list[Future[None]]:
    """Raise the error of a failed write (a full disk) as soon as it is known; returns the pending writes."""
    for write in writes:
        if wait or write.done():
            write.result()
    return [write for write in writes if not write.done()]


def _of_one_length(entries: Sequence[TextEntry], encoder: TextEncoder, size: int) -> Iterator[list[TextEntry]]:
    """Groups of at most `size` prompts of one length, with pictures of one size.

    The longest come first, so that running out of memory shows up at once.
    """

    def order(entry: TextEntry) -> tuple[int, int, int, bool]:
        width, height = (0, 0) if entry.picture is None else entry.picture.geometry.size
        return width, height, encoder.padded_length(_request(entry)), entry.bare

    lengths = {entry: order(entry) for entry in entries}
    for _, alike in groupby(sorted(entries, key=lengths.__getitem__, reverse=True), lengths.__getitem__):
        members = [*alike]
        yield from (members[start : start + size] for start in range(0, len(members), size))


@contextmanager
def _decoding_threads(config: CachingConfig) -> Iterator[ThreadPoolExecutor]:
    """Decoding threads whose pending work is cancelled when an error or Ctrl-C ends the filling."""
    threads = ThreadPoolExecutor(min(config.max_workers, os.cpu_count() or 1))
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)
