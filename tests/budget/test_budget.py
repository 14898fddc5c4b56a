"""What `simpletuner plan` says about memory, time and disk, and when it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner.budget import disk
from tests.tools.cards import pretend_to_have
from tests.tools.refusals import complaint, complaints, warnings
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]


def estimate(workspace: Workspace, capsys: Capture, *settings: str) -> list[str]:
    capsys.readouterr()
    assert workspace.run("plan", "--verbose", *settings) == 0, capsys.readouterr().err
    return capsys.readouterr().out.partition("Estimate for ")[2].splitlines()


def test_tiny_model_fits_and_every_phase_is_listed(workspace: Workspace, capsys: Capture) -> None:
    lines = estimate(workspace, capsys, "validation_disable=false")
    assert lines[0].startswith("CPU, 1000.0 GB")
    phases = [re.split(r"  +", line.strip())[0] for line in lines[2:8]]
    assert phases == [
        "encoding captions",
        "encoding pictures",
        "loading the transformer",
        "training at 64x64, batch 2",
        "rendering previews",
        "saving",
    ]
    buckets = [line.split() for line in lines if "batch 2 " in line and "training" not in line]
    assert [bucket[3] for bucket in buckets] == [str(2 * 16), str(2 * 15)], (
        "tokens of a micro-batch, the most first"
    )
    assert any("s a step" in line for line in lines)


def test_cached_entries_are_not_encoded_again(filled: Workspace, capsys: Capture) -> None:
    lines = "\n".join(estimate(filled, capsys))
    assert "encoding" not in lines
    assert "latents" not in lines


def test_missing_checkpoint_is_estimated_from_the_published_one(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(pretrained_model_name_or_path=None)
    lines = estimate(workspace, capsys, "--device-memory", "80")

    assert lines[0].startswith("a GPU with 80 GiB, 85.9 GB")
    assert (
        "  transformer, VAE, text encoders: not on this machine, sizes assumed from t2i-lite-sft"
        in lines
    )


def test_token_routes_lower_the_estimate(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(pretrained_model_name_or_path=None)
    route = '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}'

    def teraflops(routes: str) -> float:
        lines = estimate(workspace, capsys, "--device-memory", "80", f"--tread_config={routes}")
        (row,) = [line for line in lines if line.startswith("  64x64, batch 2 ")]
        return float(row.split()[4])

    plain = teraflops("null")
    routed = teraflops(route)
    neutral = teraflops(route.replace("0.5", "0"))

    assert neutral == plain
    # A sample has 16 tokens, so captions are most of the work, which no route cuts.
    assert routed < 0.9 * plain


def test_run_that_does_not_fit_is_refused(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_have(monkeypatch, 0.57)
    for command in (("plan",), ("train",), ("train", "--dry-run")):
        error = complaint(workspace, capsys, *command)
        assert error.startswith("memory: ")
        assert "needs" in error
    assert not workspace.path("output").exists()


def test_plan_of_a_run_that_does_not_fit_shows_its_numbers(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.run("plan", "--device-memory=0.57") == 2
    printed = capsys.readouterr()
    assert "Estimate for a GPU with 0.57 GiB" in printed.out
    assert "error: memory: " in printed.err
    assert "Warnings" not in printed.out


def test_device_option_is_for_plans_only(workspace: Workspace, capsys: Capture) -> None:
    for question in ("--device=h100", "--device-memory=80"):
        assert workspace.run("train", "--dry-run", question) == 0
        assert "80 GiB" in capsys.readouterr().out
        assert workspace.train(question) == 2
        assert "training uses the device of this machine" in capsys.readouterr().err
    error = complaint(workspace, capsys, "plan", "plan_device=h100")
    assert error.startswith("plan_device: is not a key here: ")


@pytest.mark.parametrize("key", ["plan_device", "plan_device_memory_gb", "device_memory"])
def test_card_in_an_older_config_is_ignored_with_a_warning(
    workspace: Workspace, capsys: Capture, key: str
) -> None:
    workspace.write_config(**{key: 80})
    assert f"{key}: is not a key here: " in warnings(workspace, capsys)
    assert estimate(workspace, capsys)[0].startswith("CPU")
    assert estimate(workspace, capsys, "--device=4090")[0].startswith("RTX 4090")


def test_i_know_what_i_am_doing_allows_a_run_that_does_not_fit(
    workspace: Workspace, capsys: Capture
) -> None:
    printed = warnings(workspace, capsys, "--device_memory=0.57", "i_know_what_i_am_doing=true")
    assert "  memory: " in printed


def test_device_memory_must_be_positive(workspace: Workspace, capsys: Capture) -> None:
    errors = complaints(workspace, capsys, "plan", "--device-memory=0")
    assert errors[0].startswith("--device-memory: ")


def test_plan_has_and_shows_what_offload_auto_chose(workspace: Workspace, capsys: Capture) -> None:
    workspace.run("plan", "offload=auto")

    shown = capsys.readouterr().out
    assert "  offload auto: gradient_checkpointing false: all activations fit" in shown
    assert "Settings (chosen by offload auto)\n  gradient_checkpointing  false\n" in shown


@pytest.mark.slow
def test_offload_auto_trains_to_the_same_losses(
    tmp_path: Path, t2i_checkpoint: Path, capsys: Capture
) -> None:
    runs = [
        Workspace.create(tmp_path / way, t2i_checkpoint, offload=way) for way in ("manual", "auto")
    ]
    for run in runs:
        assert run.train() == 0

    assert "offload auto: " in capsys.readouterr().out
    assert runs[0].metrics() == runs[1].metrics()


def test_several_processes_leave_room_for_nccl_buffers(
    workspace: Workspace, capsys: Capture
) -> None:
    usable = []
    for count in (1, 2, 8):
        assert workspace.run("plan", "--json", "--device-memory=24", f"--devices={count}") == 0
        usable.append(json.loads(capsys.readouterr().out)["device"]["usable"])

    assert usable[0] - usable[1] == pytest.approx(0.617e9, rel=1e-3), (
        "16 channels, 4 connections, 9.2 MiB"
    )
    assert usable[2] == usable[1]


@pytest.mark.parametrize(("free", "outcome"), [(1e12, "fits"), (1e6, "warning"), (1e5, "error")])
def test_lack_of_disk_space_is_an_error_or_a_warning(
    workspace: Workspace,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    outcome: str,
) -> None:
    def usage(path: Any) -> Any:
        return SimpleNamespace(total=2 * free, used=free, free=free)

    monkeypatch.setattr(disk, "shutil", SimpleNamespace(disk_usage=usage))
    if outcome == "error":
        message = complaint(workspace, capsys, "plan")
        assert message.startswith("disk: ")
        assert "checkpoints" in message
        assert "text embeddings" in message
    else:
        assert ("disk: " in warnings(workspace, capsys)) is (outcome == "warning")


def test_latents_on_another_disk_are_counted_there(
    workspace: Workspace, tmp_path: Path, capsys: Capture
) -> None:
    latents = {**DATASETS[0], "cache_dir_vae": str(tmp_path / "elsewhere")}
    workspace.write_datasets([latents, DATASETS[1]])

    assert any("latents up to" in line for line in estimate(workspace, capsys))
    assert shutil.disk_usage(disk.nearest_existing(tmp_path / "not" / "there")).free > 0


def test_weights_offloaded_to_disk_need_disk_space_instead_of_memory(
    workspace: Workspace, capsys: Capture
) -> None:
    def host(lines: list[str]) -> float:
        return next(float(line.split()[-2]) for line in lines if line.startswith("  training"))

    workspace.write_config(pretrained_model_name_or_path=None, enable_group_offload=True)
    in_memory = estimate(workspace, capsys, "--device-memory=80")
    on_disk = estimate(
        workspace, capsys, "--device-memory=80", "group_offload_to_disk_path=waiting"
    )
    assert not any("offloaded weights" in line for line in in_memory)
    assert any("offloaded weights up to 22.8 GB" in line for line in on_disk)
    assert host(in_memory) - host(on_disk) == pytest.approx(22.8, abs=0.1), (
        "blocks of float32, but for their modulation"
    )


@pytest.mark.parametrize(("compressed", "ratio"), [(True, 0.8), (False, 1.0)])
def test_the_disk_space_of_latents_follows_from_their_numbers(
    workspace: Workspace, capsys: Capture, compressed: bool, ratio: float
) -> None:
    workspace.write_datasets([{**DATASETS[0], "compress_cache": compressed}, DATASETS[1]])

    assert workspace.run("plan", "--json") == 0

    written = json.loads(capsys.readouterr().out)["disk"]
    (latents,) = [writing for writing in written if writing["what"] == "latents"]
    positions = 4 * 8 * 8 + 4 * 10 * 6  # squares and wide pictures of the same area
    assert latents["bytes"] == pytest.approx(16 * 4 * positions * ratio)  # 16 channels of float32


@pytest.mark.parametrize(("crop_style", "grows"), [("random", True), ("center", False)])
def test_random_crops_of_every_epoch_need_disk_space(
    workspace: Workspace, capsys: Capture, crop_style: str, grows: bool
) -> None:
    dataset = {**DATASETS[0], "crop": True, "crop_aspect": "square", "crop_style": crop_style}
    workspace.write_datasets([dataset, DATASETS[1]])
    sizes = []
    for epochs in (1, 20):
        capsys.readouterr()
        assert (
            workspace.run("plan", "--json", "max_train_steps=", f"num_train_epochs={epochs}") == 0
        )
        written = json.loads(capsys.readouterr().out)["disk"]
        (latents,) = [writing for writing in written if writing["what"] == "latents"]
        sizes.append(latents["bytes"])

    assert sizes[1] == pytest.approx(20 * sizes[0] if grows else sizes[0])
