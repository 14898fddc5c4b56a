"""The list of runs: what it says of every kind of run, and in which order."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import run_list
from simpletuner.annexes.page.runs.control import Runs, run_id
from simpletuner.annexes.page.runs.run_list import last_preview, listed, moment
from simpletuner.annexes.page.serve import create_app
from simpletuner.reporting.metrics import MediaFile, MediaRecord
from tests.annexes.page.run_folder import RunFolder, every_run, write_picture
from tests.annexes.page.runs.test_runs import age

DONE = RunFolder(evaluated=False, saved="result", swept=False, state="done")
ROW = re.compile(r'data-run="(.*?)".*?<span class="state \w+">(.*?)</span>(.*?)</a>', re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def rows_in(project: Path) -> dict[str, str]:
    """The state of every started run in words, by its id, in the order of the list."""
    found = ROW.findall(listed(Runs(Project(project))))
    return {
        run: " ".join([state, *re.findall(r"<span>(.*?)</span>", rest)])
        for run, state, rest in found
    }


def write_config(project: Path, name: str, output_dir: str) -> None:
    (project / "config" / name).mkdir(parents=True)
    (project / "config" / name / "config.json").write_text(json.dumps({"output_dir": output_dir}))


def test_every_kind_of_run_is_told_in_words(project: Path) -> None:
    kinds = {run_id(kind.write(project)): kind for kind in every_run()}

    told = rows_in(project)

    assert told.keys() == kinds.keys()
    for run, kind in kinds.items():
        is_saved = kind.saved != "nothing"
        rest = "at 3, can continue" if is_saved else "at 3, nothing saved"
        words = {
            "running": "running 3 of 9",
            "done": "finished 3 steps",
            "interrupted": f"interrupted {rest}",
            "cancelled": f"cancelled {rest}",
            "stopped": f"stopped {rest}" if is_saved else f"cancelled {rest}",
        }
        assert told[run] == words[kind.state], kind.name


def test_runs_that_train_are_first_then_the_newest(project: Path) -> None:
    old = DONE.write(project / "a")
    newest = DONE.write(project / "b")
    running = RunFolder(False, "nothing", False, "running").write(project / "c")
    age(old, 3000)
    age(newest, 10)
    age(running, 9000)

    assert list(rows_in(project)) == [run_id(running), run_id(newest), run_id(old)]


def test_configs_that_never_ran_are_apart_with_a_link_to_their_form(project: Path) -> None:
    write_config(project, "cats", "output/cats")
    write_config(project, "done", DONE.name)
    DONE.write(project)

    text = listed(Runs(Project(project)))

    started, _, not_started = text.partition("Not started: 1")
    assert f'data-run="{run_id(project / DONE.name)}" data-config="done"' in started
    assert 'href="?config=cats#basic"' in not_started
    assert "done" not in not_started


def test_runs_of_one_name_are_told_apart_by_their_folders(project: Path) -> None:
    for place in ("output", "older"):
        folder = DONE.write(project / place)
        folder.rename(folder.with_name("cats"))
    alone = DONE.write(project / "output")

    shown = listed(Runs(Project(project))).replace("\u200b", "").replace("<wbr>", "")

    titles = re.findall(r"<b>(.*?)</b>", shown)
    assert sorted(titles) == sorted(["older/cats", "output/cats", alone.name])


@pytest.mark.parametrize(
    ("names", "thumbnail"),
    [(("bird", "validation", "owl"), "validation"), (("bird", "owl"), "bird")],
)
def test_thumbnail_is_the_last_preview_of_the_main_prompt_or_else_of_the_first(
    project: Path, names: tuple[str, ...], thumbnail: str
) -> None:
    media = MediaFile(project / "validation_media.jsonl", 9)
    for step, name in ((0, "validation"), *((5, name) for name in names)):
        record = MediaRecord(step, name, f"a {name}", f"{name}-{step}.png", 8, 8)
        write_picture(project / record.path)
        media.append(record)
    media.append(MediaRecord(9, "validation", "a bird", "gone.png", 8, 8))
    media.close()

    shown = last_preview(project)

    assert shown is not None
    assert (shown.step, shown.short_name) == (5, thumbnail)


def test_thumbnail_of_a_run_is_a_small_picture(project: Path) -> None:
    DONE.write(project)
    page = TestClient(create_app(Project(project)))
    [source] = re.findall(r'<img src="(.*?)"', page.get("/runs").text)

    answer = page.get(source.replace("&amp;", "&"))

    assert answer.headers["content-type"] == "image/webp"
    assert "immutable" in answer.headers["cache-control"]


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("2026-03-10T14:05:00", "today 14:05"),
        ("2026-03-09T09:30:00", "yesterday 9:30"),
        ("2026-03-08T09:30:00", "8 Mar 9:30"),
        ("2025-12-31T23:59:00", "31 Dec 2025"),
    ],
)
def test_time_is_told_as_a_person_would(
    when: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.fromisoformat("2026-03-10T20:00:00")

    monkeypatch.setattr(run_list, "datetime", Clock)

    assert moment(datetime.fromisoformat(when).timestamp()) == words


def test_a_run_that_was_killed_does_not_stay_in_the_list_as_running(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFolder(False, "nothing", False, "running").write(project)
    before = rows_in(project)
    monkeypatch.setattr("simpletuner.annexes.runs.folder.RunFolder.pid", None)

    after = rows_in(project)

    assert [*before.values(), *after.values()] == [
        "running 3 of 9",
        "interrupted at 3, nothing saved",
    ]


def test_row_of_an_ended_run_is_read_again_only_after_a_change(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DONE.write(project)
    runs = Runs(Project(project))
    listed(runs)
    asked: list[str] = []
    monkeypatch.setattr("simpletuner.annexes.runs.run.Run.status", lambda run: asked.append(run.id))

    listed(runs)

    assert asked == []
    monkeypatch.undo()
    (folder / "console.log").write_text("$ simpletuner train\nmore")
    os.utime(folder / "console.log", (time.time() + 5,) * 2)
    assert list(rows_in(project).values()) == ["finished 3 steps"]
