"""Token routes (TREAD) as they are written in `tread_config`, and as numbers of blocks. Free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpletuner.config.option import parse_integer, parse_number
from simpletuner.errors import Problem, did_you_mean

KEY = "tread_config"
RATIO, FIRST, LAST = "selection_ratio", "start_layer_idx", "end_layer_idx"
ENTRIES = (RATIO, FIRST, LAST)


@dataclass(frozen=True)
class Route:
    """A window of blocks that some of the tokens pass by.

    Attributes:
        ratio: share of the tokens that are left out, from 0 up to but not including 1.
        first, last: the blocks at the edges of the window, both of them in it; negative numbers count from the end.
    """

    ratio: float
    first: int
    last: int

    def among(self, blocks: int) -> Route:
        """The same window with both edges counted from the start, of so many blocks."""
        first, last = (edge + blocks if edge < 0 else edge for edge in (self.first, self.last))
        return replace(self, first=first, last=last)

    @property
    def written(self) -> str:
        """The edges as they are in the file."""
        return f"{self.first} to {self.last}"


def read_routes(value: object, problems: list[Problem]) -> list[Route]:
    """The routes of a `tread_config` that can be read; what is wrong with the others is added to `problems`."""
    if not isinstance(value, dict):
        problems.append(_problem(f"is {value!r}; it must be an object with a list of routes."))
        return []
    problems.extend(_unknown(value, ("routes",), ""))
    routes = value.get("routes")
    if not isinstance(routes, list) or not routes:
        problems.append(_problem("needs routes, a list of at least one route."))
        return []
    read = [_read_route(route, f"routes[{number}]", problems) for number, route in enumerate(routes)]
    return [route for route in read if route is not None]


def check_routes(routes: list[Route], blocks: int | None) -> Iterator[Problem]:
    """Whether windows lie within the blocks of a model, begin before they end and do not overlap.

    Args:
        blocks: how many there are; None while the checkpoint is not on this machine. Edges that count from
            different ends cannot be compared then.
    """
    inside: list[tuple[Route, Route]] = []  # as counted from the start, and as written
    for route in routes:
        if blocks is None:
            if (route.first < 0) == (route.last < 0) and route.first > route.last:
                yield _problem(f"the route from {route.written} starts behind its end.")
            continue
        outside = [edge for edge in (route.first, route.last) if not -blocks <= edge < blocks]
        if outside:
            message = f"the model has {blocks} blocks, so an edge is between {-blocks} and {blocks - 1}, not {{}}."
            yield from (_problem(message.format(edge)) for edge in dict.fromkeys(outside))
            continue
        counted = route.among(blocks)
        if counted.first > counted.last:
            ends = f"(block {counted.first} of {blocks} to block {counted.last})"
            yield _problem(f"the route from {route.written} {ends} starts behind its end.")
            continue
        inside.append((counted, route))
    inside.sort(key=lambda pair: pair[0].first)
    for (one, first), (other, second) in itertools.pairwise(inside):
        if other.first <= one.last:
            shared = f"block {other.first}" if other.first == one.last else f"blocks {other.first} and on"
            yield _problem(f"the routes from {first.written} and {second.written} overlap ({shared}).")


def count_kept(ratio: float, units: int) -> int:
    """How many of the units of a sample a route keeps: `(1 - ratio) * units`, rounded, at least 1."""
    return max(1, round((1 - ratio) * units))


def tokens_by_block(routes: Sequence[Route], blocks: int, tokens: int, unit: int) -> tuple[int, ...]:
    """How many tokens of a sample each block computes on, empty where every block has all of them.

    Protected tokens beyond a route's share are not counted. An edge that the model does not have is passed over.

    Args:
        unit: how many tokens are kept or left out together.
    """
    counts = [tokens] * blocks
    for route in (each.among(blocks) for each in routes):
        kept = count_kept(route.ratio, tokens // unit)
        if kept < tokens // unit:
            counts = [kept * unit if route.first <= block <= route.last else n for block, n in enumerate(counts)]
    return tuple(counts) if min(counts) < tokens else ()


def _read_route(route: object, name: str, problems: list[Problem]) -> Route | None:
    if not isinstance(route, dict):
        problems.append(_problem(f"{name} is {route!r}; it must be an object with {', '.join(ENTRIES)}."))
        return None
    problems.extend(_unknown(route, ENTRIES, f"{name}."))
    absent = [entry for entry in ENTRIES if entry not in route]
    if absent:
        problems.append(_problem(f"{name} lacks {', '.join(absent)}."))
    ratio = _number(route.get(RATIO, 0), f"{name}.{RATIO}", problems)
    edges = [_edge(route.get(entry, 0), f"{name}.{entry}", problems) for entry in (FIRST, LAST)]
    if ratio is None or edges[0] is None or edges[1] is None or absent:
        return None
    return Route(ratio, edges[0], edges[1])


def _number(value: object, name: str, problems: list[Problem]) -> float | None:
    """A share of tokens; 1 would leave out all of them."""
    try:
        ratio = parse_number(value)
    except ValueError as error:
        problems.append(_problem(f"{name} {value!r} {error}."))
        return None
    if 0 <= ratio < 1:
        return ratio
    limits = "the share of tokens that are left out: at least 0 and less than 1"
    problems.append(_problem(f"{name} is {ratio:g}; it is {limits}."))
    return None


def _edge(value: object, name: str, problems: list[Problem]) -> int | None:
    try:
        number: Any = parse_integer(value)
    except ValueError as error:
        problems.append(_problem(f"{name} {value!r} {error}."))
        return None
    return int(number)


def _unknown(value: dict[Any, Any], known: tuple[str, ...], prefix: str) -> Iterator[Problem]:
    for entry in value:
        if entry not in known:
            yield _problem(f"{prefix}{entry} is not known here.{did_you_mean(str(entry), known)}")


def _problem(message: str) -> Problem:
    return Problem(KEY, message)
