"""Kernels are timed once per device and versions, and by one process for all."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from simpletuner.distributed.world import World
from simpletuner.models import blocks
from simpletuner.models.blocks import CHOICES_FILE, Choices, KernelChoices

CPU, CALL, AMONG = torch.device("cpu"), "attention", ("flash", "cuDNN")


def on(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(blocks, "describe_platform", lambda device: place)


def opened(folder: Path | None, *earlier: Path, world: World = World(), shared: Path | None = None) -> KernelChoices:
    """What a process that starts now knows."""
    choices = KernelChoices()
    choices.open(folder, *earlier, world=world, shared=shared)
    return choices


def never() -> str:
    raise AssertionError("this kernel was timed before")


def test_the_next_process_times_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "H200, torch 2.13")
    assert opened(tmp_path).choose(CPU, CALL, AMONG, lambda: "cuDNN") == "cuDNN"
    assert json.loads((tmp_path / CHOICES_FILE).read_text()) == {"H200, torch 2.13": {CALL: "cuDNN"}}
    assert opened(tmp_path).choose(CPU, CALL, AMONG, never) == "cuDNN"
    assert opened(tmp_path).choose(CPU, "another call", AMONG, lambda: "flash") == "flash"
    assert opened(tmp_path).choose(CPU, CALL, AMONG, never) == "cuDNN", "still"


@pytest.mark.parametrize("place", ["A100, torch 2.13", "H200, torch 2.14"])
def test_another_device_or_version_times_anew_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    on(monkeypatch, "H200, torch 2.13")
    opened(tmp_path).choose(CPU, CALL, AMONG, lambda: "cuDNN")
    on(monkeypatch, place)
    with caplog.at_level(logging.INFO):
        assert opened(tmp_path).choose(CPU, CALL, AMONG, lambda: "flash") == "flash"
    assert f"chosen on H200, torch 2.13, and are timed anew on {place}" in caplog.text
    on(monkeypatch, "H200, torch 2.13")
    assert opened(tmp_path).choose(CPU, CALL, AMONG, never) == "cuDNN", "back again"


@pytest.mark.parametrize("content", ["", "{", '{"H200": 1}', "[]"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    (tmp_path / CHOICES_FILE).write_text(content)
    opened(None, tmp_path)
    assert (tmp_path / CHOICES_FILE).read_text() == content, "a run that is sampled is only read"
    choices = opened(tmp_path)
    assert "is damaged: kernels are timed again" in caplog.text
    caplog.clear()
    assert choices.choose(CPU, CALL, AMONG, lambda: "flash") == "flash"
    assert opened(tmp_path).choose(CPU, CALL, AMONG, never) == "flash"
    assert not caplog.records


def test_a_kernel_that_is_unknown_is_chosen_again(tmp_path: Path) -> None:
    opened(tmp_path).choose(CPU, CALL, ("FA9",), lambda: "FA9")
    assert opened(tmp_path).choose(CPU, CALL, AMONG, lambda: "flash") == "flash"
    assert opened(tmp_path).choose(CPU, CALL, AMONG, never) == "flash"


def test_a_makeshift_is_not_remembered(tmp_path: Path) -> None:
    """Such as dense attention, because the machine has no compiler yet."""
    assert opened(tmp_path).choose(CPU, CALL, AMONG, lambda: "dense") == "dense"
    assert not (tmp_path / CHOICES_FILE).exists()


def test_a_run_that_goes_on_elsewhere_takes_its_choices_along(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    opened(old).choose(CPU, CALL, AMONG, lambda: "cuDNN")
    opened(new).choose(CPU, CALL, AMONG, lambda: "flash")
    assert opened(None, old).choose(CPU, CALL, AMONG, never) == "cuDNN"
    assert opened(new).choose(CPU, CALL, AMONG, never) == "flash"
    opened(new, old)
    assert opened(new).choose(CPU, CALL, AMONG, never) == "cuDNN"


def test_other_runs_need_not_time_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache folder may come from another machine: its choices count for equal devices and versions."""
    old, new, shared = tmp_path / "old", tmp_path / "new", tmp_path / "cache"
    on(monkeypatch, "H200, torch 2.13")
    first = opened(old, shared=shared)
    assert first.choose(CPU, CALL, AMONG, lambda: "cuDNN") == "cuDNN"
    assert opened(new, shared=shared).choose(CPU, CALL, AMONG, never) == "cuDNN"
    assert (new / CHOICES_FILE).read_text() == (old / CHOICES_FILE).read_text(), "kept with each run"
    opened(new).choose(CPU, "another call", AMONG, lambda: "cuDNN")
    (shared / CHOICES_FILE).write_text(json.dumps({"H200, torch 2.13": {CALL: "flash", "another call": "flash"}}))
    again = opened(new, shared=shared)
    assert again.choose(CPU, CALL, AMONG, never) == "cuDNN", "a run keeps its own"
    on(monkeypatch, "A100, torch 2.13")
    assert opened(tmp_path / "third", shared=shared).choose(CPU, CALL, AMONG, lambda: "flash") == "flash"


def test_processes_that_store_at_once_lose_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "H200, torch 2.13")
    calls, processes, read = ("first", "second"), [opened(tmp_path) for _ in range(2)], blocks.read_choices

    def read_slowly(path: Path) -> Choices | None:
        found = read(path)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(blocks, "read_choices", read_slowly)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda process, call: process.choose(CPU, call, AMONG, lambda: "cuDNN"), processes, calls))
    assert read(tmp_path / CHOICES_FILE) == {"H200, torch 2.13": dict.fromkeys(calls, "cuDNN")}


class Several(World):
    """Processes that share what the first of them gave."""

    given: ClassVar[dict[str, str]] = {}

    def first(self, name: str, value: str) -> str:
        return self.given.setdefault(name, value)


def test_processes_choose_alike_and_lose_no_choice(tmp_path: Path) -> None:
    Several.given = {}
    one, two = (opened(tmp_path, world=Several()) for _ in range(2))
    assert one.choose(CPU, CALL, AMONG, lambda: "cuDNN") == "cuDNN"
    assert two.choose(CPU, "only here", AMONG, lambda: "cuDNN") == "cuDNN"
    assert two.choose(CPU, CALL, AMONG, lambda: "flash") == "cuDNN", "as the first has timed it"
    assert opened(tmp_path).choose(CPU, "only here", AMONG, never) == "cuDNN"


def test_a_place_names_the_device_and_what_computes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(blocks, "version", lambda package: "4.0")
    place = blocks.describe_platform.__wrapped__(torch.device("cuda:1"))
    assert place.startswith(f"NVIDIA H200, torch {torch.__version__}, cuDNN ")
    assert "flash-attn-4 4.0" in place
