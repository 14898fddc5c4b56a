"""The browser that the tests of a module share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.page.guard import VARIABLE
from simpletuner.annexes.page.runs import control
from tests.annexes.page.limit import SECONDS, time_limit
from tests.tools.commands import forked_commands

# The shell has no windows, tabs and address bar of its own, whose drawing takes more than half of
# Chromium's time.
BROWSERS = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "chrome",
)
# Chromium shows two more pages in each window, for its address bar, which took as long as the page
# of a test. This replaces Playwright's switch of the same name: the rest are those of that list
# which would go to the network.
LESS = (
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup,HttpsUpgrades,MediaRouter,OptimizationHints,"
    "NetworkTimeServiceQuerying"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """A test that waits for what never comes fails; so do its setup and its teardown."""
    with time_limit():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with time_limit():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with time_limit():
        return (yield)


@pytest.fixture(scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def _token_elsewhere(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test makes a token in the home folder of whoever runs it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state_folder))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """What starts `simpletuner` in no time."""
    with forked_commands(tmp_path_factory.mktemp("commands")) as program:
        yield program


def _start_quickly(patch: pytest.MonkeyPatch, program: tuple[str, ...]) -> None:
    patch.setattr(control, "PROGRAM", program)


@pytest.fixture
def quick_commands(commands: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and runs that the page asks for start in no time; the real ones are for test_form and
    test_live.
    """
    _start_quickly(monkeypatch, commands)


@pytest.fixture(scope="module")
def browser(commands: tuple[str, ...]) -> Iterator[Any]:
    """A browser with one window, in which each test has a tab; without one they are skipped. What
    the page starts is `quick_commands`."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("needs an installed Chromium")
    from playwright.sync_api import expect, sync_playwright

    wait = (
        SECONDS / 2 * 1000.0
    )  # milliseconds; less than the limit, so that the failure names what did not come
    expect.set_options(timeout=wait)
    with sync_playwright() as playwright, pytest.MonkeyPatch.context() as patch:
        _start_quickly(patch, commands)
        arguments = ["--no-sandbox", f"--disable-features={LESS}"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments, timeout=wait)
        window = browser.new_context(
            viewport={"width": 1200, "height": 900}, reduced_motion="reduce"
        )
        window.set_default_timeout(wait)
        window.new_page()  # stays open, and the window with it
        yield window
        browser.close()
