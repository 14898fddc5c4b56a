"""Archiving runs, bringing them back, and deleting archived ones: every kind of run, and what is
refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import archive
from simpletuner.annexes.page.runs.contents import ARCHIVED_FILE, Contents
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.runs.queue import Queue
from simpletuner.annexes.page.runs.stars import Star, set_star
from simpletuner.annexes.page.serve import create_app
from simpletuner.planning.lock import LOCK_FILE, lock_output
from simpletuner.weights.lora_names import LORA_FILE
from tests.annexes.page.run_folder import RunFolder, every_run
from tests.annexes.page.runs.test_runs import own

DONE = RunFolder(evaluated=True, saved="result", swept=True, state="done")


@dataclass
class Page:
    """The page of a project, asked as a browser would."""

    folder: Path
    client: TestClient

    def post(self, action: str, folder: Path, code: int = 200, **more: Any) -> Any:
        """What the page answers to a press."""
        answer = self.client.post(f"/api/runs/{action}", json={"run": run_id(folder), **more})
        assert answer.status_code == code, answer.text
        return answer.json()

    def reason(self, action: str, folder: Path, code: int = 409, **more: Any) -> str:
        """Why the page refuses a press."""
        problem = self.post(action, folder, code, **more)["problems"][0]
        return str(problem["message"])

    def archive(self, folder: Path) -> Path:
        """The archived folder of a run."""
        return self.folder / self.post("archive", folder)["folder"]

    def listed(self) -> str:
        """The list of runs."""
        answer = self.client.get("/runs")
        assert answer.status_code == 200
        return answer.text

    def shown_contents(self, folder: Path) -> str:
        """What a deletion would lose, as it is shown before."""
        answer = self.client.get(f"/runs/{run_id(folder)}/contents")
        assert answer.status_code == 200, answer.text
        return answer.text


def page_of(folder: Path) -> Page:
    """The page of a project."""
    return Page(folder, TestClient(create_app(Project(folder))))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return page_of(tmp_path.resolve())


@pytest.fixture
def output(page: Page) -> Path:
    """A finished run with everything."""
    return DONE.write(page.folder / "output")


def tree(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow(2)
def test_every_ended_run_is_archived_brought_back_and_deleted(tmp_path: Path) -> None:
    # Every third kind, which covers all states with all that is saved.
    for number, kind in enumerate(list(every_run())[::3]):
        page = page_of(tmp_path.resolve() / str(number))
        folder = kind.write(page.folder / "output")
        if kind.state == "running":
            assert "is in use by" in page.reason("archive", folder), kind.name
            continue
        before = tree(folder)
        status = page.client.get(f"/api/training/status?run={run_id(folder)}").json()["status"]

        archived = page.archive(folder)

        assert archived == page.folder / "output/archive" / kind.name
        assert tree(archived).keys() - before.keys() == {ARCHIVED_FILE}, kind.name
        of_archived = page.client.get(f"/api/training/status?run={run_id(archived)}").json()
        assert of_archived["status"] == status, kind.name
        assert not any(of_archived["can"].values()), kind.name
        assert f'data-back="{run_id(archived)}"' in page.listed(), kind.name
        page.post("bring-back", archived)
        assert tree(folder) == before, kind.name
        archived = page.archive(folder)
        page.post("delete", archived, confirmed=Contents.of(archived).digest)
        assert not archived.exists(), kind.name
        assert run_id(archived) not in page.listed(), kind.name


@pytest.mark.parametrize(
    ("kind", "has_lock"),
    [
        (replace(DONE, state="interrupted"), True),  # killed: its lock says since when
        (DONE, False),
    ],
)
def test_archiving_leaves_the_lock_of_a_killed_run_and_none_of_its_own(
    page: Page, kind: RunFolder, has_lock: bool
) -> None:
    folder = kind.write(page.folder / "output")

    archived = page.archive(folder)

    assert (archived / LOCK_FILE).exists() is has_lock


def test_deletion_names_what_is_lost_first(page: Page, output: Path) -> None:
    shown = page.shown_contents(page.archive(output))

    assert "the LoRA of step 3" in shown
    assert "1 checkpoint, so the run cannot be continued" in shown
    assert "in all 14 files" in shown


def test_only_what_was_shown_is_deleted(page: Page, output: Path) -> None:
    archived = page.archive(output)
    digest = Contents.of(archived).digest
    with (archived / "console.log").open("a") as log:
        log.write("later")

    for confirmed in ("", "yes", digest):
        assert "has changed since" in page.reason("delete", archived, confirmed=confirmed)

    assert (archived / LORA_FILE).is_file()


def test_a_run_that_is_not_archived_is_not_deleted(page: Page, output: Path) -> None:
    digest = Contents.of(output).digest

    assert "archived runs can be deleted" in page.reason("delete", output, confirmed=digest)
    assert "archived runs can be brought back" in page.reason("bring-back", output)
    assert (output / LORA_FILE).is_file()


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "validation_images/mine.png",
        "checkpoint-2/mine.safetensors",
        "samples/favourite.png",
        "quarantine/pictures/cat.jpg",
        "cache/vae/notes.md",
        "branches/1/notes.txt",
        "my.safetensors",
        ".hidden",
    ],
)
def test_files_of_the_user_are_listed_and_keep_the_folder(
    page: Page, output: Path, name: str
) -> None:
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).write_text("mine")
    archived = page.archive(output)
    before = tree(archived)

    shown = page.shown_contents(archived).replace("<wbr>", "")
    reason = page.reason("delete", archived, confirmed=Contents.of(archived).digest)

    assert f'<li class="path">{name}</li>' in shown
    assert 'class="sure"' not in shown
    assert f"did not write: {name}. Move them elsewhere first." in reason
    assert tree(archived) == before


def test_stars_and_converted_files_are_deleted_with_their_run(page: Page, output: Path) -> None:
    set_star(output, Star(2, 1.0, "a bird"), starred=True)
    (output / "cats-step2-strength0.75-comfyui.safetensors").write_bytes(b"a LoRA")
    archived = page.archive(output)

    page.post("delete", archived, confirmed=Contents.of(archived).digest)

    assert not archived.exists()


@pytest.mark.parametrize("place", ["link", "requests/save", "checkpoint-2/training_state"])
def test_links_are_never_followed(page: Page, output: Path, place: str) -> None:
    elsewhere = page.folder / "pictures"
    elsewhere.mkdir()
    (elsewhere / "cat.png").write_text("a cat")
    (output / place).parent.mkdir(exist_ok=True)
    (output / place).symlink_to(elsewhere)
    archived = page.archive(output)

    reason = page.reason("delete", archived, confirmed=Contents.of(archived).digest)

    assert place in reason
    assert (elsewhere / "cat.png").is_file()


def test_a_link_in_place_of_a_file_is_a_file_of_the_user(page: Page, output: Path) -> None:
    elsewhere = page.folder / "console.log"
    (output / "console.log").rename(elsewhere)
    (output / "console.log").symlink_to(elsewhere)
    archived = page.archive(output)

    reason = page.reason("delete", archived, confirmed=Contents.of(archived).digest)

    assert "did not write: console.log." in reason
    assert (archived / "console.log").is_symlink()


def test_a_file_that_appears_during_the_deletion_is_kept(
    page: Page, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived = page.archive(output)
    unlink = Path.unlink

    def unlink_and_add(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        (archived / "new.txt").write_text("mine")

    digest = Contents.of(archived).digest
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_and_add)
        reason = page.reason("delete", archived, confirmed=digest)

    assert "new.txt appeared" in reason
    assert tree(archived).keys() == {"new.txt", ARCHIVED_FILE}


def trains(page: Page, folder: Path) -> None:
    own(folder)


def trains_elsewhere(page: Page, folder: Path) -> None:
    own(folder, host="another-machine")


def left_by_another_machine(page: Page, folder: Path) -> None:
    own(folder, host="another-machine")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))


def waits_in_the_queue(page: Page, folder: Path) -> None:
    Queue(page.folder).add("train", str(folder), config="config")


def is_rendered_by_the_queue(page: Page, folder: Path) -> None:
    Queue(page.folder).add("sweep", str(folder))


def holds_another_run(page: Page, folder: Path) -> None:
    RunFolder(evaluated=False, saved="nothing", swept=False, state="done").write(folder / "inner")


def holds_a_config(page: Page, folder: Path) -> None:
    (page.folder / "config").mkdir()
    (folder / "config.json").write_text("{}")
    (page.folder / "config/inner").symlink_to(folder)


IN_USE = [
    (trains, "is in use by process"),
    (trains_elsewhere, "is in use by process"),
    (left_by_another_machine, "If that run is over, delete"),
    (waits_in_the_queue, "waits in the queue; remove it there first"),
    (is_rendered_by_the_queue, "waits in the queue; remove it there first"),
]


@pytest.mark.parametrize(
    ("situation", "reason"),
    [*IN_USE, (holds_another_run, "also holds"), (holds_a_config, "also holds")],
)
def test_a_run_in_use_is_not_archived(
    page: Page, output: Path, situation: Callable[[Page, Path], None], reason: str
) -> None:
    situation(page, output)
    before = tree(output)

    assert reason in page.reason("archive", output)

    assert tree(output) == before


@pytest.mark.parametrize(("situation", "reason"), IN_USE)
def test_an_archived_run_in_use_is_neither_deleted_nor_moved(
    page: Page, output: Path, situation: Callable[[Page, Path], None], reason: str
) -> None:
    archived = page.archive(output)
    digest = Contents.of(archived).digest
    situation(page, archived)
    before = tree(archived)

    assert reason in page.reason("delete", archived, confirmed=digest)
    assert reason in page.reason("bring-back", archived)

    assert tree(archived) == before


def test_a_process_that_has_just_taken_the_folder_keeps_it(page: Page, output: Path) -> None:
    with lock_output(output), pytest.raises(Exception, match="is in use by"):
        archive.archive(output)

    assert not (output / ARCHIVED_FILE).exists()
    assert not (output / LOCK_FILE).exists()


def test_a_folder_whose_name_is_not_utf_8_is_shown_archived_and_comes_back(
    page: Page, output: Path
) -> None:
    named = output.rename(output.with_name(os.fsdecode(b"caf\xe9")))

    panel = page.client.get(f"/runs/{run_id(named)}/use")
    archived = page.client.post("/api/runs/archive", json={"run": run_id(named)})
    moved = archived.json()["run"]
    back = page.client.post("/api/runs/bring-back", json={"run": moved})

    assert panel.status_code == archived.status_code == back.status_code == 200
    assert named.is_dir()


def test_two_runs_of_one_name_are_archived_apart_and_come_back(page: Page, output: Path) -> None:
    first = page.archive(output)
    DONE.write(page.folder / "output")
    (output / "console.log").write_text("the second")
    second = page.archive(output)
    assert {first.name, second.name} == {output.name, f"{output.name}-2"}

    page.post("bring-back", second)
    reason = page.reason("bring-back", first, 422)

    assert (output / "console.log").read_text() == "the second"
    assert "exists again. Archive or rename it first" in reason


def test_archived_run_is_shown_but_not_trained_further(page: Page, output: Path) -> None:
    archived = page.archive(output)

    assert page.client.get(f"/download/{run_id(archived)}").status_code == 200
    head = page.client.get(f"/runs/{run_id(archived)}/head").text
    assert "Continue" not in head
    assert page.client.get(f"/runs/{run_id(output)}/head").status_code == 404


def test_config_of_an_archived_run_stays_and_is_not_started(page: Page, output: Path) -> None:
    (page.folder / "config/cats").mkdir(parents=True)
    settings = {"output_dir": f"output/{output.name}", "init_lora": f"output/{output.name}/x"}
    (page.folder / "config/cats/config.json").write_text(json.dumps(settings))

    answer = page.post("archive", output)

    assert answer["used_by"] == ["cats (init_lora)"]
    assert (page.folder / "config/cats/config.json").is_file()
    assert "Not started: 1" in page.listed()
    assert "Still used by cats (init_lora)" in page.shown_contents(page.folder / answer["folder"])


def test_ended_jobs_of_an_archived_run_leave_the_queue(page: Page, output: Path) -> None:
    queue = Queue(page.folder)
    job = queue.add("train", str(output), config="cats")
    queue.replace(job, type(job)(job.id, "train", str(output), state="interrupted"))

    page.archive(output)

    assert queue.read() == []


def test_the_page_of_a_run_neither_archives_nor_deletes(page: Page, output: Path) -> None:
    of_run = Page(page.folder, TestClient(create_app(Project(page.folder, run=output))))

    for action in ("archive", "bring-back", "delete"):
        assert "use `simpletuner server`" in of_run.reason(action, output, 403)

    assert (output / LORA_FILE).is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_named_and_nothing_changes(page: Page, output: Path) -> None:
    archived = page.archive(output)
    digest = Contents.of(archived).digest
    (archived / "checkpoint-2").chmod(0o500)

    reason = page.reason("delete", archived, confirmed=digest)

    assert "checkpoint-2 is read-only" in reason
    assert (archived / LORA_FILE).is_file()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(18, "Invalid cross-device link"), "are on different disks"),
        (OSError(30, "Read-only file system"), "cannot be written (Read-only file system)"),
        (OSError(28, "No space left on device"), "no space left on the disk"),
    ],
)
def test_failed_move_leaves_everything_in_place(
    page: Page, output: Path, error: OSError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(output)

    def fail(path: Path, target: Path) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        answer = page.client.post("/api/runs/archive", json={"run": run_id(output)})

    assert answer.status_code in (422, 507)
    assert reason in answer.text
    assert tree(output) == before


def test_archive_that_is_a_link_out_of_the_project_is_refused(
    page: Page, output: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (output.parent / "archive").symlink_to(elsewhere)

    assert "outside the project" in page.reason("archive", output, 403)
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["../../etc", "", "..", "a/b"])
def test_damaged_note_leads_nowhere_else(page: Page, output: Path, name: str) -> None:
    archived = page.archive(output)
    (archived / ARCHIVED_FILE).write_text(json.dumps({"name": name}))

    page.post("bring-back", archived)

    assert (output / LORA_FILE).is_file()


def test_run_deleted_in_a_terminal_meanwhile_is_missing(page: Page, output: Path) -> None:
    archived = page.archive(output)
    shutil.rmtree(archived)

    page.reason("delete", archived, 409, confirmed="x")
    assert run_id(archived) not in page.listed()
