"""Bounds the memory of threads that decode pictures at the same time, whatever the size of the pictures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from simpletuner.config.values import Size

# Of a picture and of what it is converted to.
BYTES_PER_PIXEL = 8
# A photo of 24 megapixels takes 0.2 GB, and the largest picture that is read 1.4 GB.
MOST_BYTES = 2 << 30


class Room:
    """Memory that threads share while they decode.

    Attributes:
        most: bytes. A picture that needs more waits until it is alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = 0
        self._changed = threading.Condition()
        self._thread = threading.local()

    @contextmanager
    def for_picture(self, size: Size) -> Iterator[None]:
        """Wait until there is room for a picture, and keep it; inside of another call it is part of that room."""
        if getattr(self._thread, "has_room", False):
            yield
            return
        width, height = size
        needed = min(width * height * BYTES_PER_PIXEL, self.most)
        with self._changed:
            self._changed.wait_for(lambda: self._taken + needed <= self.most)
            self._taken += needed
        self._thread.has_room = True
        try:
            yield
        finally:
            self._thread.has_room = False
            with self._changed:
                self._taken -= needed
                self._changed.notify_all()


DECODING = Room(MOST_BYTES)
