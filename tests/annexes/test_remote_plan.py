"""Remote datasets through the command line: `plan` downloads what it needs, once, and says so."""

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
    with serve() as site:
        addresses = [
            site.add(f"/{number}.png", picture(number, size=(96, 64))) for number in range(4)
        ]
        rows = [
            "url,caption",
            *(f"{address},picture" for address in addresses),
            f"{site.address}/gone.png,gone",
        ]
        workspace.path("table.csv").write_text("\n".join(rows))
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
        assert workspace.run("plan", "--json") == 0
        plan, progress = capfd.readouterr()
        dataset = json.loads(plan)["datasets"][0]
        assert (dataset["files"], dataset["used"]) == (5, 4)
        assert "Downloading web: 5 files" in progress
        assert workspace.run("plan", "--retry-failed") == 0
        assert site.asked["/gone.png"] == 2
        output = " ".join(capfd.readouterr().out.split())
        assert (
            "/gone.png: not used, returned HTTP 404 Not Found; --retry-failed tries again" in output
        ), output

    assert workspace.train() == 0
    assert "Downloading" not in "".join(capfd.readouterr())

    report = workspace.path("output/training_report.html").read_text()
    assert addresses[0] in report


class Hub(ThreadingHTTPServer):
    """Serves one dataset, which is public, gated or private."""

    files: dict[str, bytes]
    closed: str = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def asked(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the paths in the request."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        return [each for each in found if each["path"] in paths]

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        files = self.server.files
        if self.server.closed or "owner/set" not in path:
            headers = {
                "X-Error-Code": self.server.closed or "RepoNotFound",
                "X-Error-Message": "Access is restricted.",
            }
            self.send(403 if self.server.closed == "GatedRepo" else 401, b"{}", headers)
        elif "/resolve/" in path:
            name = path.partition("/resolve/")[2].partition("/")[2]
            content = files.get(name)
            headers = {"ETag": f'"{zlib.crc32(name.encode()):08x}"', "X-Repo-Commit": COMMIT}
            if content is None:
                headers["X-Error-Code"] = "EntryNotFound"
            self.send(404 if content is None else 200, content or b"", headers)
        elif "/tree/" in path or "/paths-info/" in path:
            found: list[dict[str, Any]] = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
            found += [{"type": "directory", "path": "data", "oid": "0" * 40}] * (len(files) > 1)
            below = re.sub(r".*/(tree|paths-info)/\w+/?", "", path)
            deep = "recursive=true" in self.path.lower()
            wanted = [
                each
                for each in found
                if each["path"].startswith(f"{below}/" if below else "")
                and (deep or "/" not in each["path"].removeprefix(f"{below}/"))
            ]
            self.send(
                200, json.dumps(self.asked(found) if self.command == "POST" else wanted).encode()
            )
        elif re.fullmatch(r"/api/datasets/owner/set(/revision/\w+)?", path):
            info = {
                "id": "owner/set",
                "sha": COMMIT,
                "private": False,
                "gated": False,
                "downloads": 0,
                "tags": [],
                "siblings": [{"rfilename": name} for name in files],
            }
            self.send(200, json.dumps(info).encode())
        else:
            self.send(404, b"{}")

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


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
    for name, value in {
        "ENDPOINT": server.address,
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": True,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.address + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
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
    workspace.write_datasets([HUB, DATASETS[1]])

    assert workspace.run("plan") == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "row" in line]
    assert [
        f"owner/set@{COMMIT}, split train, row {row}" in line for row, line in enumerate(lines)
    ] == [True] * 4

    hub.closed = "GatedRepo"
    assert workspace.run("plan", "--cached") == 0, "the hub is not asked"
    assert [line for line in capfd.readouterr().out.splitlines() if "row" in line] == lines

    workspace.write_datasets([{**HUB, "id": "another"}, DATASETS[1]])
    assert workspace.run("plan", "--cached") == 2
    assert "error: another: its rows are not fetched yet" in capfd.readouterr().err

    workspace.write_datasets([HUB, DATASETS[1]])
    hub.closed = ""
    hub.files = {"README.md": b"# Set\n"}
    assert workspace.run("plan") == 0
    assert [line for line in capfd.readouterr().out.splitlines() if "row" in line] == lines, (
        "nothing is loaded again"
    )
