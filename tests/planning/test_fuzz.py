"""Whatever a file holds, a plan exits with 0 or 2, without a traceback.

Files are drawn from fixed seeds, so a failure repeats.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig, ParquetConfig, VideoConfig
from simpletuner.config.schema import all_options
from tests.tools.cases import first_of
from tests.tools.workspace import DATASETS, Workspace

KEYS = sorted(all_options())
DATASET_KEYS = sorted(DatasetConfig.model_fields)
INNER_KEYS = {
    "video": sorted(VideoConfig.model_fields),
    "parquet": sorted(ParquetConfig.model_fields),
}
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2.5,
    1e308,
    -1e308,
    10**30,
    10**400,
    "",
    " ",
    "none",
    "auto",
    "~nobody/y",
    "~",
    ".",
    "..",
    "/",
    "\0",
    "\ud800",
    "é" * 300,
    "a" * 5000,
    "नमस्ते",
    "{env:NOT_SET}",
    "{env:HOME}",
    "{id}",
    "[1",
    "[]",
    "{}",
    "[[[[]]]]",
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    [1, "a", {}],
    float("nan"),
    float("inf"),
    "nan",
    "1e5",
    "1e400",
    "0x10",
    "1_000",
    "१२",
    "true",
    "TRUE",
    "\n",
    "a,b",
    "1x1",
    "x",
    "128x",
    "0x0",
    "-1x5",
    "\x1b[31m",
    ["a"],
    "id",
    "pictures",
    "text",
    "local",
    "image",
    "conditioning",
    "closest",
    "random",
    "parquet",
)
SPLINTERS = ('"', "{", "}", ",", "\\", "\0", "9" * 5000, "[" * 5000, "\ufeff", "// x\n", "'")


def shaken(chance: random.Random, workspace: Workspace) -> tuple[str, str]:
    """A config and a dataset file, each with a few things wrong."""
    config = json.loads(workspace.path("config/config.json").read_text())
    datasets = json.loads(json.dumps(DATASETS))
    for _ in range(chance.choice((0, 1, 1, 3))):
        config[chance.choice(KEYS)] = chance.choice(VALUES)
    for _ in range(chance.choice((0, 1, 1, 3))):
        key = chance.choice(DATASET_KEYS)
        value = chance.choice(VALUES)
        if key in INNER_KEYS:
            value = {chance.choice(INNER_KEYS[key]): value}
        chance.choice(datasets)[key] = value
    return splintered(chance, json.dumps(config)), splintered(chance, json.dumps(datasets))


def splintered(chance: random.Random, text: str) -> str:
    if chance.random() > 0.1:
        return text
    place = chance.randrange(len(text))
    return text[:place] + chance.choice(SPLINTERS) + text[place:]


def answer(workspace: Workspace, *arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return workspace.run("plan", *arguments), err.getvalue()


@pytest.mark.slow(1)
@pytest.mark.parametrize("seed", first_of(range(4)))
def test_fuzzed_files_never_cause_a_traceback(workspace: Workspace, seed: int) -> None:
    chance = random.Random(seed)
    outcomes = set()
    for _ in range(50):
        config, datasets = shaken(chance, workspace)
        workspace.path("config/shaken.json").write_text(config, encoding="utf-8")
        workspace.path("config/datasets.json").write_text(datasets, encoding="utf-8")
        code, printed = answer(
            workspace, "config_path=config/shaken.json", "data_backend_config=config/datasets.json"
        )
        assert code in (0, 2), f"{printed}\n{config}\n{datasets}"
        outcomes.add(code)

    assert outcomes == {0, 2}, "some go well, or nothing behind the loader was tried"


def test_fuzzed_command_lines_never_cause_a_traceback(workspace: Workspace) -> None:
    chance = random.Random(0)
    words = [
        *map(str, VALUES),
        "--",
        "=",
        "--=",
        "-",
        "--env",
        "--example",
        "--seed",
        "env=",
        "--use_ema",
        "seed=1",
    ]
    for _ in range(60):
        typed = [chance.choice(words) for _ in range(chance.randint(1, 4))]
        typed.append(f"{chance.choice(KEYS)}={chance.choice(words)}")
        code, printed = answer(workspace, *typed)
        assert code in (0, 2), f"{printed}\n{typed}"


@pytest.mark.parametrize("seed", range(2))
def test_noise_in_any_file_never_causes_a_traceback(workspace: Workspace, seed: int) -> None:
    chance = random.Random(seed)
    workspace.write_config(user_prompt_library="config/library.json", validation_disable=False)
    for name in (
        "config/library.json",
        "config/multidatabackend.json",
        "config/config.env",
        "config/config.json",
    ):
        for size in (0, 1, 3, 200):
            path = workspace.path(name)
            before = path.read_bytes() if path.exists() else None
            path.write_bytes(chance.randbytes(size))
            code, printed = answer(workspace)
            assert code in (0, 2), f"{name}: {printed}"
            path.unlink() if before is None else path.write_bytes(before)
