"""The table of a run's checkpoints: what it shows, its stars, and the file that one chooses."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from safetensors.numpy import save
from starlette.testclient import TestClient

from simpletuner.annexes.adapters.convert import MAGNITUDES_STAY, convert
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.runs.table import untrained_beside
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.payloads import EVENTS_FILE
from simpletuner.annexes.report.comparison import build_table
from simpletuner.annexes.report.sheet import Sheet, SheetCell
from simpletuner.headers import with_metadata
from simpletuner.planning.checkpoint_folder import (
    STARS_FILE,
    Manifest,
    describe_files,
    write_manifest,
)
from simpletuner.planning.lock import WORKER_FILE, this_process
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, REPORT_FILE, MediaRecord
from simpletuner.weights.lora_names import LORA_FILE, MAGNITUDE, METADATA_KEY, STEP_NOTE
from tests.annexes.page.page import opened
from tests.annexes.page.run_folder import IDENTITY, RunFolder, write_picture

PROMPT = "a photo of zkt, a grey cat, on a beach"
LAYER = "transformer.visual_transformer_blocks.0.self_attention.to_query"


@pytest.fixture
def page(tmp_path: Path) -> TestClient:
    return TestClient(create_app(Project(tmp_path.resolve())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run with checkpoints 100 and 200 and the result of step 300, not compared yet."""
    folder = RunFolder(evaluated=False, saved="nothing", swept=False, state="done").write(tmp_path)
    (folder / MEDIA_FILE).unlink()
    for step in (100, 200):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        write_lora(checkpoint, step)
        write_manifest(checkpoint, Manifest(step, 0, IDENTITY, describe_files(checkpoint)))
    write_lora(folder, 300)
    return folder.resolve()


def write_lora(folder: Path, step: int, *, is_dora: bool = False) -> None:
    """Write a LoRA of one layer, whose values follow from its step."""
    import numpy as np

    generator = np.random.default_rng(step)
    weights = {
        f"{LAYER}.lora_A.weight": generator.standard_normal((4, 8), np.float32),
        f"{LAYER}.lora_B.weight": generator.standard_normal((8, 4), np.float32),
    }
    if is_dora:
        weights[f"{LAYER}{MAGNITUDE}"] = generator.standard_normal(8, np.float32)
    notes = {
        STEP_NOTE: str(step),
        "modelspec.architecture": "kandinsky5-image/t2i-lite-sft/lora",
        METADATA_KEY: json.dumps({"transformer.r": 4, "transformer.lora_alpha": 4}),
    }
    (folder / LORA_FILE).write_bytes(with_metadata(save(weights), notes))


def compared(
    folder: Path,
    steps: Sequence[int] = (0, 100, 200, 300),
    strengths: Sequence[float] = (0.75, 1.0),
    prompts: Sequence[str] = (PROMPT,),
    *,
    rendered: bool = True,
) -> list[SheetCell]:
    """Write a comparison of checkpoints; returns its cells."""
    cells = []
    for number, prompt in enumerate(prompts):
        for step in steps:
            for strength in strengths if step else (0.0,):
                path = f"cells/{number}-{step}-{strength:g}.png"
                name = f"prompt{number}"
                cells.append(SheetCell(step, name, prompt, path, 8, 8, 42, strength=strength))
    (folder / "sweep").mkdir(exist_ok=True)
    (folder / "sweep/sheet.json").write_text(json.dumps([asdict(cell) for cell in cells]))
    if rendered:
        for cell in cells:
            write_picture(folder / "sweep" / cell.path)
    return cells


def measured(folder: Path, losses: dict[int, float]) -> None:
    """Add evaluation losses to the record of a run."""
    with (folder / METRICS_FILE).open("a") as record:
        for step, loss in losses.items():
            record.write(json.dumps({"step": step, "loss/val/held": loss}) + "\n")


def results(page: TestClient, folder: Path) -> str:
    answer = page.get(f"/runs/{run_id(folder)}/results")
    assert answer.status_code == 200
    assert "This part cannot be shown" not in answer.text
    return answer.text


