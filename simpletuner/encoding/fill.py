"""Encodes missing entries, each once.

    decode threads ─► bounded queue ─► encoder (this thread) ─► writer threads

One encoder is on the device at a time; without missing entries, none is loaded. Each entry is written as soon as it is
encoded, so a killed run loses at most the current batch, and the next run continues after it.

If memory runs out, the same work is retried in smaller pieces, or the run stops with advice. Smaller pieces do not
change an entry, so no key depends on free memory. Tiling would change latents, so the message only suggests it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from typing import Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from simpletuner.caching.catalogue import FEATURES, AnyEntry, FeatureEntry, LatentEntry, TextEntry
from simpletuner.caching.keys import provenance_of
from simpletuner.config.schema import CachingConfig
from simpletuner.config.types import Size
from simpletuner.data import clips, files, pictures
from simpletuner.data.dataset import Failures
from simpletuner.data.decode_memory import DECODE_MEMORY
from simpletuner.data.entries import ProgressBar
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import TextEmbeds, upload
from simpletuner.encoding.read import CacheStore
from simpletuner.errors import UserError, is_out_of_memory, shorten
from simpletuner.hashing import hash_bytes
from simpletuner.models.adapter import LatentEncoder, TextEncoder, TextRequest
from simpletuner.techniques.base import FeatureEncoder

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")

CPU = torch.device("cpu")
WRITERS = 2
Decoded = tuple[LatentEntry, np.ndarray]
Decoding = tuple[LatentEntry, Future[np.ndarray]]
NewFailures = dict[tuple[str, str], tuple[str, str]]  # `Failures` that grow

# Bytes of decoded pictures and clips in the queue, without those being decoded.
WAITING_BYTES = 1 << 30


@dataclass
class ShrinkingEncoder(Generic[Item, Encoded]):
    """Encodes batches as large as memory allows, and keeps the size for later batches.

    Attributes:
        encode: one result per item; items do not influence each other.
        name: name of an item, for messages.
        advice: advice for the user if nothing is left to try.
        relieve: called if a single item does not fit; lowers peak memory without changing results, or returns False.
        most: maximum batch size, once known.
    """

    encode: Callable[[Sequence[Item]], Sequence[Encoded]]
    name: Callable[[Item], str]
    advice: str
    relieve: Callable[[], bool] = lambda: False
    most: int | None = field(default=None, init=False)
    _reason: str = field(default="", init=False)

    def __call__(self, items: Sequence[Item]) -> list[Encoded]:
        """The results, in order.

        Raises:
            UserError: an item does not fit into memory even alone.
        """
        done: list[Encoded] = []
        while len(done) < len(items):
            # Items encoded before memory ran out are kept.
            part = items[len(done) : len(done) + (self.most or len(items))]
            made = self._tried(part)
            if made is None:
                self._shrink(part)
            else:
                done += made
        return done

    def at_once(self, items: Sequence[Item]) -> int:
        """Batch size for these items, as far as known."""
        return min(len(items), self.most or len(items))

    def _tried(self, items: Sequence[Item]) -> Sequence[Encoded] | None:
        """The results, or None if memory ran out. Drops the error, whose frames keep tensors alive."""
        try:
            return self.encode(items)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reason = (str(error) or type(error).__name__).splitlines()[0]
        return None

    def _shrink(self, items: Sequence[Item]) -> None:
        gc.collect()  # cycles of exceptions and frames may keep tensors alive
        # Blocks cached for the larger batch do not fit the smaller one.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(items) > 1:
            self.most = len(items) // 2
            logger.warning("Out of memory with %d at a time; continuing with %d.", len(items), self.most)
        elif self.relieve():
            logger.warning("Out of memory with one at a time; continuing in slices, which is slower.")
        else:
            problem = f"{self.name(items[0])} does not fit into memory, even alone."
            raise UserError(f"{problem} {self.advice} ({self._reason})")


class ChangedFileError(UserError):
    """A file changed after the plan was made."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(f"{sample.path} has changed since the plan was made; start again.")
        self.sample = sample


