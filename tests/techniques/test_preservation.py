"""Preservation: the loss includes the LoRA's effect on other captions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from simpletuner.config.techniques.preservation import PreservationConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.seeds import Place
from simpletuner.planning.techniques.preservation import PreservationSpec
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.techniques.base import Technique
from simpletuner.techniques.preservation import Preservation
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.losses import Losses
from simpletuner.training.noise import NoiseSource
from simpletuner.training.state import Assembly
from tests.tools.assembly import fixed_noise, make_assembly, make_batch
from tests.tools.runs import assert_same_run
from tests.tools.tiny import make_checkpoint
from tests.tools.tolerances import ROTATION, distance
from tests.tools.workspace import DATASETS, Workspace
from tests.training.test_step import Batches

CAPTIONS = ["a zorp", "two blue zorps", "a zorp on black", "zorp"]
WEIGHT = 3.0
SIDE = 8


def always() -> Preservation:
    """Preservation in every micro-batch."""
    return Preservation(PreservationSpec(WEIGHT, 1.0))


ROUTES = [Route(0.5, 1, 2)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with enough blocks for a route."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), visual_blocks=4)


@pytest.fixture(scope="module")
def batch(deep: Path) -> Batch:
    others = make_batch(deep, [caption.replace("zorp", "star") for caption in CAPTIONS]).embeds
    return replace(make_batch(deep, CAPTIONS, SIDE), other_embeds=others)


def moved(checkpoint: Path, *techniques: Technique, **settings: Any) -> Assembly:
    """An assembly whose LoRA already has an effect, the same every time."""
    assembly = make_assembly(
        checkpoint, *techniques, **{"gradient_checkpointing": False, **settings}
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(assembly.parameters.items()):
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return assembly


def gradients(assembly: Assembly, *batches: Batch) -> dict[str, Tensor]:
    losses = Losses()
    for micro_step, part in enumerate(batches):
        step.run_micro_step(assembly, part, 4, micro_step, losses)
    return {
        name: parameter.grad.clone()
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }


def by_hand(checkpoint: Path, batch: Batch, *others: Technique) -> dict[str, Tensor]:
    """Gradients of both losses in one graph, with a second copy of the model as the base."""
    assembly = moved(checkpoint, *others)
    noisy = step.noisy_batch(assembly, batch, 4, 0)
    main = step.micro_loss(assembly, noisy, Losses())
    main.backward()
    other = replace(noisy, batch=replace(batch, embeds=batch.other_embeds))
    base = assembly.adapter.predict(
        assembly.adapter.load_transformer(torch.float32), other
    ).detach()
    plain = moved(checkpoint)  # without the route
    change = plain.adapter.predict(plain.transformer, other) - base
    assert change.square().mean() > 1e-4, "a LoRA that does nothing shows nothing"
    (WEIGHT * change.square().mean()).backward()
    return {
        name: parameter.grad + plain.parameters[name].grad
        for name, parameter in assembly.parameters.items()
    }


@pytest.mark.parametrize(
    "techniques", [(), (partial(Tread, TreadSpec(ROUTES)),)], ids=["alone", "tread"]
)
def test_the_gradient_equals_the_hand_computed_one(
    deep: Path, batch: Batch, techniques: tuple[Callable[[], Technique], ...]
) -> None:
    expected = by_hand(deep, batch, *(build() for build in techniques))
    actual = gradients(moved(deep, *(build() for build in techniques), always()), batch)

    assert distance(actual, expected) < ROTATION
    assert distance(gradients(moved(deep), batch), expected) > 0.1, "it changes the gradient"


@pytest.mark.warns
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing_interval": 2, "enable_group_offload": True},
        {
            "gradient_checkpointing": True,
            "enable_group_offload": True,
            "offload_block_inputs": True,
        },
    ],
    ids=["checkpointed", "streamed", "inputs on the host"],
)
def test_memory_saving_changes_no_gradient(
    deep: Path, batch: Batch, settings: dict[str, Any]
) -> None:
    expected = gradients(moved(deep, Tread(TreadSpec(ROUTES)), always()), batch)
    assert (
        distance(
            gradients(moved(deep, Tread(TreadSpec(ROUTES)), always(), **settings), batch), expected
        )
        < ROTATION
    )


def test_accumulation_equals_a_larger_batch(
    deep: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for unequal micro-batches, whose samples all have the same weight."""

    def noise(source: NoiseSource, batch: Batch, step: int, micro_step: int) -> NoisyBatch:
        place = Place(3, step, micro_step, range(len(batch.names)), len(batch.names))
        return replace(fixed_noise(batch), place=place)

    monkeypatch.setattr(NoiseSource, "add", noise)
    part = partial(replace, batch)
    pieces = [
        part(
            latents=batch.latents[cut],
            embeds=batch.embeds[cut],
            names=batch.names[cut],
            other_embeds=(batch.other_embeds or [])[cut],
        )
        for cut in (slice(0, 3), slice(3, 4))
    ]
    runs = []
    for accumulation, given in ((1, [batch]), (2, pieces)):
        assembly = moved(
            deep, always(), gradient_accumulation_steps=accumulation, optimizer="torch-sgd"
        )
        report = step.optimizer_step(assembly, Batches(*given), 0)
        assert report.metrics["preservation_loss"] > 0
        assert report.passes == 3 * accumulation
        runs.append(
            {name: parameter.detach().clone() for name, parameter in assembly.parameters.items()}
        )

    assert distance(runs[1], runs[0]) < ROTATION


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"base_model_precision": "int8-quanto"},
        {"mixed_precision": "bf16"},
        {"lora_dropout": 0.5},
    ],
)
@pytest.mark.parametrize(
    "techniques", [list, lambda: [Tread(TreadSpec(ROUTES))]], ids=["", "tread"]
)
def test_a_lora_that_does_nothing_has_nothing_to_preserve(
    deep: Path, batch: Batch, settings: dict[str, Any], techniques: Callable[[], list[Technique]]
) -> None:
    assembly = make_assembly(deep, *techniques(), always(), gradient_checkpointing=True, **settings)
    metrics = step.optimizer_step(assembly, Batches(batch), 0).metrics

    assert metrics["preservation_loss"] == 0.0

    later = step.optimizer_step(assembly, Batches(batch), 1).metrics
    assert later["preservation_loss"] > 0
    assert later["optimization_loss"] == pytest.approx(
        later["train_loss"] + later["preservation_loss"]
    )


