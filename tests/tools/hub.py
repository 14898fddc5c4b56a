"""A Hugging Face hub on this machine: logins, repositories, commits of regular and large files."""

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
    """The committed files of a repository."""

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
        broken_commits, broken_uploads: how many of the next ones fail with an error of the server.
        blobs: uploaded large files by their SHA-256.
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
            return 200, self._account(token)
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        return self._answer_for_repository(path, token, body)

    def _account(self, token: str) -> dict[str, Any]:
        return {
            "type": "user",
            "name": OWNER,
            "orgs": [],
            "auth": {"accessToken": {"role": ROLES[token]}},
        }

    def _answer_for_repository(self, path: str, token: str, body: bytes) -> tuple[int, Any]:
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path) or re.fullmatch(
            r"/([^/]+/[^/]+)\.git(/.*)", path
        )
        if match is None:
            return 404, {"error": path}
        name = match[1]
        action = match[2] or ""
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}

        repository = self.repositories[name]
        if action == "/auth-check/write":
            return (403, {"error": "Forbidden"}) if token == GUEST else (200, {})
        if action == "/preupload/main":
            return 200, {"files": self._upload_modes(repository, json.loads(body)["files"])}
        if action == "/commit/main":
            return self._commit(name, body)
        if action == "/info/lfs/objects/batch":
            return 200, self._upload_actions(json.loads(body)["objects"])
        if re.fullmatch(r"/tree/[^/]+", action):
            return 200, self._tree(repository)
        if action in ("", "/revision/main"):
            return 200, self._info(name, repository)
        return 404, {"error": path}

    def _create(self, request: dict[str, Any], token: str) -> tuple[int, Any]:
        if token == GUEST:
            error = "You don't have the rights to create a model under this namespace"
            return 403, {"error": error}
        name = f"{request['organization'] or OWNER}/{request['name']}"
        answer = {"url": f"{self.address}/{name}"}
        if name in self.repositories:
            return 409, answer
        is_private = request.get("visibility") == "private" or bool(request.get("private"))
        self.repositories[name] = Repository(is_private)
        return 200, answer

    def _validate(self, content: str) -> tuple[int, Any]:
        """Accept a model card that begins with a mapping between lines of dashes."""
        block = re.match(r"---\n(.*?)\n---[ \t]*\n", content, re.DOTALL)
        if block is not None and isinstance(yaml.safe_load(block[1]), dict):
            return 200, {"warnings": []}
        return 400, {"errors": [{"message": "bad front matter"}]}

    def _info(self, name: str, repository: Repository) -> dict[str, Any]:
        siblings = []
        for path, content in repository.files.items():
            siblings.append({"rfilename": path, "size": len(content)})
        return {
            "id": name,
            "private": repository.private,
            "sha": repository.commit,
            "siblings": siblings,
        }

    def _tree(self, repository: Repository) -> list[dict[str, Any]]:
        entries = []
        for path, content in repository.files.items():
            size = len(content)
            entries.append({"type": "file", "path": path, "size": size, "oid": _etag(content)})
        return entries

    def file(self, path: str) -> tuple[bytes, str] | None:
        """Content and commit of the file that the address of a download names."""
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if match is None or match[1] not in self.repositories:
            return None
        repository = self.repositories[match[1]]
        name = match[2]
        if name not in repository.files:
            return None
        self.requests.append(f"FILE {name}")
        return repository.files[name], repository.commit

    def _upload_modes(
        self, repository: Repository, files: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """How to upload each file, and the digest of its committed version if there is one."""
        answers = []
        for file in files:
            path = file["path"]
            is_large = path.endswith((".safetensors", ".png", ".mp4"))
            mode = "lfs" if is_large else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in repository.files:
                content = repository.files[path]
                answer["oid"] = _sha256(content) if is_large else _git_blob_id(content)
            answers.append(answer)
        return answers

    def _upload_actions(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        """Addresses to upload large files to; the hub has the others already."""
        answers = []
        for entry in objects:
            answer = dict(entry)
            if entry["oid"] not in self.blobs:
                address = f"{self.address}/blobs/{entry['oid']}"
                answer["actions"] = {"upload": {"href": address, "header": {}}}
            answers.append(answer)
        return {"transfer": "basic", "objects": answers}

    def _receive(self, digest: str, content: bytes) -> tuple[int, Any]:
        if self.broken_uploads:
            self.broken_uploads -= 1
            return 400, {"error": "the connection broke"}
        assert _sha256(content) == digest
        self.blobs[digest] = content
        return 200, {}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        """Commit files; the body has one JSON object a line, the first is the commit's message."""
        if self.broken_commits:
            self.broken_commits -= 1
            return 500, {"error": "the server has a bad day"}
        repository = self.repositories[name]
        header, *operations = [json.loads(line) for line in body.splitlines()]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                repository.files[value["path"]] = self.blobs[value["oid"]]
        repository.commits.append(header["value"])
        address = f"{self.address}/{name}/commit/{repository.commit}"
        return 200, {"commitUrl": address, "commitOid": repository.commit}


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_blob_id(content: bytes) -> str:
    """The id that git gives to a file: a SHA-1 with the size in front."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


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
                file = hub.file(self.path.partition("?")[0])
            if file is None:
                content = b""
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                content, commit = file
                self.send_response(200)
                self.send_header("ETag", f'"{_etag(content)}"')
                self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _chunks(self) -> bytes:
            """The body of a chunked request: sizes in hexadecimal and content by turns, then 0."""
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_HEAD = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

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
    """Replace the hub's download functions; returns the folder of the one repository's files."""
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
