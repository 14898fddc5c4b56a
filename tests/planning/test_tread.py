"""Token routes in a config: all their problems are reported before a weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.load import build_group
from simpletuner.config.techniques.tread import Route, TreadConfig
from simpletuner.errors import Problems
from simpletuner.planning.techniques.tread import check_routes
from tests.tools.refusals import complaints
from tests.tools.reports import found_by
from tests.tools.workspace import Workspace

GOOD = {"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": -1}


def problems_of(value: Any, blocks: int | None = 32) -> list[str]:
    """The problems of a `tread_config`."""
    problems = Problems()
    routes = build_group(TreadConfig, {"tread_config": value}, problems).routes
    problems += found_by(check_routes, routes, blocks)
    return [str(problem) for problem in problems]


def route(first: int, last: int, ratio: float = 0.5) -> dict[str, Any]:
    return {"selection_ratio": ratio, "start_layer_idx": first, "end_layer_idx": last}


def test_route_of_the_guide_is_accepted() -> None:
    routes = TreadConfig.model_validate({"tread_config": {"routes": [route(2, -2)]}}).routes
    assert routes == (Route(0.5, 2, -2),)
    assert routes[0].among(32) == Route(0.5, 2, 30), "both ends included, negatives from the end"
    assert found_by(check_routes, routes, 32) == []
    assert problems_of({"routes": [route(0, 3), route(4, 4, 0), route(-2, -1, 0.99)]}) == []
    assert (
        problems_of(
            {"routes": [{"selection_ratio": "0.5", "start_layer_idx": "2", "end_layer_idx": -2.0}]}
        )
        == []
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("on", "'on' is not an object"),
        ([GOOD], "is not an object"),
        ({}, "tread_config.routes: is required"),
        ({"routes": []}, "tread_config.routes: is empty"),
        ({"routes": GOOD}, "is not a list"),
        ({"routes": [7]}, "routes[0]: 7 is not an object"),
        ({"routes": [{**GOOD, "ratio": 1}]}, "routes[0].ratio: is not a known key."),
        ({"routes": [GOOD], "rotes": []}, "rotes: is not a known key. Did you mean 'routes'?"),
        (
            {"routes": [{"selection_ratio": 0.5, "end_layer_idx": 1}]},
            "routes[0].start_layer_idx: is required.",
        ),
        (
            {"routes": [route(0, 1, 1)]},
            "routes[0].selection_ratio: 1 is out of range; it must be < 1.",
        ),
        ({"routes": [route(0, 1, -0.1)]}, "it must be ≥ 0"),
        (
            {"routes": [{**GOOD, "selection_ratio": None}]},
            "routes[0].selection_ratio: None is not a number",
        ),
        (
            {"routes": [{**GOOD, "end_layer_idx": 1.5}]},
            "routes[0].end_layer_idx: 1.5 is not a whole number",
        ),
        ({"routes": [{**GOOD, "end_layer_idx": 10**30}]}, "routes[0].end_layer_idx"),
        (
            {"routes": [route(0, 32)]},
            "the model has 32 blocks, so an index is between -32 and 31, not 32.",
        ),
        ({"routes": [route(-33, 1)]}, "not -33"),
        (
            {"routes": [route(5, 4)]},
            "the route from 5 to 4 (block 5 of 32 to block 4) starts after its end",
        ),
        (
            {"routes": [route(31, -2)]},
            "the route from 31 to -2 (block 31 of 32 to block 30) starts after its end",
        ),
        (
            {"routes": [route(20, -1), route(0, -12)]},
            "the routes from 0 to -12 and 20 to -1 overlap (block 20)",
        ),
        (
            {"routes": [route(2, 9), route(4, 5)]},
            "the routes from 2 to 9 and 4 to 5 overlap (blocks 4 and on)",
        ),
    ],
)
def test_invalid_routes_are_refused(value: Any, words: str) -> None:
    (message,) = problems_of(value)
    assert words in message


def test_routes_are_checked_as_far_as_possible_without_the_checkpoint() -> None:
    assert problems_of({"routes": [route(2, -2), route(100, 200)]}, None) == []
    assert "starts after" in problems_of({"routes": [route(-2, -3)]}, None)[0]


@pytest.mark.parametrize("as_text", [False, True])
def test_plan_reports_all_problems_of_routes(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], as_text: bool
) -> None:
    for routes in (
        [route(0, 0, 7), {"selection_ratio": 0, "end_layer_idx": 1}],
        [route(0, 2), route(1, 0)],
    ):
        value = {"routes": routes}
        workspace.write_config(tread_config=json.dumps(value) if as_text else value)
        errors = complaints(workspace, capsys)
        assert len(errors) == 2
        assert all(error.startswith("tread_config") for error in errors)
    assert "the model has 2 blocks" in " ".join(errors)


def test_model_downloaded_later_is_checked_at_the_start(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    t2i_checkpoint: Path,
) -> None:
    from simpletuner.weights.part import Part

    there: list[str] = []
    local = Part.local_folder
    fetch = Part.fetch
    monkeypatch.setattr(Part, "local_folder", lambda self: local(self) if there else None)
    monkeypatch.setattr(Part, "fetch", lambda self: (there.append(self.role), fetch(self))[1])
    workspace.write_config(tread_config={"routes": [route(0, 2)]}, i_know_what_i_am_doing=True)
    errors = complaints(workspace, capsys, "train")
    assert there, "the plan had no objection"
    assert errors == [
        "tread_config: the model has 2 blocks, so an index is between -2 and 1, not 2."
    ]
    assert not workspace.path("output/cache").exists()
