"""The server as a process: it starts in a moment, prints its address, and ends at once, whoever is
connected.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request as Ask
from urllib.request import urlopen

import pytest

from simpletuner.annexes.page import serve
from simpletuner.annexes.page.guard import Access
from simpletuner.annexes.page.project import Project
from simpletuner.cli.app import main
from simpletuner.cli.server import find_access
from tests.annexes.page.page import serving
from tests.tools.processes import PATIENCE, free_port
from tests.tools.workspace import Workspace

ADDRESS = re.compile(r"(https?)://(\S+?):(\d+)(/\?token=([\w-]{43}))?\n")


@contextmanager
def started(
    folder: Path, *options: str, program: Sequence[str] = ("-m", "simpletuner")
) -> Iterator[tuple[subprocess.Popen[str], re.Match[str]]]:
    """`simpletuner server` as a process, and the address it printed."""
    command = [sys.executable, *program, "server", "--port", str(free_port()), *options]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(1 + ("--env" in options))]
        found = ADDRESS.fullmatch(lines[-1])
        assert found is not None
        yield process, found
    finally:
        process.kill()
        process.wait()


def fetch(port: str, path: str = "/health", **headers: str) -> bytes:
    with urlopen(
        Ask(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=PATIENCE
    ) as answer:
        return bytes(answer.read())


def test_ctrl_c_ends_it_at_once_without_a_traceback(tmp_path: Path) -> None:
    with started(tmp_path) as (process, address):
        assert (address[1], address[2], address[4]) == ("http", "localhost", None)
        assert b'"ok"' in fetch(address[3])
        with socket.create_connection(("127.0.0.1", int(address[3]))) as open_one:
            open_one.sendall(b"GET / HTTP/1.1\r\n")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, "Interrupted.\n")


def test_token_is_printed_once_and_required_on_other_addresses(tmp_path: Path) -> None:
    with started(tmp_path, "--host", "0.0.0.0") as (process, address):
        token = address[5]
        with pytest.raises(OSError, match="401"):
            fetch(address[3])
        assert b'"ok"' in fetch(address[3], **{"X-API-Key": token})
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert "There are no accounts" in errors
    assert token not in output + errors


def test_starts_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys, threading; from pathlib import Path; from urllib.request import "
        "urlopen\nfrom simpletuner.annexes.page import guard, project, serve\nlistener = "
        "serve.listen('127.0.0.1', 0)\nserver = serve.make_server(project.Project(Path.cwd()), "
        "guard.Access())\nthreading.Thread(target=server.run, args=([listener],), "
        "daemon=True).start()\naddress = f'http://127.0.0.1:{listener.getsockname()[1]}'\nfor "
        "path in ('/health', '/', '/api/configs/', '/api/datasets/plan', '/api/models', "
        "'/api/hardware/memory'):\n    urlopen(address + path).read()\nprint(sorted({'torch', "
        "'diffusers', 'transformers', 'accelerate', 'peft'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_busy_port_and_foreign_address_are_reported_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["server", "--port", str(port)]) == 2
        assert capsys.readouterr().err.startswith(
            f"error: port {port} of 127.0.0.1 cannot be used (Address already in use); choose "
            "another with --port."
        )
    assert main(["server", "--host", "192.0.2.1"]) == 2
    assert "192.0.2.1" in capsys.readouterr().err


@pytest.mark.parametrize("own", [True, False])
def test_connection_of_another_user_needs_the_token(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[object] = []
    monkeypatch.setattr(serve, "is_own_user", lambda *both: ends.append(both) or own)
    with serving(tmp_path, Access(token="x" * 43)) as (port, _):
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client:
            for _ in range(2):
                client.request("GET", "/health")
                with client.getresponse() as answer:
                    assert answer.status == (200 if own else 401)
                    answer.read()
            here = client.sock.getsockname()
        assert b'"ok"' in fetch(str(port), **{"X-API-Key": "x" * 43})
    assert ends == [(here, ("127.0.0.1", port))], (
        "asked once a connection, and not at all with the token"
    )


def test_page_without_a_token_prints_a_warning_in_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert find_access("127.0.0.1", None, no_auth=True) == Access("127.0.0.1")
    assert capsys.readouterr().err.startswith(
        "\x1b[31mwarning: --no-auth lets anyone who can reach 127.0.0.1 use"
    )
    assert main(["train", "--no-auth"]) == 2
    assert "--no-auth needs --page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ssl"], "--ssl needs --ssl-key and --ssl-cert; to make a pair: openssl"),
        (["--ssl-key", "no.pem", "--ssl-cert", "no.pem"], "cannot be used"),
        (["--root", "nowhere"], "--root nowhere is not a folder"),
        (["--token", "0123456789abcdef"], "No such option: --token"),
        (["--token-file", "/dev/null/x"], "cannot be stored"),
        (["--mode", "all"], "unified"),
        (["--env", "my-cta"], "There is no config 'my-cta'. Did you mean 'my-cat'?"),
        (["--env", "../nothing"], "'../nothing' is not the name of a config."),
    ],
)
def test_bad_option_is_refused(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config/my-cat").mkdir(parents=True)
    Path("config/my-cat/config.json").write_text("{}")
    assert main(["server", "--port", str(free_port()), *options]) == 2
    assert words in capsys.readouterr().err


STREAMS = """
import asyncio, sys, time
from starlette.responses import StreamingResponse
from starlette.routing import Route
from simpletuner.cli.app import main
from simpletuner.annexes.page import serve