def fill_texts(entries: Sequence[TextEntry], encoder: TextEncoder, size: int, bar: ProgressBar) -> list[str]:
    """Encode missing captions in batches of `size`; returns notes about truncated captions.

    Raises:
        UserError: a caption does not fit into memory, or the encoder's output is not finite.
    """
    encode = ShrinkingEncoder(partial(_encode_texts, encoder), lambda entry: entry.source, TEXT_ADVICE)
    notes = []
    with _writing() as write:
        for group in _of_one_length(entries, encoder, size):
            # Padded to a fixed batch size: kernels round differently by batch size, and an entry must not depend on the
            # rest of its batch, so that an interrupted fill continues with the same bytes.
            filled = group + group[-1:] * (size - len(group))
            for entry, embeds in zip(group, encode(filled), strict=False):
                write(entry, embeds, encode.most or size)
                cut = encoder.truncated(entry.caption)
                if cut is not None:
                    notes.append(f"{entry.source}: the caption is too long; this part is cut off: {cut!r}")
            bar.advance(len(group), group[-1].source)
    return notes


def fill_latents(
    entries: Sequence[LatentEntry], load: Callable[[], LatentEncoder], config: CachingConfig, bar: ProgressBar
) -> Failures:
    """Encode pictures and clips; returns the files that could not be decoded.

    Threads and order never change a latent. With `vae_batch_size` above 1, samples of one size and length are batched,
    which changes the rounding, so an entry records its batch size.

    Raises:
        UserError: a sample does not fit into memory, or the VAE's output is not finite.
    """
    if not entries:
        return {}
    encode = _shrinking(load(), config)
    failures = NewFailures()
    with ExitStack() as stack, _writing() as write:
        decoders = ThreadPoolExecutor(min(config.max_workers, os.cpu_count() or 1))
        stack.callback(decoders.shutdown, cancel_futures=True)  # also after an error or Ctrl-C
        # At least one batch, since the encoder waits for a full batch.
        ahead = max(config.image_processing_batch_size, config.vae_batch_size)
        decoding = _decode_ahead(entries, ahead, decoders)
        for group in _batches(decoding, config.vae_batch_size, failures):
            for (entry, _), latent in zip(group, encode(group), strict=True):
                write(entry, {"latents": latent}, encode.at_once(group))
            bar.advance(len(group), group[-1][0].sample.name)
    return failures


def _shrinking(encoder: LatentEncoder, config: CachingConfig) -> ShrinkingEncoder[Decoded, Tensor]:
    tiles = "" if config.vae_enable_tiling else ", vae_enable_tiling (tiles change latents slightly at their seams)"
    less = f"At the same size, these need less memory: group_offload_vae{tiles}."
    advice = f"A smaller resolution or fewer frames of a clip (video.num_frames) help. {less}"
    return ShrinkingEncoder(
        partial(_encode_latents, encoder), lambda decoded: _describe(decoded[0].sample), advice, encoder.use_less_memory
    )


def encode_now(entry: LatentEntry, encoder: LatentEncoder, config: CachingConfig) -> Tensor:
    """Decode and encode one sample; the same latents as `fill_latents` with a `vae_batch_size` of 1.

    Raises:
        UserError: the sample cannot be decoded or does not fit into memory, or the VAE's output is not finite.
    """
    try:
        pixels = _decode(entry.sample)
    except files.MediaError as error:
        remedy = "remove it, or let the caches be filled before training, which leaves such files out"
        raise UserError(f"{entry.sample.path} {error}; {remedy}.") from error
    return _shrinking(encoder, config)([(entry, pixels)])[0]


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
            raise UserError(f"{entry.kind.name}: the encoder's output is not finite for {entry.source}.")
        write_entry(entry, {FEATURES: features})
        bar.advance(1, entry.source)


def _encode_texts(encoder: TextEncoder, group: Sequence[TextEntry]) -> list[TextEmbeds]:
    # Without the duplicates that pad a batch, so that their picture is decoded once.
    requests = {each: TextRequest(each.caption, _picture(each.picture), each.bare) for each in dict.fromkeys(group)}
    embeds = encoder.encode([requests[entry] for entry in group])
    tensors = [embedding.values() for embedding in embeds]
    _stop_if_not_finite("text encoder", tensors, group, "text_encoder_1_precision fp32")
    return embeds


