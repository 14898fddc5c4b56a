"""The report: one offline file, everything escaped, small enough to be mailed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.publishing.card import public_settings
from simpletuner.annexes.report import html
from simpletuner.annexes.report.environment import describe_device, describe_environment
from simpletuner.annexes.report.html import (
    breakable,
    build_grid,
    charts_of,
    is_noisy,
    smoothed,
    thin,
    thin_extremes,
    thumbnail,
)
from simpletuner.annexes.report.report import (
    LEDGER_ROWS,
    settings_of,
    write_report,
)
from simpletuner.config.load import Layer, resolve
from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.sample import LedgerEntry
from simpletuner.errors import Problems
from simpletuner.reporting.metrics import MediaRecord

VOID = {"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
NASTY = "</script><script>alert(1)</script> & \"quotes\" 'too' <img src=x onerror=alert(2)> चमक"
SAMPLE = {
    "source": thumbnail(Image.new("RGB", (8, 8))),
    "captions": ["a star", "one more star"],
    "is_clip": False,
    "edited_from": "",
}


class Page(HTMLParser):
    """Checks that tags are balanced and collects what the page refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "action", "data")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def picture(
    folder: Path, step: int, name: str = "glimmer", side: int = 32, noise: bool = False
) -> MediaRecord:
    path = f"validation_images/step_{step}_{name}_0_{side}x{side}.png"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shape = (side, side, 3)
    if noise:
        pixels = np.random.default_rng(step).integers(0, 255, shape, dtype=np.uint8)
    else:
        pixels = np.full(shape, step % 255, dtype=np.uint8)
    Image.fromarray(pixels).save(folder / path)
    return MediaRecord(step, name, f"prompt of {name}", path, side, side, 1)


def rows(count: int) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "epoch": 1,
            "train_loss": 1 / step + step % 3,
            "learning_rate": 1e-4,
            "seconds": 0.5,
        }
        for step in range(1, count + 1)
    ]


def render(data: dict[str, Any]) -> Page:
    path = data["output_dir"] / "training_report.html"
    write_report(path, data)
    return Page(path)


def data_of(
    folder: Path, metrics: Sequence[Mapping[str, Any]] | None = None, **changes: object
) -> dict[str, Any]:
    """The data of a report of a run in progress, with some changes."""
    data: dict[str, Any] = {
        "title": "demo",
        "subtitle": "",
        "state": "running",
        "step": 40,
        "total_steps": 300,
        "output_dir": folder,
        "metrics": Columns.of(rows(40) if metrics is None else metrics),
        "previews": [],
        "environment": {},
        "message": "",
        "notes": [],
        "result": None,
        "settings": [],
        "datasets": [],
        "ledger": [],
        "ledger_lines": len(changes.get("ledger", ())),
        "next_step": "",
        "samples": [],
    }
    return {**data, **changes}


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    page = render(data_of(tmp_path, [], step=0))

    assert "demo · running, step 0" in page.text
    assert page.tags.count("section") == 0


