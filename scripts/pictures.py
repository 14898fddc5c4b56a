"""Take the pictures of the page that the README shows.

    simpletuner examples copy demo
    simpletuner train --env demo output_dir=output/glimmer
    simpletuner sweep output/glimmer --strengths 0.75,1
    python scripts/pictures.py

In an empty folder, whose only run is shown. Needs an installed Chromium.
"""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image, ImageOps
from playwright.sync_api import Page, sync_playwright

TARGET = Path(__file__).parents[1] / "docs" / "images"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
WINDOW = {"width": 1280, "height": 1040}
LARGEST = 150_000  # bytes of a file
STARTING = 60  # seconds


@contextmanager
def served_page() -> Iterator[str]:
    """The address of a server on the current folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "simpletuner", "server", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"http://localhost:{port}/"
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Return when a server listens."""
    end = time.monotonic() + STARTING
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    sys.exit("The server does not start.")


@contextmanager
def browser_window() -> Iterator[Page]:
    """A page of a fixed size, light and without motion."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit("Chromium is not installed.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page(viewport=WINDOW, color_scheme="light", reduced_motion="reduce")
        browser.close()


def open_run(page: Page, address: str) -> None:
    """Show the newest run, with all its pictures loaded."""
    page.goto(f"{address}#run")
    page.locator("#table img").first.wait_for()
    page.evaluate("for (const image of document.images) image.loading = 'eager'")
    page.evaluate("Promise.allSettled([...document.images].map((image) => image.decode()))")


def store(screenshot: bytes, name: str, *, margin: int = 0) -> None:
    """Write a PNG with a palette of 256 colours, a third of the size of one without."""
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture = ImageOps.expand(picture, margin, fill=picture.getpixel((0, 0)))
    picture.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    size = len(file.getvalue())
    if size > LARGEST:
        sys.exit(f"{name} has {size:,} bytes, more than {LARGEST:,}.")
    (TARGET / name).write_bytes(file.getvalue())
    print(f"{name}: {picture.width}x{picture.height}, {size:,} bytes")


def main() -> None:
    with served_page() as address, browser_window() as page:
        open_run(page, address)
        store(page.screenshot(), "run.png")
        store(page.locator("section.previews").screenshot(), "previews.png", margin=16)


if __name__ == "__main__":
    main()