def test_only_one_graph_is_alive_at_a_time(deep: Path, batch: Batch) -> None:
    """The main pass with recomputation, the base, and the extra pass with recomputation."""
    assembly = make_assembly(deep, always(), gradient_checkpointing=True)
    seen: list[tuple[int, bool]] = []
    blocks = assembly.adapter.block_layout(assembly.transformer).visual_blocks
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(
            lambda *_, number=number: seen.append((number, torch.is_grad_enabled()))
        )
    gradients(assembly, batch)
    numbers = [number for number, _ in seen]
    there = [0, 1, 2, 3]
    back = [3, 2, 1, 0]

    assert numbers == there + back + there + there + back
    assert [with_gradients for _, with_gradients in seen] == [True] * 8 + [False] * 4 + [True] * 8


def stub(probability: float = 1.0) -> Preservation:
    technique = Preservation(PreservationSpec(1.0, probability))
    site: Any = SimpleNamespace(disabled=nullcontext)
    technique.attach(site)
    return technique


def test_the_draw_of_a_batch_depends_on_its_position_in_the_run(batch: Batch) -> None:
    def losses(place: Place, batch: Batch = batch) -> bool:
        noisy = replace(fixed_noise(batch), place=place)
        return bool(stub(0.3).extra_passes(noisy))

    places = [Place(7, number, 0, range(2), 4) for number in range(400)]
    drawn = [losses(place) for place in places]

    assert abs(sum(drawn) / 400 - 0.3) < 0.07

    torch.rand(3)
    assert drawn == [losses(replace(place, slots=range(2, 4))) for place in places], (
        "every process draws the same"
    )
    assert drawn != [losses(replace(place, micro_step=1)) for place in places]
    assert not any(losses(place, replace(batch, other_embeds=None)) for place in places[:20])
    with pytest.raises(ValueError, match="position in the run"):
        [run(lambda noisy: noisy.noisy_latents) for run in stub().extra_passes(fixed_noise(batch))]


def test_a_conditioning_first_frame_is_excluded_from_the_loss() -> None:
    latents = torch.randn(1, 16, 3, 4, 4)
    place = Place(0, 0, 0, range(1), 1)
    clip = replace(
        fixed_noise(Batch(latents, [], ["x"], condition=latents[:, :, :1], other_embeds=[])),
        place=place,
    )

    def forward(noisy: NoisyBatch) -> Tensor:
        first = torch.arange(3) == 0
        return (10.0 * first + 2.0 * ~first).view(1, 1, 3, 1, 1).expand_as(
            latents
        ) * torch.is_grad_enabled()

    assert stub().extra_passes(clip)[0](forward)["preservation_loss"] == 4.0

    picture = replace(clip, batch=replace(clip.batch, condition=None))
    assert stub().extra_passes(picture)[0](forward)["preservation_loss"] == 36.0


