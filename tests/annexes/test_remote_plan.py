"""Remote datasets through the command line: `plan` downloads what it needs once, and reports it."""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest

from simpletuner.annexes.remote import store
from tests.tools.web_server import picture, serve
from tests.tools.workspace import DATASETS, Workspace

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {
    "id": "hub",
    "type": "huggingface",
    "resolution": 64,
    "huggingface": {"dataset_name": "owner/set", "caption_column": "text", "revision": "main"},
}


@pytest.fixture
def workspace(tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setattr(store, "PAUSES", (0.0, 0.0))
    return Workspace.create(tmp_path / "work", t2i_checkpoint)


def test_a_plan_downloads_once_and_training_reads_the_files(
    workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = {
        "id": "web",
        "type": "csv",
        "csv_file": "table.csv",
        "csv_cache_dir": "downloads/{id}",
        "csv_caption_column": "caption",
        "resolution": 64,
        "allow_private_urls": "true",
    }
    workspace.write_datasets([entry, DATASETS[1]])

    with serve() as site:
        addresses = []
        for number in range(4):
            addresses.append(site.add(f"/{number}.png", picture(number, size=(96, 64))))
        rows = ["url,caption"]
        rows += [f"{address},picture" for address in addresses]
        rows += [f"{site.address}/gone.png,gone"]
        workspace.path("table.csv").write_text("\n".join(rows))

        assert workspace.run("plan", "--json") == 0
        plan, progress = capfd.readouterr()
        dataset = json.loads(plan)["datasets"][0]
        assert (dataset["files"], dataset["used"]) == (5, 4)
        assert "Downloading web: 5 files" in progress

        assert workspace.run("plan", "--retry-failed") == 0
        assert site.requests["/gone.png"] == 2
        output = " ".join(capfd.readouterr().out.split())
        reason = "/gone.png: not used, returned HTTP 404 Not Found; --retry-failed tries again"
        assert reason in output, output

    assert workspace.train() == 0
    assert "Downloading" not in "".join(capfd.readouterr())

    report = workspace.path("output/training_report.html").read_text()
    assert addresses[0] in report


class Hub(ThreadingHTTPServer):
    """Serves one dataset, owner/set, which is public, gated or private.

    Attributes:
        files: contents by path.
        closed: the hub's error code for every request; "" if the dataset is public.
    """

    files: dict[str, bytes]
    closed: str = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's API that `datasets` uses to list and read a dataset."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        if self.server.closed or "owner/set" not in path:
            self.refuse()
        elif "/resolve/" in path:
            revision_and_name = path.partition("/resolve/")[2]
            self.send_file(revision_and_name.partition("/")[2])
        elif "/tree/" in path or "/paths-info/" in path:
            listing = self.paths_info() if self.command == "POST" else self.tree(path)
            self.send(200, json.dumps(listing).encode())
        elif re.fullmatch(r"/api/datasets/owner/set(/revision/\w+)?", path):
            self.send(200, json.dumps(self.dataset_info()).encode())
        else:
            self.send(404, b"{}")

    def refuse(self) -> None:
        """As the hub refuses a gated dataset, or one that is private or does not exist."""
        code = self.server.closed or "RepoNotFound"
        headers = {"X-Error-Code": code, "X-Error-Message": "Access is restricted."}
        self.send(403 if code == "GatedRepo" else 401, b"{}", headers)

    def send_file(self, name: str) -> None:
        headers = {"ETag": f'"{zlib.crc32(name.encode()):08x}"', "X-Repo-Commit": COMMIT}
        content = self.server.files.get(name)
        if content is None:
            self.send(404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
        else:
            self.send(200, content, headers)

    def entries(self) -> list[dict[str, Any]]:
        """All files, and their folder if there is one."""
        entries: list[dict[str, Any]] = []
        for name, content in self.server.files.items():
            entries.append({"type": "file", "path": name, "size": len(content), "oid": "0" * 40})
        if any("/" in name for name in self.server.files):
            entries.append({"type": "directory", "path": "data", "oid": "0" * 40})
        return entries

    def paths_info(self) -> list[dict[str, Any]]:
        """The entries that the request's body names."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        return [entry for entry in self.entries() if entry["path"] in paths]

    def tree(self, path: str) -> list[dict[str, Any]]:
        """The entries of a folder, with those of its folders if the request is recursive."""
        folder = re.sub(r".*/(tree|paths-info)/\w+/?", "", path)
        prefix = f"{folder}/" if folder else ""
        is_recursive = "recursive=true" in self.path.lower()
        entries = []
        for entry in self.entries():
            is_below = entry["path"].startswith(prefix)
            is_direct = "/" not in entry["path"].removeprefix(prefix)
            if is_below and (is_recursive or is_direct):
                entries.append(entry)
        return entries

    def dataset_info(self) -> dict[str, Any]:
        return {
            "id": "owner/set",
            "sha": COMMIT,
            "private": False,
            "gated": False,
            "downloads": 0,
            "tags": [],
            "siblings": [{"rfilename": name} for name in self.server.files],
        }

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import datasets

    columns = {
        "image": [{"bytes": picture(number), "path": None} for number in range(4)],
        "text": list("abcd"),
    }
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    table.to_parquet(str(tmp_path / "train.parquet"))
    server = Hub(("127.0.0.1", 0), Handler)
    server.files = {
        "README.md": b"# Set\n",
        "data/train-00000-of-00001.parquet": (tmp_path / "train.parquet").read_bytes(),
    }
    constants = {
        "ENDPOINT": server.address,
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": True,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.address + "/{repo_id}/resolve/{revision}/{filename}",
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.address)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("code", ["GatedRepo", "RepoNotFound"])
def test_dataset_refused_by_the_hub_suggests_login(
    workspace: Workspace, hub: Hub, code: str, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace.write_datasets([HUB, DATASETS[1]])
    hub.closed = code

    assert workspace.run("plan") == 2
    _, err = capfd.readouterr()
    assert (
        "error: hub: the hub has no dataset 'owner/set', or it is private or gated: log in "
        "with `hf auth" in err
    )
    assert "1 problem to fix" in err


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_pinned_to_its_commit(
    workspace: Workspace, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    def printed_rows() -> list[str]:
        return [line for line in capfd.readouterr().out.splitlines() if "row" in line]

    workspace.write_datasets([HUB, DATASETS[1]])

    assert workspace.run("plan", "--verbose") == 0
    rows = printed_rows()
    assert len(rows) == 4
    for number, row in enumerate(rows):
        assert f"owner/set@{COMMIT}, split train, row {number}" in row

    hub.closed = "GatedRepo"
    assert workspace.run("plan", "--verbose", "--cached") == 0, "no request is sent to the hub"
    assert printed_rows() == rows

    workspace.write_datasets([{**HUB, "id": "another"}, DATASETS[1]])
    assert workspace.run("plan", "--cached") == 2
    assert "error: another: its rows are not fetched yet" in capfd.readouterr().err

    workspace.write_datasets([HUB, DATASETS[1]])
    hub.closed = ""
    hub.files = {"README.md": b"# Set\n"}
    assert workspace.run("plan", "--verbose") == 0
    assert printed_rows() == rows, "nothing is downloaded again"
