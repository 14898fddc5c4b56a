"""The start card: files that are dropped, what they are taken for, and the run that follows."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.new import receive, start_card
from simpletuner.annexes.page.new.drop_folder import LEDGER
from simpletuner.annexes.page.new.receive import HIDDEN, safe_name
from tests.annexes.page.page import serving
from tests.tools.clips import write_clip
from tests.tools.processes import PATIENCE
from tests.tools.web_server import picture

BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def cats(page: TestClient, folder: Path) -> Path:
    """A new folder for files."""
    answer = page.post("/api/uploads", json={"name": "my cats"})
    assert (answer.status_code, answer.json()) == (
        201,
        {"name": "my-cats", "folder": "datasets/my-cats"},
    )
    return folder / "datasets" / "my-cats"


def put(page: TestClient, name: str, content: Any, folder: str = "my-cats") -> Any:
    return page.put(f"/api/uploads/{folder}/{name}", content=content, headers=BYTES)


def files(folder: Path) -> list[str]:
    """All that lies below a folder, hidden or not, without the page's list of dropped files."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != LEDGER]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def zipped(*members: tuple[str | ZipInfo, bytes]) -> bytes:
    data = io.BytesIO()
    with ZipFile(data, "w", ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return data.getvalue()


def test_dropped_files_are_kept_under_their_names(page: TestClient, cats: Path) -> None:
    assert put(page, "beach/ a cat.png ", picture(1)).json() == {
        "saved": ["beach/a cat.png"],
        "skipped": [],
    }
    assert put(page, "beach/a%20cat.txt", b"a cat").json()["saved"] == ["beach/a cat.txt"]
    assert files(cats) == ["beach/a cat.png", "beach/a cat.txt"]
    assert (cats / "beach" / "a cat.png").read_bytes() == picture(1)


def test_nothing_is_overwritten_and_duplicates_are_named(page: TestClient, cats: Path) -> None:
    put(page, "a.png", picture(1))
    told = put(page, "a.png", picture(2)).json()
    assert told["saved"] == []
    assert told["skipped"][0]["file"] == "a.png"
    assert "already" in told["skipped"][0]["reason"]
    assert (cats / "a.png").read_bytes() == picture(1)
    assert page.post("/api/uploads", json={"name": "my cats"}).json()["name"] == "my-cats-2"


def test_a_file_system_without_links_overwrites_nothing_either(
    page: TestClient, cats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(receive.os, "link", refuse)
    assert put(page, "a.png", picture(1)).json()["saved"] == ["a.png"]
    assert put(page, "a.png", picture(2)).json()["saved"] == []
    assert (cats / "a.png").read_bytes() == picture(1)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../../etc/a.png", "etc/a.png"),
        ("..\\..\\a.png", "a.png"),
        ("/a.png", "a.png"),
        ("a\x00b\n\x7f.png", "a-b--.png"),
        ("gp\u202egnp.png", "gp-gnp.png"),
        ("con.png", "_con.png"),
        ("LPT1", "_LPT1"),
        ("console.png", "console.png"),
        ('w<h>a:t"?*|.png', "w-h-a-t----.png"),
        ("बिल्ली की.png", "बिल्ली की.png"),
        ("e\u0301.png", "\u00e9.png"),
        ("dots...", "dots"),
        ("ä" * 200 + ".png", "ä" * 98 + ".png"),
    ],
)
def test_names_are_made_safe(name: str, kept: str) -> None:
    assert safe_name(name) == kept


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("notes.pdf", b"%PDF", "is not a picture, a clip, a caption (.txt, .caption) or a zip"),
        (".hidden.png", picture(1), "is hidden"),
        (
            "a.jxl",
            b"?",
            "is a picture in a format that is not read (.jxl); save it as .png or .jpg",
        ),
        ("@eaDir/SYNOPHOTO_THUMB_M.jpg", picture(1), "belongs to the system"),
        ("captions.jsonl", b"{}", "is not a picture, a clip, a caption"),
        ("a.png", b"not a picture", "is not a picture"),
        ("a.mp4", b"not a clip", "is named like a clip, but holds text"),
        ("a.png", picture(1)[:60], ""),
    ],
)
def test_unusable_uploads_are_named(
    page: TestClient, cats: Path, name: str, content: bytes, reason: str
) -> None:
    told = put(page, name, content).json()
    assert (told["saved"], told["skipped"][0]["file"]) == ([], name)
    assert reason in told["skipped"][0]["reason"]
    assert files(cats) == []


