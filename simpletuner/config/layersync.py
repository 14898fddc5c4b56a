"""LayerSync: its keys and the rules between them. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from simpletuner.config.option import TechniqueGroup, beyond_last, common, option, when
from simpletuner.config.tread import Route
from simpletuner.config.values import Flag, Integer, Number
from simpletuner.errors import Problem

if TYPE_CHECKING:
    from simpletuner.models.spec import FamilySpec

# The authors' weights: for training from scratch, and in their LoRA for Wan, both in github.com/vita-epfl/LayerSync.
DEFAULT_WEIGHTS = {"full": 0.2, "lora": 0.002}
SWITCH, BLOCKS = "layersync_enabled", ("layersync_student_block", "layersync_teacher_block")


class LayerSyncConfig(TechniqueGroup):
    """LayerSync"""

    requires = when(SWITCH)

    layersync_enabled: Flag = common(
        False, "Align a block with a deeper one; see docs/experimental/LAYERSYNC.md.", label="LayerSync"
    )
    layersync_student_block: Integer | None = common(None, "The aligned block, counted from 0.", ge=0)
    layersync_teacher_block: Integer | None = common(None, "The deeper block to align with.", ge=0)
    layersync_lambda: Number | None = option(
        None, "Weight of the loss.", ge=0, default_note="0.002 for a LoRA, 0.2 for full", label="Weight"
    )

    def weight(self, model_type: str) -> float:
        """The weight of the loss; 0 if LayerSync is off."""
        chosen = DEFAULT_WEIGHTS[model_type] if self.layersync_lambda is None else self.layersync_lambda
        return chosen if self.layersync_enabled else 0.0

    @property
    def blocks(self) -> dict[str, int]:
        """The student and the teacher, as far as they are set, by their keys."""
        return {key: block for key in BLOCKS if (block := getattr(self, key)) is not None}

    def check_model(self, spec: FamilySpec, routes: Sequence[Route], blocks: int | None) -> Iterator[Problem]:
        yield from check_layersync(self, routes, blocks)


def check_layersync(config: LayerSyncConfig, routes: Sequence[Route], blocks: int | None) -> Iterator[Problem]:
    """Two different blocks of the model whose tokens can be compared.

    Args:
        blocks: number of blocks; None if the checkpoint is not on this machine.
    """
    if not config.layersync_enabled:
        return
    given = config.blocks
    for key in (key for key in BLOCKS if key not in given):
        yield Problem(key, f"is required by {SWITCH}: a block of the transformer, counted from 0.")
    yield from beyond_last(given, blocks)
    if len(given) > len(set(given.values())):
        yield Problem(BLOCKS[1], "is the student block, too; a block always equals itself, so choose a deeper one.")
    elif len(given) == 2 and given[BLOCKS[0]] > given[BLOCKS[1]]:
        message = f"{given[BLOCKS[1]]} comes before {BLOCKS[0]} {given[BLOCKS[0]]}; LayerSync aligns with a deeper one."
        yield Problem(BLOCKS[1], message, fatal=False)
    # One route drops the same tokens in both blocks, and a block without a route has them all.
    touched = [route for route in routes if blocks is not None and route.among(blocks).holds(*given.values())]
    if len(touched) > 1:
        message = "and the student block are in two routes of tread_config, which keep different tokens; use one route."
        yield Problem(BLOCKS[1], message)
