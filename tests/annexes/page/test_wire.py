"""What crosses the wire: compressed text, and media, parts of files and events as they are."""

from __future__ import annotations

import gzip
import http.client
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.serve import create_app
from tests.annexes.page.page import serving
from tests.annexes.page.runs.test_runs import STEPS, own, tell
from tests.tools.processes import PATIENCE
from tests.tools.workspace import Workspace

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "output"
    folder.mkdir()
    tell(folder, *STEPS)
    return folder


def test_a_page_is_compressed_for_those_who_can_read_it(output: Path) -> None:
    client = TestClient(create_app(Project(output.parent)))
    with client.stream("GET", "/settings") as answer:
        body = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    plain = client.get("/settings", headers={"Accept-Encoding": "identity"})
    assert gzip.decompress(body) == plain.content
    assert "content-encoding" not in plain.headers
    assert len(body) < len(plain.content) / 5


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.gif", "a.webp", "a.mp4", "a.webm"])
def test_media_are_sent_as_they_are(output: Path, name: str) -> None:
    content = b"as large as a file that would be compressed " * 100
    (output / name).write_bytes(content)
    client = TestClient(create_app(Project(output.parent)))
    address = f"/media/{run_id(output)}/{name}"
    whole = client.get(address)
    assert "content-encoding" not in whole.headers
    assert whole.headers["content-length"] == str(len(content))
    part = client.get(address, headers={"Range": "bytes=5-1004"})
    assert (part.status_code, part.content) == (206, content[5:1005])
    assert "content-encoding" not in part.headers


def test_an_event_arrives_at_once(output: Path) -> None:
    own(output)
    with serving(output.parent) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request(
            "GET", f"/api/training/events?run={run_id(output)}", headers={"Accept-Encoding": "gzip"}
        )
        answer = connection.getresponse()
        assert answer.getheader("content-encoding") is None
        assert answer.readline() == b": connected\n"
        tell(output, *STEPS)
        assert answer.readline() == b"\n"
        assert answer.readline().startswith(b"id: ")  # while the stream stays open
        connection.close()


@pytest.mark.slow
def test_the_first_visit_takes_sixty_kilobytes(
    browser: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.folder)
    sizes: dict[str, float] = {}
    with (
        serving(workspace.folder.resolve()) as (port, _),
        browser.browser.new_context(locale="hi") as context,  # the longest texts
    ):  # with nothing in its cache
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        addresses: dict[str, str] = {}
        session.on(
            "Network.responseReceived",
            lambda event: addresses.update({event["requestId"]: event["response"]["url"]}),
        )
        session.on(
            "Network.loadingFinished",
            lambda event: sizes.update(
                {addresses[event["requestId"]].partition(f":{port}")[2]: event["encodedDataLength"]}
            ),
        )
        page.goto(f"http://127.0.0.1:{port}/")
        sync_api.expect(page.get_by_role("heading", level=1)).to_have_text("output")
        page.wait_for_load_state("networkidle")
        # Headers and the list of runs included.
        first = sum(sizes.values())
        assert {"/", "/static/app.js", "/static/run.js", "/runs"} <= sizes.keys()
        assert first < 60_000, sizes
        assert "/settings" not in sizes, "is loaded when it is first shown"
        page.locator(".places [data-place=settings]").click()
        sync_api.expect(page.locator("#verdict")).to_have_text("fits")
    # The plan and the list of configs included.
    assert {"/settings", "/api/plan", "/api/training/validate"} <= sizes.keys()
    assert sum(address.endswith("/api/configs/") for address in addresses.values()) == 1
    assert sum(sizes.values()) - first < 60_000, sizes
