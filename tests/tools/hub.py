"""A Hugging Face hub on this machine: logins, repositories, commits with regular and large
files.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

WRITE = "hf_writewritewritewrite"
READ = "hf_readreadreadreadread"
GUEST = "hf_guestguestguestguest"
ROLES = {WRITE: "write", READ: "read", GUEST: "write"}
OWNER = "me"


@dataclass
class Repository:
    """What was committed to it."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)

    def text(self, path: str) -> str:
        return self.files[path].decode()

    @property
    def commit(self) -> str:
        return f"{len(self.commits):040x}"


@dataclass
class FakeHub:
    """The state of the server.

    Attributes:
        broken_commits, broken_uploads: how many of the next ones end with an error of the server.
        blobs: large files that have arrived, by their SHA-256.
        requests: method and path of each request.
    """

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken_commits: int = 0
    broken_uploads: int = 0

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """The status and the content of an answer."""
        self.requests.append(f"{method} {path}")
        if method == "PUT":
            return self._receive(path.rpartition("/")[2], body)
        if token not in ROLES:
            return 401, {"error": "Invalid credentials"}
        if path == "/api/whoami-v2":
            return 200, {
                "type": "user",
                "name": OWNER,
                "orgs": [],
                "auth": {"accessToken": {"role": ROLES[token]}},
            }
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        for pattern, action in (
            (
                r"/api/models/([^/]+/[^/]+)/auth-check/write",
                lambda repository, _: self._may_write(repository, token),
            ),
            (r"/api/models/([^/]+/[^/]+)/preupload/main", self._modes),
            (r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"/api/models/([^/]+/[^/]+)/tree/[^/]+", self._tree),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", self._info),
        ):
            if match := re.fullmatch(pattern, path):
                if match[1] not in self.repositories:
                    return 404, {"error": "Repository not found"}
                return action(match[1], body)
        return 404, {"error": path}

    def _create(self, wanted: dict[str, Any], token: str) -> tuple[int, Any]:
        name = f"{wanted['organization'] or OWNER}/{wanted['name']}"
        if token == GUEST:
            return 403, {
                "error": "You don't have the rights to create a model under this namespace"
            }
        known = name in self.repositories
        self.repositories.setdefault(
            name, Repository(wanted.get("visibility") == "private" or bool(wanted.get("private")))
        )
        return (409 if known else 200), {"url": f"{self.address}/{name}"}

    def _may_write(self, repository: str, token: str) -> tuple[int, Any]:
        return (403, {"error": "Forbidden"}) if token == GUEST else (200, {})

    def _validate(self, content: str) -> tuple[int, Any]:
        block = re.match(r"---\n(.*?)\n---[ \t]*\n", content, re.DOTALL)
        good = block is not None and isinstance(yaml.safe_load(block[1]), dict)
        return (
            (200, {"warnings": []})
            if good
            else (400, {"errors": [{"message": "bad front matter"}]})
        )

    def _info(self, repository: str, _: bytes) -> tuple[int, Any]:
        found = self.repositories[repository]
        files = [{"rfilename": path, "size": len(content)} for path, content in found.files.items()]
        return 200, {
            "id": repository,
            "private": found.private,
            "sha": found.commit,
            "siblings": files,
        }

    def _tree(self, repository: str, _: bytes) -> tuple[int, Any]:
        files = self.repositories[repository].files
        entries = []
        for path, content in files.items():
            entries.append(
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
            )
        return 200, entries

    def file(self, path: str) -> tuple[bytes, str] | None:
        """Content and commit of the file that an address of a download names."""
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        found = self.repositories.get(match[1]) if match else None
        if match is None or found is None or match[2] not in found.files:
            return None
        self.requests.append(f"FILE {match[2]}")
        return found.files[match[2]], found.commit

    def _modes(self, repository: str, body: bytes) -> tuple[int, Any]:
        files = self.repositories[repository].files
        answers = []
        for each in json.loads(body)["files"]:
            large = each["path"].endswith((".safetensors", ".png", ".mp4"))
            answer = {
                "path": each["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
            }
            if each["path"] in files:
                content = files[each["path"]]
                header = b"" if large else f"blob {len(content)}\0".encode()
                kind = hashlib.sha256 if large else hashlib.sha1
                answer["oid"] = kind(header + content).hexdigest()
            answers.append(answer)
        return 200, {"files": answers}

    def _batch(self, repository: str, body: bytes) -> tuple[int, Any]:
        objects = []
        for each in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.address}/blobs/{each['oid']}", "header": {}}}
            objects.append({**each, **({} if each["oid"] in self.blobs else {"actions": action})})
        return 200, {"transfer": "basic", "objects": objects}

    def _receive(self, digest: str, content: bytes) -> tuple[int, Any]:
        if self.broken_uploads:
            self.broken_uploads -= 1
            return 400, {"error": "the connection broke"}
        assert hashlib.sha256(content).hexdigest() == digest
        self.blobs[digest] = content
        return 200, {}

    def _commit(self, repository: str, body: bytes) -> tuple[int, Any]:
        if self.broken_commits:
            self.broken_commits -= 1
            return 500, {"error": "the server has a bad day"}
        found = self.repositories[repository]
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                found.files[value["path"]] = self.blobs[value["oid"]]
        found.commits.append(lines[0]["value"])
        number = f"{len(found.commits):040x}"
        return 200, {
            "commitUrl": f"{self.address}/{repository}/commit/{number}",
            "commitOid": number,
        }


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    """A hub that listens while the block runs."""
    hub = FakeHub()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def _answer(self) -> None:
            if self.command in ("GET", "HEAD") and "/resolve/" in self.path:
                self._send_file()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            with lock:
                status, content = hub.answer(self.command, self.path.partition("?")[0], token, body)
            text = json.dumps(content).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _send_file(self) -> None:
            with lock:
                found = hub.file(self.path.partition("?")[0])
            content, commit = found or (b"", "")
            self.send_response(200 if found else 404)
            if found:
                self.send_header("ETag", f'"{_etag(content)}"')
                self.send_header("X-Repo-Commit", commit)
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_HEAD = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()


@contextlib.contextmanager
def used_hub(monkeypatch: pytest.MonkeyPatch, token: str | None = WRITE) -> Iterator[FakeHub]:
    """A hub that this process uses, logged in with a token."""
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        yield hub


def repository_of_loras(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the hub's functions that download; returns the folder with the files of its one
    repository.
    """
    remote = folder / "remote"
    cache = folder / "cache"
    remote.mkdir()

    def download(repository: str, name: str) -> str:
        target = cache / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(remote / name, target)
        return str(target)

    def snapshot(repository: str, *, local_files_only: bool) -> str:
        if not cache.is_dir():
            raise LocalEntryNotFoundError("nothing is here")
        return str(cache)

    def names(api: object, repository: str) -> list[str]:
        return [str(path.relative_to(remote)) for path in remote.rglob("*") if path.is_file()]

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", names)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return remote