def heads(shown: str) -> list[str]:
    """The heads of the columns, as text."""
    found = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', shown, re.DOTALL)
    return [" ".join(re.sub("<[^>]*>", " ", head).split()) for head in found]


def rows(shown: str) -> list[list[str]]:
    """The cells of each line of the table, as HTML."""
    lines = re.findall(r'<tr class="prompt-row".*?</tr>', shown, re.DOTALL)
    return [re.findall(r"<td.*?</td>", line, re.DOTALL) for line in lines]


def test_columns_are_the_untrained_model_the_checkpoints_and_the_result(
    page: TestClient, folder: Path
) -> None:
    compared(folder)

    shown = results(page, folder)

    assert heads(shown) == [
        "Prompt",
        "Strength",
        "untrained",
        "step 100",
        "step 200",
        "step 300 result",
    ]
    assert [len(row) for row in rows(shown)] == [4, 4]
    assert re.findall(r'<th scope="row"[^>]*>(.*?)</th>', shown) == ["0.75", "1"]
    assert shown.count("Use this: step 200 at strength 0.75") == 1
    assert "hold out a few files in the next run." in shown


def test_previews_are_shown_until_checkpoints_are_compared(page: TestClient, folder: Path) -> None:
    records = [MediaRecord(step, "cat", PROMPT, f"{step}.png", 8, 8) for step in (0, 100, 150)]
    for record in records:
        write_picture(folder / record.path)
    lines = [json.dumps(asdict(record)) + "\n" for record in records]
    (folder / MEDIA_FILE).write_text("".join(lines))

    shown = results(page, folder)

    assert heads(shown)[1:] == ["untrained", "step 100", "step 150 no checkpoint"]
    assert "Use this: step 100" in shown
    assert "Use this: step 150" not in shown


def test_untrained_model_alone_is_not_a_table(page: TestClient, folder: Path) -> None:
    record = MediaRecord(0, "cat", PROMPT, "0.png", 8, 8)
    write_picture(folder / record.path)
    (folder / MEDIA_FILE).write_text(json.dumps(asdict(record)) + "\n")

    shown = results(page, folder)

    assert "<table" not in shown
    assert "Compare</button>" in shown


def test_checkpoints_without_a_plain_lora_are_not_offered_for_comparison(
    page: TestClient, folder: Path
) -> None:
    for step in (100, 200):
        checkpoint = folder / f"checkpoint-{step}"
        (checkpoint / LORA_FILE).rename(checkpoint / "lokr_weights.safetensors")
        manifest = Manifest(step, 0, IDENTITY, describe_files(checkpoint))
        write_manifest(checkpoint, manifest)

    shown = results(page, folder)

    assert "These checkpoints cannot be compared" in shown
    assert "Compare</button>" not in shown


def test_loss_says_whether_it_was_measured(page: TestClient, folder: Path) -> None:
    compared(folder)
    measured(folder, {100: 1.5, 250: 1.2})

    shown = results(page, folder)

    assert heads(shown)[3:] == [
        "step 100 loss 1.5",
        "step 200 loss 1.3, interpolated",
        "step 300 result",
    ]


def test_only_the_best_checkpoint_at_its_best_strength_is_marked(
    page: TestClient, folder: Path
) -> None:
    compared(folder)
    measured(folder, {100: 1.5, 200: 1.2, 300: 1.4})
    losses = {"step": 200, "losses": {"0.75": 1.1, "1": 1.2}}
    (folder / "sweep/losses.json").write_text(json.dumps(losses))

    shown = results(page, folder)

    marked = [">lowest loss<" in cell for row in rows(shown) for cell in row]
    assert marked == [False, False, True, False] + [False] * 4
    assert "Step 200 at strength 0.75" in shown
    assert "the lowest held-out loss" in shown


def test_no_cell_has_the_lowest_loss_if_the_result_has_a_lower_one(
    page: TestClient, folder: Path
) -> None:
    measured(folder, {100: 0.5, 200: 0.45, 300: 0.4})
    compared(folder, steps=(0, 100, 200))

    shown = results(page, folder)

    assert ": the lowest held-out loss" in shown
    assert "lowest loss" not in shown


