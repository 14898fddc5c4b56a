"""Decodes and writes sampled previews in a thread while training continues."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from PIL.Image import Image

from simpletuner.errors import WriteError
from simpletuner.memory.offload.side_stream import SideStream
from simpletuner.reporting.metrics import MediaRecord

logger = logging.getLogger(__name__)

Write = Callable[[list[Image]], MediaRecord]
Result = TypeVar("Result")


@dataclass
class DecodingThread:
    """Decodes previews one at a time; on a GPU, in a side stream.

    Attributes:
        thread: a pool of one worker, since some VAEs keep state between frames.
    """

    thread: Executor
    device: torch.device
    _pending: deque[tuple[str, Future[MediaRecord]]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._side = SideStream(self.device)

    @property
    def is_idle(self) -> bool:
        """Whether no preview is waiting to be decoded or reported."""
        return not self._pending

    def submit(self, name: str, decode: Callable[[], list[Image]], write: Write) -> None:
        """Decode and write a preview once its latents are computed."""
        latents_ready = self._side.end_of_compute()
        record = self.thread.submit(partial(self._decode, latents_ready, decode, write))
        self._pending.append((name, record))

    def decode(self, decode: Callable[[], list[Image]]) -> None:
        """Decode in the thread, and wait; unlike those of previews, errors are raised."""
        latents_ready = self._side.end_of_compute()

        def drop(frames: list[Image]) -> None:
            pass

        self.thread.submit(self._decode, latents_ready, decode, drop).result()

    def _decode(
        self,
        latents_ready: torch.cuda.Event | None,
        decode: Callable[[], list[Image]],
        write: Callable[[list[Image]], Result],
    ) -> Result:
        """What the thread does for one preview."""
        # Gradient mode, device and stream are per thread.
        with torch.no_grad(), self._side.after_compute(latents_ready):
            frames = decode()
        return write(frames)

    def finished(self, *, wait: bool) -> Iterator[MediaRecord]:
        """The records of previews on disk, in order.

        A preview that could not be decoded is left out, with a warning in the log.

        Raises:
            WriteError: the disk is full or not writable.
        """
        while self._pending and (wait or self._pending[0][1].done()):
            name, preview = self._pending.popleft()
            try:
                yield preview.result()
            except WriteError:
                raise
            except Exception as error:  # noqa: BLE001 - a lost preview must not stop the run
                logger.warning("The preview %s is lost: %s: %s", name, type(error).__name__, error)
