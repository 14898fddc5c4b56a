"""What other sites, other machines and hurried hands try, and that the guard is what stops them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page import guard, serve
from simpletuner.annexes.page import project as projects
from simpletuner.annexes.page.guard import Access, Guard, is_own
from simpletuner.annexes.page.project import LARGEST_BODY, Project
from simpletuner.annexes.page.serve import create_app
from tests.annexes.page.page import serving
from tests.tools.processes import PATIENCE

TOKEN = "x" * 43
JSON = {"content-type": "application/json"}
VALID = json.dumps({"values": {"seed": 3}}).encode()
CONFIG = "/api/configs/config"


def stream() -> Iterator[bytes]:
    """A huge body in pieces, which is sent without a Content-Length."""
    yield b'{"values": {"seed": 3}'
    for _ in range(2 * LARGEST_BODY // 2**16):
        yield b" " * 2**16
    yield b"}"


@dataclass
class Attack:
    """A request, the status that it must get, and the one it gets without the guard: most are let
    through then.
    """

    status: int
    unguarded: int | None
    path: str = CONFIG
    method: str = "PUT"
    headers: dict[str, Any] = field(default_factory=dict)
    body: Any = VALID
    token: str | None = None


ATTACKS = {
    "DNS rebinding reads": Attack(403, 404, method="GET", headers={"host": "evil.example:8001"}),
    "DNS rebinding writes": Attack(403, 200, headers={**JSON, "host": "evil.example"}),
    "a name that only begins like ours": Attack(
        403, 404, method="GET", headers={"host": "localhost.evil.example"}
    ),
    "no host": Attack(403, 404, method="GET", headers={"host": ""}),
    "foreign origin": Attack(403, 200, headers={**JSON, "origin": "https://evil.example"}),
    "another server on this machine": Attack(
        403, 200, headers={**JSON, "origin": "http://localhost:3000"}
    ),
    "sandboxed frame": Attack(403, 200, headers={**JSON, "origin": "null"}),
    "cross-site fetch": Attack(403, 200, headers={**JSON, "sec-fetch-site": "cross-site"}),
    "same site, other port": Attack(403, 200, headers={**JSON, "sec-fetch-site": "same-site"}),
    "foreign page embeds": Attack(
        403, 404, method="GET", headers={"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}
    ),
    "form without preflight": Attack(415, 200, headers={"content-type": "text/plain"}),
    "form of a page": Attack(
        415, 200, headers={"content-type": "application/x-www-form-urlencoded"}
    ),
    "no content type": Attack(415, 200),
    "huge body": Attack(413, 413, headers=JSON, body=VALID + b" " * LARGEST_BODY),
    "huge body in pieces": Attack(413, 413, headers=JSON, body=stream()),
    "no length": Attack(413, None, headers={**JSON, "content-length": "-1"}),
    "no token": Attack(401, 404, method="GET", token=TOKEN),
    "wrong token": Attack(401, 404, method="GET", headers={"x-api-key": "y" * 43}, token=TOKEN),
    "token with more letters": Attack(
        401, 404, method="GET", headers={"authorization": f"Bearer {TOKEN}x"}, token=TOKEN
    ),
    "token of no ASCII": Attack(
        401, None, method="GET", headers={"cookie": b"simpletuner-80=\xe4"}, token=TOKEN
    ),
    "wrong token in the address": Attack(401, 200, "/?token=no", "GET", token=TOKEN),
    "post that claims to be a link": Attack(
        403,
        202,
        "/callback",
        "POST",
        {
            **JSON,
            "origin": "https://evil.example",
            "sec-fetch-site": "cross-site",
            "sec-fetch-dest": "document",
        },
        b'{"type": "error"}',
    ),
    "callback without token": Attack(
        401, 202, "/callback", "POST", JSON, b'{"type": "error"}', token=TOKEN
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "project" / "config").mkdir(parents=True)
    return Project((tmp_path / "project").resolve())


def client(app: Any) -> TestClient:
    return TestClient(app, base_url="http://localhost:8001", raise_server_exceptions=False)


def send(app: Any, attack: Attack) -> Any:
    body = {} if attack.method == "GET" else {"content": attack.body}
    return client(app).request(attack.method, attack.path, headers=attack.headers, **body)


@pytest.mark.parametrize(
    "attack", [pytest.param(attack, id=name) for name, attack in ATTACKS.items()]
)
def test_attacks_are_refused(attack: Attack, project: Project) -> None:
    access = Access(token=attack.token)
    answer = send(Guard(create_app(project), access), attack)
    assert answer.status_code == attack.status
    assert answer.json()["problems"][0]["message"]
    assert not (project.folder / "config" / "config.json").exists()


@pytest.mark.parametrize(
    "attack",
    [pytest.param(attack, id=name) for name, attack in ATTACKS.items() if attack.unguarded],
)
def test_attacks_would_pass_without_the_guard(attack: Attack, project: Project) -> None:
    body = stream() if isinstance(attack.body, Iterator) else attack.body
    assert (
        send(create_app(project), Attack(**{**vars(attack), "body": body})).status_code
        == attack.unguarded
    )


def as_user(app: Any, own: bool) -> Any:
    """The application as its server shows it a connection of its own user, or of another."""

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {guard.OWN_USER: lambda: own}}, receive, send)

    return with_state


@pytest.mark.parametrize(
    ("host", "own", "status"),
    [
        ("127.0.0.1", True, 200),
        ("127.0.0.1", False, 401),
        ("::1", False, 401),
        ("0.0.0.0", True, 401),
    ],
)
def test_only_its_own_user_needs_no_token(
    host: str, own: bool, status: int, project: Project
) -> None:
    visitor = client(as_user(Guard(create_app(project), Access(host, TOKEN, "~/page-token")), own))
    assert visitor.get("/health").status_code == status
    assert visitor.get("/health", headers={"x-api-key": TOKEN}).status_code == 200
    if status == 401:
        told = visitor.get("/health").json()["problems"][0]["message"]
        assert ("~/page-token" in told) == (host != "0.0.0.0")  # where strangers could read it


def test_size_of_a_chunked_body_is_limited(project: Project) -> None:
    """The test client joins the pieces of a body, so here they come one by one."""
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in stream()]
    answered = []

    async def receive() -> Any:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        answered.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "PUT",
        "path": CONFIG,
        "headers": headers,
        "query_string": b"",
        "scheme": "http",
    }
    asyncio.run(Guard(create_app(project), Access())(scope, receive, send))
    assert answered[0]["status"] == 413
    assert pieces, "the rest is not read"


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, None),
        ({"host": "127.0.0.1:8001"}, None),
        ({"host": "[::1]:8001"}, None),
        ({"host": "LOCALHOST"}, None),
        ({"origin": "http://localhost:8001", "sec-fetch-site": "same-origin"}, None),
        ({"x-api-key": TOKEN}, TOKEN),
        ({"authorization": f"Bearer {TOKEN}"}, TOKEN),
        ({"content-type": "application/json; charset=utf-8"}, None),
    ],
)
def test_own_page_and_scripts_pass(
    headers: dict[str, str], token: str | None, project: Project
) -> None:
    attack = Attack(200, 200, headers={**JSON, **headers})
    assert send(Guard(create_app(project), Access(token=token)), attack).status_code == 200


def test_link_from_another_site_opens_the_page(project: Project) -> None:
    headers = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert client(Guard(create_app(project), Access())).get("/", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "name", "status"),
    [
        ("box.example", "box.example:8001", 200),
        ("box.example", "other.example", 403),
        ("0.0.0.0", "any.proxy.example", 200),
        ("::1", "[::1]:8001", 200),
        ("127.0.0.1", "192.168.1.5", 403),
    ],
)
def test_page_answers_only_to_its_host_names(
    host: str, name: str, status: int, project: Project
) -> None:
    headers = {"host": name, "x-api-key": TOKEN}
    answer = client(Guard(create_app(project), Access(host, TOKEN))).get("/health", headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/api/datasets/browse?path=..",
        "/api/datasets/browse?path=/etc",
        "/api/datasets/browse?path=%2e%2e%2f%2e%2e",
        "/api/datasets/browse?path=~root",
        "/api/datasets/browse?path=config/../../other",
        "/api/datasets/browse?path=way-out",
        "/api/datasets/browse?path=a%00b",
        "/api/configs/../config",
        "/api/configs/..%2f..%2fother%2fconfig",
        "/api/configs/%2e%2e",
        "/api/configs/linked",
        "/api/configs/examples/../../secret",
        "/api/datasets/plan?config=../other",
        "/api/datasets/plan?config=pointing",
        "/static/../project.py",
        "/static/..%2fproject.py",
        "/static/%2e%2e/%2e%2e/errors.py",
        "/static/html.py",
    ],
)
def test_no_file_outside_is_read(path: str, project: Project) -> None:
    outside = project.folder.parent / "other"
    outside.mkdir()
    for name in ("config.json", "multidatabackend.json"):
        (outside / name).write_text('{"secret_value": 1}')
    (project.folder / "way-out").symlink_to(outside)
    (project.folder / "config" / "linked").symlink_to(outside)
    (project.folder / "config" / "pointing").mkdir()
    text = json.dumps({"data_backend_config": str(outside / "config.json")})
    (project.folder / "config" / "pointing" / "config.json").write_text(text)
    answer = client(Guard(create_app(project), Access())).get(path)
    assert answer.status_code in (400, 403, 404)
    assert "secret_value" not in answer.text


def test_no_file_outside_is_written(project: Project) -> None:
    outside = project.folder.parent / "other"
    outside.mkdir()
    (project.folder / "config" / "linked").symlink_to(outside)
    visitor = client(Guard(create_app(project), Access()))
    assert visitor.put("/api/configs/linked", json={"values": {}}).status_code == 403
    assert visitor.put("/api/configs/examples/demo", json={"values": {}}).status_code == 403
    assert (
        visitor.put("/api/datasets/plan?config=examples/demo", json={"entries": []}).status_code
        == 403
    )
    for path in (str(outside / "new.json"), "../other/new.json", "train.sh", ".env"):
        name = f"of-{len(path)}"
        assert (
            visitor.put(
                f"/api/configs/{name}", json={"values": {"data_backend_config": path}}
            ).status_code
            == 200
        )
        assert (
            visitor.put(f"/api/datasets/plan?config={name}", json={"entries": []}).status_code
            == 403
        )
    assert sorted(path.name for path in project.folder.iterdir()) == ["config"]
    assert list(outside.iterdir()) == []


def test_folder_given_with_root_is_inside(project: Project, tmp_path: Path) -> None:
    shared = (tmp_path / "shared").resolve()
    shared.mkdir()
    app = create_app(Project(project.folder, (shared,)))
    assert client(app).get(f"/api/datasets/browse?path={shared}").status_code == 200
    assert client(app).get(f"/api/datasets/browse?path={shared.parent}").status_code == 403


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_first_visit_turns_the_token_into_a_cookie(scheme: str, project: Project) -> None:
    app = Guard(create_app(project), Access("0.0.0.0", TOKEN))
    visitor = TestClient(app, base_url=f"{scheme}://localhost:8001")
    assert visitor.get("/").status_code == 401
    welcome = visitor.get(f"/?token={TOKEN}")
    given = welcome.headers["set-cookie"].lower()
    assert "httponly" in given
    assert "samesite=strict" in given
    assert ("secure" in given) is (scheme == "https"), (
        "it is not sent where the network can read it"
    )
    assert TOKEN not in welcome.text
    assert visitor.get("/").status_code == 200
    assert visitor.put(CONFIG, json={"values": {}}).status_code == 200


def test_every_answer_has_the_headers(project: Project) -> None:
    visitor = client(Guard(create_app(project), Access()))
    for answer in (
        visitor.get("/"),
        visitor.get("/nope"),
        visitor.get("/", headers={"host": "evil.example"}),
    ):
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe-inline" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_page_of_a_run_accepts_only_its_buttons(project: Project) -> None:
    visitor = client(Guard(create_app(project, "trainer"), Access(in_run=True)))
    assert visitor.get("/").status_code == 200
    for path in ("/api/training/start", "/api/plan", "/callback"):
        assert visitor.post(path, json={}).status_code == 403
    assert visitor.put(CONFIG, json={"values": {}}).status_code == 403
    assert visitor.post("/api/training/stop", json={}).status_code != 403


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((host, True) for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1")),
        *(
            (host, False)
            for host in (
                "0.0.0.0",
                "::",
                "",
                "192.168.1.5",
                "box.example",
                "127.0.0.1.evil.example",
            )
        ),
    ],
)
def test_address_of_this_machine_only(host: str, own: bool) -> None:
    assert is_own(host) is own


@pytest.fixture
def port(project: Project) -> Iterator[int]:
    """A server on a real socket."""
    with serving(project.folder) as (port, _):
        yield port


def answers(port: int) -> bytes:
    """What a well-behaved client gets meanwhile."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as browser:
        browser.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return browser.recv(12)


def slow_clients(port: int) -> list[socket.socket]:
    slow = [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(50)]
    for number, client in enumerate(slow):
        client.sendall(b"GET /health HTTP/1.1\r\nX: "[: number % 20])
    return slow


def test_slow_clients_do_not_delay_others(port: int) -> None:
    slow = slow_clients(port)
    assert answers(port) == b"HTTP/1.1 200"
    for client in slow:
        client.close()


def test_slow_clients_are_dropped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.1)
    for client in slow_clients(port):
        with client, suppress(ConnectionError):
            client.sendall(b"x")  # a byte now and then does not keep the connection
            assert client.recv(1) == b""


def test_request_with_an_endless_body_times_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projects, "BODY_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as slow:
        head = (
            f"PUT {CONFIG} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            "application/json\r\nContent-Length: 100\r\n\r\n"
        )
        slow.sendall(head.encode() + b"{")
        assert answers(port) == b"HTTP/1.1 200"
        assert slow.recv(12) == b"HTTP/1.1 408"
