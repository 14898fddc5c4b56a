"""Several runs side by side: curves, settings that differ, previews of shared prompts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.serve import create_app
from simpletuner.planning.checkpoint_folder import Manifest, describe_files, write_manifest
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, MediaRecord
from tests.annexes.page.run_folder import IDENTITY, RunFolder, every_run, write_picture

DONE = RunFolder(evaluated=True, saved="checkpoint", swept=False, state="done")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path.resolve()


@pytest.fixture
def page(project: Path) -> TestClient:
    return TestClient(create_app(Project(project)))


def compare(page: TestClient, *folders: Path, code: int = 200) -> str:
    answer = page.get("/compare", params={"run": [run_id(folder) for folder in folders]})
    assert answer.status_code == code, answer.text
    return answer.text


def charts_in(text: str) -> dict[str, dict[str, Any]]:
    """The lines of every chart by their names, by the titles of the charts."""
    data = json.loads(re.findall(r'id="charts">(.*?)</script>', text)[0])
    return {
        chart["title"]: {line["name"]: line for line in chart["series"]} for chart in data["charts"]
    }


def rows_in(text: str) -> dict[str, list[str]]:
    """The settings that differ by their keys."""
    rows = re.findall(r'<tr><th scope="row"><span title="(.*?)">.*?</th>(.*?)</tr>', text)
    return {
        key: [cell.replace("<wbr>", "") for cell in re.findall("<td>(.*?)</td>", cells)]
        for key, cells in rows
    }


def write_run(project: Path, name: str, files: int = 8, **settings: Any) -> Path:
    """A run whose checkpoint has recorded some settings."""
    folder = replace(DONE).write(project / "made").rename(project / name)
    saved = folder / "checkpoint-2"
    (saved / "config.json").write_text(json.dumps({"output_dir": name, **settings}))
    identity = replace(
        IDENTITY, datasets=f"{files:064}", order={"cats.resolution": [f"{files} of 8x8@1"]}
    )
    write_manifest(saved, Manifest(2, 0, identity, describe_files(saved)))
    return folder


@pytest.mark.slow
def test_neighbouring_kinds_of_runs_are_compared(page: TestClient, project: Path) -> None:
    kinds = list(every_run())[::2]
    folders = [kind.write(project) for kind in kinds]

    for place in range(len(kinds) - 1):
        text = compare(page, folders[place], folders[place + 1])
        pair = kinds[place], kinds[place + 1]
        lines = charts_in(text)
        assert lines["Loss"].keys() == {kind.name for kind in pair}
        evaluated = {kind.name for kind in pair if kind.evaluated}
        assert lines.get("Held-out loss", {}).keys() == evaluated
        assert "2 runs compared" in text
        rendered = [kind.media for kind in pair]
        assert ("Enlarge validation of" in text) == ("nothing" not in rendered)


def test_each_run_has_one_colour_in_all_charts(page: TestClient, project: Path) -> None:
    plain = RunFolder(False, "nothing", False, "done").write(project)
    evaluated = RunFolder(True, "nothing", False, "done").write(project)

    charts = charts_in(compare(page, plain, evaluated))

    assert [line["colour"] for line in charts["Loss"].values()] == [0, 1]
    assert [line["colour"] for line in charts["Held-out loss"].values()] == [1]


def test_only_settings_that_differ_are_shown(page: TestClient, project: Path) -> None:
    first = write_run(project, "first", learning_rate=1e-4, lora_rank=16, use_ema=False)
    second = write_run(project, "second", files=9, learning_rate=1e-4, lora_rank=32, use_ema=True)

    rows = rows_in(compare(page, first, second))

    assert rows == {
        "files": ["cats: 8 (000000)", "cats: 9 (000000)"],
        "lora_rank": ["16", "32"],
        "use_ema": ["off", "on"],
    }


def test_secrets_are_not_shown_though_they_differ(page: TestClient, project: Path) -> None:
    secrets = ("https://hooks.example.org/aaaa1111bbbb", "https://hooks.example.org/cccc2222dddd")
    first, second = (
        write_run(project, name, webhook_config=[{"webhook_url": secret}], lora_rank=rank)
        for name, secret, rank in (("first", secrets[0], 8), ("second", secrets[1], 9))
    )

    text = compare(page, first, second)

    assert "lora_rank" in text
    assert not any(secret in text for secret in secrets)


def test_a_run_without_a_checkpoint_has_the_settings_of_its_config(
    page: TestClient, project: Path
) -> None:
    first = write_run(project, "first", learning_rate=1e-4)
    second = RunFolder(False, "nothing", False, "running").write(project)
    (project / "config/new").mkdir(parents=True)
    settings = {"output_dir": second.name, "learning_rate": 0.5}
    (project / "config/new/config.json").write_text(json.dumps(settings))

    text = compare(page, first, second)

    assert rows_in(text)["learning_rate"] == ["0.0001", "0.5"]
    assert f"{second.name}: as the config says now" in text


def test_unknown_settings_are_called_unknown(page: TestClient, project: Path) -> None:
    runs = [write_run(project, name, lora_rank=len(name)) for name in ("a", "bb")]
    third = RunFolder(False, "nothing", False, "done").write(project)

    text = compare(page, *runs, third)

    assert rows_in(text)["lora_rank"] == ["1", "2", "not known"]
    assert f"{third.name}: the settings are not known." in text


def test_previews_are_side_by_side_where_prompts_are_shared(
    page: TestClient, project: Path
) -> None:
    folders = []
    for name, prompts in {"a": ("a bird", "an owl"), "b": ("a cat", "a bird")}.items():
        folder = replace(DONE, state="done").write(project / "made").rename(project / name)
        records = [
            MediaRecord(step, "x", prompt, f"{step}-{place}.png", 8, 8)
            for step in (1, 2)
            for place, prompt in enumerate(prompts)
        ]
        # Runs are compared without the moving average, which few of them have.
        records.append(replace(records[-1], path="2-ema.png", ema=True))
        for record in records:
            write_picture(folder / record.path)
        (folder / MEDIA_FILE).write_text(
            "".join(json.dumps(asdict(each)) + "\n" for each in records)
        )
        folders.append(folder)

    text = compare(page, *folders)

    assert re.findall(r'<p class="prompt">(.*?)</p>', text) == ["a bird"]
    assert re.findall(r'data-label="(.*?), 8', text) == ["a, step 2", "b, step 2"]
    sources = re.findall(r'<img src="(.*?)"', text)
    assert not any("ema" in source for source in sources)
    for source in sources:
        assert page.get(source).headers["content-type"] == "image/png"


@pytest.mark.parametrize("count", [0, 1, 7])
def test_two_to_six_runs_are_compared(page: TestClient, project: Path, count: int) -> None:
    folders = [DONE.write(project / str(number)) for number in range(count)]

    text = compare(page, *folders, code=400)

    assert f"2 to 6 runs can be compared, not {count}." in text
    assert 'href="/#run"' in text


def test_runs_of_one_name_are_told_apart(page: TestClient, project: Path) -> None:
    folders = [DONE.write(project / name) for name in "ab"]

    charts = charts_in(compare(page, *folders))

    assert charts["Loss"].keys() == {f"a/{DONE.name}", f"b/{DONE.name}"}


def test_curves_are_read_again_after_a_step(page: TestClient, project: Path) -> None:
    folders = [DONE.write(project / name) for name in "ab"]
    compare(page, *folders)
    with (folders[0] / METRICS_FILE).open("a") as record:
        record.write(json.dumps({"step": 4, "train_loss": 0.25}) + "\n")

    charts = charts_in(compare(page, *folders))

    assert charts["Loss"][f"a/{DONE.name}"]["raw"][-1] == [4, 0.25]
