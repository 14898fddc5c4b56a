"""Warnings about checkpoints that were trained on files as earlier versions read them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner.data.buckets import Geometry
from simpletuner.data.clips import ClipFacts
from simpletuner.data.sample import Sample
from simpletuner.planning.resume import _check_conversions

GEOMETRY = Geometry("1.0", (64, 64), (64, 64), (0, 0))
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
def test_a_resumed_run_warns_of_files_that_look_different(
    sample: Sample, settings: dict[str, str], said: str | None
) -> None:
    identity = SimpleNamespace(settings=settings)
    checkpoint: Any = SimpleNamespace(path=Path("checkpoint-8"), manifest=SimpleNamespace(identity=identity))
    dataset: Any = SimpleNamespace(id="a", samples=(sample,))
    messages = [problem.message for problem in _check_conversions([dataset], checkpoint)]
    assert len(messages) == (said is not None)
    assert all(said in message for message in messages if said)
