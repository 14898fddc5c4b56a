"""A table of what `offload: auto` chooses, for a spread of models and cards.

`python -m tests.annexes.test_picks` writes the table again. Read the difference: a pick may be
another one, but its step may not be slower by more than 3 %.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.fitting.fit import check_fit, choose
from simpletuner.budget.budget import Budget
from simpletuner.budget.workload import Bucket
from simpletuner.models.vae_cost import VaeLoad
from tests.annexes.test_fit import CLIP, LITE, PICTURE, SANA, budget, gpu
from tests.tools.reports import found_by

TABLE = Path(__file__).with_name("picks.json")
MODELS = {
    "t2i-lite-sft": replace(PICTURE, batch=1),
    "t2v-lite-sft-5s": LITE,
    "t2v-pro-sft-5s-hd": CLIP,
    "2b-480p": SANA,
    "2b-720p": Bucket(1280, 704, 81, 1, 1.0, 300),
}
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    f"{flavour} {kind} {gigabytes} GB": (flavour, gigabytes, {"model_type": kind})
    for flavour in MODELS
    for kind in ("lora", "full")
    for gigabytes in (12, 16, 24, 48, 80)
}
CASES |= {
    f"t2v-lite-sft-5s {kind} {gigabytes} GB, 4 processes": (
        "t2v-lite-sft-5s",
        gigabytes,
        {"model_type": kind, "num_processes": 4},
    )
    for kind in ("lora", "full")
    for gigabytes in (12, 24, 48)
}
CASES |= {
    f"t2v-lite-sft-5s lora {gigabytes} GB": ("t2v-lite-sft-5s", gigabytes, {})
    for gigabytes in (6, 8, 10)
}


def whole_run(flavour: str, gigabytes: float, settings: dict[str, Any]) -> Budget:
    """Captions and samples to encode, training and previews, on a host with 64 GiB."""
    bucket = MODELS[flavour]
    before = budget(
        gpu(gigabytes * 2**30 / 1e9, 64 * 2**30),
        bucket,
        flavour,
        True,
        **{"speed": "auto", **settings},
    )
    encoded = [VaeLoad(1, bucket.frames, bucket.width, bucket.height)]
    guidance = before.config.validation.validation_guidance or 1
    preview = replace(bucket, share=1.0, guided=guidance > 1)
    return replace(before, workload=replace(before.workload, encoded=encoded, previews=[preview]))


def pick(case: str) -> dict[str, Any]:
    """The row of the table."""
    before = whole_run(*CASES[case])
    chosen = choose(before)
    defaults = before.config.flat
    return {
        "settings": {
            key: value for key, value in chosen.config.flat.items() if defaults[key] != value
        },
        "decisions": list(chosen.decisions),
        "seconds": round(chosen.step_seconds, 3),
        "before": [problem.message for problem in found_by(check_fit, before)],
        "after": [problem.message for problem in found_by(check_fit, chosen)],
    }


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("case", CASES)
def test_auto_offload_picks_what_the_table_has(case: str, table: dict[str, Any]) -> None:
    assert pick(case) == table[case]


if __name__ == "__main__":
    TABLE.write_text(
        json.dumps({case: pick(case) for case in CASES}, indent=1) + "\n", encoding="utf-8"
    )
