"""Advice that works: a setting that a message proposes is not refused next."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.draft import Draft
from simpletuner.config.datasets import dataset_options
from simpletuner.config.option import Option, When
from simpletuner.config.remote import SOURCES
from simpletuner.config.schema import all_options
from simpletuner.config.sources import Arguments, config_from_values
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.build import plan_training
from tests.tools.advice import Judge, Settings, comes_to_an_end, proposals, refused_next
from tests.tools.workspace import CONFIG, DATASETS, Workspace

OPTIONS = all_options()
DATASET_OPTIONS = dataset_options()
CHOSEN = ("model_family", "model_type", "plan_device")
# Settings that exclude or need each other in many ways.
ENTANGLED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("lora", "full"),
    "num_processes": (1, 2),
    "fsdp_enable": (False, True),
    "optimizer": ("adamw_bf16", "adamw", "muon", "ao-adamw8bit", "torch-sgd", "optimi-lion"),
    "optimizer_release_gradients": (False, True),
    "mixed_precision": ("bf16", "no", "fp16"),
    "base_model_precision": ("no_change", "int8-quanto", "fp32"),
    "dynamo_backend": ("inductor", "cudagraphs", "no"),
    "dynamo_mode": (None, "max-autotune", "reduce-overhead"),
    "enable_group_offload": (False, True),
    "offload_block_inputs": (False, True),
    "lora_type": ("standard", "lokr"),
    "use_dora": (False, True),
    "lora_init_type": ("default", "pissa"),
}
MOST_ROUNDS = 5


def unusual(option: Option) -> list[Any]:
    """Values that are not the default."""
    if option.is_flag:
        return [not option.default]
    if option.choices:
        return [word for word in option.choices if word != option.default]
    if option.type_name in ("integer", "number"):
        lowest = option.limits.get("ge", option.limits.get("gt", 0))
        return [lowest + 1, lowest + 3]
    return []


def meeting(condition: When) -> dict[str, Any]:
    """Settings with which a condition holds."""
    settings: dict[str, Any] = {}
    for key, values in condition.keys.items():
        others = unusual(OPTIONS[key]) or [True]
        settings[key] = values[0] if values and not condition.negated else others[0]
    return {**settings, **(meeting(condition.also) if condition.also else {})}


def broken_settings() -> Iterator[dict[str, Any]]:
    """Every value of every key alone, and beside whatever it excludes."""
    for key, option in OPTIONS.items():
        if key in CHOSEN:
            continue
        for value in unusual(option):
            yield {key: value}
        for condition in option.excludes:
            yield from ({**meeting(condition), key: value} for value in unusual(option)[:1])


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """The errors of settings, as the page and the wizard see them."""
    file = tmp_path / "config.json"
    return lambda settings: [
        problem for problem in Draft(file, settings).judgement.problems if problem.fatal
    ]


@pytest.mark.slow(2)
@pytest.mark.parametrize("model_type", ["lora", "full"])
@pytest.mark.parametrize(
    "family",
    [
        FAMILIES["kandinsky5-image"].name,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES),
    ],
)
def test_following_the_advice_of_a_message_causes_no_new_error(
    judge: Judge, family: str, model_type: str
) -> None:
    followed = 0
    refused: list[str] = []
    for settings in broken_settings():
        whole = {"model_family": family, "model_type": model_type, **settings}
        problems = judge(whole)
        followed += sum(len(proposals(problem, OPTIONS)) for problem in problems)
        refused += refused_next(whole, problems, judge, OPTIONS)

    assert followed >= 15, "the words of proposals are recognised"
    assert refused == []


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 5))]
)
def test_following_advice_for_entangled_settings_terminates(judge: Judge, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        drawn = {key: chance.choice(values) for key, values in ENTANGLED.items()}
        settings = {
            "model_family": "kandinsky5-image",
            **{k: v for k, v in drawn.items() if v is not None},
        }

        assert comes_to_an_end(settings, judge, OPTIONS, MOST_ROUNDS), settings


def broken_entries() -> Iterator[dict[str, Any]]:
    """Every value of every choice of a dataset, and every key of a remote type."""
    for key, option in DATASET_OPTIONS.items():
        is_remote = any(key in source.keys.model_fields for source in SOURCES.values())
        values = unusual(option) if option.choices or is_remote else []
        if key not in ("id", "type", "dataset_type"):
            # A table is a file, which no words of a message can make.
            if not values and is_remote:
                values = ["words"]
            for value in values:
                if value != "parquet":
                    yield {key: value}
    for value in (1, 40):
        yield {"resolution": value, "resolution_type": "pixel"}


@pytest.mark.slow(2)
def test_following_the_advice_about_a_dataset_causes_no_new_error(workspace: Workspace) -> None:
    def judge(entry: Settings) -> list[Problem]:
        workspace.write_datasets([dict(entry), DATASETS[1]])
        content = json.loads(workspace.path("config/config.json").read_text())
        arguments = Arguments(base=config_from_values({**CONFIG, **content}))
        try:
            plan_training(arguments)
        except ConfigError as error:
            return [problem for problem in error.problems if problem.fatal]
        return []

    followed = 0
    refused: list[str] = []
    with workspace.inside():
        for keys in broken_entries():
            entry = {**DATASETS[0], **keys}
            problems = judge(entry)
            followed += sum(len(proposals(problem, DATASET_OPTIONS)) for problem in problems)
            refused += refused_next(entry, problems, judge, DATASET_OPTIONS)

    assert followed >= 10, "the words of proposals are recognised"
    assert refused == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("'fp8' is not available yet; use bf16.", [{"mixed_precision": "bf16"}]),
        ("needs model_type full: the gradients of a LoRA are small.", [{"model_type": "full"}]),
        (
            "fits no x; leave it out and set offload auto.",
            [{"mixed_precision": None, "offload": "auto"}],
        ),
        (
            "is x. Use bf16, or num_processes 1.",
            [{"mixed_precision": "bf16"}, {"num_processes": "1"}],
        ),
        ("cannot be combined with lr_scale.", [{"mixed_precision": None}]),
        ("needs crepa_enabled.", [{"crepa_enabled": True}]),
        ("is not one of: a, b.", []),
    ],
)
def test_proposals_are_parsed_from_messages(message: str, expected: list[dict[str, Any]]) -> None:
    assert proposals(Problem("mixed_precision", message), OPTIONS) == expected