@pytest.mark.parametrize(
    "name", ["a.txt", "a.png.txt", "a.caption", "metadata.jsonl", "sub/metadata.csv"]
)
def test_captions_are_kept_however_they_are_named(page: TestClient, cats: Path, name: str) -> None:
    assert put(page, name, b"a cat").json() == {"saved": [name], "skipped": []}
    assert files(cats) == [name]


def test_a_zip_is_unpacked_without_its_folder(page: TestClient, cats: Path) -> None:
    content = zipped(
        ("cats/before/a.png", picture(1)),
        ("cats/after/a.png", picture(2)),
        ("cats/after/a.txt", b"night"),
        ("cats/after/notes.pdf", b"?"),
        ("__MACOSX/cats/._a.png", b"?"),
        ("cats/after\\b.png", b"damaged"),
    )
    told = put(page, "cats.zip", content).json()
    assert told["saved"] == ["before/a.png", "after/a.png", "after/a.txt"]
    assert [each["file"] for each in told["skipped"]] == [
        "cats/after/notes.pdf",
        "__MACOSX/cats/._a.png",
        "after/b.png",
    ]
    assert files(cats) == ["after/a.png", "after/a.txt", "before/a.png"]


def locked() -> bytes:
    """A zip whose only file is marked as encrypted."""
    content = bytearray(zipped(("a.png", picture(1))))
    for signature, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + place] |= 1
    return bytes(content)


def link() -> ZipInfo:
    member = ZipInfo("a.png")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            zipped(*((f"{number}.txt", b"") for number in range(40))),
            "40 files, 0 B; at most 30 files and",
        ),
        (
            zipped(("a.bmp", bytes(2**20))),
            "1 file, 1.0 MB; at most 30 files and 524 kB are allowed",
        ),
        (
            zipped(*((f"{number:0200}.txt", b"") for number in range(30))),
            "its list of files takes 7.5 kB; at most 4",
        ),
        (zipped(("a.png", picture(1)))[:-30], "cannot be unpacked"),
        (b"not a zip", "cannot be unpacked: File is not a zip file"),
        (locked(), "password required"),
    ],
)
def test_a_dangerous_zip_is_refused_whole(
    page: TestClient, cats: Path, content: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "MOST_FILES", 30)
    monkeypatch.setattr(receive, "SMALL", 2**19)
    monkeypatch.setattr(receive, "LONGEST_LIST", 4000)
    answer = put(page, "cats.zip", content)
    assert answer.status_code == 422
    assert reason in answer.json()["problems"][0]["message"]
    assert files(cats) == []


def test_links_and_names_in_a_zip_cannot_leave_the_folder(page: TestClient, cats: Path) -> None:
    members = [
        ("../b.png", picture(2)),
        ("/etc/c.png", picture(3)),
        ("C:/d.png", picture(4)),
        (link(), b"/etc/passwd"),
    ]
    told = put(page, "cats.zip", zipped(*members)).json()
    assert told["saved"] == ["b.png", "etc/c.png", "C-/d.png"]
    assert [each["file"] for each in told["skipped"]] == ["a.png"]
    assert files(cats) == ["C-/d.png", "b.png", "etc/c.png"]


