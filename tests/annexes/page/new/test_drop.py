"""The files of a drop: their faults, their captions, those that are left out, and the run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter
from starlette.testclient import TestClient

from simpletuner.annexes.page.new import drop_looks
from simpletuner.data.clips import probe_clip
from tests.annexes.page.new.test_start_card import put, zipped
from tests.tools.clips import write_clip
from tests.tools.web_server import picture

SUBJECT = {"purpose": "subject", "trigger": "zkt, a grey cat"}


def sharp(seed: int = 0, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """A picture of random squares, with sharp edges."""
    cells = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), np.uint8)
    return Image.fromarray(cells).resize(size, Image.Resampling.NEAREST)


def encoded(shown: Image.Image) -> bytes:
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()


def clip_bytes(folder: Path, seconds: float) -> bytes:
    path = folder / "clip.mp4"
    write_clip(path, seconds=seconds, size=(64, 48))
    content = path.read_bytes()
    path.unlink()
    return content


def upload(page: TestClient, files: dict[str, bytes], name: str = "") -> str:
    """The folder of new dropped files."""
    place: dict[str, str] = page.post("/api/uploads", json={"name": name}).json()
    for file, content in files.items():
        answer = put(page, file, content, place["name"])
        assert answer.status_code == 201, answer.text
    return place["folder"]


def files_of(page: TestClient, folder: str, **answers: Any) -> dict[str, Any]:
    """The files once all have been looked at."""
    while True:
        answer = page.post("/api/drop/files", json={"folder": folder, **answers})
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        if shown["looked"] == shown["all"]:
            return shown


def faults_of(page: TestClient, folder: str, **answers: Any) -> dict[str, list[str]]:
    """The kinds of faults, by file."""
    shown = files_of(page, folder, **answers)["files"]
    return {file["name"]: [fault["kind"] for fault in file["faults"]] for file in shown}


def write(page: TestClient, folder: str, **answers: Any) -> Any:
    return page.post("/api/start/write", json={"folder": folder, **SUBJECT, **answers})


def leave_out(page: TestClient, folder: str, **what: Any) -> None:
    answer = page.post("/api/drop/out", json={"folder": folder, "out": True, **what})
    assert answer.status_code == 200, answer.text


def entry_of(folder: Path, name: str) -> Any:
    return json.loads((folder / f"config/{name}/multidatabackend.json").read_text())[0]


def test_a_blurred_picture_is_marked_and_sharp_ones_are_not(page: TestClient) -> None:
    pictures = {f"{seed}.png": encoded(sharp(seed)) for seed in range(3)}
    pictures["soft.png"] = encoded(sharp(9).filter(ImageFilter.GaussianBlur(6)))

    faults = faults_of(page, upload(page, pictures))

    assert [name for name, kinds in faults.items() if "blurred" in kinds] == ["soft.png"]


def test_where_most_pictures_are_soft_none_is_marked(page: TestClient) -> None:
    soft = ImageFilter.GaussianBlur(6)
    pictures = {f"{seed}.png": encoded(sharp(seed).filter(soft)) for seed in range(3)}
    pictures["sharp.png"] = encoded(sharp(9))

    faults = faults_of(page, upload(page, pictures))

    assert all("blurred" not in kinds for kinds in faults.values())


@pytest.mark.parametrize("size", [(320, 240), (300, 226)])
def test_a_copy_of_a_picture_is_marked_with_the_larger_one(
    page: TestClient, size: tuple[int, int]
) -> None:
    folder = upload(page, {"b.png": encoded(sharp()), "c.png": encoded(sharp().resize(size))})

    (shown,) = [file for file in files_of(page, folder)["files"] if file["name"] == "c.png"]

    assert {"kind": "duplicate", "detail": "b.png", "leaves_out": False} in shown["faults"]


def test_the_other_copy_is_no_duplicate_once_one_is_left_out(page: TestClient) -> None:
    folder = upload(page, {"b.png": encoded(sharp()), "c.png": encoded(sharp())})

    leave_out(page, folder, kind="duplicate")

    assert faults_of(page, folder) == {"b.png": ["small"], "c.png": []}


def test_few_small_pictures_are_said_to_be_left_out(page: TestClient) -> None:
    pictures = {f"{seed}.png": encoded(sharp(seed, (1100, 1100))) for seed in range(5)}
    folder = upload(page, {**pictures, "small.png": encoded(sharp(9))})

    shown = {file["name"]: file["faults"] for file in files_of(page, folder)["files"]}

    assert shown["small.png"] == [{"kind": "small", "detail": "320x240", "leaves_out": True}]
    assert shown["0.png"] == []


def test_small_pictures_are_trained_too_at_the_size_of_the_remedy(page: TestClient) -> None:
    pictures = {f"{seed}.png": encoded(sharp(seed, (1100, 1100))) for seed in range(5)}
    folder = upload(page, {**pictures, "small.png": encoded(sharp(9, (640, 512)))})

    smaller = page.post("/api/start/look", json={"folder": folder, **SUBJECT}).json()["smaller"]

    assert smaller == 512
    assert faults_of(page, folder, resolution=smaller)["small.png"] == []
    assert write(page, folder, resolution=smaller, name="all").status_code == 201
    assert json.loads(Path("config/all/config.json").read_text())["resolution"] == 512


def test_a_clip_that_is_too_short_is_marked(page: TestClient, folder: Path) -> None:
    long = clip_bytes(folder, 2.6)
    clips = {f"{number}.mp4": long for number in range(4)}
    dropped = upload(page, {**clips, "short.mp4": clip_bytes(folder, 0.5)})

    shown = {file["name"]: file for file in files_of(page, dropped)["files"]}

    (short,) = [fault for fault in shown["short.mp4"]["faults"] if fault["kind"] == "short"]
    assert short["leaves_out"]
    assert short["detail"].startswith("0.5 s of ")
    assert shown["0.mp4"]["seconds"] == pytest.approx(
        probe_clip(folder / dropped / "0.mp4").seconds
    )


def test_a_damaged_file_of_the_project_is_marked(page: TestClient, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/a.png").write_bytes(picture(1))
    (folder / "mine/torn.png").write_bytes(picture(2)[:60])

    assert faults_of(page, "mine")["torn.png"] == ["unreadable"]


def test_a_link_out_of_the_project_is_not_decoded(
    page: TestClient, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "a.png"
    secret.write_bytes(picture(1))
    (folder / "mine").mkdir()
    (folder / "mine/link.png").symlink_to(secret)
    (folder / "mine/b.png").write_bytes(picture(2))

    (link,) = [file for file in files_of(page, "mine")["files"] if file["name"] == "link.png"]

    assert link["faults"][0]["detail"] == "is behind a link out of the project"


def test_files_are_looked_at_a_few_in_each_request(
    page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = upload(page, {f"{seed}.png": picture(seed) for seed in range(3)})
    times = iter(range(1000))
    monkeypatch.setattr(drop_looks.time, "monotonic", lambda: next(times))

    first = page.post("/api/drop/files", json={"folder": folder}).json()

    assert 0 < first["looked"] < first["all"]
    assert len(first["files"]) == 3


def test_ten_thousand_files_are_shown_a_page_at_a_time(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_looks, "measure", lambda path, now: drop_looks.Look(now))
    (folder / "many").mkdir()
    for number in range(10_000):
        (folder / f"many/{number:05}.png").touch()

    shown = page.post("/api/drop/files", json={"folder": "many", "from": 120}).json()

    assert (shown["all"], len(shown["files"])) == (10_000, 60)
    assert shown["files"][0]["name"] == "00120.png"


def test_a_file_that_is_left_out_stays_and_the_run_does_not_train_it(
    page: TestClient, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from simpletuner.cli.app import main

    dropped = upload(page, {f"{seed}.png": encoded(sharp(seed)) for seed in range(6)})

    leave_out(page, dropped, files=["3.png"])

    assert write(page, dropped).json()["config"] == "zkt"
    assert (folder / "datasets/zkt/3.png").is_file()
    assert entry_of(folder, "zkt")["exclude_files"] == "exclude.json"
    main(["plan", "env=zkt", "--json"])
    trained = json.loads(capsys.readouterr().out)["datasets"][0]
    assert trained["used"] == 5
    assert {"file": "3.png", "reason": "is left out by exclude.json"} in trained["left_out"]


def test_a_file_is_taken_in_again(page: TestClient, folder: Path) -> None:
    dropped = upload(page, {"a.png": picture(1), "b.png": picture(2)})
    leave_out(page, dropped, files=["a.png", "b.png"])

    page.post("/api/drop/out", json={"folder": dropped, "out": False, "files": ["b.png"]})

    shown = {file["name"]: file["out"] for file in files_of(page, dropped)["files"]}
    assert shown == {"a.png": True, "b.png": False}
    assert json.loads((folder / dropped / "exclude.json").read_text()) == ["a.png"]


def test_files_of_kohya_folders_are_left_out_of_their_dataset(
    page: TestClient, folder: Path
) -> None:
    names = [f"10_zkt cat/{seed}.png" for seed in range(6)]
    dropped = upload(page, {name: picture(seed) for seed, name in enumerate(names)})

    leave_out(page, dropped, files=[names[2]])

    assert json.loads((folder / dropped / "10_zkt cat/exclude.json").read_text()) == ["2.png"]
    assert page.post("/api/start/look", json={"folder": dropped}).json()["files"] == 5


def test_a_file_that_the_folder_lacks_cannot_be_left_out(page: TestClient) -> None:
    dropped = upload(page, {"a.png": picture(1)})

    answer = page.post("/api/drop/out", json={"folder": dropped, "files": ["../x"], "out": True})

    assert answer.status_code == 404


def test_a_caption_is_written_beside_its_file(page: TestClient, folder: Path) -> None:
    dropped = upload(page, {"a b.png": picture(1)})
    body = {"folder": dropped, "file": "a b.png", "text": "on a chair"}

    answer = page.put("/api/drop/caption", json=body)

    assert answer.json()["file"]["text"] == "on a chair\n"
    assert (folder / dropped / "a b.txt").read_text() == "on a chair\n"


def test_a_caption_that_changed_meanwhile_is_not_overwritten(
    page: TestClient, folder: Path
) -> None:
    dropped = upload(page, {"a.png": picture(1), "a.txt": b"theirs"})

    answer = page.put("/api/drop/caption", json={"folder": dropped, "file": "a.png", "text": "x"})

    assert answer.status_code == 412
    assert answer.json()["file"]["text"] == "theirs"
    assert (folder / dropped / "a.txt").read_text() == "theirs"


def test_captions_of_a_table_are_not_edited(page: TestClient) -> None:
    rows = b'{"file_name": "a.png", "text": "a cat"}\n'
    dropped = upload(page, {"a.png": picture(1), "metadata.jsonl": rows})

    answer = page.put("/api/drop/caption", json={"folder": dropped, "file": "a.png", "text": "x"})

    assert answer.status_code == 403
    assert "table" in answer.json()["problems"][0]["message"]


def test_a_start_that_leaves_many_files_out_asks_first(page: TestClient, folder: Path) -> None:
    dropped = upload(page, {f"{seed}.png": picture(seed) for seed in range(8)})
    for name in ("1", "2"):
        (folder / dropped / f"{name}.txt").write_text("on a chair")

    asked = write(page, dropped)

    assert asked.status_code == 409
    assert asked.json()["problems"][0]["message"] == (
        "6 of 8 pictures would be left out: 6 without a caption. 2 others would be trained."
    )
    assert not (folder / "config").exists()
    assert write(page, dropped, agreed=True).status_code == 201
    config = json.loads((folder / "config/zkt/config.json").read_text())
    assert config["max_train_steps"] == 600, "of two files"


def test_a_start_that_leaves_few_files_out_does_not_ask(page: TestClient, folder: Path) -> None:
    dropped = upload(page, {f"{seed}.png": picture(seed) for seed in range(8)})
    for seed in range(7):
        (folder / dropped / f"{seed}.txt").write_text("on a chair")

    assert write(page, dropped).status_code == 201


def test_captions_of_the_rest_are_no_reason_to_ask(page: TestClient, folder: Path) -> None:
    dropped = upload(page, {"0.png": picture(0), "1.png": picture(1), "1.txt": b"on a chair"})

    written = write(page, dropped, captions=True)

    assert written.status_code == 201
    assert entry_of(folder, "zkt")["caption_strategy"] == "textfile"


def test_an_edit_without_captions_is_refused(page: TestClient) -> None:
    dropped = upload(page, {"before/a.png": picture(1), "after/a.png": picture(2)})

    answer = page.post("/api/start/write", json={"folder": dropped})

    assert answer.status_code == 422
    assert "1 of 1 picture would be left out" in answer.json()["problems"][0]["message"]


@pytest.mark.parametrize("trigger", ["zkt", "", "zkt,", ", a cat"])
def test_a_subject_needs_a_word_and_what_it_is(page: TestClient, trigger: str) -> None:
    dropped = upload(page, {"a.png": picture(1)})

    answer = write(page, dropped, trigger=trigger)

    assert answer.status_code == 422
    (problem,) = answer.json()["problems"]
    assert (problem["key"], "zkt, a grey cat" in problem["message"]) == ("trigger", True)


@pytest.mark.parametrize(
    ("dropped_as", "trigger", "name", "folder_name"),
    [
        ("", "zkt, a grey cat", "zkt", "zkt"),
        ("", "Zoë K, a woman", "Zoë-K", "Zoë-K"),
        ("my cats", "zkt, a grey cat", "my-cats", "my-cats"),
    ],
)
def test_a_run_and_its_folder_are_named_by_the_words(
    page: TestClient, folder: Path, dropped_as: str, trigger: str, name: str, folder_name: str
) -> None:
    dropped = upload(page, {"a.png": picture(1)}, dropped_as)

    assert write(page, dropped, trigger=trigger).json()["config"] == name

    assert entry_of(folder, name)["instance_data_dir"] == f"datasets/{folder_name}"
    assert sorted(path.name for path in (folder / "datasets").iterdir()) == [folder_name]
    assert sorted(path.name for path in (folder / "datasets" / folder_name).iterdir()) == ["a.png"]


def test_a_second_drop_of_the_same_words_gets_other_names(page: TestClient, folder: Path) -> None:
    for number in range(2):
        write(page, upload(page, {"a.png": picture(number)}))

    assert entry_of(folder, "zkt-2")["instance_data_dir"] == "datasets/zkt-2"
    assert entry_of(folder, "zkt")["instance_data_dir"] == "datasets/zkt"


def test_a_drop_that_is_given_up_is_discarded(page: TestClient, folder: Path) -> None:
    dropped = upload(page, {"x/a.png": picture(1), "b.png": picture(2)})
    page.put("/api/drop/caption", json={"folder": dropped, "file": "b.png", "text": "a cat"})
    leave_out(page, dropped, files=["b.png"])

    assert page.post("/api/drop/discard", json={"folder": dropped}).status_code == 200
    assert [*(folder / "datasets").iterdir()] == []


@pytest.mark.parametrize("reason", ["used", "own files", "not dropped", "outside"])
def test_files_that_were_not_just_dropped_are_never_deleted(
    page: TestClient, folder: Path, reason: str
) -> None:
    dropped = upload(page, {"a.png": picture(1)})
    if reason == "used":
        write(page, dropped)
        dropped = "datasets/zkt"
    elif reason == "own files":
        (folder / dropped / "b.png").write_bytes(picture(2))
    elif reason == "not dropped":
        (folder / dropped / ".dropped").unlink()
    before = sorted(path for path in folder.rglob("*") if path.is_file())

    asked = ".." if reason == "outside" else dropped
    answer = page.post("/api/drop/discard", json={"folder": asked})

    assert answer.status_code in (403, 409)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


ROW = '{"file_name": "%s.png", "text": "on a chair"}\n'
CAPTIONS = {
    "none": {},
    ".txt": {"a.txt": b"a", "b.txt": b"b"},
    "csv": {"metadata.csv": b"file_name,text\na.png,a\nb.png,b\n"},
    "jsonl": {"metadata.jsonl": (ROW % "a" + ROW % "b").encode()},
}


@pytest.mark.parametrize("captions", CAPTIONS)
@pytest.mark.parametrize("is_zipped", [False, True])
@pytest.mark.parametrize("kind", ["pictures", "mixed", "edits"])
def test_every_kind_of_drop_becomes_a_run_without_new_errors(
    page: TestClient, folder: Path, captions: str, is_zipped: bool, kind: str
) -> None:
    files = {"a.png": picture(1), "b.png": picture(2), **CAPTIONS[captions]}
    if kind == "mixed":
        files["c.mp4"] = clip_bytes(folder, 0.5)
    if kind == "edits":
        sources = {f"before/{name}": picture(5) for name in ("a.png", "b.png")}
        files = {**{f"after/{name}": content for name, content in files.items()}, **sources}
    if is_zipped:
        files = {"all.zip": zipped(*files.items())}
    dropped = upload(page, files, "cats")

    written = write(page, dropped, purpose="edit" if kind == "edits" else "subject")

    if kind == "edits" and captions == "none":
        assert written.status_code == 422
        return
    assert written.status_code == 201, written.text
    saved = page.get("/api/configs/cats").json()
    assert [problem for problem in saved["problems"] if problem["fatal"]] == []
    seen = files_of(page, dropped)
    assert [file["name"] for file in seen["files"]] == ["a.png", "b.png"]


def test_the_plan_of_a_drop_is_that_of_the_run(
    page: TestClient, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, as the page's subprocess and the command would in two."""
    from simpletuner.cli.app import main

    dropped = upload(page, {f"{seed}.png": encoded(sharp(seed)) for seed in range(3)})
    answers = {"folder": dropped, **SUBJECT, "model": "kandinsky5-image"}
    planned = page.post("/api/start/plan", json=answers).json()
    write(page, dropped, model="kandinsky5-image")

    main(["plan", "env=zkt", "--json"])

    shown = json.loads(capsys.readouterr().out)
    assert planned["seconds"]["total"] == pytest.approx(shown["seconds"]["total"])
    assert planned["length"] == shown["length"]