def _encode_latents(encoder: LatentEncoder, group: Sequence[Decoded]) -> list[Tensor]:
    pixels = np.stack([array for _, array in group])
    # One seed per entry, so that its draw from the posterior is independent of batch and order.
    latents = encoder.encode(to_pixels(pixels, encoder.device), [entry.key.seed() for entry, _ in group])
    _stop_if_not_finite("VAE", [[latent] for latent in latents], [entry for entry, _ in group], "vae_dtype fp32")
    return list(latents)


def _describe(sample: Sample) -> str:
    width, height = sample.geometry.size
    length = f"@{sample.frames}" if sample.frames > 1 else ""
    return f"{sample.full_name} ({width}x{height}{length})"


TEXT_ADVICE = "These need less memory: group_offload_text_encoder, tokenizer_max_length."


def _stop_if_not_finite(
    encoder: str, encoded: Sequence[Iterable[Tensor]], entries: Sequence[LatentEntry | TextEntry], remedy: str
) -> None:
    """Keep the output of an encoder that overflows out of the cache.

    Raises:
        UserError: a tensor holds NaN or infinity.
    """
    pairs = zip(entries, encoded, strict=True)
    bad = [entry.source for entry, tensors in pairs if not all(bool(tensor.isfinite().all()) for tensor in tensors)]
    if bad:
        raise UserError(f"The {encoder}'s output is not finite for {shorten(list(dict.fromkeys(bad)))}; try {remedy}.")


def to_pixels(frames: np.ndarray, device: torch.device = CPU) -> Tensor:
    """Convert frames `... F H W 3` (or one frame, `H W 3`) of 0..255 to `... 3 F H W` in [-1, 1], float32.

    Rounds as the pipelines do. Frames are uploaded as bytes.
    """
    pixels = upload(torch.tensor(frames if frames.ndim > 3 else frames[None]), device).float()
    # In place, since a clip of 10 seconds takes a gigabyte in float32; the operations are in the pipelines' order.
    # Divided by a tensor: for a number, CUDA multiplies by the reciprocal, which rounds differently.
    return pixels.div_(torch.full((), 255.0, device=device)).mul_(2.0).sub_(1.0).movedim(-1, -4)


def prepared_picture(sample: Sample) -> Image.Image:
    """The picture of a sample, or frame 0 of its clip, resized and cropped to its geometry."""
    return Image.fromarray(clips.fit_clip(sample.first_frame.images(), sample.geometry)[0])


def _batches(decoding: Iterable[Decoding], size: int, failures: NewFailures) -> Iterator[list[Decoded]]:
    """Groups of at most `size` entries of the same shape."""
    for _, alike in groupby(_decoded(decoding, failures), key=lambda decoded: decoded[1].shape):
        while group := [*islice(alike, size)]:
            yield group


def _decoded(decoding: Iterable[Decoding], failures: NewFailures) -> Iterator[Decoded]:
    """Entries with their pixels; files that cannot be decoded are added to `failures`."""
    for entry, decoded in decoding:
        try:
            yield entry, decoded.result()
        except files.UnreadableError as error:
            again = "It was readable when the run was planned; start again."
            raise UserError(f"{entry.sample.path} {error}. {again}") from error
        except files.MediaError as error:
            failures[(entry.sample.dataset_id, entry.sample.name)] = (error.reason, str(error))
        except MemoryError as error:
            less = "lower max_workers and image_processing_batch_size"
            raise UserError(f"{_describe(entry.sample)}: not enough memory to decode it; {less}.") from error


