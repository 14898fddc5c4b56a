"""The real copiers, and where images are stored."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from simpletuner.config.precision import QUANTISATIONS
from simpletuner.config.schema import OffloadConfig
from simpletuner.memory.offload import attach, image
from simpletuner.memory.offload.attach import Offload
from simpletuner.memory.offload.copiers import Copier, DiskCopier, choose_copier
from simpletuner.memory.offload.image import ALIGNMENT, WeightImage
from simpletuner.memory.quantisation.layers import quantise
from simpletuner.timing import StreamClock
from tests.tools.streaming import CPU, Trained, assert_equal, to_int8

GPU = torch.device("cuda")


def test_copies_in_line_count_as_waiting() -> None:
    plain = Trained()
    streamed = Trained()
    streamer = streamed.offloaded()

    assert type(streamer.copier) is Copier
    for _ in range(2):
        assert_equal(streamed.step(), plain.step())
    assert streamer.waited() > 0
    assert streamer.waited() == 0


def test_waits_on_a_stream_are_counted_after_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    over: list[bool] = []
    event = SimpleNamespace(
        record=lambda: None, query=lambda: bool(over), elapsed_time=lambda later: 250.0
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    clock = StreamClock()
    for _ in range(2):
        with clock.running():
            pass

    assert clock.read() == 0, "nothing has happened yet, and asking does not wait"

    over.append(True)
    assert clock.read() == 0.5
    assert clock.read() == 0


def test_a_stream_without_cuda_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    attach._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            Trained().offloaded(group_offload_use_stream=True)
    assert caplog.text.count("group_offload_use_stream has no effect") == 1


def test_a_group_size_beyond_the_blocks_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = Trained()
    streamed = Trained()
    streamer = streamed.offloaded(group_offload_blocks_per_group=99)

    assert "group_offload_blocks_per_group: 99 is more than the 6 blocks that stream" in caplog.text
    assert len(streamer.images) == 1
    assert_equal(streamed.step(), plain.step())


@pytest.mark.parametrize(
    ("residents", "staying"), [(0, []), (1, [3]), (2, [1, 4]), (3, [1, 3, 5]), (6, [*range(6)])]
)
def test_residents_are_evenly_spaced(residents: int, staying: list[int]) -> None:
    blocks = [nn.Identity() for _ in range(6)]
    streamed = attach.streamed_blocks(blocks, residents)
    assert [index for index, block in enumerate(blocks) if block not in streamed] == staying


def test_an_image_is_aligned_and_keeps_layouts() -> None:
    conv = nn.Conv2d(4, 8, 3).requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = conv.weight.clone()
    stride = conv.weight.stride()
    image = WeightImage([conv])

    assert image.nbytes % ALIGNMENT == 0
    assert (conv.weight.data_ptr() - image.flat.data_ptr()) % ALIGNMENT == 0
    assert conv.weight.stride() == stride
    assert torch.equal(conv.weight, before)

    slot = image.flat.clone()
    image.bind(slot)
    slot.zero_()

    assert not conv.weight.any()

    image.bind(image.flat)
    assert torch.equal(conv.weight, before)


def test_an_image_on_disk_takes_no_memory_and_leaves_no_file(tmp_path: Path) -> None:
    flat = torch.arange(2 * ALIGNMENT, dtype=torch.int64).view(torch.uint8)
    mapped = image.on_disk(flat, tmp_path)

    assert torch.equal(mapped, flat)
    assert list(tmp_path.iterdir()) == []


def test_an_image_is_mapped_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has none."""
    paths = []
    from_file = torch.from_file

    def record(path: str, **settings: Any) -> torch.Tensor:
        paths.append(path)
        return from_file(path, **settings)

    monkeypatch.setattr(torch, "from_file", record)
    image.on_disk(torch.zeros(8, dtype=torch.uint8), tmp_path)

    assert [path.rpartition("/")[0] for path in paths] == ["/dev/fd"]


