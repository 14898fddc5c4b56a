"""Tests that wait for what never comes fail, and those after them go on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.annexes.page.limit import kill_browsers, time_limit
from tests.annexes.page.page import tab

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")


def test_a_test_that_sleeps_for_ever_is_interrupted() -> None:
    with pytest.raises(TimeoutError, match="more than"), time_limit(0.1):
        time.sleep(60)


@pytest.mark.slow
def test_a_script_that_never_ends_fails_its_test_and_closes_the_browser(browser: Any) -> None:
    start = time.monotonic()

    with pytest.raises(sync_api.Error, match="closed"), time_limit(0.5), tab(browser) as page:
        page.evaluate("new Promise(() => {})")

    assert time.monotonic() - start < 30
    assert not kill_browsers()