@pytest.mark.parametrize(
    "losses",
    [
        {"step": 100, "losses": {"strong": 0.4}},
        {"step": 100, "strong": 0.4},
        {"nan": 0.4},
        [0.4],
    ],
)
def test_damaged_losses_of_strengths_hide_no_cell(
    page: TestClient, folder: Path, losses: object
) -> None:
    measured(folder, {100: 0.45, 200: 0.5, 300: 0.6})
    compared(folder)
    (folder / "sweep/losses.json").write_text(json.dumps(losses))

    shown = results(page, folder)

    assert shown.count("data-use") > 4


def test_comparison_of_an_earlier_version_has_its_strengths(page: TestClient, folder: Path) -> None:
    cells = compared(folder, steps=(100, 200))
    records = [
        {**asdict(cell), "short_name": f"{cell.short_name} at {cell.strength:g}"} for cell in cells
    ]
    for record in records:
        del record["strength"]
    (folder / "sweep/sheet.json").write_text(json.dumps(records))

    shown = results(page, folder)

    assert re.findall(r'<th scope="row"[^>]*>(.*?)</th>', shown) == ["0.75", "1"]
    assert re.findall(r'data-name="(.*?)"', shown) == ["prompt0", "prompt0"]


def test_only_prompts_without_an_untrained_cell_take_that_of_the_previews() -> None:
    untrained = SheetCell(0, "dog", "a dog", "sweep/0.png", 8, 8, strength=0.0)
    cells = [
        SheetCell(100, "cat", "a cat", "sweep/1.png", 8, 8),
        SheetCell(100, "dog", "a dog", "sweep/2.png", 8, 8),
        untrained,
    ]
    previews = [
        SheetCell(step, name, f"a {name}", f"{name}-{step}.png", 8, 8)
        for name in ("cat", "dog", "owl")
        for step in (0, 100)
    ]

    added = untrained_beside(cells, previews)

    assert [cell.path for cell in added] == ["cat-0.png"]


