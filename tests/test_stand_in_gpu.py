"""The device of the stand-in GPU: its memory has limits, and its streams run late."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_double, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tests.tools.stand_in_gpu.build import DEVICE, compile_library

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
MIB = 1 << 20
NAN_BYTE = b"\xff"


class Device:
    """The functions of device.h."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        self.c.device_message.restype = c_char_p
        self.c.device_used.restype = c_size_t
        for name in ("stream_default", "stream_create", "event_create"):
            getattr(self.c, name).restype = c_void_p
        for name in ("allocate", "free", "pin", "unpin", "register", "unregister", "is_lost"):
            getattr(self.c, f"device_{name}").restype = c_bool
        for name in ("stream_copy", "stream_kernel", "stream_query", "event_query"):
            getattr(self.c, name).restype = c_bool
        self.stream = c_void_p(self.c.stream_default())

    @property
    def message(self) -> str:
        return str(self.c.device_message().decode())

    @property
    def is_lost(self) -> bool:
        return bool(self.c.device_is_lost())

    def new_stream(self) -> c_void_p:
        return c_void_p(self.c.stream_create())

    def allocate(self, size: int) -> int | None:
        return self._new(self.c.device_allocate, size)

    def pin(self, size: int) -> int:
        address = self._new(self.c.device_pin, size)
        assert address is not None
        return address

    def _new(self, function: Any, size: int) -> int | None:
        address = c_void_p()
        return address.value if function(c_size_t(size), ctypes.byref(address)) else None

    def free(self, address: int) -> bool:
        return bool(self.c.device_free(c_void_p(address)))

    def copy(self, target: int, source: int, size: int, stream: c_void_p | None = None) -> bool:
        return bool(
            self.c.stream_copy(
                stream or self.stream, c_void_p(target), c_void_p(source), c_size_t(size)
            )
        )

    def kernel(
        self, address: int, size: int, *, writes: bool = False, stream: c_void_p | None = None
    ) -> bool:
        """Begin a kernel that reads or writes some bytes."""
        return bool(
            self.c.stream_kernel(
                stream or self.stream,
                b"a kernel",
                1,
                (c_void_p * 1)(address),
                (c_size_t * 1)(size),
                (c_bool * 1)(writes),
            )
        )

    def order(self, before: c_void_p, after: c_void_p) -> None:
        """Make a stream wait for all that another one has to do."""
        event = c_void_p(self.c.event_create())
        self.c.event_record(event, before)
        self.c.event_wait(event, after)
        self.c.event_destroy(event)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("device") / "device.so"
    compile_library(target, DEVICE, ["-Werror"])
    return target


@pytest.fixture
def device(library: Path, tmp_path: Path) -> Iterator[Device]:
    """A new device of one MiB: a library that is loaded from another file starts anew."""
    device = Device(shutil.copy(library, tmp_path))
    device.c.device_set_limit(c_size_t(MIB))
    yield device
    device.c.device_forget_fault()


