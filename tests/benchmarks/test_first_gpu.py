"""The first run on a GPU, tried on a CPU: sections work or give a reason; none stops the rest."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_gpu, gpu_sections
from benchmarks.gpu_sections import SECTIONS, SUSPECTS, Line, Machine, SkippedError
from benchmarks.models import SHAPES, build_transformer, dtype_of, hollow_transformer
from simpletuner.config.schema import all_options
from tests.tools.commands import forked_commands
from tests.tools.processes import PATIENCE

CPU = Machine("cpu", "tiny")
NEED_CUDA = {"pcie", "attention"}


@pytest.mark.parametrize("name", SECTIONS)
def test_section_gives_numbers_or_a_reason(name: str) -> None:
    function, limit = SECTIONS[name]
    assert limit <= 180

    if name in NEED_CUDA:
        with pytest.raises(SkippedError, match="needs CUDA"):
            list(function(CPU))
        return
    lines = list(function(CPU))
    assert lines
    assert all(line.value > 0 or "waiting" in line.name for line in lines)
    assert len({line.name for line in lines}) == len(lines)


def test_all_sections_fit_into_two_runs() -> None:
    assert sum(limit for _, limit in SECTIONS.values()) <= 2 * 60 * first_gpu.MINUTES


@pytest.mark.slow
@pytest.mark.thorough
def test_first_gpu_runs_all_sections_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "cpu.json"
    flags = ["--device", "cpu", "--size", "tiny", "--only", "peaks", "--patience", "20"]
    monkeypatch.setattr(sys, "argv", ["first_gpu", *flags, "--json", str(path)])

    with pytest.raises(SystemExit) as exit_info:
        first_gpu.main()
    assert exit_info.value.code == 0

    content = json.loads(path.read_text())
    assert content["environment"]["device"] == "cpu"
    assert {name: result["state"] for name, result in content["sections"].items()} == {
        "peaks": "done"
    }
    assert "matmul 256^3 float32" in capsys.readouterr().out


def test_suspects_name_keys_that_exist() -> None:
    named = {key for text in SUSPECTS.values() for key in re.findall(r"`(\w+): \w+`", text)}

    assert named
    assert named <= all_options().keys()


def run_python(*words: str) -> dict[str, Any]:
    """The result of a Python program that runs as a section."""
    command = [sys.executable, *words]
    return first_gpu.result_of(partial(first_gpu.run_process, command), PATIENCE)


def test_section_that_cannot_run_here_reports_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program is a fork of this process, since its imports take longer than a section."""
    options = argparse.Namespace(device="cpu", size="tiny")
    python, module, name, *words = first_gpu.section_words("pcie", options)
    assert [python, module, name] == [sys.executable, "-m", first_gpu.__name__]

    with forked_commands(tmp_path, first_gpu.main) as program:
        result = run_python(*program[1:], *words)
    assert (result["state"], result["lines"]) == ("skipped", [])

    first_gpu.show_section("pcie", result)
    assert "needs CUDA" in capsys.readouterr().out


def test_failing_section_reports_its_error() -> None:
    result = run_python("-c", "{}['no such section']")

    assert result["state"] == "failed"
    assert result["reason"] == "KeyError: 'no such section'"


