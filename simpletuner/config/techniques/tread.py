"""Keys of TREAD, the routes that tokens take, and the tokens that each block sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from simpletuner.config.option import Group, TechniqueGroup, common
from simpletuner.config.types import Integer, Number, parse_json_text


@dataclass(frozen=True)
class Route:
    """A range of blocks that some of the tokens skip.

    Attributes:
        ratio: share of tokens that skip the blocks, in [0, 1).
        first, last: first and last block of the range, inclusive; negative numbers count from the
            end.
    """

    # pydantic's attribute for plain dataclasses.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    ratio: Annotated[Number, Field(alias="selection_ratio", ge=0, lt=1)]
    first: Annotated[Integer, Field(alias="start_layer_idx")]
    last: Annotated[Integer, Field(alias="end_layer_idx")]

    def among(self, blocks: int) -> Route:
        """The same range in a model of `blocks` blocks, both ends counted from the start."""
        first = self.first + blocks if self.first < 0 else self.first
        last = self.last + blocks if self.last < 0 else self.last
        return replace(self, first=first, last=last)

    def holds(self, *blocks: int) -> bool:
        """Whether the range, counted from the start, contains any of these blocks."""
        return any(self.first <= block <= self.last for block in blocks)

    @property
    def written(self) -> str:
        """The ends of the range, as in the config."""
        return f"{self.first} to {self.last}"


def _around_middle(share: float) -> dict[str, Any]:
    return {"routes": [{"selection_ratio": share, "start_layer_idx": 2, "end_layer_idx": -2}]}


# Presets of `tread_config`: one route around all but the outermost blocks.
ROUTES: Mapping[str, Any] = {
    "none": None,
    "quarter": _around_middle(0.25),
    "half": _around_middle(0.5),
}


class RouteGroup(Group):
    """The value of `tread_config`."""

    routes: Annotated[list[Route], Field(min_length=1)]


class TreadConfig(TechniqueGroup):
    """TREAD"""

    tread_config: Annotated[RouteGroup, BeforeValidator(parse_json_text)] | None = common(
        None, form="JSON", label="TREAD Routes"
    )
    """Token routing: {"routes": [{"selection_ratio", "start_layer_idx", "end_layer_idx"}]}, see
    docs/TREAD.md."""

    @property
    def routes(self) -> tuple[Route, ...]:
        """The ranges of blocks that tokens skip; empty without `tread_config`."""
        return () if self.tread_config is None else tuple(self.tread_config.routes)


def count_kept(ratio: float, units: int) -> int:
    """Number of a sample's units that a route keeps: `(1 - ratio) * units`, rounded, at least 1."""
    return max(1, round((1 - ratio) * units))


def tokens_by_block(
    routes: Sequence[Route], blocks: int, tokens: int, unit: int
) -> tuple[int, ...]:
    """Number of tokens that each block processes; empty if every block processes all tokens.

    Protected tokens beyond a route's share are not counted. Block indices beyond the model are
    ignored.

    Args:
        unit: number of tokens kept or dropped together.
    """
    counts = [tokens] * blocks
    units = tokens // unit
    for route in routes:
        skipped = route.among(blocks)
        kept = count_kept(route.ratio, units)
        if kept >= units:  # a small ratio may not drop a single unit
            continue
        for block in range(blocks):
            if skipped.holds(block):
                counts[block] = kept * unit
    return tuple(counts) if min(counts) < tokens else ()
