"""The documentation as the server shows it: every page and its links, and from where the form leads
there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.docs import FOLDER, titles
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(Project(tmp_path)))


def test_every_page_is_served_and_its_links_lead_on(client: TestClient) -> None:
    pages = {f"/docs/{path}": client.get(f"/docs/{path}").text for path in titles()}
    assert len(pages) == len([*FOLDER.rglob("*.md")]) > 20
    for address, page in pages.items():
        assert "<h1" in page
        for link in re.findall(r'(?:href|src)="([^":]+)"', page):
            target = client.build_request("GET", address).url.join(link)
            there = pages.get(target.path) or client.get(target.path).raise_for_status()
            assert not target.fragment or f'id="{target.fragment}"' in there, f"{address}: {link}"


def test_the_list_of_pages_names_all(client: TestClient) -> None:
    listed = client.get("/docs/").text
    assert all(f'<a href="/docs/{path}">' in listed for path in titles())


@pytest.mark.parametrize(
    "path", ["none.md", "../pyproject.toml", "%2e%2e/README.md", "notebooks/demo.ipynb", "images"]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/docs/{path}").status_code == 404


def test_help_leads_to_the_documentation(client: TestClient) -> None:
    form = client.get("/").text
    assert '<a href="/docs/TREAD.md" target="_blank">docs/TREAD.md</a>' in form
    assert all(
        client.get(link).status_code == 200
        for link in set(re.findall(r'href="(/docs/[^"]+)"', form))
    )