def test_of_too_many_cells_whole_prompts_are_left_out_and_counted(folder: Path) -> None:
    cells = compared(folder, steps=(100, 200), prompts=("a cat", "a dog", "an owl"))
    sheet = Sheet.of_run(folder)

    with patch("simpletuner.annexes.report.comparison.MOST_CELLS", 2 * len(cells) // 3):
        shown = build_table(sheet, lambda cell: cell.path)

    assert [rows.prompt for rows in shown.prompts] == ["a cat", "a dog"]
    assert shown.hidden == 1


def test_planned_cells_say_that_they_are_being_rendered(page: TestClient, folder: Path) -> None:
    cells = compared(folder, rendered=False)
    for cell in cells[:3]:
        write_picture(folder / "sweep" / cell.path)
    (folder / "sweep" / WORKER_FILE).write_text(
        json.dumps(asdict(replace(this_process(), since=0.0)))
    )

    shown = results(page, folder)

    assert "3 of 7 rendered" in shown
    assert shown.count("to be rendered") == 4
    assert "Ctrl-C there stops it" in shown
    assert "Compare</button>" not in shown


def test_killed_comparison_is_offered_again(page: TestClient, folder: Path) -> None:
    cells = compared(folder, rendered=False)
    write_picture(folder / "sweep" / cells[1].path)
    owner = replace(this_process(), started="1")
    (folder / "sweep" / WORKER_FILE).write_text(json.dumps(asdict(owner)))

    shown = results(page, folder)

    assert "rendered" not in re.findall(r"\d+ of \d+ (\w+)", shown)
    assert "not rendered" in shown
    assert "Compare</button>" in shown


def test_two_thousand_cells_and_long_prompts_are_shown(page: TestClient, folder: Path) -> None:
    steps = range(0, 2600, 100)
    prompts = [f"{number} {'word ' * 2000}" for number in range(20)]
    compared(folder, steps, (0.5, 0.75, 1.0, 1.5), prompts, rendered=False)
    begun = time.monotonic()

    shown = results(page, folder)

    assert time.monotonic() - begun < 20
    assert len(rows(shown)) == 80
    assert all(prompt.strip() in shown for prompt in prompts)


# ---- The file ----


def uses(page: TestClient, folder: Path, **query: Any) -> str:
    answer = page.get(f"/runs/{run_id(folder)}/use", params=query)
    assert answer.status_code == 200, answer.text
    return unescape(answer.text)


@pytest.mark.parametrize("step", ["100", "300"])
@pytest.mark.parametrize("strength", ["1", "0.75", "-1", "100"])
@pytest.mark.parametrize("form", ["comfyui", "diffusers"])
def test_page_and_terminal_write_the_same_file(
    page: TestClient, folder: Path, tmp_path: Path, step: str, strength: str, form: Any
) -> None:
    shown = uses(page, folder, step=step, strength=strength)
    [address] = [link for link in re.findall(r'href="(.*?)"', shown) if f"form={form}" in link]

    answer = page.get(address)

    checkpoint = None if step == "300" else step
    made = convert(folder, form, tmp_path, float(strength), checkpoint=checkpoint)
    assert answer.content == made.path.read_bytes()
    assert made.path.name in answer.headers["content-disposition"]
    assert "--" not in made.path.name
    assert made.path.name in shown.replace("<wbr>", "")


@pytest.mark.parametrize("name", ["été", "猫", "बिल्ली", "עברית", "a b"])
def test_run_of_any_name_gives_a_file_of_its_name(
    page: TestClient, folder: Path, name: str
) -> None:
    renamed = folder.rename(folder.with_name(name))

    answer = page.get(f"/download/{run_id(renamed)}?form=comfyui&strength=0.5")

    assert answer.status_code == 200
    saved_as = re.sub(r"[^\w.-]+", "-", name)
    assert f"{saved_as}-step300" in unquote(answer.headers["content-disposition"])


def test_panel_shows_the_command_and_the_program_with_the_strength(
    page: TestClient, folder: Path
) -> None:
    program = 'pipe.load_lora_weights("output/cats")\npipe.to("cpu")'
    report = f'<div class="snippet"><button>Copy</button><pre>{program}</pre>'
    (folder / "training_report.html").write_text(report)

    shown = uses(page, folder, step=200, strength=0.75)

    command = f"simpletuner convert {folder} --checkpoint 200 --strength 0.75 --to comfyui"
    assert command in shown
    assert "at strength 1." in shown
    assert f'load_lora_weights("{folder}/checkpoint-200", weight_name="{LORA_FILE}"' in shown
    assert 'pipe.set_adapters("chosen", 0.75)' in shown


def test_strength_is_left_out_of_the_file_of_a_dora(page: TestClient, folder: Path) -> None:
    write_lora(folder, 300, is_dora=True)

    shown = uses(page, folder, strength=0.75)

    addresses = [link for link in re.findall(r'href="(.*?)"', shown) if "/download/" in link]
    assert addresses
    assert not [link for link in addresses if "strength" in link]
    assert MAGNITUDES_STAY in shown


@pytest.mark.parametrize(
    ("step", "has_program"),
    [
        ("", True),
        ("200", False),  # its weights are elsewhere
    ],
)
def test_program_that_loads_no_lora_is_only_for_the_result(
    page: TestClient, folder: Path, step: str, has_program: bool
) -> None:
    program = 'pipe = load("output/cats")'
    report = f'<div class="snippet"><button>Copy</button><pre>{program}</pre>'
    (folder / REPORT_FILE).write_text(report)

    shown = uses(page, folder, step=step)

    assert (program in shown) is has_program


def test_strength_can_be_left_out_of_the_file(page: TestClient, folder: Path) -> None:
    shown = uses(page, folder, step=200, strength=0.75, built_in=0)

    [address, _] = [link for link in re.findall(r'href="(.*?)"', shown) if "/download/" in link]
    assert "strength" not in parse_qs(urlsplit(address).query)
    assert "at strength 0.75." in shown


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"strength": "0"}, 400, "Strength 0 is the untrained model"),
        ({"strength": "much"}, 400, "is not a number"),
        ({"strength": "nan"}, 400, "The strength 'nan'"),
        ({"step": "150"}, 404, "has no weights of step 150"),
        ({"step": "../1"}, 404, "has no weights of step"),
        ({"form": "kohya"}, 404, "is neither comfyui nor diffusers"),
        ({"step": "100", "ema": "1"}, 404, "the run had no use_ema"),
    ],
)
def test_impossible_files_are_refused(
    page: TestClient, folder: Path, query: dict[str, str], status: int, words: str
) -> None:
    answer = page.get(f"/download/{run_id(folder)}", params=query)

    assert answer.status_code == status
    assert words in answer.text