def test_report_shows_every_section_and_loads_nothing(tmp_path: Path) -> None:
    records = [picture(tmp_path, step) for step in (0, 20, 40)]
    ledger = [
        LedgerEntry(
            "stars",
            "a.png",
            original_size=Size(64, 64),
            geometry=Geometry("32x32", Size(32, 32), Size(48, 32), (8, 0)),
        ),
        LedgerEntry("stars", "b.png", "is truncated"),
    ]
    datasets = [("stars", 2, 1, ["32x32"])]
    environment = describe_environment("cpu")

    page = render(
        data_of(
            tmp_path, previews=records, datasets=datasets, ledger=ledger, environment=environment
        )
    )

    for text in (
        "40 of 300",
        "0.50 s/step",
        "Loss",
        "Learning rate",
        "glimmer",
        "is truncated",
        "1 of 2",
        "Python",
    ):
        assert text in page.text
    assert page.tags.count("img") == 3
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert "link" not in page.tags
    assert set(re.findall(r"https?://[^\s\"'<>]+", page.source)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", page.source)
    assert "default-src 'none'" in unescape(page.source)


def test_text_from_outside_is_escaped_everywhere(tmp_path: Path) -> None:
    record = replace(picture(tmp_path, 0), short_name=NASTY, prompt=NASTY)
    gone = replace(record, step=40, path=NASTY)

    values = [("model_family", NASTY), ("model_type", "lora"), ("validation_prompt", NASTY)]
    config = resolve([Layer("f", values)], Problems())
    assert config is not None

    page = render(
        data_of(
            tmp_path,
            title=NASTY,
            subtitle=NASTY,
            message=NASTY,
            notes=[NASTY],
            metrics=[*rows(3), {"step": 4, "train_loss": 1.0, NASTY: 1.0}, {"step": 5, NASTY: 2.0}],
            previews=[record, gone],
            settings=settings_of(config),
            datasets=[(NASTY, 1, 0, [NASTY])],
            ledger=[
                LedgerEntry(
                    NASTY, NASTY, NASTY, geometry=Geometry(NASTY, Size(8, 8), Size(8, 8), (0, 0))
                )
            ],
            samples=[{**SAMPLE, "name": NASTY, "captions": [NASTY]}],
            environment={NASTY: NASTY},
            result={"path": NASTY, "size": "1 B", "snippet": NASTY, "errors": NASTY},
        )
    )
    assert page.tags.count("script") == 4
    assert page.tags.count("img") == 2
    assert page.handlers == []
    assert page.text.count(NASTY) >= 14


def test_report_shows_where_the_time_went(tmp_path: Path) -> None:
    timed = [
        {**row, "data_seconds": 0.05, "data_share": 0.1, "compute_share": 0.9} for row in rows(40)
    ]
    page = render(data_of(tmp_path, metrics=timed))
    assert "compute 90 %, waiting for data 10 %" in page.text
    assert "data_share" not in page.source

    streamed = [{**row, "weights_seconds": 0.1} for row in timed]
    page = render(data_of(tmp_path, metrics=streamed))
    assert "compute 70 %, waiting for weights 20 %, waiting for data 10 %" in page.text


@pytest.mark.parametrize(("device", "is_shown"), [("NVIDIA H200, 140 GiB", True), ("cpu", False)])
def test_mfu_is_shown_only_for_known_gpus(tmp_path: Path, device: str, is_shown: bool) -> None:
    metrics = [{**row, "mfu": 0.3 + row["step"] % 3 / 10} for row in rows(40)]

    page = render(data_of(tmp_path, metrics=metrics, environment={"device": device}))

    assert ("40 % of the measured matmul rate" in page.text) is is_shown
    assert ("MFU" in page.source) is is_shown


def test_report_begins_with_few_figures_and_what_to_do_next(tmp_path: Path) -> None:
    recorded = [{**row, "peak_memory_gb": 0.6} for row in rows(40)]
    recorded[19]["loss/val/held"] = 0.51
    recorded[39]["loss/val/held"] = 0.63
    sentence = "Take checkpoint 20: the loss on held-out files has risen since."

    page = render(
        data_of(
            tmp_path, metrics=recorded, next_step=sentence, environment=describe_environment("cpu")
        )
    )

    top = page.text.partition("Curves")[0]
    assert f"Next: {sentence}" in top
    assert "Held-out loss at step 200.51" in top
    assert "Peak memory0.60 GB" in top, "as on the page of a run"
    assert "compute" not in top
    assert "CPU" not in top
    assert "DeviceCPU" in page.text


def test_backticks_of_a_warning_are_shown_as_code(tmp_path: Path) -> None:
    page = render(data_of(tmp_path, notes=["`cache gc --remove` deletes <it>"]))

    assert "<li><code>cache gc --remove</code> deletes &lt;it&gt;</li>" in page.source


def test_settings_have_names_and_name_only_unusual_origins(tmp_path: Path) -> None:
    layers = [
        Layer("family default", [("validation_guidance", 5.0)]),
        Layer(
            "config/cats/config.json",
            [("model_family", "kandinsky5-image"), ("model_type", "lora"), ("lora_rank", 8)],
        ),
    ]
    config = resolve(layers, Problems())
    assert config is not None

    page = render(data_of(tmp_path, settings=settings_of(config)))

    assert page.text.count("config/cats/config.json") == 1
    assert "family default" in page.text
    assert re.search(r"Rank\s*lora_rank", page.text)


def test_report_of_a_stopped_run_shows_the_reason(tmp_path: Path) -> None:
    page = render(data_of(tmp_path, state="stopped", message="the disk is full"))

    assert "the disk is full" in page.text
    assert "state stopped" in page.source


@pytest.mark.slow
def test_report_of_a_long_run_stays_small(tmp_path: Path) -> None:
    records = [
        picture(tmp_path, step, f"p{row}", 160, noise=True)
        for row in range(26)
        for step in range(0, 600, 100)
    ]
    ledger = [LedgerEntry("d", f"{index}.png", "x", "x") for index in range(LEDGER_ROWS)]
    datasets: list[Any] = [("d", 30_000, 27_000, [])]

    page = render(
        data_of(
            tmp_path,
            metrics=rows(50_000),
            previews=records,
            datasets=datasets,
            ledger=ledger,
            ledger_lines=30_000,
        )
    )

    assert len(page.source) < 10_000_000
    assert "2 more steps" in page.text
    assert "2 more prompts" in page.text
    assert f"And {30_000 - LEDGER_ROWS:,} more files" in page.text
    assert page.text.count("not used: x") == LEDGER_ROWS


def test_large_pictures_are_packed_as_smaller_copies_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "BUDGET", 100_000)
    records = [picture(tmp_path, step, side=400, noise=True) for step in (0, 10)]
    html._pack.cache_clear()

    build_grid(records, tmp_path)
    grid = build_grid(records, tmp_path)

    sources = [cell.source for cell in grid.rows[0].plain if cell]
    assert all(source.startswith("data:image/webp") for source in sources)
    assert all(len(source) < 70_000 for source in sources)
    assert html._pack.cache_info().misses == 2  # one for each picture, none for the second grid


