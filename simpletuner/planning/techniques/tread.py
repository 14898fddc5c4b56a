"""TREAD: routes that fit the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.tread import Route, TreadConfig
from simpletuner.errors import Problems
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.techniques.spec import TechniqueSpec, TrainedData

KEY = "tread_config"


class TreadSpec(TechniqueSpec):
    """Routes around blocks. They save what the skipped blocks would cost; nothing is added."""

    name = "tread"
    trains = "simpletuner.techniques.tread:Tread"
    keys = TreadConfig

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> TreadSpec | None:
        routes = config.techniques.of(TreadConfig).routes
        return cls(routes) if routes else None

    @classmethod
    def check_model(
        cls,
        config: RunConfig,
        spec: FamilySpec,
        routes: Sequence[Route],
        blocks: int | None,
        report: Problems,
    ) -> None:
        check_routes(routes, blocks, report)


def check_routes(routes: Sequence[Route], blocks: int | None, report: Problems) -> None:
    """Report ranges beyond the model's blocks, ranges that start after their end, and overlaps."""
    if blocks is None:
        _check_order(routes, report)
        return
    valid: list[tuple[Route, Route]] = []  # (counted from the start, as written)
    for route in routes:
        edges = dict.fromkeys((route.first, route.last))  # without duplicates
        outside = [edge for edge in edges if not -blocks <= edge < blocks]
        for edge in outside:
            report.error(
                KEY,
                f"the model has {blocks} blocks, so an index is between {-blocks} and "
                f"{blocks - 1}, not {edge}.",
            )
        if outside:
            continue
        # Comparable only now: -1 and 31 may be the same block.
        counted = route.among(blocks)
        if counted.first > counted.last:
            ends = f"(block {counted.first} of {blocks} to block {counted.last})"
            report.error(KEY, f"the route from {route.written} {ends} starts after its end.")
            continue
        valid.append((counted, route))
    _check_overlaps(valid, report)


def _check_order(routes: Sequence[Route], report: Problems) -> None:
    """Report routes that start after their end, whatever the number of blocks."""
    for route in routes:
        # Indices from opposite ends cannot be compared without that number.
        from_one_end = (route.first < 0) == (route.last < 0)
        if from_one_end and route.first > route.last:
            report.error(KEY, f"the route from {route.written} starts after its end.")


def _check_overlaps(routes: Sequence[tuple[Route, Route]], report: Problems) -> None:
    """Report overlaps between routes.

    Args:
        routes: pairs (counted from the start, as written).
    """
    # Sorted by start, overlapping routes are neighbours.
    in_order = sorted(routes, key=lambda pair: pair[0].first)
    for (earlier, first), (later, second) in itertools.pairwise(in_order):
        if later.first > earlier.last:
            continue
        shared = f"blocks {later.first} and on"
        if later.first == earlier.last:
            shared = f"block {later.first}"
        report.error(
            KEY, f"the routes from {first.written} and {second.written} overlap ({shared})."
        )