async def events():
    while True:
        yield ": still here\\n\\n"
        await asyncio.sleep(0.05)

def with_more(*given):
    app = real(*given)
    app.router.routes += [Route("/ticking", lambda request: StreamingResponse(events()))]
    app.router.routes += [Route("/working", lambda request: time.sleep(3600))]
    return app

real, serve.create_app = serve.create_app, with_more
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_streams_and_long_requests_end_with_the_server(tmp_path: Path) -> None:
    with started(tmp_path, program=["-c", STREAMS]) as (process, address):
        browsers = [
            socket.create_connection(("127.0.0.1", int(address[3])), PATIENCE) for _ in range(100)
        ]
        for number, browser in enumerate(browsers):
            path = "ticking" if number else "working"
            browser.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert all(browser.recv(12) == b"HTTP/1.1 200" for browser in browsers[1:])
        assert b'"ok"' in fetch(address[3])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (130, "Interrupted.\n")
        for browser in browsers:
            browser.close()


@pytest.mark.parametrize(
    ("mode", "there", "missing"),
    [
        ("unified", ["/", "/callback"], []),
        ("trainer", ["/"], ["/callback"]),
        ("callback", ["/callback"], ["/"]),
    ],
)
def test_mode_chooses_what_is_served(
    mode: serve.Mode, there: list[str], missing: list[str], tmp_path: Path
) -> None:
    routes = {route.path for route in serve.create_app(Project(tmp_path), mode).routes}  # type: ignore[attr-defined]
    assert {"/health", *there} <= routes
    assert not routes & set(missing)


@pytest.mark.slow
def test_reload_restarts_the_server_after_a_change(tmp_path: Path) -> None:
    with started(tmp_path, "--reload") as (process, address):
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            try:
                assert b'"ok"' in fetch(address[3])
                break
            except OSError:
                time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 130)


def test_page_of_a_run_is_up_while_it_lasts(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run serves its page from a thread, its Ctrl-C stays its own, and the page ends with
    it.
    """
    seen: list[Any] = []
    monkeypatch.chdir(workspace.folder)

    def look(budget: object, *rest: object, **more: object) -> None:
        seen.append(fetch(str(port)))
        seen.append(signal.getsignal(signal.SIGINT))
        with pytest.raises(OSError, match="403"):
            fetch(str(port), Host="evil.example")
        monkeypatch.setattr(serve, "is_own_user", lambda *ends: False)
        with pytest.raises(OSError, match="401"):
            fetch(str(port))

    monkeypatch.setattr("simpletuner.cli.execute.run_plan", look)
    monkeypatch.setattr(serve, "SHUTDOWN_SECONDS", PATIENCE)
    before = signal.getsignal(signal.SIGINT)
    port = free_port()
    assert main(["train", "--page-port", str(port)]) == 0
    assert b'"ok"' in seen[0]
    assert seen[1] is before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_run_does_not_start_if_its_page_has_no_port(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace.folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["train", "--page-port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert not (workspace.folder / "output").exists()


def test_a_limit_of_open_files_is_logged_once_and_other_errors_as_usual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = serve.make_server(Project(Path.cwd()), Access())
    loop = asyncio.new_event_loop()

    for _ in range(3):
        server.report(
            loop,
            {"message": "accept", "exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE))},
        )
    server.report(loop, {"message": "a bug", "exception": ValueError("a bug")})
    loop.close()

    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Connections wait",
        "a bug",
    ]
