"""How often a new run saves checkpoints and renders previews."""

from __future__ import annotations

from simpletuner.rounding import ceil_div

# To choose from at the end; see docs/CHOOSING.md.
CHECKPOINTS = 8
FEWEST_CHECKPOINTS = 4


def checkpoint_interval(steps: int) -> int:
    """Steps between checkpoints; the last interval ends with the run if its length allows it."""
    for count in range(CHECKPOINTS, FEWEST_CHECKPOINTS - 1, -1):
        if steps % count == 0:
            return steps // count
    # Rounded up, so that none is saved just before the last one.
    return ceil_div(steps, CHECKPOINTS)


def preview_interval(steps: int, saving: int, rounds: float) -> int:
    """Steps between previews: a multiple of the checkpoints' interval that divides the run.

    Args:
        saving: steps between checkpoints.
        rounds: the most rounds of previews, including that of the untrained model.
    """
    checkpoints = ceil_div(steps, saving)
    for checkpoints_per_round in range(1, checkpoints):
        if checkpoints % checkpoints_per_round != 0:
            continue
        # The untrained model is rendered first.
        if 1 + checkpoints / checkpoints_per_round <= rounds:
            return checkpoints_per_round * saving
    return steps