@pytest.mark.parametrize(
    ("keys", "caption", "other"),
    [
        ({}, "a Zorp, red", ""),
        ({"preservation_prompt": "a cat"}, "a Zorp, red", "a cat"),
        (
            {"preservation_prompt": "cat", "preservation_trigger": "zorp"},
            "a Zorp, red zorp",
            "a cat, red cat",
        ),
        ({"preservation_prompt": r"\1", "preservation_trigger": "a.b"}, "a.b axb", r"\1 axb"),
        ({"preservation_prompt": "cat", "preservation_trigger": "zorp"}, "zorps", "cat"),
    ],
    ids=["blank", "whole caption", "class word", "no patterns", "not there"],
)
def test_the_other_caption_follows_the_settings(
    keys: dict[str, str], caption: str, other: str
) -> None:
    assert PreservationConfig(preservation_weight=1, **keys).other_caption(caption) == other


WORDS = {"preservation_trigger": "picture", "preservation_prompt": "photo"}


@pytest.mark.slow
def test_runs_resume_bit_for_bit(tmp_path: Path, t2i_checkpoint: Path) -> None:
    runs = []
    for name in ("straight", "plain"):
        run = Workspace.create(
            tmp_path / name,
            t2i_checkpoint,
            pictures=4,
            lora_dropout=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            max_train_steps=6,
            checkpoint_step_interval=3,
            preservation_weight=WEIGHT,
            **WORDS,
        )
        regular = {**DATASETS[0], "id": "regular", "is_regularisation_data": True}
        run.write_datasets([DATASETS[0], regular, DATASETS[1]])
        runs.append(run)
    runs[1].write_config(
        preservation_weight=None, preservation_trigger=None, preservation_prompt=None
    )
    assert runs[0].train() == 0
    broken = runs[0].stopped(tmp_path / "broken", 3)
    assert broken.train() == 0
    assert_same_run(runs[0], broken)

    preserved = [line.get("preservation_loss") for line in runs[0].metrics()]
    assert None in preserved
    assert any(preserved), "some steps preserve, some do not"
    assert runs[1].run("cache", "fill") == 0
    captions = len(list(runs[1].path("cache/text").rglob("*.zst")))
    assert len(list(runs[0].path("cache/text").rglob("*.zst"))) == captions + 4 + 1, (
        "four named, and the prompt alone"
    )


@pytest.mark.slow
def test_blank_preservation_caches_the_empty_caption(
    tmp_path: Path, i2i_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without caption dropout, and once per source picture if the prompt contains it."""
    run = Workspace.create(
        tmp_path,
        i2i_checkpoint,
        pictures=4,
        model_flavour="i2i-lite-sft",
        caption_dropout_probability=0,
        preservation_weight=1,
        preservation_probability=1,
    )
    run.add_pictures("datasets/sources", 4, seed=5)
    source = {**DATASETS[0], "id": "sources", "instance_data_dir": "datasets/sources"}
    source.update(dataset_type="conditioning", conditioning_type="reference_strict")
    run.write_datasets([{**DATASETS[0], "conditioning_data": ["sources"]}, source, DATASETS[1]])
    assert run.train() == 0
    assert len(list(run.path("cache/text").rglob("*.zst"))) == 4 * (2 + 1)
    assert "encoded again" not in caplog.text, "planned, not found missing in a step"
    assert all("preservation_loss" in line for line in run.metrics())


@pytest.mark.parametrize(
    ("settings", "code", "expected"),
    [
        (
            {"preservation_weight": 1, "model_type": "full"},
            2,
            "preservation_weight: needs model_type lora",
        ),
        (
            {"preservation_weight": 1, "preservation_trigger": "picture"},
            2,
            "'picture' needs a preservation_prompt",
        ),
        (
            {**WORDS, "preservation_weight": 1, "preservation_trigger": "pictur"},
            2,
            "'pictur' is in 0 of 16 captions.",
        ),
        (
            {**WORDS, "preservation_weight": 1},
            0,
            "'picture' is in 8 of 16 captions; for the others",
        ),
        ({"preservation_weight": 1, "preservation_prompt": "a <|im_end|>"}, 2, "holds <|im_end|>"),
        (WORDS, 0, "preservation_prompt: has no effect"),
    ],
)
def test_invalid_settings_are_reported(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    code: int,
    expected: str,
) -> None:
    workspace.write_config(**settings)

    assert workspace.run("plan") == code

    captured = capsys.readouterr()
    assert expected in " ".join((captured.out + captured.err).split())
