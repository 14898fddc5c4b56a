"""Decodes pictures and clips ahead of the VAE."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, groupby

import numpy as np
from PIL import Image

from simpletuner.caching.catalogue import LatentEntry
from simpletuner.config.types import Size
from simpletuner.data import clips, files, pictures
from simpletuner.data.decode_memory import DECODE_MEMORY
from simpletuner.data.sample import Sample
from simpletuner.errors import UserError
from simpletuner.hashing import hash_bytes

Decoded = tuple[LatentEntry, np.ndarray]
Decoding = tuple[LatentEntry, Future[np.ndarray]]
NewFailures = dict[tuple[str, str], tuple[str, str]]  # `Failures` to add to

# Bytes of decoded pictures and clips in the queue, without those being decoded.
WAITING_BYTES = 1 << 30


class ChangedFileError(UserError):
    """A file changed after the plan was made."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(f"{sample.path} has changed since the plan was made; start again.")
        self.sample = sample


def name_and_shape(sample: Sample) -> str:
    """A sample for messages: `pictures/a.png (768x512)`."""
    return f"{sample.full_name} ({sample.geometry.size.of_frames(sample.frames)})"


def prepared_picture(sample: Sample) -> Image.Image:
    """The picture of a sample, or frame 0 of its clip, resized and cropped to its geometry."""
    frames = clips.fit_clip(sample.first_frame.images(), sample.geometry)
    return Image.fromarray(frames[0])


def batches_of_one_shape(
    decoding: Iterable[Decoding], size: int, failures: NewFailures
) -> Iterator[list[Decoded]]:
    """Groups of at most `size` entries of the same shape."""

    def shape_of(decoded: Decoded) -> tuple[int, ...]:
        _, pixels = decoded
        return pixels.shape

    for _, alike in groupby(_decoded(decoding, failures), key=shape_of):
        group: list[Decoded] = []
        for decoded in alike:
            group.append(decoded)
            if len(group) == size:
                yield group
                group = []
        if group:
            yield group


def _decoded(decoding: Iterable[Decoding], failures: NewFailures) -> Iterator[Decoded]:
    """Entries with their pixels; files that cannot be decoded are added to `failures`."""
    for entry, decoded in decoding:
        try:
            yield entry, decoded.result()
        except files.UnreadableError as error:
            advice = "It was readable when the run was planned; start again."
            raise UserError(f"{entry.sample.path} {error}. {advice}") from error
        except files.MediaError as error:
            failures[(entry.sample.dataset_id, entry.sample.name)] = (error.reason, str(error))
        except MemoryError as error:
            name = name_and_shape(entry.sample)
            advice = "lower max_workers and image_processing_batch_size"
            raise UserError(f"{name}: not enough memory to decode it; {advice}.") from error


def decode_ahead(
    entries: Sequence[LatentEntry], most: int, decoders: ThreadPoolExecutor
) -> Iterator[Decoding]:
    """Entries grouped by shape, with the future of their pixels.

    Decodes ahead up to `most` entries or `WAITING_BYTES`.
    """
    # Grouped, since the VAE encodes batches of one shape.
    shapes: dict[tuple[Size, int], list[LatentEntry]] = defaultdict(list)
    for entry in entries:
        shapes[entry.sample.geometry.size, entry.sample.frames].append(entry)
    waiting: deque[Decoding] = deque()
    waiting_bytes = 0

    def is_full(sample: Sample) -> bool:
        # At least two, however large, so that one is decoded while another is encoded.
        if len(waiting) < 2:
            return False
        return len(waiting) >= most or waiting_bytes + _bytes(sample) > WAITING_BYTES

    for entry in chain.from_iterable(shapes.values()):
        while is_full(entry.sample):
            oldest, pixels = waiting.popleft()
            waiting_bytes -= _bytes(oldest.sample)
            yield oldest, pixels
        waiting.append((entry, decoders.submit(decode_sample, entry.sample)))
        waiting_bytes += _bytes(entry.sample)
    yield from waiting


def _bytes(sample: Sample) -> int:
    """Size of a sample's decoded pixels."""
    width, height = sample.geometry.size
    return 3 * width * height * sample.frames


def decode_sample(sample: Sample) -> np.ndarray:
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
    finally:
        # Afterwards, since readers open a clip by name; the hash reveals changes in between.
        _check_same(sample, files.content_hash(sample.path))


def _check_same(sample: Sample, content: str) -> None:
    """Keep latents from being stored under the hash of an earlier version of their file.

    Raises:
        ChangedFileError: the file has changed.
    """
    if content != sample.content:
        raise ChangedFileError(sample)


def prompt_picture(sample: Sample | None) -> Image.Image | None:
    """The picture in a prompt."""
    if sample is None:
        return None
    try:
        return Image.fromarray(decode_sample(sample.first_frame)[0])
    except files.MediaError as error:
        advice = "It is part of a prompt; replace it or remove the pair."
        raise UserError(f"{sample.path} {error}. {advice}") from error
