"""Latents of clips: their keys, their conditions, and how they are encoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simpletuner.caching.catalogue import Catalogue, LatentEntry, missing
from simpletuner.config.schema import CachingConfig
from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.clips import probe_clip
from simpletuner.data.files import content_hash
from simpletuner.data.sample import Sample
from simpletuner.data.sampler import PlannedBatch
from simpletuner.encoding import decoding, fill
from simpletuner.encoding.decoding import prepared_picture
from simpletuner.encoding.fill import fill_latents, to_pixels
from simpletuner.encoding.read import BatchReader, CacheStore
from tests.tools.catalogues import make_catalogue
from tests.tools.clips import time_in, write_clip
from tests.tools.processes import PATIENCE

SIZE = Size(96, 64)


class SmallEncoder:
    """A VAE by its shapes: every eighth pixel of every fourth frame."""

    vae: Any = None
    device = torch.device("cpu")

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.wait = wait

    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        self.wait()
        self.shapes.append(tuple(pixels.shape))
        return pixels[:, :, ::4, ::8, ::8].clone()

    def use_less_memory(self) -> bool:
        return False


class Silent:
    """A progress bar that shows nothing."""

    def advance(self, count: int = 1, note: str = "") -> None:
        pass


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return make_catalogue(tmp_path, "films")


@pytest.fixture
def film(tmp_path: Path) -> Sample:
    """A clip of 17 frames."""
    path = tmp_path / "film.mp4"
    write_clip(path, seconds=1)
    return Sample(
        dataset_id="films",
        name=path.name,
        root=path.parent,
        content=content_hash(path),
        original_size=SIZE,
        geometry=Geometry("1.5", SIZE, SIZE, (0, 0)),
        captions=("a film",),
        frames=17,
        frame_rate=24,
        clip=probe_clip(path),
    )


def copy_of(film: Sample) -> Sample:
    """The same clip in a file of other bytes."""
    path = film.path.with_name("copy.mp4")
    path.write_bytes(film.path.read_bytes() + b"\0\0\0\x08free")
    return replace(film, name=path.name, content=content_hash(path))


def config_of(**changes: object) -> CachingConfig:
    return CachingConfig().model_copy(update=changes)


def test_frames_and_rate_belong_to_the_key(catalogue: Catalogue, film: Sample) -> None:
    variants = [film, replace(film, frames=13), replace(film, frame_rate=16.0), film.first_frame]

    keys = [catalogue.latent(variant).key for variant in variants]

    assert len({key.digest() for key in keys}) == 4
    assert keys[0].frames == 17
    assert keys[0].rate == 24
    assert keys[3].frames == 1
    assert keys[3].rate is None, "the first frame is the same at every rate"


def test_each_reader_has_latents_of_its_own(catalogue: Catalogue, film: Sample) -> None:
    assert film.clip is not None

    by_decord = replace(film, clip=replace(film.clip, reader="decord"))
    picture = replace(film, clip=None, frames=1, frame_rate=None)
    samples = [film, by_decord, film.first_frame, by_decord.first_frame, picture]

    assert len({catalogue.latent(sample).key.digest() for sample in samples}) == 5


def test_the_condition_of_an_i2v_sample_is_its_first_frame(
    catalogue: Catalogue, film: Sample
) -> None:
    condition = catalogue.condition(replace(film, is_i2v=True))

    assert condition is not None
    assert condition.key == catalogue.latent(film.first_frame).key


def test_the_condition_of_a_sample_with_a_partner_is_that(
    catalogue: Catalogue, film: Sample
) -> None:
    partner = replace(film, name="partner", content="b" * 64)

    assert catalogue.condition(film) is None
    assert catalogue.condition(replace(film, partner=partner)) == catalogue.latent(partner)


def test_clips_are_encoded_by_size_and_length(catalogue: Catalogue, film: Sample) -> None:
    samples = [
        film,
        replace(film, frames=13),
        replace(film, frame_rate=12.0, frames=9),
        film.first_frame,
        copy_of(film),
    ]
    entries = [catalogue.latent(sample) for sample in samples]
    encoder = SmallEncoder()

    failures = fill_latents(entries, lambda: encoder, config_of(vae_batch_size=2), Silent())  # type: ignore[return-value]

    assert failures == {}
    assert not missing(entries)
    assert encoder.shapes == [
        (2, 3, 17, 64, 96),
        (1, 3, 13, 64, 96),
        (1, 3, 9, 64, 96),
        (1, 3, 1, 64, 96),
    ]

    store = CacheStore(entries[0].folder)
    latents = store.read(entries[0].key.digest())["latents"]
    first_frame = store.read(entries[3].key.digest())["latents"]

    assert latents.shape == (3, 5, 8, 12)
    assert torch.equal(first_frame, latents[:, :1])


def test_a_batch_carries_its_conditions(catalogue: Catalogue, film: Sample) -> None:
    samples = tuple(replace(sample, is_i2v=True) for sample in (film, copy_of(film)))
    plain_samples = tuple(replace(sample, is_i2v=False) for sample in samples)
    entries: list[LatentEntry] = []
    for sample in samples:
        condition = catalogue.condition(sample)
        assert condition is not None
        entries += [catalogue.latent(sample), condition]
    fill_latents(entries, SmallEncoder, config_of(), Silent())
    text = catalogue.text("films", "a film", None)
    CacheStore(text.folder).write(text.key.digest(), {"prompt_embeds": torch.ones(2, 4)}, {})
    planned = PlannedBatch(1, 0, "films", "1.5", SIZE, samples, ("a film", "a film"), range(2))
    reader = BatchReader(
        catalogue, 0.0, 1, lambda entry: pytest.fail("nothing is damaged"), pytest.fail
    )

    batch = reader(planned)
    plain_batch = reader(replace(planned, samples=plain_samples))

    assert batch.latents.shape == (2, 3, 5, 8, 12)
    assert batch.condition is not None
    assert torch.equal(batch.condition, batch.latents[:, :, :1])
    assert plain_batch.condition is None


def test_a_clip_that_cannot_be_decoded_is_named(catalogue: Catalogue, film: Sample) -> None:
    broken = film.path.with_name("broken.mp4")
    broken.write_bytes(film.path.read_bytes()[:500])
    broken_film = replace(film, name="broken.mp4", content=content_hash(broken))
    short = replace(film, name="short.mp4", frames=81)
    short.path.write_bytes(film.path.read_bytes())
    entries = [catalogue.latent(sample) for sample in (broken_film, film, short)]

    failures = fill_latents(entries, SmallEncoder, config_of(), Silent())

    assert set(failures) == {("films", "broken.mp4"), ("films", "short.mp4")}
    assert "ends after 1.00 seconds" in failures["films", "short.mp4"][1]
    assert len(missing(entries)) == 2


def test_the_picture_that_a_preview_starts_from_is_frame_0(film: Sample) -> None:
    picture = prepared_picture(film)
    assert picture.size == SIZE
    assert time_in(np.asarray(picture)) == pytest.approx(0, abs=0.03)


def test_pixels_are_rounded_as_the_pipelines_do() -> None:
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    expected = (2.0 * (torch.tensor(values).float() / 255.0) - 1.0).permute(3, 0, 1, 2)

    assert torch.equal(to_pixels(values), expected)
    assert torch.equal(to_pixels(values[0]), expected)
    assert torch.equal(to_pixels(np.stack([values, values])), torch.stack([expected, expected]))


def test_pixels_are_uploaded_as_bytes(
    catalogue: Catalogue, film: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[tuple[torch.dtype, torch.device]] = []
    upload = fill.upload

    def watched(tensor: Tensor, device: torch.device) -> Tensor:
        uploads.append((tensor.dtype, device))
        return upload(tensor, device)

    monkeypatch.setattr(fill, "upload", watched)
    encoder = SmallEncoder()

    fill_latents([catalogue.latent(film)], lambda: encoder, config_of(), Silent())  # type: ignore[return-value]

    assert uploads == [(torch.uint8, encoder.device)]


def test_pixels_are_on_the_device_of_the_encoder() -> None:
    meta = torch.device("meta")
    assert to_pixels(np.zeros((1, 8, 8, 3), np.uint8), meta).device == meta


@pytest.mark.parametrize(("budget", "most"), [(0, 2), (3 * 17 * 96 * 64 * 4, 4), (1 << 30, 8)])
def test_waiting_clips_take_a_bounded_amount_of_memory(
    catalogue: Catalogue, film: Sample, budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "WAITING_BYTES", budget)
    entries = [catalogue.latent(replace(film, content=f"{index:064}")) for index in range(20)]
    started: list[str] = []

    def decode(sample: Sample) -> np.ndarray:
        started.append(sample.content)
        return np.zeros((sample.frames, 64, 96, 3), dtype=np.uint8)

    monkeypatch.setattr(decoding, "decode_sample", decode)
    handed_out = 0
    with ThreadPoolExecutor(4) as decoders:
        for entry, decoded in decoding.decode_ahead(entries, 8, decoders):
            decoded.result()
            time.sleep(0.001)
            handed_out += 1
            assert len(started) <= handed_out + most
            assert isinstance(entry, LatentEntry)

    assert handed_out == 20


def test_decoding_and_writing_go_on_while_the_encoder_works(
    catalogue: Catalogue, film: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip is encoded while the next is decoded and the one before is written."""
    crops = [replace(film.geometry, resized=(108, 72), crop=(index, 0)) for index in range(4)]
    entries = [catalogue.latent(replace(film, geometry=crop)) for crop in crops]
    decoded = [threading.Event() for _ in entries]
    written = [threading.Event() for _ in entries]

    def noted(function: Callable[..., Any], done: list[threading.Event]) -> Callable[..., Any]:
        def wrapped(item: Sample | LatentEntry, *arguments: Any) -> Any:
            result = function(item, *arguments)
            sample = item if isinstance(item, Sample) else item.sample
            done[sample.geometry.crop[0]].set()
            return result

        return wrapped

    def wait() -> None:
        number = len(encoder.shapes)
        for event in (*decoded[number + 1 : number + 2], *written[:number]):
            assert event.wait(PATIENCE)

    monkeypatch.setattr(decoding, "decode_sample", noted(decoding.decode_sample, decoded))
    monkeypatch.setattr(fill, "write_entry", noted(fill.write_entry, written))
    encoder = SmallEncoder(wait)

    fill_latents(entries, lambda: encoder, config_of(vae_batch_size=1, max_workers=2), Silent())  # type: ignore[return-value]

    assert len(encoder.shapes) == 4


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