class Stack(nn.Module):
    """Two stacks, one too short to stream, and a layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)
        self.long = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(5)]
        )
        self.short = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.head, *self.long, *self.short):
            x = layer(x)
        return x


@pytest.mark.parametrize("name", ["", "int8-quanto"])
def test_long_stacks_of_layers_are_streamed(name: str, tmp_path: Path) -> None:
    """Also stacks that are quantised while they are packed."""
    model = Stack().requires_grad_(False)
    whole = copy.deepcopy(model)
    x = torch.randn(3, 16)
    later = None
    if name:
        quantise(whole, r".*", QUANTISATIONS[name], accelerator=CPU)
        later = partial(quantise, model, r".*", QUANTISATIONS[name], accelerator=CPU)
    with torch.no_grad():
        expected = whole(x)
        offload = Offload(OffloadConfig(group_offload_to_disk_path=str(tmp_path)), CPU)
        streamers = offload.attach_to_stacks(model, later)
        assert [len(streamer.images) for streamer in streamers] == [5]
        for _ in range(2):
            assert torch.equal(model(x), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("to_disk", [False, True])
@pytest.mark.parametrize("use_stream", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_streaming_is_bit_equal_on_a_gpu(
    tmp_path: Path, to_disk: bool, use_stream: bool, checkpointing: bool
) -> None:
    plain = Trained(checkpointing=checkpointing)
    streamed = Trained(checkpointing=checkpointing)
    plain.to(GPU)
    folder = str(tmp_path) if to_disk else None
    streamer = streamed.offloaded(
        device=GPU, group_offload_use_stream=use_stream, group_offload_to_disk_path=folder
    )

    assert type(streamer.copier) is (DiskCopier if to_disk and use_stream else Copier)
    assert (streamer.copier.side.stream is not None) == use_stream
    for _ in range(3):
        assert_equal(streamed.step(), plain.step())
        assert torch.equal(streamed.sample(), plain.sample())

    torch.cuda.synchronize()
    assert streamer.waited() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quantised_weights_stream_on_a_gpu() -> None:
    """A wrapper reports the device of its content."""
    plain = Trained(prepare=to_int8)
    streamed = Trained(prepare=to_int8)
    plain.to(GPU)
    streamer = streamed.offloaded(device=GPU, group_offload_use_stream=True)
    for _ in range(2):
        actual = streamed.step()
        expected = plain.step()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value)
    device_types = {tensor.device.type for image in streamer.images for tensor in image.tensors}

    assert device_types == {"cpu", "cuda"}


def test_images_share_no_page() -> None:
    """CUDA refuses to lock a page a second time, and small buffers of the heap lie on one."""
    images = [WeightImage([nn.Linear(8, 8).requires_grad_(False)]) for _ in range(20)]
    pages = [packed.flat.data_ptr() // image.PAGE for packed in images]

    assert len(set(pages)) == len(pages)
    for packed in images:
        assert packed.flat.data_ptr() % image.PAGE == 0
        assert packed.flat.storage_offset() == 0, "places count from the start of the storage"


class Runtime:
    """CUDA's runtime on a machine where pages can be pinned, or cannot."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.locked = dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked |= {} if self.error else {address: nbytes}
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stack of current GPUs of this thread: GPU 3, and those of open `device` contexts."""
    current = [3]

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return current


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("error", [0, 2])
def test_pinned_pages_are_unlocked_with_their_owner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    """An error that is not asked for would be raised by the next kernel; memory is given back after
    the last copy.
    """
    runtime = Runtime(error)
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("waited"))
    monkeypatch.setattr(image, "_forget_error", lambda: calls.append("forgot"))
    flat = image.whole_pages(5000)
    owner = nn.Identity()
    image.page_lock(flat, owner)

    assert runtime.locked == (
        {} if error else {flat.data_ptr(): -(-5000 // image.PAGE) * image.PAGE}
    )
    assert ("could not be pinned" in caplog.text) is bool(error)
    assert "ulimit" not in caplog.text, "the driver does not count pinned pages against it"

    del owner
    gc.collect()

    assert runtime.locked == {}
    assert calls == (["forgot"] if error else ["waited"])


def test_the_gpu_that_locked_pages_unlocks_them(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int]
) -> None:
    """Whichever thread collects garbage: it may use the first GPU, where nothing copies, and a
    context takes memory.
    """
    runtime = Runtime(0)
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(gpus[-1]))
    flat = image.whole_pages(5000)
    owner = nn.Identity()
    image.page_lock(flat, owner)
    gpus.append(0)
    del owner
    gc.collect()

    assert (waited, runtime.locked, gpus) == ([3], {}, [3, 0])


@pytest.mark.usefixtures("gpus")
def test_memory_is_unlocked_silently_after_the_device_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    flat = image.whole_pages(5000)
    owner = nn.Identity()
    image.page_lock(flat, owner)
    del owner
    gc.collect()

    assert runtime.locked == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_that_cannot_be_pinned_only_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    flat = image.whole_pages(1 << 20)
    owners = nn.Identity(), nn.Identity()
    for owner in owners:
        image.page_lock(flat, owner)

    assert "could not be pinned" in caplog.text, "the second time"
    assert torch.ones(3, device=GPU).add(1).sum().item() == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_are_pinned_in_place() -> None:
    flat = image.whole_pages(1 << 20)
    owner = nn.Identity()
    image.page_lock(flat, owner)

    assert flat.is_pinned()

    del owner
    gc.collect()

    assert not flat.is_pinned()


def test_devices_without_cuda_use_the_plain_copier() -> None:
    assert type(choose_copier(CPU, 1, use_stream=True, on_disk=True)) is Copier
    assert type(choose_copier(torch.device("mps"), 1, use_stream=True, on_disk=False)) is Copier