def test_memory_has_a_limit(device: Device) -> None:
    first = device.allocate(MIB // 2)
    assert first is not None
    assert device.allocate(MIB // 2 + 1) is None
    assert "out of memory" in device.message
    assert not device.is_lost, "a program may go on with less"

    device.free(first)

    assert device.c.device_used() == 0
    assert device.allocate(MIB) is not None


def test_new_memory_is_nan(device: Device) -> None:
    address = device.allocate(100)
    assert address is not None
    assert ctypes.string_at(address, 100) == 100 * NAN_BYTE


@pytest.mark.parametrize("size", [4097, 10_000])
def test_a_copy_beyond_its_memory_loses_the_device(device: Device, size: int) -> None:
    address = device.allocate(4096)
    assert address is not None
    source = ctypes.create_string_buffer(size)

    assert not device.copy(address, ctypes.addressof(source), size)
    assert f"reaches beyond its memory: {size} bytes" in device.message
    assert device.is_lost
    assert not device.copy(address, ctypes.addressof(source), 10), "as after an illegal address"


def test_freed_memory_cannot_be_used(device: Device) -> None:
    address = device.allocate(4096)
    assert address is not None
    device.free(address)

    assert not device.kernel(address, 10)
    assert "memory that is not allocated" in device.message


def test_memory_cannot_be_freed_twice(device: Device) -> None:
    address = device.allocate(4096)
    assert address is not None

    assert device.free(address)
    assert not device.free(address)
    assert device.is_lost


def test_a_copy_is_late_until_the_host_waits(device: Device) -> None:
    on_device = device.allocate(3)
    on_host = device.pin(3)
    assert on_device is not None
    ctypes.memmove(on_host, b"new", 3)
    back = device.pin(3)
    device.copy(on_device, on_host, 3)
    device.copy(back, on_device, 3)

    assert ctypes.string_at(back, 3) == 3 * NAN_BYTE

    device.c.stream_synchronize(device.stream)
    assert ctypes.string_at(back, 3) == b"new"


def test_pinned_memory_that_changes_too_early_reaches_the_device(device: Device) -> None:
    on_device = device.allocate(3)
    on_host = device.pin(3)
    assert on_device is not None
    ctypes.memmove(on_host, b"new", 3)
    device.copy(on_device, on_host, 3)
    ctypes.memmove(on_host, b"bad", 3)
    device.c.device_synchronize()

    assert ctypes.string_at(on_device, 3) == b"bad"


def test_pageable_memory_is_read_at_once(device: Device) -> None:
    on_device = device.allocate(3)
    assert on_device is not None
    on_host = ctypes.create_string_buffer(b"new")
    device.copy(on_device, ctypes.addressof(on_host), 3)
    on_host.value = b"bad"
    device.c.device_synchronize()

    assert ctypes.string_at(on_device, 3) == b"new"


@pytest.mark.parametrize("copies_first", [True, False])
def test_a_missing_wait_between_streams_is_a_race(device: Device, copies_first: bool) -> None:
    """Also where the kernel comes first, which would be over by then on a fast device."""
    on_device = device.allocate(8)
    on_host = device.pin(8)
    assert on_device is not None
    side = device.new_stream()
    actions = [
        lambda: device.copy(on_device, on_host, 8, side),
        lambda: device.kernel(on_device + 4, 4),
    ]
    first, second = actions if copies_first else reversed(actions)

    assert first()
    assert not second()
    assert "race: " in device.message
    assert "does not wait for" in device.message


@pytest.mark.parametrize("wait", ["event", "host"])
def test_streams_that_wait_do_not_race(device: Device, wait: str) -> None:
    on_device = device.allocate(8)
    on_host = device.pin(8)
    assert on_device is not None
    side = device.new_stream()
    ctypes.memmove(on_host, b"weights!", 8)
    device.copy(on_device, on_host, 8, side)
    if wait == "event":
        device.order(side, device.stream)
    else:
        device.c.stream_synchronize(side)

    assert device.kernel(on_device, 8)
    assert ctypes.string_at(on_device, 8) == b"weights!", "the kernel finds the copy done"


def test_two_streams_may_read_the_same_memory(device: Device) -> None:
    address = device.allocate(8)
    assert address is not None

    assert device.kernel(address, 8)
    assert device.kernel(address, 8, stream=device.new_stream())


def test_memory_that_is_freed_before_its_copy_is_over_is_waited_for(device: Device) -> None:
    on_device = device.allocate(3)
    on_host = device.pin(3)
    assert on_device is not None
    back = device.pin(3)
    ctypes.memmove(on_host, b"new", 3)
    device.copy(on_device, on_host, 3)
    device.copy(back, on_device, 3)

    assert device.free(on_device)
    assert ctypes.string_at(back, 3) == b"new", "cudaFree waits for the device"


def test_an_event_is_never_reached_at_once_but_after_some_questions(device: Device) -> None:
    on_device = device.allocate(3)
    assert on_device is not None
    device.copy(on_device, device.pin(3), 3)
    event = c_void_p(device.c.event_create())
    device.c.event_record(event, device.stream)

    assert [device.c.event_query(event) for _ in range(3)] == [False, False, True]


def test_events_measure_time(device: Device) -> None:
    before, after = (c_void_p(device.c.event_create()) for _ in range(2))
    seconds = c_double()
    for event in (before, after):
        device.c.event_record(event, device.stream)
    device.c.event_seconds.restype = c_bool
    assert not device.c.event_seconds(before, after, ctypes.byref(seconds))

    device.c.device_synchronize()

    assert device.c.event_seconds(before, after, ctypes.byref(seconds))
    assert seconds.value >= 0


def test_pages_can_be_locked_only_once(device: Device) -> None:
    buffer = ctypes.create_string_buffer(3 * 4096)
    address = c_void_p(ctypes.addressof(buffer))
    size = c_size_t(len(buffer))

    assert device.c.device_register(address, size)
    assert not device.c.device_register(address, size)
    assert device.c.device_unregister(address)
    assert not device.c.device_unregister(address)
    assert not device.is_lost
