"""The plans that the docs show are today's; `python -m tests.docs.plans` writes them anew."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.languages import DOCS, LANGUAGES
from tests.docs.plans import (
    CARD_EXAMPLES,
    SAMPLE,
    SAMPLED,
    excerpt,
    plan,
    printed,
    renewed,
    write_files,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    write_files(folder)
    return folder


@pytest.fixture(autouse=True)
def _other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpletuner.budget.device.torch_uses_gpus", lambda: False)
    # A full fine-tune writes 82 GB, for which this machine may have no room.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))


@pytest.mark.slow(1)
@pytest.mark.parametrize("page", [*SAMPLED, "DISTRIBUTED"])
def test_documented_plans_are_current(
    page: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert (
        renewed(page).splitlines() == (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    )


@pytest.mark.parametrize(
    ("command", "sample"), SAMPLE.findall((DOCS / "MEMORY.md").read_text(encoding="utf-8"))
)
def test_memory_page_commands_work_without_files(
    command: str, sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert excerpt(command, sample) == sample
    assert [*tmp_path.iterdir()] == []


# Gigabytes that TROUBLESHOOTING.md names for the examples of CARD_EXAMPLES, in their order.
DOCUMENTED_HOST_MEMORY = (18, 7, 18, 47)


@pytest.mark.parametrize(
    ("example", "gigabytes"), [*zip(CARD_EXAMPLES, DOCUMENTED_HOST_MEMORY, strict=True)]
)
def test_documented_host_memory_is_enough(
    example: str, gigabytes: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    page = (DOCS / "TROUBLESHOOTING.md").read_text(encoding="utf-8")

    output, _ = printed("plan", f"example={example}", "offload=auto", "--device", "4060")

    needed = [float(host) for host in re.findall(r" GB +([\d.]+) GB$", output, re.MULTILINE)]
    assert f"{gigabytes} GB" in page
    assert gigabytes - 1 < max(needed) <= gigabytes


def test_documented_shortage_is_current(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    page = (DOCS / "TROUBLESHOOTING.md").read_text(encoding="utf-8")

    _, errors = printed("plan", "example=kandinsky5-image-lora", "--device-memory", "12")

    [error] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert error in page.splitlines()


def test_troubleshooting_shows_the_warning_about_guidance(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    page = (DOCS / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    [warning] = [line for line in page.splitlines() if "turn black or noisy" in line]

    output, _ = printed("plan", "example=kandinsky5-video-lite-lora", "validation_guidance=9")

    assert warning.removeprefix("warning: ") in output


def test_every_sample_of_an_estimate_is_regenerated() -> None:
    """A table of phases or ways that no command stands above could go stale."""
    sampled = {DOCS / f"{name}.md" for name in SAMPLED}
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name not in LANGUAGES]

    for page in pages:
        text = page.read_text(encoding="utf-8")
        has_sample = SAMPLE.search(text) is not None
        assert has_sample == (page in sampled), page

        rest = SAMPLE.sub("", text)
        assert not re.search(r"^  (peak memory|ways to train) ", rest, re.MULTILINE), page


# What the guides recommend.
GROUP_OFFLOAD = ["enable_group_offload=true", "group_offload_use_stream=true"]
SANA_IN_FULL = [
    "plan",
    "example=sanavideo-full-24gb",
    "offload=manual",
    "optimizer_release_gradients=null",
]


@pytest.mark.parametrize(
    "wrong", [GROUP_OFFLOAD, ["base_model_precision=int8-quanto"]], ids=lambda words: words[0]
)
def test_lora_only_command_for_a_full_fine_tune_suggests_what_fits(
    wrong: list[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    output, errors = printed(*SANA_IN_FULL, *wrong, "--device-memory", "24")
    assert output == ""

    [error] = [line for line in errors.splitlines() if line.startswith("error: ")]
    key = wrong[0].partition("=")[0]
    written = {"enable_group_offload": "false", "base_model_precision": "no_change"}[key]
    fits = re.search(
        rf" This would fit: {key} {written}, offload auto, which takes (.*) GB on the device and ",
        error,
    )
    assert fits

    then = plan(*SANA_IN_FULL[1:], f"{key}={written}", "offload=auto", "--device-memory", "24")
    assert then["ok"]
    assert fits[1] == f"{max(phase['device'] for phase in then['memory']) / 1e9:.1f}"


def test_plan_without_a_gpu_estimates_no_gpu_time(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert "This would fit" not in printed(*SANA_IN_FULL, *GROUP_OFFLOAD)[1].splitlines()[0]


def test_lite_fits_13_gb_as_documented(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    tips = [*GROUP_OFFLOAD, "offload_during_startup=true", "offload=auto", "--device-memory", "13"]

    assert plan("example=kandinsky5-video-lite-lora", "validation_resolution=512x768", *tips)["ok"]


def test_documented_preview_counts_include_weights(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    example = [
        "example=kandinsky5-video-lite-i2v-lora",
        "validation_step_interval=250",
        "num_eval_images=3",
    ]

    example += ["use_ema=true"]
    assert ": validation, 3 clips a round" in printed("plan", *example)[0], (
        "the average alone, unless told otherwise"
    )
    assert ", 6 clips a round" in printed("plan", *example, "ema_validation=comparison")[0]

    rounds = [plan(*example, f"num_eval_images={count}")["seconds"]["previews"] for count in (1, 3)]
    assert rounds[1] == pytest.approx(3 * rounds[0])


@pytest.mark.parametrize(
    "example",
    [
        "kandinsky5-image-lora",
        "kandinsky5-video-lite-lora",
        "kandinsky5-video-lite-10s-lora",
        "kandinsky5-video-pro-lora",
        "sanavideo-lora",
    ],
)
@pytest.mark.parametrize(("card", "steps"), [("h100", 1000), ("4090", 3000)])
def test_documented_previews_cost_a_tenth_of_a_run(
    example: str, card: str, steps: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)

    document = plan(
        f"example={example}", "offload=auto", f"max_train_steps={steps}", "--device", card
    )

    seconds = document["seconds"]
    assert 0.04 < seconds["previews"] / (seconds["training"] + seconds["previews"]) <= 0.1
