"""Training a published model on a machine without a GPU that torch can use."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner.budget import device
from simpletuner.budget.device import find_device
from simpletuner.budget.drivers import Gpu, torch_uses_gpus
from simpletuner.reporting.screen import in_red
from simpletuner.reporting.wording import duration_text
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
CONSENT = "To train on the CPU, run train --yes or set i_know_what_i_am_doing."


@pytest.fixture
def published(tmp_path: Path) -> Workspace:
    """A run of a checkpoint that would have to be downloaded."""
    workspace = Workspace.create(tmp_path / "published", tmp_path)
    workspace.write_config(pretrained_model_name_or_path=None, max_train_steps=100_000)
    return workspace


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device names of the runs that would have started, in this order."""
    devices: list[str] = []

    def note_device(budget: Any, *_: object) -> None:
        devices.append(budget.device.name)

    monkeypatch.setattr("simpletuner.cli.execute.run_plan", note_device)
    return devices


def test_plan_warns_first_of_training_without_a_gpu(published: Workspace, capsys: Capture) -> None:
    assert published.run("plan") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("No GPU was found. On the CPU this takes about ")
    assert re.search(r" about \d+ (days|years), ", first)
    assert first.endswith(CONSENT)
    assert first not in "\n".join(rest)

    assert published.run("plan", "--json") == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    (problem,) = [problem for problem in problems if problem["key"] == "device"]
    assert problem["message"].lower() == first.lower()
    assert not problem["fatal"]


def test_plan_does_not_warn_where_no_gpu_is_needed(
    published: Workspace, workspace: Workspace, capsys: Capture
) -> None:
    assert published.run("plan", "max_train_steps=1") == 0
    assert "--yes" not in capsys.readouterr().out, "a run of minutes needs no consent"

    assert published.run("plan", "--device-memory=80") == 0
    assert "No GPU" not in capsys.readouterr().out

    assert workspace.run("plan", "max_train_steps=100000000") == 0
    assert "No GPU" not in capsys.readouterr().out, "a tiny model is meant for a CPU"


def test_training_for_days_on_a_cpu_needs_consent(
    published: Workspace, begun: list[str], capsys: Capture
) -> None:
    assert published.train() == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: device: no GPU was found. On the CPU this takes about ")
    assert CONSENT in errors
    assert not published.path("output").exists()
    assert begun == []

    for consent in ("--yes", "i_know_what_i_am_doing=true", "max_train_steps=1"):
        assert published.train(consent) == 0
        output = capsys.readouterr().out
        assert output.startswith("warning: No GPU was found. On the CPU this takes about ")
        assert "--yes" not in output
    assert begun == ["CPU"] * 3


def test_the_cpu_build_is_named_beside_the_gpu_that_it_cannot_use(
    published: Workspace, begun: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "query_gpu", lambda: Gpu("NVIDIA H100 PCIe", 80e9))
    monkeypatch.setattr(device, "torch_uses_gpus", lambda: False)
    assert (find_device().name, find_device().idle) == ("CPU", "NVIDIA H100 PCIe")

    assert published.train() == 2
    errors = capsys.readouterr().err
    assert (
        "torch cannot use the NVIDIA H100 PCIe of this machine, since its CPU build is "
        "installed. On the CPU this takes about " in errors
    )
    assert "Run pip uninstall torch, then pip install torch." in errors
    assert begun == []


def test_gpu_that_torch_cannot_use_is_reported_before_downloads(
    published: Workspace, begun: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a driver that is too old for the installed build."""
    monkeypatch.setattr(device, "query_gpu", lambda: Gpu("NVIDIA H100 PCIe", 80e9))

    assert published.train() == 2
    assert (
        "torch cannot use the NVIDIA H100 PCIe of this machine. On the CPU this takes about "
        in capsys.readouterr().err
    )
    assert begun == []

    assert published.train("--yes") == 0
    assert begun == ["CPU"]


def test_gpu_that_only_torch_detects_is_used(
    published: Workspace, begun: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may lack nvidia-smi."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)

    assert published.train() == 0
    assert "No GPU" not in capsys.readouterr().out
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n", True),
        ("# another layout\n", True),
        (None, True),
    ],
)
def test_cpu_build_of_torch_is_detected_without_import(
    version: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: torch)

    assert torch_uses_gpus() is expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_red_is_used_only_on_colour_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert in_red("days", Terminal()) == "\x1b[31mdays\x1b[0m"
    assert in_red("days", io.StringIO()) == "days"

    monkeypatch.setenv("NO_COLOR", "1")
    assert in_red("days", Terminal()) == "days"

    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert in_red("days", Terminal()) == "days"


def test_long_durations_are_given_in_hours_days_or_years() -> None:
    day = 24 * 60 * 60
    assert duration_text(3 * day) == "72 h"
    assert duration_text(999 * day) == "999 days"
    assert duration_text(1001 * day) == "3 years"
    assert duration_text(31836 * day) == "87 years"
