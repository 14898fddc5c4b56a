"""Token routes (TREAD): `tread_config`, and the blocks that it refers to. Free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from simpletuner.config.option import Group, TechniqueGroup, common
from simpletuner.config.values import Integer, Number, parse_json_text
from simpletuner.errors import Problem

if TYPE_CHECKING:
    from simpletuner.models.spec import FamilySpec


@dataclass(frozen=True)
class Route:
    """A range of blocks that some of the tokens skip.

    Attributes:
        ratio: share of the tokens that skip the blocks, at least 0 and below 1.
        first, last: the first and the last block of the range, inclusive; negative numbers count from the end.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where pydantic looks in a plain dataclass

    ratio: Annotated[Number, Field(alias="selection_ratio", ge=0, lt=1)]
    first: Annotated[Integer, Field(alias="start_layer_idx")]
    last: Annotated[Integer, Field(alias="end_layer_idx")]

    def among(self, blocks: int) -> Route:
        """The same range in a model of `blocks` blocks, both ends counted from the start."""
        first, last = (edge + blocks if edge < 0 else edge for edge in (self.first, self.last))
        return replace(self, first=first, last=last)

    def holds(self, *blocks: int) -> bool:
        """Whether the range, counted from the start, has any of these blocks."""
        return any(self.first <= block <= self.last for block in blocks)

    @property
    def written(self) -> str:
        """The ends of the range as in the config."""
        return f"{self.first} to {self.last}"


class RouteGroup(Group):
    """The value of `tread_config`."""

    routes: Annotated[list[Route], Field(min_length=1)]


class TreadConfig(TechniqueGroup):
    """TREAD"""

    tread_config: Annotated[RouteGroup, BeforeValidator(parse_json_text)] | None = common(
        None,
        'Token routing: {"routes": [{"selection_ratio", "start_layer_idx", "end_layer_idx"}]}, see docs/TREAD.md.',
        form="JSON",
        label="TREAD Routes",
    )

    @property
    def routes(self) -> tuple[Route, ...]:
        """The ranges of blocks that tokens skip; empty without `tread_config`."""
        return () if self.tread_config is None else tuple(self.tread_config.routes)

    def check_model(self, spec: FamilySpec, routes: Sequence[Route], blocks: int | None) -> Iterator[Problem]:
        yield from check_routes(routes, blocks)


_problem = partial(Problem, "tread_config")


def check_routes(routes: Sequence[Route], blocks: int | None) -> Iterator[Problem]:
    """Check that ranges are within the model's blocks, start before they end and do not overlap.

    Args:
        blocks: number of blocks; None if the checkpoint is not on this machine. Ends that count from different ends
            of the model cannot be compared then.
    """
    inside: list[tuple[Route, Route]] = []  # counted from the start, and as written
    for route in routes:
        if blocks is None:
            if (route.first < 0) == (route.last < 0) and route.first > route.last:
                yield _problem(f"the route from {route.written} starts after its end.")
            continue
        outside = {edge: None for edge in (route.first, route.last) if not -blocks <= edge < blocks}
        for edge in outside:
            message = f"the model has {blocks} blocks, so an index is between {-blocks} and {blocks - 1},"
            yield _problem(f"{message} not {edge}.")
        if outside:
            continue
        # Only now comparable: -1 and 31 may be the same block.
        counted = route.among(blocks)
        if counted.first > counted.last:
            ends = f"(block {counted.first} of {blocks} to block {counted.last})"
            yield _problem(f"the route from {route.written} {ends} starts after its end.")
            continue
        inside.append((counted, route))
    yield from _check_overlaps(inside)


def _check_overlaps(routes: Sequence[tuple[Route, Route]]) -> Iterator[Problem]:
    """Routes counted from the start, with the same as written."""
    # In the order of their starts, overlapping routes have overlapping neighbours.
    in_order = sorted(routes, key=lambda pair: pair[0].first)
    for (one, first), (following, second) in itertools.pairwise(in_order):
        if following.first <= one.last:
            shared = f"block {following.first}" if following.first == one.last else f"blocks {following.first} and on"
            yield _problem(f"the routes from {first.written} and {second.written} overlap ({shared}).")


def count_kept(ratio: float, units: int) -> int:
    """How many of a sample's units a route keeps: `(1 - ratio) * units`, rounded, at least 1."""
    return max(1, round((1 - ratio) * units))


def tokens_by_block(routes: Sequence[Route], blocks: int, tokens: int, unit: int) -> tuple[int, ...]:
    """How many tokens of a sample each block processes; empty if every block processes all of them.

    Protected tokens beyond a route's share are not counted. Block indices that the model does not have are ignored.

    Args:
        unit: how many tokens are kept or dropped together.
    """
    counts = [tokens] * blocks
    for route in (each.among(blocks) for each in routes):
        kept = count_kept(route.ratio, tokens // unit)
        if kept < tokens // unit:
            counts = [kept * unit if route.holds(block) else n for block, n in enumerate(counts)]
    # A ratio can be too small to drop even one unit.
    return tuple(counts) if min(counts) < tokens else ()
