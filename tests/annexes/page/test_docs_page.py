"""The documentation as the server shows it: every page and its links, the index, and the search."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.docs import FOLDER, MOST_MATCHES, listed_pages, search_docs
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app
from tests.annexes.page.page import opened


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(Project(tmp_path)))


def test_every_page_is_served_and_its_links_lead_on(client: TestClient) -> None:
    addresses = ["/docs/", *(f"/docs/{path}" for path in listed_pages())]
    pages = {address: client.get(address).text for address in addresses}

    for address, page in pages.items():
        assert "<h1" in page
        for link in re.findall(r'(?:href|src)="([^":]+)"', page):
            target = client.build_request("GET", address).url.join(link)
            text = pages.get(target.path) or client.get(target.path).raise_for_status().text
            if target.path == "/":
                continue  # its anchors are places, which its script shows
            assert not target.fragment or f'id="{target.fragment}"' in text, f"{address}: {link}"


def test_the_index_lists_every_page_once() -> None:
    paths = {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*.md")}

    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)

    assert sorted(links) == sorted(paths - {"README.md"})


def test_the_index_has_three_kinds_and_a_line_for_every_page(client: TestClient) -> None:
    index = client.get("/docs/").text

    assert re.findall(r"<h2[^>]*>([^<]+)", index)[:3] == [
        "Start",
        "Guides",
        "Reference and how it works",
    ]
    assert '<td><a href="CHOOSING.md">Choosing</a></td>\n<td>which checkpoint' in index


def test_every_page_names_all_pages_at_its_side(client: TestClient) -> None:
    for path in ("", "TUTORIAL.md"):
        page = client.get(f"/docs/{path}").text
        side = page.partition('aria-label="All pages"')[2].partition("</nav>")[0]

        assert re.findall(r'href="/docs/([^"]+)"', side) == listed_pages(), path


@pytest.mark.parametrize(
    ("query", "address"),
    [
        ("comfyui", "/docs/TROUBLESHOOTING.md#comfyui-does-not-load-it"),
        ("NO gpu found", "/docs/TROUBLESHOOTING.md#no-gpu-is-found"),
        ("masked loss", "/docs/DREAMBOOTH.md#masked-loss"),
        ("checkpoint strength", "/docs/CHOOSING.md"),
        ("安装", "/docs/zh/INSTALL.md"),
    ],
)
def test_a_search_shows_headings_with_the_words_first(query: str, address: str) -> None:
    first, *_ = search_docs(query)

    assert first.section.address == address


def test_a_search_finds_only_sections_with_all_words() -> None:
    matches = search_docs("preservation zkt sofa")

    assert [match.section.address for match in matches] == [
        "/docs/DREAMBOOTH.md#preservation-without-data"
    ]
    assert "<mark>" in matches[0].excerpt


def test_a_search_shows_code_and_keys(client: TestClient) -> None:
    page = client.get("/docs/", params={"q": "lr_warmup_steps"}).text

    assert "<mark>lr_warmup_steps</mark>" in page
    assert f"The first {MOST_MATCHES} sections" not in page


def test_a_search_for_nothing_known_says_so(client: TestClient) -> None:
    page = client.get("/docs/", params={"q": "zebrafish <script>"}).text

    assert "Nothing contains all of these words." in page
    assert "zebrafish &lt;script&gt;" in page
    assert "<script>" not in page.partition("</head>")[2]


def test_an_empty_search_is_the_index(client: TestClient) -> None:
    assert client.get("/docs/", params={"q": " "}).text == client.get("/docs/").text


@pytest.mark.parametrize(
    "path", ["none.md", "../pyproject.toml", "%2e%2e/README.md", "notebooks/demo.ipynb", "images"]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/docs/{path}").status_code == 404


def test_help_leads_to_the_documentation(client: TestClient) -> None:
    form = client.get("/settings").text

    assert '<a href="/docs/TREAD.md" target="_blank">docs/TREAD.md</a>' in form
    links = set(re.findall(r'href="(/docs/[^"]+)"', form))
    assert all(client.get(link).status_code == 200 for link in links)


@pytest.mark.slow
def test_sections_appear_while_one_types(browser: Any, tmp_path: Path) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    with opened(browser, tmp_path) as page:
        page.goto(f"http://{page.url.split('/')[2]}/docs/experimental/VIDEO_CREPA.md")

        page.get_by_role("searchbox").fill("masked loss")
        page.get_by_role("link", name="Masked loss").first.click()

        expect(page).to_have_url(re.compile("/docs/DREAMBOOTH.md#masked-loss$"))
