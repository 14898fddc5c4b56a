"""The stand-in for a GPU finds what it is for: waits that are missing, and memory that ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.memory.offload.side_stream import SideStream
from tests.memory.test_block_inputs import (
    test_block_inputs_are_offloaded_on_a_gpu as offload_inputs,
)
from tests.memory.test_copiers import test_streaming_is_bit_equal_on_a_gpu as stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("STAND_IN_GPU_LIBRARY" not in os.environ, reason="is about the stand-in"),
]
GPU = torch.device("cuda")


def copy_at_once(side: SideStream, end: Any = None) -> AbstractContextManager[object]:
    """`after_compute` without its wait."""
    return nullcontext() if side.stream is None else torch.cuda.stream(side.stream)


def compute_at_once(side: SideStream, end: Any) -> None:
    """`make_compute_wait` without its wait."""
    while any(event is end for _, event in side._kept):
        side._kept.popleft()


def keep_nothing(side: SideStream, copied: object) -> Any:
    """`keep` without keeping."""
    return side.end_of_copies()


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("after_compute", copy_at_once),
        ("make_compute_wait", compute_at_once),
        ("keep", keep_nothing),
    ],
)
def test_a_missing_wait_is_a_race(
    monkeypatch: pytest.MonkeyPatch, name: str, without: Callable[..., Any]
) -> None:
    monkeypatch.setattr(SideStream, name, without)

    with pytest.raises(torch.AcceleratorError, match=r"race: .* does not wait for"):
        offload_inputs(streams=True)


def test_a_buffer_that_is_filled_again_before_its_copy_changes_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)

    with pytest.raises(AssertionError):
        stream(tmp_path, to_disk=True, use_stream=True, checkpointing=False)


def test_memory_ends_at_its_limit() -> None:
    free, total = torch.cuda.mem_get_info()
    assert free <= total

    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=GPU)

    assert torch.ones(3, device=GPU).sum().item() == 3


def test_a_saved_state_repeats_the_draws() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.randn(5, device=GPU)
    second = torch.randn(5, device=GPU)
    assert not torch.equal(first, second)

    torch.cuda.set_rng_state(state)

    assert torch.equal(torch.randn(5, device=GPU), first)


def test_a_kernel_without_a_mirror_is_named() -> None:
    with pytest.raises(torch.AcceleratorError, match=r"the kernel .*spin.* has no mirror"):
        torch.cuda._sleep(1)
