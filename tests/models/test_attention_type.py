"""`attention_type` replaces what config.json says, wherever the transformer's config is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simpletuner.budget.workload import parts_of
from simpletuner.config.schema import RunConfig
from simpletuner.config.types import Size
from simpletuner.models.kandinsky5.spec import (
    KANDINSKY5_IMAGE,
    KANDINSKY5_VIDEO,
    describe_attention,
)
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec
from simpletuner.weights.part import Part
from tests.annexes.test_fit import budget, config, gpu
from tests.tools.families import make_video_adapter
from tests.tools.reports import found_by
from tests.tools.tiny import make_checkpoint

PRO = "t2v-pro-sft-5s-hd"
ORIGINAL = "t2v-pro-sft-10s-hd"  # published in its original form alone
SD = Size(768, 512)
HD = Size(1280, 768)


def settings(flavour: str, attention: str) -> RunConfig:
    return config("kandinsky5-video", model_flavour=flavour, attention_type=attention)


def source_of(flavour: str, attention: str) -> ModelSource:
    return ModelSource.from_settings(
        KANDINSKY5_VIDEO,
        KANDINSKY5_VIDEO.flavour(flavour),
        settings(flavour, attention).flat,
    )


@pytest.mark.parametrize("flavour", [PRO, ORIGINAL])
@pytest.mark.parametrize(("attention", "multiple"), [("auto", 128), ("nabla", 128), ("dense", 16)])
def test_sizes_are_multiples_of_a_tile_with_nabla_alone(
    flavour: str, attention: str, multiple: int
) -> None:
    source = source_of(flavour, attention)

    spec = KANDINSKY5_VIDEO.for_checkpoint(KANDINSKY5_VIDEO.flavour(flavour), source)

    assert spec.size_multiple == multiple


@pytest.mark.parametrize(("attention", "is_sparse"), [("auto", True), ("dense", False)])
def test_the_plan_counts_the_chosen_attention(attention: str, is_sparse: bool) -> None:
    plan = budget(gpu(80), flavour=PRO, attention_type=attention).plan

    transformer = parts_of(plan, "cuda").transformer

    assert (transformer.density is not None) is is_sparse


@pytest.mark.parametrize("empty", [False, True])
def test_the_loaded_transformer_has_the_chosen_attention(tmp_path: Path, empty: bool) -> None:
    checkpoint = make_checkpoint(tmp_path, "t2v", nabla=True)
    adapter = make_video_adapter(checkpoint, "t2v", attention_type="dense")

    transformer = adapter.load_transformer(torch.float32, empty=empty)

    assert transformer.config["attention_type"] == "regular"
    assert adapter.load_bare_pipeline().transformer.config["attention_type"] == "regular"


def test_a_checkpoint_that_is_sampled_has_the_chosen_attention() -> None:
    checkpoint = Part("transformer", "source", "output/checkpoint-1", "transformer", None, None)

    source = source_of(PRO, "dense").with_transformer(checkpoint)

    assert source["transformer"].location == checkpoint.location
    assert source["transformer"].overrides == {"attention_type": "regular"}


@pytest.mark.parametrize(
    ("flavour", "size", "is_named"),
    [(PRO, SD, True), (PRO, HD, False), (ORIGINAL, SD, False), ("t2v-lite-sft-10s", SD, False)],
)
def test_the_plan_says_where_the_publishers_program_is_dense(
    flavour: str, size: Size, is_named: bool
) -> None:
    source = source_of(flavour, "auto")

    text = describe_attention(KANDINSKY5_VIDEO.flavour(flavour), source, [size])

    assert text is not None
    assert ("attention_type dense" in text) is is_named


def test_the_plan_says_nothing_where_attention_is_always_dense() -> None:
    flavour = "t2v-lite-sft-5s"

    text = describe_attention(KANDINSKY5_VIDEO.flavour(flavour), source_of(flavour, "auto"), [SD])

    assert text is None


@pytest.mark.parametrize("spec", [KANDINSKY5_IMAGE, KANDINSKY5_VIDEO])
def test_nabla_is_refused_for_a_dense_flavour_before_it_is_downloaded(spec: FamilySpec) -> None:
    flavour = spec.flavour(None)
    asked = config(spec.name, attention_type="nabla").flat
    source = ModelSource.from_settings(spec, flavour, asked)

    (problem,) = found_by(spec.checks.checkpoint, flavour, source)

    assert f"'nabla': {flavour.name} was not trained with block-sparse attention" in str(problem)
