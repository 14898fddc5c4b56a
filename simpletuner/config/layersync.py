"""LayerSync: its keys and the rules between them. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from simpletuner.config.option import Flag, Group, Integer, Number, option
from simpletuner.config.tread import Route
from simpletuner.errors import Problem

# The authors' weights: for training from scratch, and in their LoRA for Wan, both in github.com/vita-epfl/LayerSync.
DEFAULT_WEIGHTS = {"full": 0.2, "lora": 0.002}
SWITCH = "layersync_enabled"


class LayerSyncConfig(Group):
    """LayerSync"""

    layersync_enabled: Flag = option(
        False, "Align the tokens of one block with those of a deeper one, see docs/experimental/LAYERSYNC.md."
    )
    layersync_student_block: Integer | None = option(None, "The block that is aligned, counted from 0; required.", ge=0)
    layersync_teacher_block: Integer | None = option(
        None, "The block it is aligned with, usually a deeper one; required.", ge=0
    )
    layersync_lambda: Number | None = option(
        None, "Weight of the loss.", ge=0, default_note="0.002 for a LoRA, 0.2 for full"
    )

    def weight(self, model_type: str) -> float:
        """The weight of the loss; 0 if LayerSync is off."""
        chosen = DEFAULT_WEIGHTS[model_type] if self.layersync_lambda is None else self.layersync_lambda
        return chosen if self.layersync_enabled else 0.0

    @property
    def blocks(self) -> dict[str, int]:
        """The student and the teacher, as far as they are set, by their keys."""
        found = {key: getattr(self, key) for key in ("layersync_student_block", "layersync_teacher_block")}
        return {key: block for key, block in found.items() if block is not None}


def check_layersync(
    config: LayerSyncConfig, is_explicit: Callable[[str], bool], routes: Sequence[Route], blocks: int | None
) -> Iterator[Problem]:
    """Two different blocks of the model whose tokens can be compared.

    Args:
        blocks: number of blocks; None if the checkpoint is not on this machine.
    """
    if not config.layersync_enabled:
        for key in filter(is_explicit, set(LayerSyncConfig.model_fields) - {SWITCH}):
            yield Problem(key, f"has no effect: {SWITCH} is off.", fatal=False)
        return
    given = config.blocks
    for key in LayerSyncConfig.model_fields:
        if key.endswith("_block") and key not in given:
            yield Problem(key, f"is required by {SWITCH}: a block of the transformer, counted from 0.")
    for key, block in given.items():
        if blocks is not None and block >= blocks:
            yield Problem(key, f"{block} is out of range: the model has {blocks} blocks, 0 to {blocks - 1}.")
    if len(given) == 2 and len(set(given.values())) == 1:
        message = f"is the student block, too ({block}): a block is always equal to itself; choose a deeper one."
        yield Problem("layersync_teacher_block", message)
    yield from _check_routes(config, routes, blocks)


def _check_routes(config: LayerSyncConfig, routes: Sequence[Route], blocks: int | None) -> Iterator[Problem]:
    """Each route draws its own tokens, so two of them have few in common."""
    if blocks is None:
        return
    ranges = [route.among(blocks) for route in routes]
    inside = {route for route in ranges for block in config.blocks.values() if route.first <= block <= route.last}
    if len(inside) > 1:
        message = "and the student block are in two routes of tread_config, which keep different tokens; use one route."
        yield Problem("layersync_teacher_block", message)
