"""Intervals of recurring work: whether it is due, and how often it is still to come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Work that is due after every so many steps, after every so many epochs, or both.

    Attributes:
        steps: may be fractional, as for a share of an epoch; None or 0 for none.
        epochs: complete epochs; None for none.
    """

    steps: float | None
    epochs: int | None = None

    def is_due(self, step: int, epochs_before: int = 0, epochs_done: int = 0) -> bool:
        """Whether a step ends an interval.

        Args:
            epochs_before: number of complete epochs before the step.
            epochs_done: number after it. With long accumulation, a step may complete several.
        """
        if self.epochs is not None and epochs_done // self.epochs > epochs_before // self.epochs:
            return True
        if not self.steps:
            return False
        return ended(self.steps, step) > ended(self.steps, step - 1)


@dataclass(frozen=True)
class Rounds:
    """Work that recurs during training.

    Attributes:
        every: steps between two rounds; may be fractional if set in epochs.
        seconds: expected duration of a round, until one has been measured.
        at_end: a further round follows the last step, unless an interval ends there.
    """

    every: float
    seconds: float = 0.0
    at_end: bool = False

    def after(self, step: int, total: int) -> int:
        """Number of remaining rounds after a step."""
        count = ended(self.every, total) - ended(self.every, step)
        if self.at_end and step < total and total % self.every > 1e-9:
            count += 1
        return count


def ended(every: float, step: int) -> int:
    """How many intervals of `every` steps have ended with a step."""
    # The small term absorbs rounding errors, so that an interval that ends exactly here counts.
    return int(step / every + 1e-9)