def test_a_full_disk_leaves_nothing(
    page: TestClient, cats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*files: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    put(page, "a.png", picture(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        answer = put(page, "b.zip", zipped(("b.png", picture(2)), ("c.png", picture(3))))
        assert answer.status_code == 507
        assert "no space left on the disk" in answer.json()["problems"][0]["message"]
    usage = shutil.disk_usage(cats)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    told = put(page, "b.png", picture(2))
    assert told.status_code == 507
    assert "do not fit on the disk, which has 10 B free" in told.json()["problems"][0]["message"]
    assert files(cats) == ["a.png"]


def test_a_connection_that_breaks_leaves_nothing(folder: Path, cats: Path) -> None:
    head = (
        "PUT /api/uploads/my-cats/a.png HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
    )
    with serving(folder) as (port, _):
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client:
            client.connect()
            client.sock.sendall(
                f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + picture(1)
            )
            while not [*cats.glob(f"{HIDDEN}*")]:
                pass
        while [*cats.glob(f"{HIDDEN}*")]:
            pass
    assert files(cats) == []


def test_an_upload_may_be_slow_but_not_silent(
    folder: Path, cats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_card, "IDLE_SECONDS", 0.3)
    content = picture(1)
    with (
        serving(folder) as (port, _),
        closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client,
    ):

        def slowly() -> Iterator[bytes]:
            for start in range(0, len(content), len(content) // 5):
                threading.Event().wait(0.1)  # .5 s in all
                yield content[start : start + len(content) // 5]

        headers = {**BYTES, "Content-Length": str(len(content))}
        client.request("PUT", "/api/uploads/my-cats/a.png", slowly(), headers)
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["saved"]) == (201, ["a.png"])
        client.putrequest("PUT", "/api/uploads/my-cats/b.png")
        for name, value in headers.items():
            client.putheader(name, value)
        client.endheaders(content[:10])
        answer = client.getresponse()
        assert (answer.status, "No data for 0.3 s" in answer.read().decode()) == (408, True)
    assert files(cats) == ["a.png"]


def test_two_uploads_at_once(page: TestClient, cats: Path) -> None:
    """Of one name the first is kept; of others, both."""
    told: list[Any] = []
    names = ["a.png", "a.png", "b.png", "c.zip", "c.zip"]
    contents = {
        ".png": picture(1),
        ".zip": zipped(("x/d.png", picture(2)), ("x/e.png", picture(3))),
    }
    threads = [
        threading.Thread(
            target=lambda name=name: told.append(
                put(page, name, contents[Path(name).suffix]).json()
            )
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for answer in told for name in answer["saved"]) == [
        "a.png",
        "b.png",
        "d.png",
        "e.png",
    ]
    assert sum(len(answer["skipped"]) for answer in told) == 3
    assert files(cats) == ["a.png", "b.png", "d.png", "e.png"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/uploads/my-cats/a.png", {"Content-Type": "image/png"}, 415),
        ("/api/uploads/my-cats/a.png", {**BYTES, "Content-Length": str(2**37)}, 413),
        ("/api/uploads/my-cats/a.png", {**BYTES, "Origin": "http://evil.example"}, 403),
        ("/api/uploads/nothing/a.png", BYTES, 404),
        ("/api/uploads/.../a.png", BYTES, 404),
        ("/api/uploads/linked/a.png", BYTES, 403),
        ("/api/configs/a", BYTES, 415),
    ],
)
def test_uploads_outside_their_folder_are_refused(
    page: TestClient,
    cats: Path,
    tmp_path_factory: pytest.TempPathFactory,
    path: str,
    headers: Any,
    status: int,
) -> None:
    (cats.parent / "linked").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    (cats / "out").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert page.put(path, content=b"x", headers=headers).status_code == status
    assert put(page, "out/a.png", picture(1)).json()["saved"] == []
    assert files(cats.parent) == []


def test_large_uploads_are_refused_with_a_message(
    page: TestClient, cats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "LARGEST_FILE", 10)
    answer = put(page, "a.png", picture(1))
    assert (answer.status_code, answer.json()["problems"][0]["message"]) == (
        422,
        "a.png is larger than 10 B.",
    )
    monkeypatch.setattr(receive, "LARGEST_FILE", 1000)
    answer = put(page, "a.zip", zipped(("a.png", bytes(2000))))
    assert "1 file, 2.0 kB; at most 10,000 files and 1.0 kB are allowed" in answer.text
    assert files(cats) == []


def look(page: TestClient, **answers: str) -> Any:
    return page.post("/api/start/look", json=answers)


def test_dropped_files_are_described_with_the_models_that_suit(
    page: TestClient, cats: Path
) -> None:
    for number in range(3):
        put(page, f"{number}.png", picture(number))
    put(page, "0.txt", b"a cat")
    (cats / ".DS_Store").write_bytes(b"?")
    (cats / "notes.pdf").write_bytes(b"?")
    (cats / ".captions-20260101-120000.json").write_text("{}")  # our own
    write_clip(cats / "a.mp4", seconds=0.5, size=(64, 48))
    seen = look(page, folder="datasets/my-cats").json()
    assert (seen["name"], seen["files"], seen["uncaptioned"]) == ("my-cats", 3, 2)
    assert seen["described"] == "3 pictures, 80x64, 1 captioned"
    assert seen["notes"][0].startswith("Not trained, clips: a.mp4.")
    assert {each["file"] for each in seen["skipped"]} == {"notes.pdf", "a.mp4"}
    assert list(seen["purposes"]) == ["subject", "style"]
    models = look(page, folder="datasets/my-cats", purpose="style").json()["models"]
    assert list(models) == ["kandinsky5-image", "demo"]
    assert models["kandinsky5-image"]["title"].startswith("Kandinsky 5 Image")
    (clips := cats.with_name("clips")).mkdir()
    (cats / "a.mp4").rename(clips / "a.mp4")
    assert len(look(page, folder="datasets/clips").json()["models"]) == 4


@pytest.mark.parametrize(
    ("answers", "status", "message"),
    [
        ({"folder": "nothing"}, 422, "is not a folder"),
        ({"folder": "config"}, 422, "contains no pictures and no clips"),
        ({"folder": "/etc"}, 403, "outside the project"),
        (
            {"folder": "datasets/my-cats", "purpose": "motoin"},
            422,
            "'motoin' is not one of: subject, style",
        ),
        (
            {"folder": "datasets/my-cats", "model": "flux"},
            422,
            "'flux' is not one of: kandinsky5-image, demo.",
        ),
        ({"folder": "datasets/my-cats", "name": "../x"}, 422, "cannot name a config"),
        ({"folder": "datasets/my-cats", "name": "old"}, 409, "There is a config 'old' already."),
    ],
)
def test_invalid_answers_are_refused(
    page: TestClient, cats: Path, folder: Path, answers: dict[str, str], status: int, message: str
) -> None:
    put(page, "a.png", picture(1))
    (folder / "config" / "old").mkdir(parents=True)
    answer = page.post("/api/start/write", json=answers)
    assert (answer.status_code, message in answer.json()["problems"][0]["message"]) == (
        status,
        True,
    ), answer.json()
    assert files(folder / "config") == []


def test_a_copied_demo_can_start(page: TestClient) -> None:
    """Its paths below config/examples lead into the package."""
    example = page.get("/api/configs/examples/demo").json()
    values = {
        key: value for key, value in example["values"].items() if key != "data_backend_config"
    }
    copy = {
        "config": "mine",
        "values": {**values, "output_dir": "output/mine"},
        "datasets": example["datasets"],
    }
    told = page.post("/api/training/validate", json=copy).json()["problems"]
    assert [problem for problem in told if problem["fatal"]] == []


def test_card_writes_the_same_config_as_the_command(
    page: TestClient, cats: Path, folder: Path
) -> None:
    from simpletuner.cli.app import main

    put(page, "a.png", picture(1))
    answers = {"folder": "datasets/my-cats", "purpose": "style", "trigger": "qxz", "name": "there"}
    assert page.post("/api/start/write", json=answers).json()["config"] == "there"
    main(
        [
            "start",
            "datasets/my-cats",
            "--yes",
            "--purpose",
            "style",
            "--trigger",
            "qxz",
            "--dry-run",
        ]
    )
    for file in ("config.json", "multidatabackend.json", "user_prompt_library.json"):
        here, there = (folder / "config" / name / file for name in ("my-cats", "there"))
        assert re.sub("there", "my-cats", there.read_text()) == here.read_text()
    assert look(page, folder="datasets/my-cats").json()["name"] == "my-cats-2"
