"""Out of memory while encoding: do the same work in smaller pieces, or stop with advice.

None of this changes an entry, so no key depends on free memory. Tiling would change latents, so it is left to the user:
the final message suggests it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from simpletuner.errors import UserError, is_out_of_memory

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")


@dataclass
class ShrinkingEncoder(Generic[Item, Encoded]):
    """Encodes batches as large as memory allows, and remembers the size for later batches.

    Attributes:
        encode: one result per item; items do not influence each other.
        name: name of an item, for messages.
        advice: what the user can do if nothing is left to try.
        relieve: called if a single item does not fit; lowers peak memory without changing results, or returns False.
        most: items at a time, once known.
    """

    encode: Callable[[Sequence[Item]], Sequence[Encoded]]
    name: Callable[[Item], str]
    advice: str
    relieve: Callable[[], bool] = lambda: False
    most: int | None = field(default=None, init=False)
    _reason: str = field(default="", init=False)

    def __call__(self, items: Sequence[Item]) -> list[Encoded]:
        """The results, in order.

        Raises:
            UserError: an item does not fit into memory even alone.
        """
        done: list[Encoded] = []
        while len(done) < len(items):
            part = items[len(done) : len(done) + (self.most or len(items))]
            made = self._tried(part)
            if made is None:
                self._shrink(part)
            else:
                done += made
        return done

    def at_once(self, items: Sequence[Item]) -> int:
        """How many of these items are encoded together, as far as is known."""
        return min(len(items), self.most or len(items))

    def _tried(self, items: Sequence[Item]) -> Sequence[Encoded] | None:
        """The results, or None if memory ran out. The error, whose frames keep tensors alive, is gone on return."""
        try:
            return self.encode(items)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reason = (str(error) or type(error).__name__).splitlines()[0]
        return None

    def _shrink(self, items: Sequence[Item]) -> None:
        gc.collect()  # exceptions and their frames form cycles that may keep tensors alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(items) > 1:
            self.most = len(items) // 2
            logger.warning("Out of memory with %d at a time; continuing with %d.", len(items), self.most)
        elif self.relieve():
            logger.warning("Out of memory with one at a time; continuing in slices, which is slower.")
        else:
            problem = f"{self.name(items[0])} does not fit into memory, even alone."
            raise UserError(f"{problem} {self.advice} ({self._reason})")