def _decode_ahead(entries: Sequence[LatentEntry], most: int, decoders: ThreadPoolExecutor) -> Iterator[Decoding]:
    """Entries grouped by shape, with the future of their pixels; decodes ahead up to `most` or `WAITING_BYTES`."""
    # Grouped, since the VAE encodes batches of one shape.
    shapes: dict[tuple[Size, int], list[LatentEntry]] = defaultdict(list)
    for entry in entries:
        shapes[entry.sample.geometry.size, entry.sample.frames].append(entry)
    waiting: deque[Decoding] = deque()
    held = 0
    for entry in chain.from_iterable(shapes.values()):
        # At least two, however large, so that one is decoded while another is encoded.
        while len(waiting) > 1 and (len(waiting) >= most or held + _bytes(entry.sample) > WAITING_BYTES):
            held -= _bytes(waiting[0][0].sample)
            yield waiting.popleft()
        waiting.append((entry, decoders.submit(_decode, entry.sample)))
        held += _bytes(entry.sample)
    yield from waiting


def _bytes(sample: Sample) -> int:
    """Size of a sample's decoded pixels."""
    width, height = sample.geometry.size
    return 3 * width * height * sample.frames


def _decode(sample: Sample) -> np.ndarray:
    """The pixels of a sample, 0..255, `F H W 3`.

    Raises:
        MediaError: the file is damaged.
        UserError: the file has changed since its key was computed, or cannot be read.
    """
    if sample.clip is None:
        # Hashes the same bytes that are decoded, so the file cannot change in between.
        with DECODE_MEMORY.reserved(sample.original_size):
            data = files.read_file(sample.path, files.LARGEST_PICTURE)
            _check_same(sample, hash_bytes(data))
            return pictures.fit(pictures.decode(data), sample.geometry)[None]
    try:
        return clips.retry_once(lambda: clips.fit_clip(sample.images(), sample.geometry))
    finally:  # afterwards, since readers open a clip by name; the hash reveals changes in between
        _check_same(sample, files.content_hash(sample.path))


def _check_same(sample: Sample, content: str) -> None:
    """Raise if a file has changed, so that latents are not stored under the hash of an earlier version."""
    if content != sample.content:
        raise ChangedFileError(sample)


def _picture(sample: Sample | None) -> Image.Image | None:
    """The picture in a prompt."""
    if sample is None:
        return None
    try:
        return Image.fromarray(_decode(sample.first_frame)[0])
    except files.MediaError as error:
        raise UserError(f"{sample.path} {error}. It is part of a prompt; replace it or remove the pair.") from error


def write_entry(entry: AnyEntry, tensors: dict[str, Tensor], together: int = 1) -> None:
    """Write the output of an encoder to the cache; `together` is the batch size of the encoding."""
    provenance = provenance_of(entry.key, entry.source)
    # Not part of the key, since another batch size changes only the rounding.
    if together > 1:
        provenance["encoded_together"] = str(together)
    CacheStore(entry.folder, entry.compress).write(entry.key.digest(), tensors, provenance)


@contextmanager
def _writing() -> Iterator[Callable[[AnyEntry, dict[str, Tensor], int], None]]:
    """`write_entry` in threads; the error of a failed write, such as a full disk, is raised later or at the end."""
    pending = deque[Future[None]]()
    with ThreadPoolExecutor(WRITERS) as writers:

        def write(entry: AnyEntry, tensors: dict[str, Tensor], together: int) -> None:
            pending.append(writers.submit(write_entry, entry, tensors, together))
            while pending and pending[0].done():
                pending.popleft().result()

        yield write
    for written in pending:
        written.result()


def _of_one_length(entries: Sequence[TextEntry], encoder: TextEncoder, size: int) -> Iterator[list[TextEntry]]:
    """Groups of at most `size` prompts of one length, with pictures of one size.

    The longest prompts come first, so that running out of memory shows immediately.
    """

    def order(entry: TextEntry) -> tuple[int, int, int, bool]:
        width, height = (0, 0) if entry.picture is None else entry.picture.geometry.size
        return width, height, encoder.padded_length(TextRequest(entry.caption, None, entry.bare)), entry.bare

    lengths = {entry: order(entry) for entry in entries}
    for _, alike in groupby(sorted(entries, key=lengths.__getitem__, reverse=True), lengths.__getitem__):
        members = [*alike]
        yield from (members[start : start + size] for start in range(0, len(members), size))