def test_full_fine_tune_shows_its_folder_and_its_command(page: TestClient, folder: Path) -> None:
    identity = replace(IDENTITY, model_type="full")
    transformer = folder / "checkpoint-400/transformer"
    transformer.mkdir(parents=True)
    (transformer / "config.json").write_text('{"_class_name": "Kandinsky5Transformer3DModel"}')
    (folder / LORA_FILE).unlink()
    files = describe_files(transformer.parent)
    write_manifest(transformer.parent, Manifest(400, 0, identity, files))

    shown = uses(page, folder, step=400)

    assert "checkpoint-400/transformer" in shown.replace("<wbr>", "")
    assert f"simpletuner convert {folder} --checkpoint 400 --to comfyui" in shown
    assert "/download/" not in shown


# ---- Stars ----


def star(page: TestClient, folder: Path, **body: Any) -> Any:
    values = {"run": run_id(folder), "step": 200, "strength": 0.75, "prompt": "prompt0"}
    return page.post("/api/training/star", json={**values, "starred": True, **body})


def test_starred_cell_is_shown_with_its_file(page: TestClient, folder: Path) -> None:
    compared(folder)

    assert star(page, folder).status_code == 200

    shown = results(page, folder)
    assert shown.count('aria-pressed="true"') == 1
    assert "★</span> Step 200 at strength 0.75" in shown
    star(page, folder, starred=False)
    assert 'aria-pressed="true"' not in results(page, folder)


def test_two_tabs_that_star_keep_each_others_stars(page: TestClient, folder: Path) -> None:
    with ThreadPoolExecutor(8) as tabs:
        answers = list(tabs.map(lambda number: star(page, folder, step=number), range(1, 41)))

    assert all(answer.status_code == 200 for answer in answers)
    stars = json.loads((folder / STARS_FILE).read_text())
    assert sorted(each["step"] for each in stars) == list(range(1, 41))


def test_a_file_with_the_most_stars_takes_no_more_and_says_so(
    page: TestClient, folder: Path
) -> None:
    with patch("simpletuner.annexes.page.runs.stars.MOST_STARS", 2):
        answers = [star(page, folder, step=step) for step in (1, 2, 3)]

    assert [answer.is_success for answer in answers] == [True, True, False]
    assert "already has 2 stars; take some back first." in answers[-1].text
    assert len(json.loads((folder / STARS_FILE).read_text())) == 2


def test_star_does_not_bring_back_a_deleted_folder(page: TestClient, folder: Path) -> None:
    results(page, folder)
    shutil.rmtree(folder)
    star = {"run": run_id(folder), "step": 300, "strength": 1, "prompt": "a", "starred": True}

    answer = page.post("/api/training/star", json=star)

    assert answer.status_code == 422
    assert "was deleted or moved" in answer.text
    assert not folder.exists()


def test_star_of_a_deleted_checkpoint_stays_and_says_so(page: TestClient, folder: Path) -> None:
    compared(folder, steps=(0, 50, 100, 200, 300))
    star(page, folder, step=50)

    shown = results(page, folder)

    assert "its checkpoint was deleted" in shown
    assert "Use this: step 50" not in shown
    assert "Take the star back" in shown
    assert "step 50 no checkpoint" in heads(shown)


def test_damaged_stars_are_named_and_kept(page: TestClient, folder: Path) -> None:
    compared(folder)
    (folder / STARS_FILE).write_text("[")

    shown = results(page, folder)

    assert "The stars cannot be shown" in shown
    assert star(page, folder).status_code == 422
    assert (folder / STARS_FILE).read_text() == "["