def test_numbers_measured_before_a_timeout_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a child of the section, such as a compiler, keeps its output open."""
    line = json.dumps(vars(Line("first", 1.0, "s")))
    has_written = tmp_path / "has-written"
    # A whole line, a child that lives on, and half a line.
    script = f"echo '{line}'; sleep 3600 & echo '{{\"cut'; touch {has_written}; wait"
    popen = subprocess.Popen

    def start(words: Any, **more: Any) -> Any:
        process = popen(["sh", "-c", script], **more)
        while not has_written.exists():
            time.sleep(0.01)
        return process

    monkeypatch.setattr(first_gpu.subprocess, "Popen", start)

    result = first_gpu.result_of(partial(first_gpu.run_process, ["peaks"]), 0.2)

    assert (result["state"], result["reason"]) == ("failed", "took longer than 0 s")
    assert [measured["name"] for measured in result["lines"]] == ["first"]


def test_failing_section_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for name in SECTIONS:
        result = {"state": "done", "reason": "", "seconds": 1.0, "lines": []}
        if name == "step":
            result |= {"state": "failed", "reason": "an error"}
        results.append(result)
    monkeypatch.setattr(first_gpu, "result_of", lambda run, limit: results.pop(0))
    options = argparse.Namespace(
        device="cpu", size="tiny", only=None, json=tmp_path / "cpu.json", minutes=60.0, patience=1.0
    )

    assert first_gpu.run_all(options) == 1
    written = json.loads(options.json.read_text())["sections"]
    assert [name for name, result in written.items() if result["state"] == "failed"] == ["step"]
    assert written["step"]["reason"] == f"an error. Suspect: {SUSPECTS['step']}"
    assert written.keys() == SECTIONS.keys() >= SUSPECTS.keys()


def test_next_run_measures_the_remaining_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First those without a result, then those that failed. `--only` keeps all other results."""
    ran: list[str] = []
    states = {"step": "failed", "pcie": "skipped"}
    monkeypatch.setattr(first_gpu.time, "monotonic", lambda: 50.0 * len(ran))
    monkeypatch.setattr(first_gpu, "section_words", lambda name, options: name)

    def run(work: Any, limit: float) -> dict[str, Any]:
        ran.append(*work.args)
        return {"state": states.get(ran[-1], "done"), "reason": "", "seconds": 1.0, "lines": []}

    monkeypatch.setattr(first_gpu, "result_of", run)
    options = argparse.Namespace(
        device="cpu", size="tiny", only=None, json=tmp_path / "x", minutes=5.0, patience=1.0
    )

    assert first_gpu.run_all(options) == 1
    # Every section takes 50 of the 300 s. After four of them, one with a limit of 110 s and 10 s of
    # imports no longer fits, but shorter ones do.
    assert ran == ["products", "step", "full", "sparse", "peaks", "attention"]

    remaining = [name for name in SECTIONS if name not in ran]
    advice = f"the same command runs what is left: {', '.join(remaining)}\n"
    assert advice in capsys.readouterr().out

    options.minutes = 60.0
    states["step"] = "done"
    assert first_gpu.run_all(options) == 0
    assert ran[6:] == [*remaining, "step"]

    options.only = ["vae"]
    assert first_gpu.run_all(options) == 0
    assert ran[-1] == "vae"
    assert json.loads(options.json.read_text())["sections"].keys() == SECTIONS.keys()

    options.only = None
    options.size = "real"
    first_gpu.run_all(options)
    assert ran[-len(SECTIONS) :] == [*SECTIONS], "none of this size"


def test_a_device_has_a_file_name() -> None:
    assert (
        first_gpu.file_name("NVIDIA H100 80GB HBM3, 79 GiB, CUDA 13.0") == "nvidia-h100-80gb-hbm3"
    )


@pytest.mark.parametrize("size", [name for name, shape in SHAPES.items() if shape.gigabytes])
def test_real_sizes_weigh_what_the_models_weigh(size: str) -> None:
    model = hollow_transformer(size)
    assert all(parameter.is_meta for parameter in model.parameters())

    weight = sum(
        parameter.numel() * dtype_of(model, name, torch.bfloat16).itemsize
        for name, parameter in model.named_parameters()
    )

    assert weight / 1e9 == pytest.approx(SHAPES[size].gigabytes, abs=0.05)


def test_real_sizes_have_the_published_token_counts() -> None:
    assert SHAPES["lite"].tokens == 24_576
    assert SHAPES["image"].tokens == 4_096
    assert SHAPES["pro"].tokens == 47_616
    assert SHAPES["sana"].tokens == 32_760


@pytest.mark.parametrize("size", ["tiny", "tiny-video", "tiny-sana"])
def test_random_models_are_alive_and_the_same_each_time(size: str) -> None:
    first = build_transformer(size, "cpu", torch.bfloat16)
    second = build_transformer(size, "cpu", torch.bfloat16)

    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert all(parameter.any() for parameter in first.parameters())

    kept = {
        name for name, parameter in first.named_parameters() if parameter.dtype == torch.float32
    }
    assert all("modulation" in name or "time_embeddings" in name for name in kept)
    assert bool(kept) == (size != "tiny-sana")
    assert not any(buffer.is_meta for buffer in first.buffers())


def test_section_is_skipped_by_a_version_without_its_option() -> None:
    gpu_sections.need_keys("gradient_checkpointing")

    with pytest.raises(SkippedError, match="no option of_tomorrow"):
        gpu_sections.need_keys("of_tomorrow")
