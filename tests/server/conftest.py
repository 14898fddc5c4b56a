"""The browser that the tests of a module share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import PATIENCE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; the tests are skipped if none is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs an installed Chromium")
    from playwright.sync_api import expect, sync_playwright

    wait = PATIENCE * 1000.0
    expect.set_options(timeout=wait)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=wait)
        yield browser
        browser.close()
