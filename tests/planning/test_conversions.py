"""Warnings about checkpoints of earlier versions, which read files or computed differently."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.clips import ClipFacts
from simpletuner.data.sample import Sample
from simpletuner.planning.resume import _check_conversions, _check_kernels
from tests.tools.reports import found_by

GEOMETRY = Geometry("1.0", Size(64, 64), Size(64, 64), (0, 0))
CLIP = Sample("a", "a.mp4", Path("a"), "c" * 64, (64, 64), GEOMETRY, clip=ClipFacts(64, 64, 1, 24))
PICTURE = Sample("a", "a.png", Path("a"), "c" * 64, (64, 64), GEOMETRY)
CONVERTED = Sample("a", "b.png", Path("a"), "c" * 64, (64, 64), GEOMETRY, conversions=("sRGB",))


@pytest.mark.parametrize(
    ("sample", "settings", "said"),
    [
        (CLIP, {}, "was trained on slightly darker colours of 1 clip"),
        (CONVERTED, {}, "was trained without the colour profile"),
        (PICTURE, {}, None),
        (CLIP, {"colour_profiles": "any"}, None),
        (CONVERTED, {"colour_profiles": "any"}, None),
    ],
)
def test_resumed_run_warns_about_files_that_look_different(
    sample: Sample, settings: dict[str, str], said: str | None
) -> None:
    identity = SimpleNamespace(settings=settings)
    checkpoint: Any = SimpleNamespace(
        path=Path("checkpoint-8"), manifest=SimpleNamespace(identity=identity)
    )
    dataset: Any = SimpleNamespace(id="a", samples=(sample,))
    messages = [problem.message for problem in found_by(_check_conversions, [dataset], checkpoint)]

    assert len(messages) == (said is not None)
    assert all(said in message for message in messages if said)


@pytest.mark.parametrize(
    ("version", "file", "is_warned"),
    [
        ("0.1.0", "kernel_choices.json", True),
        ("0.2.0", "kernel_choices.json", False),
        ("0.1.0", "config.json", False),
    ],
)
def test_resumed_run_warns_about_kernels_chosen_by_timing(
    tmp_path: Path, version: str, file: str, is_warned: bool
) -> None:
    (tmp_path / file).touch()
    identity = SimpleNamespace(versions={"simpletuner": version})
    checkpoint: Any = SimpleNamespace(
        path=tmp_path / "checkpoint-8", manifest=SimpleNamespace(identity=identity)
    )
    messages = [
        problem.message for problem in found_by(_check_kernels, tmp_path / "other", checkpoint)
    ]
    message = (
        "checkpoint-8 was written by version 0.1.0, which chose attention kernels by timing. "
        "kernel_choices.json is no longer read, so the kernels may differ, and with them the "
        "rounding."
    )

    assert messages == ([message] if is_warned else [])