def test_missing_or_broken_previews_leave_an_empty_cell(tmp_path: Path) -> None:
    whole, gone, broken = (picture(tmp_path, step) for step in (0, 1, 2))
    (tmp_path / gone.path).unlink()
    (tmp_path / broken.path).rename((tmp_path / broken.path).with_suffix(".bmp"))
    broken = replace(broken, path=broken.path.replace(".png", ".bmp"))
    (tmp_path / broken.path).write_bytes(b"BM no picture")

    [row] = build_grid([whole, gone, broken], tmp_path).rows

    assert [bool(cell and cell.source) for cell in row.plain] == [True, False, False]
    assert render(data_of(tmp_path, previews=[whole, gone, broken])).text.count("file gone") == 2


def test_large_video_is_linked_instead_of_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "BUDGET", 1000)
    for name, size in (("small.mp4", 100), ("large one.mp4", 5000)):
        (tmp_path / name).write_bytes(b"\0" * size)
    records = [
        MediaRecord(0, "a", "", "small.mp4", 8, 8),
        MediaRecord(10, "a", "", "large one.mp4", 8, 8),
    ]

    page = render(data_of(tmp_path, previews=records))

    assert [reference[:15] for reference in page.references] == [
        "data:video/mp4;",
        "large%20one.mp4",
    ]


def test_ema_preview_shares_the_cell_of_its_step(tmp_path: Path) -> None:
    plain = [picture(tmp_path, step) for step in (10, 0)]
    grid = build_grid([*plain, replace(plain[0], ema=True)], tmp_path)
    assert grid.steps == [0, 10]

    [row] = grid.rows
    assert [cell is not None for cell in row.plain] == [True, True]
    assert [cell is not None for cell in row.averaged] == [False, True]

    page = render(data_of(tmp_path, previews=[*plain, replace(plain[0], ema=True)]))
    assert page.text.count("step 10") == 1, "one cell holds both"
    assert "EMA" in page.text


def test_the_users_prompts_come_first_and_the_empty_one_last(tmp_path: Path) -> None:
    empty = replace(picture(tmp_path, 0, "unconditional"), prompt="")
    records = [empty, picture(tmp_path, 0, "portrait"), picture(tmp_path, 0, "validation")]

    assert [row.name for row in build_grid(records, tmp_path).rows] == [
        "validation",
        "portrait",
        "unconditional",
    ]


def test_training_pictures_are_shown_with_their_captions(tmp_path: Path) -> None:
    source = thumbnail(Image.new("RGB", (2000, 1000), "red"))
    sample = {**SAMPLE, "name": "stars/a.png", "source": source}
    pair = {**sample, "name": "stars/b.png", "edited_from": source}

    page = render(data_of(tmp_path, samples=[sample, pair], datasets=[("stars", 9, 9, [])]))

    assert "a star (and 1 more)" in page.text
    assert "2 of 9" in page.text
    assert page.tags.count("img") == 3
    assert all(len(reference) < 2000 for reference in page.references)


def test_the_result_names_file_size_and_use(tmp_path: Path) -> None:
    result = {
        "path": "lora.safetensors",
        "size": "12.3 MB",
        "snippet": "import torch",
        "errors": "",
    }
    page = render(data_of(tmp_path, state="finished", result=result))
    for words in ("lora.safetensors", "12.3 MB", "import torch"):
        assert words in page.text

    comfyui = render(data_of(tmp_path, result={**result, "snippet": ""}))
    assert "ComfyUI" in comfyui.text


@pytest.mark.parametrize(
    ("state", "refreshes"), [("running", True), ("finished", False), ("stopped", False)]
)
def test_only_a_running_report_refreshes_itself(
    tmp_path: Path, state: str, refreshes: bool
) -> None:
    page = render(data_of(tmp_path, state=state))

    assert ('http-equiv="refresh"' in page.source) is refreshes
    assert ('data-refresh="30"' in page.source) is refreshes


def test_names_wrap_after_separators_and_stay_escaped() -> None:
    assert breakable("a/b_c<&'") == "a/<wbr>b_<wbr>c&lt;&amp;&#39;"


