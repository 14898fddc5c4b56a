"""Encodes batches that fit into memory, however little there is."""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from simpletuner.errors import UserError, is_out_of_memory

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")


class ShrinkingEncoder(ABC, Generic[Item, Encoded]):
    """Encodes batches as large as memory allows, and keeps the size for later batches.

    Attributes:
        advice: advice for the user if nothing is left to try.
        most: maximum batch size, once known.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.most: int | None = None
        self._reason = ""

    @abstractmethod
    def encode(self, items: Sequence[Item]) -> Sequence[Encoded]:
        """One result per item; items do not influence each other."""

    @abstractmethod
    def name(self, item: Item) -> str:
        """The name of an item, for messages."""

    def relieve(self) -> bool:
        """Lower the peak memory of a single item, without changing results.

        Returns:
            False if that is impossible.
        """
        return False

    def __call__(self, items: Sequence[Item]) -> list[Encoded]:
        """The results, in order.

        Raises:
            UserError: an item does not fit into memory even alone.
        """
        done: list[Encoded] = []
        while len(done) < len(items):
            # Items encoded before memory ran out are kept.
            part = items[len(done) : len(done) + (self.most or len(items))]
            encoded = self._try_to_encode(part)
            if encoded is None:
                self._shrink(part)
            else:
                done += encoded
        return done

    def at_once(self, items: Sequence[Item]) -> int:
        """Batch size for these items, as far as known."""
        return min(len(items), self.most or len(items))

    def _try_to_encode(self, items: Sequence[Item]) -> Sequence[Encoded] | None:
        """The results, or None if memory ran out."""
        # The error is dropped, since its frames keep tensors alive.
        try:
            return self.encode(items)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reason = (str(error) or type(error).__name__).splitlines()[0]
        return None

    def _shrink(self, items: Sequence[Item]) -> None:
        """Choose smaller batches, or slices of a single item, after memory ran out."""
        gc.collect()  # cycles of exceptions and frames may keep tensors alive
        # Blocks cached for the larger batch do not fit the smaller one.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(items) > 1:
            self.most = len(items) // 2
            logger.warning(
                "Out of memory with %d at a time; continuing with %d.", len(items), self.most
            )
        elif self.relieve():
            logger.warning(
                "Out of memory with one at a time; continuing in slices, which is slower."
            )
        else:
            problem = f"{self.name(items[0])} does not fit into memory, even alone."
            raise UserError(f"{problem} {self.advice} ({self._reason})")
