"""Bounds the memory of threads that decode pictures at the same time, however large these are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Four bytes of the picture, and four of its conversion.
BYTES_PER_PIXEL = 8
# A photo of 24 megapixels takes 0.2 GB, and the largest picture that is read 1.4 GB.
MOST_BYTES = 2 << 30


class DecodeMemory:
    """Memory that threads share while they decode.

    Attributes:
        most: bytes. A picture that needs more waits until it is alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._reserved = 0
        self._changed = threading.Condition()
        self._thread = threading.local()

    @contextmanager
    def reserved(self, size: tuple[int, int]) -> Iterator[None]:
        """Wait until there is memory for a picture of this size, and hold it.

        A thread that holds memory already gets no more: what it decodes inside is the same picture.
        """
        if getattr(self._thread, "holds_memory", False):  # unset in a new thread
            yield
            return
        width, height = size
        needed = min(width * height * BYTES_PER_PIXEL, self.most)
        with self._changed:
            self._changed.wait_for(lambda: self._reserved + needed <= self.most)
            self._reserved += needed
        self._thread.holds_memory = True
        try:
            yield
        finally:
            self._thread.holds_memory = False
            with self._changed:
                self._reserved -= needed
                self._changed.notify_all()


DECODE_MEMORY = DecodeMemory(MOST_BYTES)
