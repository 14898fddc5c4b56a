"""Every benchmark runs from its command line, at its smallest; what it measures is not judged."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import many_files, real_size, startup, step
from benchmarks.models import SHAPES, make_batch, make_config
from tests.tools.cases import first_of
from tests.tools.workspace import Workspace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALLEST = {
    "chain": "--size tiny --clips 1",
    "clips": "--rounds 1 --only 480p --frames 4",
    "data_wait": "--size tiny --steps 2",
    "host": "--rounds 1 --only stock fast",
    "startup": "--only help",
    "step": "--size tiny --batches 1 --steps 1",
}
# Benchmarks whose parts have separate tests.
ELSEWHERE = {"first_gpu", "first_gpus", "cost_table", "many_files", "products", "real_size"}


def test_every_benchmark_has_a_test() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(SMALLEST) | ELSEWHERE


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the handler that a benchmark replaces for as long as its process lasts."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("signals", "traced_only")
@pytest.mark.parametrize("name", first_of(SMALLEST))
def test_benchmark_runs_at_a_small_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "deep", replace(SHAPES["deep"], latents=(1, 8, 8)))
    file = tmp_path / "ratios.json"
    words = SMALLEST[name].split()
    monkeypatch.setattr(sys, "argv", [name, "--rounds", "1", "--json", str(file), *words])

    importlib.import_module(f"benchmarks.{name}").main()
    ratios = json.loads(file.read_text())["ratios"]

    assert ratios
    assert all(len(ratio["rounds"]) >= 1 and min(ratio["rounds"]) >= 0 for ratio in ratios)
    assert ratios[0]["name"] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_the_compiled_rival_of_sparse_attention_is_traced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it were traced again, a checkpoint would recompute by another graph than it ran."""
    shape = SHAPES["medium-nabla"]
    settings = {**shape.settings, "num_text_blocks": 1, "num_visual_blocks": 1}
    small = replace(shape, settings=settings, latents=(1, 16, 32))
    monkeypatch.setitem(SHAPES, "medium-nabla", small)
    config = make_config("medium-nabla", lora_rank=4)
    batch = make_batch("medium-nabla", 1)
    take_step = step.plain("medium-nabla", "cpu", config, batch, repeated=True)
    take_step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    take_step()

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


def test_startup_benchmark_times_a_folder_that_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path)])
    exec(startup.MAKE_FOLDER, {})
    folders = {command.folder for command in startup.commands(tmp_path).values()}

    assert Workspace(tmp_path / "run").run("plan") == 0
    assert tmp_path / "run" in folders


def test_generated_benchmark_files_are_all_cached(
    tmp_path: Path, t2i_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.create(
        tmp_path / "run", t2i_checkpoint, pictures=0, **many_files.SETTINGS
    )
    pictures = workspace.path("datasets/pictures")
    many_files.add_pictures(pictures, 0, many_files.FEW)

    assert workspace.run("cache", "fill") == 0

    many_files.add_pictures(pictures, many_files.FEW, many_files.FEW + 4)
    with workspace.inside():
        many_files.copy_entries()
    capsys.readouterr()
    assert workspace.run("plan") == 0
    assert (
        f"{many_files.FEW + 4} of {many_files.FEW + 4} exist, 0 to encode"
        in capsys.readouterr().out
    )


@pytest.mark.skipif(not real_size.STATUS.is_file(), reason="needs /proc")
@pytest.mark.parametrize("kind", real_size.KINDS)
def test_real_size_benchmark_writes_loads_and_measures(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_size, "SHARD", 100_000)
    monkeypatch.setattr(real_size, "in_a_process", real_size.measure)
    file = tmp_path / "ratios.json"
    arguments = ["--folder", str(tmp_path), "--size", "tiny-video", "--kinds", kind]
    arguments += ["--json", str(file)]
    if "disk" in kind:
        arguments.append("--sparse")
    monkeypatch.setattr(sys, "argv", ["real_size", *arguments])

    real_size.main()
    assert len(list((tmp_path / "tiny-video" / "transformer").glob("*.safetensors"))) > 1

    ratios = json.loads(file.read_text())["ratios"]
    assert [ratio["median"] > 0 for ratio in ratios] == [True, True]
    assert "packed weights" in capsys.readouterr().out


def test_a_missing_package_of_the_dev_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    for module in ("tests.tools.pictures", "tests.tools.clips", "benchmarks.chain"):
        monkeypatch.delitem(sys.modules, module, raising=False)

    with pytest.raises(SystemExit, match=r"skimage.*dev"):
        importlib.import_module("benchmarks.chain")
