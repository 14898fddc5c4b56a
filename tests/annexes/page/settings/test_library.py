"""The files of a dataset on the page: shown as they are trained, captioned, left out, and never
lost.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image, ImageFilter
from starlette.testclient import TestClient

from simpletuner.annexes.captions import editing, library
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.page.settings import library_order
from simpletuner.annexes.page.settings.library_order import ORDERS
from simpletuner.annexes.runs.run import Run
from tests.annexes.page.page import opened
from tests.tools.caption_server import serve_captions
from tests.tools.clips import write_clip
from tests.tools.processes import PATIENCE

CONFIG = {"model_family": "kandinsky5-image", "model_type": "lora", "output_dir": "output/mine"}
CATS = {
    "id": "cats",
    "type": "local",
    "instance_data_dir": "cats",
    "caption_strategy": "textfile",
    "resolution": 64,
    "resolution_type": "pixel",
    "crop": True,
    "crop_style": "center",
}
ODD = "odd\n\x07<b>.png"


def write(folder: Path, name: str, config: dict[str, Any], *entries: dict[str, Any]) -> None:
    path = folder / "config" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    texts = {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True}
    (path / "multidatabackend.json").write_text(json.dumps([*entries, texts]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a dataset of three captioned pictures and one without a caption."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats").mkdir()
    for index in range(4):
        Image.new("RGB", (128, 64), (60 * index, 90, 90)).save(tmp_path / f"cats/{index}.png")
    for index in range(3):
        (tmp_path / f"cats/{index}.txt").write_text(f"a cat number {index}\n")
    write(tmp_path, "", CONFIG, CATS)
    return tmp_path.resolve()


@pytest.fixture
def page(folder: Path) -> TestClient:
    return TestClient(create_app(Project(folder)))


def show(client: TestClient, **asked: Any) -> str:
    answer = client.get("/library", params={"dataset": "cats", **asked})
    assert answer.status_code == 200, answer.text
    return answer.text


def names(html: str) -> list[str]:
    return re.findall(r'data-file="([^"]+)"', html)


def tag(html: str, name: str) -> str:
    found = re.search(rf'data-file="{re.escape(quote(name))}" data-tag="(\w*)"', html)
    assert found, name
    return found.group(1)


def save(page: TestClient, name: str, text: str, seen: str, dataset: str = "cats") -> Any:
    body = {"dataset": dataset, "file": name, "text": text}
    return page.put(
        "/api/library/caption", json=body, headers={"If-Match": f'"{seen}"'} if seen else {}
    )


def leave_out(page: TestClient, name: str, out: bool = True, dataset: str = "cats") -> Any:
    return page.put("/api/library/excluded", json={"dataset": dataset, "file": name, "out": out})


def edit(page: TestClient, **body: Any) -> Any:
    return page.post("/api/library/edit", json={"dataset": "cats", **body})


def test_every_file_is_shown_as_it_is_trained(page: TestClient, folder: Path) -> None:
    (folder / "cats/broken.png").write_bytes((folder / "cats/0.png").read_bytes()[:60])
    (folder / "cats" / ODD).write_bytes((folder / "cats/0.png").read_bytes())
    html = show(page)
    assert names(html) == ["0.png", "1.png", "2.png", "3.png", "broken.png", quote(ODD)]
    assert "128x64 → 64x64" in html
    assert "left:25.00%;top:0.00%;width:50.00%;height:100.00%" in html
    assert "\na cat number 1</textarea>" in html
    assert "not used: has no caption file &#39;3.txt&#39; beside it" in html
    assert "not used: is truncated" in html
    assert "odd\\n\\x07&lt;b&gt;" in html.replace("<wbr>", "")
    assert save(page, ODD, "an odd cat", "").status_code == 200
    assert (folder / "cats" / ODD).with_suffix(".txt").read_text() == "an odd cat\n"


def test_a_page_reads_only_its_own_files(page: TestClient, folder: Path) -> None:
    for index in range(100, 160):
        (folder / f"cats/{index}.png").hardlink_to(folder / "cats/0.png")
    assert len(names(show(page, page=2))) == 4
    assert len(library._facts[folder / "cats"]) == 4
    assert 'max="2" value="2"' in show(page, page="99999999999")
    assert '#dataset/files/cats?words=png"' in show(page, page=2, words="png")


def test_a_new_file_is_shown(page: TestClient, folder: Path) -> None:
    assert len(names(show(page))) == 4
    (folder / "cats/9.png").hardlink_to(folder / "cats/0.png")
    assert len(names(show(page))) == 5


def test_a_caption_is_saved_unless_it_changed_outside(page: TestClient, folder: Path) -> None:
    seen = tag(show(page), "0.png")
    answer = save(page, "0.png", "a cat in a box", seen)
    assert (answer.status_code, answer.json()["note"]) == (
        200,
        "Saved. Training will use it from its next start.",
    )
    assert (folder / "cats/0.txt").read_text() == "a cat in a box\n"
    assert "a cat in a box</textarea>" in answer.json()["card"]
    conflict = save(page, "0.png", "late", seen)
    assert conflict.status_code == 412
    assert "0.txt has changed" in conflict.json()["problems"][0]["message"]
    assert "a cat in a box</textarea>" in conflict.json()["card"]
    assert (folder / "cats/0.txt").read_text() == "a cat in a box\n"
    assert save(page, "0.png", "late", tag(conflict.json()["card"], "0.png")).status_code == 200


def test_a_missing_caption_is_added(page: TestClient, folder: Path) -> None:
    assert names(show(page, only="uncaptioned")) == ["3.png"]
    answer = save(page, "3.png", "new", "")
    assert "not used" not in answer.json()["card"]
    assert names(show(page, only="uncaptioned")) == []
    emptied = save(page, "3.png", " \n", tag(answer.json()["card"], "3.png"))
    assert "not used: has an empty caption file" in emptied.json()["card"]
    assert names(show(page, only="uncaptioned")) == ["3.png"]


def test_the_run_that_uses_the_old_caption_is_named(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        folder,
        "other",
        {**CONFIG, "output_dir": "output/other"},
        {**CATS, "instance_data_dir": "dogs"},
    )
    monkeypatch.setattr(Run, "status", lambda run: {"status": "running"})
    note = save(page, "0.png", "new", tag(show(page), "0.png")).json()["note"]
    assert note == "Saved. mine keeps using the captions read at its start until it is restarted."


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("a\nb\n".encode("utf-16"), "a\nb</textarea>"),
        (b"caf\xe9", "This file has a caption file that is not UTF-8 text"),
    ],
)
def test_captions_in_other_encodings(
    content: bytes, shown: str, page: TestClient, folder: Path
) -> None:
    (folder / "cats/0.txt").write_bytes(content)
    assert shown in show(page)
    assert save(page, "0.png", "x", "0" * 32).status_code == 412
    assert (folder / "cats/0.txt").read_bytes() == content


def test_trained_form_of_an_edited_caption_is_shown(page: TestClient, folder: Path) -> None:
    write(
        folder,
        "",
        CONFIG,
        {**CATS, "instance_prompt": "zkt", "prepend_instance_prompt": True, "max_num_samples": 2},
    )
    (folder / "cats/1.txt").write_text("one\ntwo\n")
    html = show(page)
    assert "Trained as: zkt a cat number 0" in html
    assert "2 captions; one is drawn at each use." in html
    assert ("Of its files, 2 are chosen" in html, html.count("not used")) == (True, 1)


def test_search_in_names_and_captions(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(show(page, words="NUMBER 1")) == ["1.png"]
    assert names(show(page, words="3.p")) == ["3.png"]
    assert "0 files." in show(page, words="dog")
    monkeypatch.setattr(library, "PATIENCE", -1.0)
    assert "0 files; 4 were not searched" in show(page, words="cat")


def test_files_are_shown_in_the_order_that_was_asked_for(page: TestClient, folder: Path) -> None:
    (folder / "cats/1.txt").write_text("a very long caption of a cat\n")
    Image.new("RGB", (64, 32)).save(folder / "cats/2.png")

    orders = {order: names(show(page, order=order)) for order in ORDERS}

    assert orders[""] == ["0.png", "1.png", "2.png", "3.png"]
    assert orders["uncaptioned"] == ["3.png", "0.png", "1.png", "2.png"]
    assert orders["longest"] == ["1.png", "0.png", "2.png", "3.png"]
    assert orders["smallest"] == ["2.png", "0.png", "1.png", "3.png"]
    assert names(show(page, order="nonsense")) == orders[""]


def test_the_blurriest_pictures_come_first(page: TestClient, folder: Path) -> None:
    random = np.random.default_rng(0)
    sharp = Image.fromarray(random.integers(0, 255, (256, 256, 3), dtype=np.uint8))
    sharp.save(folder / "cats/1.png")
    sharp.filter(ImageFilter.GaussianBlur(3)).save(folder / "cats/2.png")

    assert names(show(page, order="blurriest"))[:2] == ["2.png", "1.png"]


def test_files_that_are_not_compared_in_time_are_counted_and_last(
    page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_order, "SECONDS", -1.0)

    html = show(page, order="longest")

    assert "4 of them are still being compared" in html
    assert len(names(html)) == 4


def test_the_size_of_a_page_can_be_chosen(page: TestClient, folder: Path) -> None:
    for index in range(100, 160):
        (folder / f"cats/{index}.png").hardlink_to(folder / "cats/0.png")

    assert len(names(show(page, size=120))) == 64
    assert len(names(show(page, size=7))) == 60


def test_the_large_view_lists_the_files_of_a_view_and_their_captions(page: TestClient) -> None:
    asked = {"dataset": "cats", "order": "uncaptioned"}

    listed = page.get("/api/library/names", params=asked).json()["names"]
    body = {"dataset": "cats", "files": [*listed[:2], "nobody.png"]}
    files = page.post("/api/library/files", json=body).json()["files"]

    assert listed == ["3.png", "0.png", "1.png", "2.png"]
    assert [(file["name"], file["text"]) for file in files] == [
        ("3.png", None),
        ("0.png", "a cat number 0\n"),
    ]
    saved = save(page, "0.png", "a cat", files[1]["tag"]).json()["file"]
    assert saved["text"] == "a cat\n"
    assert save(page, "0.png", "late", files[1]["tag"]).json()["file"] == saved


def test_an_enlarged_picture_is_marked_as_a_warning(page: TestClient, folder: Path) -> None:
    Image.new("RGB", (24, 24)).save(folder / "cats/0.png")

    assert '<span class="badge warning">enlarged 2.7 times</span>' in show(page)


def test_all_captions_change_after_a_preview(page: TestClient, folder: Path) -> None:
    preview = edit(page, find="number", replace="no.").json()
    assert preview["count"] == 3
    assert preview["first"][0] == {
        "name": "0.txt",
        "before": "a cat number 0\n",
        "after": "a cat no. 0\n",
    }
    assert (folder / "cats/0.txt").read_text() == "a cat number 0\n"
    (folder / "cats/2.txt").write_text("mine\n")
    late = edit(page, find="number", replace="no.", seen=preview["digest"])
    assert (late.status_code, late.json()["count"]) == (412, 2)
    done = edit(page, find="number", replace="no.", seen=late.json()["digest"]).json()
    assert (done["count"], (folder / "cats/0.txt").read_text()) == (2, "a cat no. 0\n")
    back = edit(page, undo=done["backup"]).json()
    edit(page, undo=done["backup"], seen=back["digest"])
    assert (folder / "cats/0.txt").read_text() == "a cat number 0\n"


def test_the_trigger_comes_first(page: TestClient, folder: Path) -> None:
    preview = edit(page, trigger="zkt").json()
    edit(page, trigger="zkt", seen=preview["digest"])
    assert (folder / "cats/1.txt").read_text() == "zkt, a cat number 1\n"
    assert edit(page, trigger="zkt").json()["count"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Enter a text to find, or a trigger word."),
        ({"undo": "../../config/config.json"}, "Enter a text to find, or a trigger word."),
        ({"undo": ".captions-1.json"}, "cannot be read"),
        ({"trigger": "a\nb"}, "on one line"),
        ({"find": "cat", "replace": "<|im_end|>"}, "control token"),
    ],
)
def test_invalid_edits_are_refused(body: dict[str, str], message: str, page: TestClient) -> None:
    answer = edit(page, **body)
    assert (answer.status_code, message in answer.text) == (422, True), answer.text


def test_file_is_excluded_and_included_again(page: TestClient, folder: Path) -> None:
    card = leave_out(page, "1.png").json()["card"]
    assert "Take back" in card
    assert "left:25.00%" in card  # it is shown as it would be trained
    assert json.loads((folder / "cats/exclude.json").read_text()) == ["1.png"]
    assert names(show(page, only="excluded")) == ["1.png"]
    assert "Leave out" in leave_out(page, "1.png", out=False).json()["card"]
    assert names(show(page, only="excluded")) == []
    (folder / "cats/exclude.json").write_text("[1")
    assert leave_out(page, "1.png").status_code == 422
    assert (folder / "cats/exclude.json").read_text() == "[1"
    assert leave_out(page, "9.png").status_code == 404
    assert page.get("/library", params={"dataset": "dogs"}).status_code == 404


LOCKED = {
    "filename": ({"caption_strategy": "filename"}, "Each file is captioned by its name."),
    "prompt": (
        {"caption_strategy": "instanceprompt", "instance_prompt": "zkt"},
        "trained with Instance Prompt",
    ),
    "table": (
        {
            "caption_strategy": "parquet",
            "metadata_backend": "parquet",
            "parquet": {"path": "t.parquet"},
        },
        "Captions come from a table",
    ),
    "hub": (
        {"type": "huggingface", "dataset_name": "me/cats", "caption_strategy": None},
        "come from huggingface",
    ),
    "mask": (
        {"dataset_type": "conditioning", "conditioning_type": "mask"},
        "These are partners or masks",
    ),
}


@pytest.mark.parametrize(("keys", "message"), LOCKED.values(), ids=LOCKED)
def test_captions_of_tables_and_sources_cannot_be_edited(
    keys: dict[str, Any], message: str, page: TestClient, folder: Path
) -> None:
    changed = {key: value for key, value in {**CATS, **keys}.items() if value is not None}
    (folder / "dogs").mkdir()
    write(folder, "", CONFIG, changed, {**CATS, "id": "dogs", "instance_data_dir": "dogs"})
    html = show(page)
    assert message in html
    assert "<textarea" not in html
    for answer in (save(page, "0.png", "x", ""), edit(page, find="cat"), edit(page, trigger="zkt")):
        assert (answer.status_code, message in answer.text) == (403, True), answer.text
    is_own = not {"type", "conditioning_type"} & keys.keys()
    assert leave_out(page, "0.png").status_code == (200 if is_own else 403)
    assert (folder / "cats/0.txt").read_text() == "a cat number 0\n"


def test_packaged_examples_are_only_shown(page: TestClient) -> None:
    asked = {"config": "examples/demo", "dataset": "glimmers"}
    html = page.get("/library", params=asked).text
    assert "copy the example to change it" in html
    assert "<textarea" not in html
    assert "96x96 → 96x96" in html
    body = {**asked, "file": "glimmer-01.png"}
    assert page.put("/api/library/caption", json={**body, "text": "x"}).status_code == 403
    assert page.put("/api/library/excluded", json={**body, "out": True}).status_code == 403
    picture = re.findall(r'src="(/library/thumbnail[^"]+)"', html)[0].replace("&amp;", "&")
    assert page.get(picture).headers["content-type"] == "image/webp"


def test_pairs_are_cropped_as_they_are_trained(page: TestClient, folder: Path) -> None:
    (folder / "masks").mkdir()
    for index in range(3):
        Image.new("L", (128, 64), 255).save(folder / f"masks/{index}.png")
    mask = {
        "id": "masks",
        "type": "local",
        "dataset_type": "conditioning",
        "conditioning_type": "mask",
    }
    masks = {**mask, "instance_data_dir": "masks"}
    write(folder, "", CONFIG, {**CATS, "conditioning_data": "masks"}, masks)
    (folder / "cats/3.txt").write_text("no mask")
    html = show(page)
    assert html.count("128x64 → 64x64") == 3
    assert "not used: has no partner in masks" in html


def test_nothing_outside_the_project_is_shown_or_written(page: TestClient, folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret\n")
    Image.new("RGB", (8, 8)).save(outside / "secret.png")
    (folder / "cats/3.txt").symlink_to(outside / "secret.txt")
    assert save(page, "3.png", "x", editing.tag_of("secret\n")).status_code == 403
    assert (outside / "secret.txt").read_text() == "secret\n"
    for route in ("thumbnail", "media"):
        assert (
            page.get(f"/library/{route}", params={"path": str(outside / "secret.png")}).status_code
            == 403
        )
        assert (
            page.get(f"/library/{route}", params={"path": "config/config.json"}).status_code == 404
        )
    write(folder, "", CONFIG, {**CATS, "exclude_files": "../../list.json"})
    assert leave_out(page, "0.png").status_code in (403, 422)
    write(folder, "", CONFIG, {**CATS, "instance_data_dir": "gone"})
    assert "is not a folder" in page.get("/library", params={"dataset": "cats"}).text
    write(folder, "", CONFIG, {**CATS, "instance_data_dir": str(outside)})
    assert page.get("/library", params={"dataset": "cats"}).status_code == 422


def link_out(folder: Path, *names: str) -> None:
    """Move files of the dataset out of the project, and leave links to them."""
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir(exist_ok=True)
    for name in names:
        (folder / "cats" / name).rename(outside / name)
        (folder / "cats" / name).symlink_to(outside / name)


@pytest.mark.parametrize(
    "asked", [{}, {"words": "cat"}, {"only": "uncaptioned"}], ids=["all", "search", "uncaptioned"]
)
def test_a_caption_behind_a_link_out_of_the_project_is_named_and_not_shown(
    page: TestClient, folder: Path, asked: dict[str, str]
) -> None:
    link_out(folder, "1.txt")

    html = show(page, **asked)

    assert "a cat number 1" not in html
    if not asked:
        assert (
            html.count(
                "1.txt is behind a link out of the project; to allow its folder, start the "
                "server with --root."
            )
            == 1
        )


@pytest.mark.parametrize("table", ["metadata.jsonl", "metadata.csv"])
def test_captions_of_a_table_behind_a_link_are_not_shown(
    page: TestClient, folder: Path, table: str
) -> None:
    rows = {
        "metadata.jsonl": '{"file_name": "0.png", "text": "a secret"}\n',
        "metadata.csv": "file_name,text\n0.png,a secret\n",
    }
    (folder / "cats" / table).write_text(rows[table])
    write(folder, "", CONFIG, {**CATS, "caption_strategy": "metadata"})
    assert "a secret" in show(page)

    link_out(folder, table)

    html = show(page)
    assert "a secret" not in html
    assert f"{table} is behind a link out of the project" in html


def test_a_picture_behind_a_link_out_of_the_project_is_named(
    page: TestClient, folder: Path
) -> None:
    link_out(folder, "1.png")

    html = show(page)

    assert html.count("1.png is behind a link out of the project") == 1
    assert "1.png&amp;stamp" not in html
    assert html.count("a cat number 1") >= 1


def test_links_out_of_the_project_are_shown_with_root(folder: Path) -> None:
    link_out(folder, "1.txt")
    outside = folder.parent / f"{folder.name}-outside"

    html = show(TestClient(create_app(Project(folder, (outside,)))))

    assert "a cat number 1" in html


@pytest.mark.parametrize(
    "request_body", [{"find": "cat"}, {"trigger": "zkt"}], ids=["find", "trigger"]
)
def test_a_link_out_of_the_project_is_named_and_does_not_block_an_edit(
    page: TestClient, folder: Path, request_body: dict[str, str]
) -> None:
    link_out(folder, "1.txt")

    preview = edit(page, **request_body, replace="dog").json()
    applied = edit(page, **request_body, replace="dog", seen=preview["digest"])

    assert (preview["count"], preview["linked"]) == (2, ["1.txt"])
    assert applied.json()["count"] == 2
    assert (folder / "cats/1.txt").read_text() == "a cat number 1\n"


@pytest.mark.parametrize("name", ["1.txt", "1.png"])
def test_the_page_of_a_dataset_names_a_link_out_of_the_project(
    page: TestClient, folder: Path, name: str
) -> None:
    link_out(folder, name)

    answer = page.get("/dataset?config=config")

    assert answer.status_code == 422
    problem = answer.json()["problems"][0]
    assert problem["key"] == "cats"
    assert problem["message"].startswith(
        f"{name} is behind a link out of the project. Start the server with --root"
    )


def test_thumbnails_are_small_and_kept_by_the_browser(page: TestClient, folder: Path) -> None:
    Image.new("RGB", (4000, 1000)).save(folder / "cats/large.png")
    answer = page.get("/library/thumbnail", params={"path": "cats/large.png"})
    assert Image.open(io.BytesIO(answer.content)).size == (320, 80)
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    (folder / "cats/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert page.get("/library/thumbnail", params={"path": "cats/broken.png"}).status_code == 422
    write_clip(folder / "cats/clip.mp4", seconds=0.5)
    answer = page.get("/library/thumbnail", params={"path": "cats/clip.mp4"})
    assert Image.open(io.BytesIO(answer.content)).format == "WEBP"
    part = page.get(
        "/library/media", params={"path": "cats/clip.mp4"}, headers={"Range": "bytes=0-9"}
    )
    assert (part.status_code, len(part.content), part.headers["content-type"]) == (
        206,
        10,
        "video/mp4",
    )


def test_clip_is_labelled_as_a_clip(page: TestClient, folder: Path) -> None:
    frames = [Image.new("RGB", (96, 96), (20 * index, 80, 80)) for index in range(9)]
    frames[0].save(folder / "cats/moving.gif", save_all=True, append_images=frames[1:], duration=80)
    write_clip(folder / "cats/clip.mp4", seconds=0.5)
    write(folder, "", {**CONFIG, "model_family": "sanavideo"}, {**CATS, "dataset_type": "video"})
    cards = {card.partition('"')[0]: card for card in show(page).split('data-file="')[1:]}
    assert '<span class="badge">clip: its first frame</span>' in cards["moving.gif"]
    assert '<span class="badge">clip</span>' in cards["clip.mp4"]


def test_missing_captions_are_a_job_of_the_queue(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what starts after the server was started again waits for them, too."""
    started: list[list[str]] = []
    children: list[subprocess.Popen[bytes]] = []

    def spawn(runs: Runs, console: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        started.append(arguments)
        console.write_text("$ simpletuner caption\nWriting captions: 30/100\n")
        children.append(subprocess.Popen(["sleep", "600"]))
        return children[-1]

    monkeypatch.setattr(Runs, "spawn", spawn)
    runner = cast(Any, page.app).state.runner
    assert page.get("/api/library/describe").json()["running"] is False
    body = {"dataset": "cats", "style": "short", "trigger": "zkt"}
    assert page.post("/api/library/describe", json=body).status_code == 202
    runner.queue.add("sweep", str(folder / "output/mine"))
    assert "Waiting in the queue" in page.get("/api/library/describe").json()["message"]
    runner.step()
    file = f"--config={folder / 'config/config.json'}"
    assert started == [["caption", "--dataset=cats", "--style=short", "--trigger=zkt", file]]
    job = runner.queue.read()[0]
    progress = {
        "job": job.id,
        "config": "config",
        "dataset": "cats",
        "running": True,
        "message": "Writing captions: 30/100",
    }
    assert page.get("/api/library/describe").json() == progress
    assert page.post("/api/library/describe", json=body).status_code == 409
    again = create_app(Project(folder)).state.runner
    again.step()
    assert [job.state for job in again.queue.read()] == ["running", "waiting"]
    assert (
        page.post("/api/training/queue/remove", json={"job": job.id}).status_code == 200
    )  # Ctrl-C
    (folder / "output/mine/caption.log").write_text("$ simpletuner caption\nInterrupted.\n")
    children[0].wait(PATIENCE)
    again.step()
    states = [(job.command, job.state) for job in again.queue.read()]
    assert states == [("caption", "cancelled"), ("sweep", "running")]
    assert page.get("/api/library/describe").json()["running"] is False
    children[1].kill()
    children[1].wait(PATIENCE)


def describe(page: TestClient, **body: Any) -> Any:
    return page.post("/api/library/describe", json={"dataset": "cats", **body})


def test_a_server_of_this_machine_writes_captions_as_a_job(page: TestClient) -> None:
    answer = describe(page, address="http://localhost:1234", model="llava")

    (job,) = cast(Any, page.app).state.runner.queue.read()
    assert answer.status_code == 202
    assert job.options[:3] == [
        "--dataset=cats",
        "--address=http://localhost:1234/v1",
        "--model=llava",
    ]
    assert "--send-to-network" not in job.options


def test_a_server_of_the_network_needs_consent_on_the_page(page: TestClient) -> None:
    refused = describe(page, address="https://api.example.com/v1")
    agreed = describe(page, address="https://api.example.com/v1", send=True)

    (problem,) = refused.json()["problems"]
    (job,) = cast(Any, page.app).state.runner.queue.read()
    assert (refused.status_code, agreed.status_code) == (409, 202)
    assert problem["key"] == "send"
    assert "would be sent to api.example.com, which is not this machine" in problem["message"]
    assert "--send-to-network" in job.options


@pytest.mark.parametrize(("address", "gets_key"), [("/v1", True), ("/other", False)])
def test_only_the_address_that_the_host_named_gets_the_key_from_the_page(
    address: str, gets_key: bool, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_captions("llava") as server:
        base = server.address.removesuffix("/v1")
        monkeypatch.setenv("CAPTION_ADDRESS", server.address)
        monkeypatch.setenv("CAPTION_API_KEY", "local-9f3b77aa21")

        page.post("/api/library/models", json={"address": base + address})
        describe(page, address=base + address)

    (job,) = cast(Any, page.app).state.runner.queue.read()
    assert server.keys == ["Bearer local-9f3b77aa21" if gets_key else None]
    assert ("--without-key" in job.options) is not gets_key
    assert "local-9f3b77aa21" not in str(job)


def test_models_of_a_server_are_proposed(page: TestClient) -> None:
    with serve_captions("llava", "qwen") as server:
        answer = page.post("/api/library/models", json={"address": server.address})
        far = page.post("/api/library/models", json={"address": "http://10.0.0.1/v1"})

    assert answer.json() == {"models": ["llava", "qwen"]}
    assert far.status_code == 409
    assert page.post("/api/library/models", json={"address": "nowhere"}).status_code == 422


def test_killed_captioning_is_reported(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def spawn(runs: Runs, console: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        console.write_text("$ simpletuner caption\nWriting captions: 30/100\n")
        children.append(subprocess.Popen(["sleep", "600"]))
        return children[-1]

    monkeypatch.setattr(Runs, "spawn", spawn)
    runner = cast(Any, page.app).state.runner
    page.post("/api/library/describe", json={"dataset": "cats"})
    runner.step()
    children[0].kill()
    children[0].wait(PATIENCE)
    runner.step()
    state = page.get("/api/library/describe").json()
    assert state["running"] is False
    assert state["message"] == "Ended unexpectedly. Its last line: Writing captions: 30/100"


@pytest.mark.slow(4)
def test_files_in_a_browser(browser: Any, folder: Path) -> None:
    with opened(browser, folder, "#dataset") as page:
        page.get_by_role("link", name="Files", exact=True).click()
        dialog = page.get_by_role("dialog", name="cats")
        caption = dialog.get_by_label("Caption of 0.png")
        caption.fill("typed")
        caption.press("Control+Enter")
        dialog.get_by_text("Saved. Training will use it").wait_for()
        assert page.evaluate("document.activeElement.ariaLabel") == "Caption of 1.png"
        assert (folder / "cats/0.txt").read_text() == "typed\n"
        dialog.get_by_role("button", name="Leave out 1.png").click()
        dialog.get_by_role("button", name="Take back 1.png").wait_for()
        dialog.get_by_label("Show", exact=True).select_option("Left out")
        dialog.get_by_text("1 file.").wait_for()
        page.go_back()
        dialog.get_by_text("4 files.").wait_for()
        box = dialog.locator(".box").first.bounding_box()
        frame = dialog.locator(".frame").first.bounding_box()
        assert box["width"] == pytest.approx(frame["width"] / 2, abs=1)
        page.go_back()
        dialog.wait_for(state="hidden")


@pytest.mark.slow(4)
def test_captions_are_written_one_after_another_in_a_browser(browser: Any, folder: Path) -> None:
    from playwright.sync_api import expect

    (folder / "cats/1.txt").unlink()
    with opened(browser, folder, "#dataset/files/cats") as page:
        page.set_viewport_size({"width": 400, "height": 800})
        page.get_by_role("button", name="Write captions one by one").click()
        writer = page.get_by_role("dialog", name="1.png")
        writer.get_by_text("2 of 4").wait_for()
        page.keyboard.type("a red cat")
        page.keyboard.press("Control+Enter")
        page.get_by_role("dialog", name="3.png").get_by_text("4 of 4").wait_for()
        page.keyboard.type("a blue cat")
        page.keyboard.press("Escape")
        library = page.get_by_role("dialog", name="cats")
        expect(library.get_by_label("Caption of 3.png")).to_have_value("a blue cat")
        assert (folder / "cats/1.txt").read_text() == "a red cat\n"
        assert (folder / "cats/3.txt").read_text() == "a blue cat\n"


@pytest.mark.slow(4)
def test_a_replacement_in_a_browser(browser: Any, folder: Path) -> None:
    with opened(browser, folder, "#dataset/files/cats") as page:
        page.set_viewport_size({"width": 400, "height": 800})
        dialog = page.get_by_role("dialog", name="cats")
        dialog.get_by_text("Change or write many captions").click()
        dialog.get_by_label("Find in all captions").fill("cat")
        dialog.get_by_label("Replace by").fill("fox")
        dialog.get_by_role("button", name="Preview").click()
        dialog.get_by_role("button", name="Change 3 captions").click()
        dialog.get_by_text("3 captions changed.").wait_for()
        assert dialog.get_by_label("Caption of 2.png").input_value() == "a fox number 2"
        dialog.get_by_role("button", name="Undo").click()
        dialog.get_by_role("button", name="Change 3 captions").click()
        dialog.get_by_text("3 captions changed.").wait_for()
        assert (folder / "cats/2.txt").read_text() == "a cat number 2\n"


@pytest.mark.slow(4)
def test_a_conflict_in_a_browser(browser: Any, folder: Path) -> None:
    """Both texts are seen, and nothing typed is lost by leaving."""
    with opened(browser, folder, "#dataset/files/cats") as page:
        dialog = page.get_by_role("dialog", name="cats")
        caption = dialog.get_by_label("Caption of 0.png")
        caption.wait_for()
        (folder / "cats/0.txt").write_text("from outside\n")
        caption.fill("from here")
        page.keyboard.press("Escape")
        dialog.get_by_text("from outside").wait_for()
        assert page.evaluate("location.hash") == "#dataset/files/cats"
        assert caption.input_value() == "from here"
        dialog.get_by_role("button", name="Save mine").click()
        dialog.get_by_text("Saved. Training will use it").wait_for()
        assert (folder / "cats/0.txt").read_text() == "from here\n"
        caption.fill("last words")  # leaving saves them
        page.keyboard.press("Escape")
        dialog.wait_for(state="hidden")
        assert (folder / "cats/0.txt").read_text() == "last words\n"


def drawn(
    white: tuple[int, int, int, int] | None = (64, 0, 96, 64), size: tuple[int, int] = (128, 64)
) -> str:
    """A mask as the page sends it."""
    picture = Image.new("L", size)
    file = io.BytesIO()
    if white:
        picture.paste(255, white)
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def save_mask(page: TestClient, name: str, mask: str, seen: str = "", dataset: str = "cats") -> Any:
    body = {"dataset": dataset, "file": name, "mask": mask}
    return page.put(
        "/api/library/mask", json=body, headers={"If-Match": f'"{seen}"'} if seen else {}
    )


def stamp(card: str) -> str:
    return re.findall(r'aria-label="Mask of [^>]*data-tag="([^"]*)"', card)[0]


def test_the_first_mask_makes_a_dataset_of_masks(page: TestClient, folder: Path) -> None:
    before = json.loads((folder / "config/multidatabackend.json").read_text())
    answer = save_mask(page, "0.png", drawn()).json()
    assert "Other files got white masks (3)" in answer["note"]
    assert "config/multidatabackend.json has a new dataset, cats-masks." in answer["note"]
    assert "50&nbsp;% is learned" in answer["card"]  # of the crop, which is 32 to 96
    made = json.loads((folder / "config/multidatabackend.json").read_text())
    assert made[:-1] == before
    assert (made[-1]["id"], made[-1]["instance_data_dir"]) == ("cats-masks", "cats_masks")
    assert {path.name: Image.open(path).getextrema() for path in folder.glob("cats_masks/*")} == {
        "0.png": (0, 255),
        **dict.fromkeys(("1.png", "2.png", "3.png"), (255, 255)),
    }
    html = show(page)
    assert "no partner" not in html
    assert html.count("% is learned") == 1
    again = save_mask(page, "0.png", drawn((64, 0, 80, 64)), stamp(answer["card"])).json()
    assert again["note"] == "Saved. Training will use it from its next start."
    assert "25&nbsp;% is learned" in again["card"]
    assert json.loads((folder / "config/multidatabackend.json").read_text()) == made


def test_existing_masks_are_kept(page: TestClient, folder: Path) -> None:
    (folder / "cats_masks").mkdir()
    for name in ("0.png", "1.jpg"):
        Image.new("L", (128, 64), 128).save(folder / "cats_masks" / name)
    kept = {path: path.read_bytes() for path in folder.glob("cats_masks/*")}
    conflict = save_mask(page, "0.png", drawn())
    assert (conflict.status_code, "0.png has changed" in conflict.text) == (412, True)
    assert "in another format" in save_mask(page, "1.png", drawn()).text
    assert save_mask(page, "2.png", drawn()).status_code == 200
    assert kept == {path: path.read_bytes() for path in kept}
    html = show(page)
    assert html.count("50.2&nbsp;% is learned") == 2
    assert 'aria-label="Mask of 1.png"' not in html


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (drawn(None), "The mask is black"),
        (drawn(size=(64, 64)), "The mask is 64x64 and its file 128x64: the aspect ratios differ."),
        ("data:image/png;base64,AAAA", "The mask is not a picture."),
        ("data:image/png;base64,A", "The mask is not sent as a data URI"),
    ],
)
def test_invalid_masks_are_refused(mask: str, message: str, page: TestClient, folder: Path) -> None:
    (folder / "cats/broken.png").write_bytes(b"?")
    assert "broken.png is not a picture." in save_mask(page, "broken.png", drawn()).text
    answer = save_mask(page, "0.png", mask)
    assert (answer.status_code, message in answer.text) == (422, True), answer.text
    assert not (folder / "cats_masks").exists()


def test_masks_that_cannot_be_painted(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletuner.annexes.captions.masks.MOST_FILLED", 2)
    assert "3 files have no mask" in save_mask(page, "0.png", drawn()).text
    assert not (folder / "cats_masks").exists()
    mask = {
        **CATS,
        "id": "m",
        "dataset_type": "conditioning",
        "conditioning_type": "mask",
        "source_dataset_id": "cats",
    }
    write(folder, "", CONFIG, CATS, {**mask, "type": "huggingface", "dataset_name": "me/masks"})
    assert "The masks come from huggingface" in save_mask(page, "0.png", drawn()).text
    assert 'class="paint"' not in show(page)


def test_without_permission_nothing_is_half_written(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **more: not mode & os.W_OK and may(path, mode, **more)
    )
    before = sorted(folder.rglob("*"))
    for answer in (
        save_mask(page, "0.png", drawn()),
        page.post("/api/library/describe", json={"dataset": "cats"}),
        page.put("/api/configs/config", json={"values": {"lora_rank": 4}}),
    ):
        assert (answer.status_code, "cannot be written to (no permission in" in answer.text) == (
            403,
            True,
        ), answer.text
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_mask_is_painted_and_planned(browser: Any, folder: Path) -> None:
    (folder / "cats/3.txt").write_text("a cat number 3\n")
    with opened(browser, folder, "#dataset/files/cats") as page:
        page.get_by_role("button", name="Mask of 0.png").click()
        painter = page.get_by_role("dialog", name="Mask of 0.png")
        canvas = painter.locator("canvas")
        save = painter.get_by_role("button", name="Save")
        painter.get_by_text("Nothing is painted yet").wait_for()
        assert save.is_disabled()
        tint = "canvas => canvas.getContext('2d').getImageData(0, 0, 1, 1).data[3]"
        assert canvas.evaluate(tint) == 0, "all is learned, so nothing is tinted yet"
        painter.get_by_label("Size").fill("50")
        canvas.click(position={"x": canvas.bounding_box()["width"] / 2, "y": 1})
        # Half a circle of a quarter of the height, pi / 32 of the crop.
        painter.get_by_text(
            re.compile(r"^(9|10)\.\d+ % of the trained crop is learned\.")
        ).wait_for()
        assert canvas.evaluate(tint) == 255
        canvas.press("ArrowDown")
        canvas.press(" ")
        painter.get_by_role("button", name="Undo").click()
        painter.get_by_role("button", name="Learn all").click()
        painter.get_by_text("100 % of the trained crop is learned.").wait_for()
        half = base64.b64decode(drawn().partition(",")[2])
        painter.get_by_label("Choose a file").set_input_files(
            {"name": "m.png", "mimeType": "", "buffer": half}
        )
        painter.get_by_text("50 % of the trained crop is learned.").wait_for()
        page.keyboard.press("Escape")
        painter.get_by_text("The mask has not been saved.").wait_for()
        save.click()
        files = page.get_by_role("dialog", name="cats")
        files.get_by_text("config/multidatabackend.json has a new dataset").wait_for()
        assert files.get_by_text("50 % is learned").is_visible()
        page.keyboard.press("Escape")
        page.get_by_text("4 of 4 files used, 87.5 % learned").wait_for()
    assert Image.open(folder / "cats_masks/0.png").getbbox() == (64, 0, 96, 64)