def test_first_and_last_step_are_always_shown() -> None:
    assert thin([0, 5, 10], 4) == [0, 5, 10]
    assert thin(range(0, 10_001, 50), 6) == [0, 2000, 4000, 6000, 8000, 10_000]

    uneven = thin([0, 1, 2, 3, 1000], 4)
    assert (uneven[0], uneven[-1]) == (0, 1000)


def test_thinned_curves_keep_their_ends_and_their_spikes() -> None:
    points = [(step, 1.0) for step in range(50_000)]
    points[31_415] = (31_415, 99.0)

    assert len(thin(points)) == 1000
    assert len(thin_extremes(points)) <= 1000
    assert (thin(points)[0][0], thin(points)[-1][0]) == (0, 49_999)
    assert (31_415, 99.0) in thin_extremes(points)
    steps = [step for step, _ in thin_extremes(points)]
    assert steps == sorted(steps)


def test_only_noise_is_smoothed() -> None:
    ramp = [(step, float(step)) for step in range(100)]

    noise = [(step, float(step % 2)) for step in range(100)]

    assert not is_noisy(ramp)
    assert is_noisy(noise)
    assert smoothed("x", ramp).smooth == ()
    assert smoothed("x", noise).smooth[-1][1] == pytest.approx(0.5, abs=0.15)


def test_charts_show_every_recorded_metric(tmp_path: Path) -> None:
    extra = {
        "grad_norm": 1.0,
        "crepa_loss": 0.1,
        "note": "text",
        "flag": True,
        "peak_memory_gb": 2.5,
    }
    recorded = [{**row, **extra, "timesteps": [10.0, 999.9]} for row in rows(20)]
    recorded[10] = {**recorded[10], "loss/val/pooled": 0.4, "train_loss": None}

    charts = charts_of(Columns.of(recorded))
    assert [(chart.title, chart.minor) for chart in charts] == [
        ("Loss", False),
        ("Learning rate", False),
        ("Gradient norm", False),
        ("Seconds per step", False),
        ("Peak memory", False),
        ("Timesteps", False),
        ("crepa_loss", True),
    ]
    assert [series.name for series in charts[0].series] == ["loss", "held-out loss (pooled)"]
    assert len(charts[0].series[0].raw) == 19

    # Bars 50 wide: timesteps 10 and 999.9 of 20 steps lie in the first and the last of them.
    [bars] = [chart.series[0].raw for chart in charts if chart.bars]
    assert {centre: count for centre, count in bars if count} == {25: 20.0, 975: 20.0}

    page = render(data_of(tmp_path, recorded, step=1, total_steps=1))
    assert '"hours":[[1,' in page.source


def test_prompt_with_tildes_is_not_taken_for_a_home_folder(tmp_path: Path) -> None:
    settings = {"validation_prompt": "~kitten~", "output_dir": str(tmp_path / "x")}

    assert public_settings(settings).keys() == {"validation_prompt"}


def test_settings_mark_what_changed_and_hide_secrets() -> None:
    problems = Problems()
    hook = {"webhook_type": "raw", "callback_url": "https://example.org/geheim"}
    values = [
        ("model_family", "kandinsky5-image"),
        ("model_type", "lora"),
        ("webhook_config", hook),
    ]
    of_the_family = [("validation_guidance", 5.0), ("crepa_block_index", 8)]

    config = resolve([Layer("family default", of_the_family), Layer("my.json", values)], problems)
    assert config is not None

    settings = {setting["key"]: setting for setting in settings_of(config)}
    assert settings["model_type"]["changed"]
    assert settings["model_type"]["origin"] == "my.json"
    assert settings["validation_guidance"]["origin"] == "family default"
    assert settings["validation_guidance"]["changed"]
    assert not settings["output_dir"]["changed"], "a default"
    assert not settings["rope_scale"]["changed"], "a default that is spelled differently"
    assert not settings["crepa_block_index"]["changed"], "CREPA is off"
    assert settings["gradient_checkpointing"]["value"] == "true"
    assert "geheim" not in settings["webhook_config"]["value"]


def test_files_of_the_report_page_are_packaged() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())

    shipped = pyproject["tool"]["setuptools"]["package-data"]["simpletuner"]

    assert {"config/*.toml", "annexes/*/*.css", "annexes/*/*.jinja", "annexes/*/*.js"} <= set(
        shipped
    )


def test_environment_is_described_without_torch() -> None:
    environment = describe_environment("a device")

    assert environment["device"] == "a device"
    assert environment["python"].startswith("3.")
    assert "torch" in environment


def test_a_gpu_of_rocm_is_described_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    gpu = SimpleNamespace(name="Radeon RX 7900", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.2")

    assert describe_device() == "Radeon RX 7900, 24 GiB, ROCm 6.2"
