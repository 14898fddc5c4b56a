"""What the buttons of a dataset's files write is what the plan accepts, also where files share a
stem.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.page.settings.files import Configuration
from simpletuner.annexes.page.settings.library import datasets_in
from simpletuner.data.build import build_datasets
from simpletuner.errors import Problems
from tests.annexes.page.settings.test_library import CATS, CONFIG, drawn, save_mask, write

# Phones save a photo as HEIC and as JPEG, with one stem; other programs crop one of them.
FILES = {
    "a.jpg": (96, 64),
    "a.png": (128, 64),
    "a.webp": (64, 96),
    "b.png": (128, 64),
    "b.jpg": (64, 64),
    "c.png": (96, 96),
}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats").mkdir()
    for name, size in FILES.items():
        Image.new("RGB", size, (90, 90, 90)).save(tmp_path / "cats" / name)
    for stem in "abc":
        (tmp_path / f"cats/{stem}.txt").write_text("a cat")
    write(tmp_path, "", CONFIG, CATS)
    return TestClient(create_app(Project(tmp_path.resolve())))


def check_plan() -> None:
    """The datasets of the project in the working folder have no error."""
    problems = Problems()
    entries, context = datasets_in(Configuration.saved(Project(Path.cwd()), "config"))
    build_datasets([context.fill(entry) for entry in entries], context, problems)
    assert [str(problem) for problem in problems if problem.fatal] == []


def paint(page: TestClient, name: str, share: float) -> None:
    """Paint a mask of which the left part is learned, over the one that the page shows."""
    shown = page.get("/library", params={"dataset": "cats"}).text
    stamps = re.findall(rf'aria-label="Mask of {re.escape(name)}[^>]*data-tag="([^"]*)"', shown)
    width, height = FILES[name]
    mask = drawn((0, 0, int(width * share), height), FILES[name])
    answer = save_mask(page, name, mask, stamps[0] if stamps else "")
    assert answer.status_code == 200, answer.text
    check_plan()


def exclude(page: TestClient, name: str, *, out: bool) -> None:
    answer = page.put("/api/library/excluded", json={"dataset": "cats", "file": name, "out": out})
    assert answer.status_code == 200, answer.text
    check_plan()


@pytest.mark.parametrize("painted", FILES)
def test_painted_masks_are_accepted_by_the_plan(page: TestClient, painted: str) -> None:
    first, second, *_ = (name for name in FILES if name != painted)
    exclude(page, first, out=True)
    paint(page, painted, 0.5)
    paint(page, second, 0.75)
    exclude(page, first, out=False)
    exclude(page, painted, out=True)
    exclude(page, painted, out=False)
    paint(page, painted, 0.75)
    # Every file has a mask of its own ratio.
    for name, (width, height) in FILES.items():
        file = Path("cats_masks", f"{name}.png" if name != "c.png" else name)
        with Image.open(file) as mask:
            assert mask.width * height == mask.height * width, name


@pytest.mark.parametrize("name", ["sub/d.png", "c.png"])
def test_no_mask_is_written_behind_a_link_out_of_the_project(
    page: TestClient, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Also not the white one of another file."""
    paint(page, "c.png", 0.5)
    before = (tmp_path / "cats_masks/c.png").read_bytes()
    outside = tmp_path_factory.mktemp("outside")
    (tmp_path / "cats/sub").mkdir()
    Image.new("RGB", (96, 96)).save(tmp_path / "cats/sub/d.png")
    (tmp_path / "cats_masks/sub").symlink_to(outside)
    shown = page.get("/library", params={"dataset": "cats"}).text
    stamps = re.findall(rf'aria-label="Mask of {re.escape(name)}[^>]*data-tag="([^"]*)"', shown)

    answer = save_mask(page, name, drawn((0, 0, 48, 96), (96, 96)), stamps[0] if stamps else "")

    assert answer.status_code == 422
    assert "is behind a link out of the project" in answer.text
    assert list(outside.iterdir()) == []
    assert (tmp_path / "cats_masks/c.png").read_bytes() == before


def caption(page: TestClient, name: str, text: str) -> None:
    shown = page.get("/library", params={"dataset": "cats"}).text
    (tag,) = re.findall(rf'data-file="{re.escape(name)}"[^>]*data-tag="([^"]*)"', shown)
    body = {"dataset": "cats", "file": name, "text": text}
    headers = {"If-Match": f'"{tag}"'} if tag else {}
    answer = page.put("/api/library/caption", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    check_plan()


def edit_all(page: TestClient, **edit: str) -> str:
    """Change all captions; returns the name of the copy of those before."""
    body = {"dataset": "cats", **edit}
    preview = page.post("/api/library/edit", json=body).json()
    answer = page.post("/api/library/edit", json={**body, "seen": preview["digest"]})
    assert answer.status_code == 200, answer.text
    check_plan()
    return str(answer.json()["backup"])


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_buttons_leads_to_an_error_of_the_plan(page: TestClient, seed: int) -> None:
    chance = random.Random(seed)
    out = ""  # the file that is left out
    backup = ""
    for _ in range(12):
        name = chance.choice([*FILES])
        button = chance.choice(["mask", "out", "caption", "trigger", "replace", "undo"])
        if button == "mask" and name != out:
            paint(page, name, chance.choice([0.25, 0.5, 1.0]))
        elif button == "out":
            exclude(page, out or name, out=not out)
            out = "" if out else name
        elif button == "caption":
            caption(page, name, chance.choice(["", "a cat, asleep", "a\nb", "zkt " * 100]))
        elif button == "trigger":
            backup = edit_all(page, trigger="zkt")
        elif button == "replace":
            backup = edit_all(page, find="cat", replace="dog")
        elif button == "undo" and backup:
            edit_all(page, undo=backup)