@pytest.mark.parametrize(
    "body",
    [
        {"step": 0},
        {"step": "200"},
        {"step": True},
        {"strength": "0.75"},
        {"strength": None},
        {"prompt": 7},
        {"prompt": "p" * 1000},
    ],
)
def test_invalid_stars_are_refused(page: TestClient, folder: Path, body: dict[str, Any]) -> None:
    assert star(page, folder, **body).status_code == 400
    assert not (folder / STARS_FILE).exists()


# ---- With a browser ----


@pytest.mark.slow(5)
@pytest.mark.parametrize("has_loss", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_file_for_comfyui_at_a_strength_is_two_clicks_away(
    browser: Any, page: TestClient, folder: Path, has_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    compared(folder)
    if has_loss:
        measured(folder, {100: 1.5, 200: 1.2, 300: 1.4})
    with opened(browser, folder.parent, f"?run={run_id(folder)}#run") as tab:
        tab.get_by_role("button", name="Use this: step 200 at strength 0.75").last.click()
        with tab.expect_download() as download:
            tab.get_by_role("link", name="Download for ComfyUI").click()
        name = f"{folder.name}-step200-strength0.75-comfyui.safetensors"
        assert download.value.suggested_filename == name
        tab.get_by_role("button", name="Close").click()
        tab.get_by_role("button", name="Star prompt0, step 100").last.click()
        expect = pytest.importorskip("playwright.sync_api").expect
        expect(tab.get_by_role("list", name="Starred")).to_contain_text("Step 100")
        tab.get_by_role("button", name="Enlarge prompt0, step 200").last.click()
        viewer = tab.locator("#viewer")
        tab.keyboard.press("ArrowUp")
        expect(viewer).to_contain_text("step 200, strength 0.75")
        tab.keyboard.press("ArrowLeft")
        expect(viewer).to_contain_text("step 100")
        viewer.get_by_role("button", name="Use this").click()
        expect(tab.get_by_role("dialog", name="Step 100 at strength 0.75")).to_be_visible()


# ---- Estimates ----


def estimate(page: TestClient, folder: Path, **body: Any) -> str:
    values = {"run": run_id(folder), "prompts": [PROMPT], "strengths": "0.5, 1"}
    answer = page.post("/api/training/estimate", json={**values, **body})
    return str(answer.json()["estimate"])


def time_previews(folder: Path, seconds: int) -> None:
    """Add the events of a round of two previews."""
    for done in (0, 1, 2):
        progress = {"current": done, "total": 2}
        event = {
            "id": 1000 + done,
            "type": "lifecycle.stage",
            "timestamp": f"2026-11-29T01:00:{done * seconds:02d}.000+00:00",
            "stage": {"key": "validation", "label": "Rendering", "progress": progress},
        }
        with (folder / EVENTS_FILE).open("a") as events:
            events.write(json.dumps(event) + "\n")


def test_estimate_counts_what_is_missing_and_how_long_it_takes(
    page: TestClient, folder: Path
) -> None:
    time_previews(folder, 20)

    # Three steps at two strengths, and the untrained model.
    assert estimate(page, folder) == "7 pictures, about 2 min"
    compared(folder, steps=(0, 100), strengths=(0.5,))
    assert estimate(page, folder) == ("5 pictures, about 2 min (2 of 7 are rendered already)")
    assert estimate(page, folder, checkpoints="100", strengths="0.5") == (
        "All of them are rendered already."
    )


def test_estimate_names_what_is_wrong(page: TestClient, folder: Path) -> None:
    assert estimate(page, folder, checkpoints="150") == "There is no checkpoint of step 150."
    # The result is compared with all checkpoints, but is not one of them.
    assert estimate(page, folder, checkpoints="300") == "There is no checkpoint of step 300."
    assert "are numbers" in estimate(page, folder, strengths="much")
    assert "not measured how long" in estimate(page, folder)


def test_nothing_is_rendered_already_of_a_run_without_previews(
    page: TestClient, folder: Path
) -> None:
    (folder / MEDIA_FILE).unlink(missing_ok=True)
    run = run_id(folder)

    answer = page.post("/api/training/estimate", json={"run": run, "strengths": "1"})

    assert answer.json()["estimate"].startswith("The run has rendered no previews")
