"""Which modules get a LoRA, from names alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.errors import Problems
from simpletuner.models.kandinsky5.spec import ALL_LINEAR, KANDINSKY5_IMAGE
from simpletuner.models.lora_layers import (
    check_targets,
    linear_modules,
    matching_modules,
    resolve_targets,
)
from simpletuner.weights.files import tensor_shapes
from tests.tools.reports import found_by

DEFAULT = ["to_query", "to_key", "to_value"]


@pytest.fixture
def modules(t2i_checkpoint: Path) -> dict[str, tuple[int, int]]:
    (file,) = (t2i_checkpoint / "transformer").glob("*.safetensors")
    return linear_modules(tensor_shapes(file))


def resolve(value: Any) -> tuple[Any, list[str]]:
    """The resolved targets, and the problems."""
    problems = Problems()
    targets = resolve_targets(value, KANDINSKY5_IMAGE, problems)
    return targets, [str(problem) for problem in problems]


def test_targets_may_be_a_preset_a_list_a_string_or_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    path.write_text(json.dumps(["a", "b"]))

    assert resolve(None) == (DEFAULT, [])
    assert resolve("all-linear") == (ALL_LINEAR, [])
    for value in (["a", "b"], "a, b", str(path)):
        assert resolve(value) == (["a", "b"], [])


@pytest.mark.parametrize("value", [[], [1], {"a": 1}, 5, True, ["a", None]])
def test_other_values_are_refused_and_replaced_by_the_default(value: Any) -> None:
    targets, problems = resolve(value)

    assert targets == DEFAULT
    assert problems == [f"peft_lora_target_modules: {value!r} is not a list of module names."]


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 1}', None])
def test_an_unusable_targets_file_is_one_problem(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "targets.json"
    if content is not None:
        path.write_text(content)
    targets, problems = resolve(str(path))

    assert targets == DEFAULT
    assert len(problems) == 1


def test_a_name_matches_whole_parts_of_a_path(modules: dict[str, tuple[int, int]]) -> None:
    chosen = matching_modules(modules, DEFAULT)

    assert chosen
    assert {name.rsplit(".", 1)[-1] for name in chosen} == set(DEFAULT)
    assert matching_modules(modules, ["query"]) == []


def test_all_linear_selects_only_layers_of_blocks(modules: dict[str, tuple[int, int]]) -> None:
    chosen = matching_modules(modules, ALL_LINEAR)

    assert set(matching_modules(modules, DEFAULT)) < set(chosen)
    assert all("_transformer_blocks." in name for name in chosen)


def test_a_target_that_matches_nothing_is_refused_with_the_nearest_name(
    modules: dict[str, tuple[int, int]],
) -> None:
    assert found_by(check_targets, modules, DEFAULT) == []
    assert found_by(check_targets, modules, ALL_LINEAR) == []
    (problem,) = found_by(check_targets, modules, ["to_query", "to_keys"])

    expected = "'to_keys' matches no module of the transformer. Did you mean 'to_key'?"
    assert problem.message == expected
    assert len(found_by(check_targets, modules, "nothing")) == 1
