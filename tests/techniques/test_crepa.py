"""CREPA: hand-computed losses, positions in every order of tokens, and schedules."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import make_noisy
from simpletuner.diffusion.seeds import Place
from simpletuner.models.adapter import TextRequest
from simpletuner.models.cost import STOCK, BatchShape
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.planning.techniques.crepa import CrepaSpec
from simpletuner.planning.techniques.table import chosen_techniques
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.rehearsal import rehearse_micro_step
from simpletuner.techniques.crepa import (
    FEATURES,
    Alignment,
    Crepa,
    Grid,
    align,
    neighbours_of,
    scheduled_weight,
)
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.state import Assembly
from tests.tools.assembly import make_assembly, make_batch, make_site, no_forward
from tests.tools.families import CPU, make_adapter, make_config, make_video_adapter
from tests.tools.tiny import WIDTH, make_checkpoint
from tests.tools.tolerances import ROTATION, assert_close, distance
from tests.training.test_step import Batches

BLOCK = 1
SIDE = 16
TOKENS = 64
PLACE = Place(seed=3, global_step=0, micro_step=0, slots=range(1), group=1)
BACKBONE = {"crepa_feature_source": "backbone", "crepa_teacher_block_index": 3}


def crepa_of(regularised: frozenset[str] = frozenset(), **settings: Any) -> Crepa:
    config = CrepaConfig.model_validate(
        {"crepa_enabled": True, "crepa_block_index": BLOCK, **settings}
    )
    crepa = Crepa(CrepaSpec(config, regularised, total_steps=10))
    crepa.width = WIDTH
    return crepa


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("deep"), visual_blocks=4)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "nabla"])
def clips(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video checkpoint, dense or with block-sparse attention."""
    return make_checkpoint(
        tmp_path_factory.mktemp("clips"), "t2v", nabla=request.param, visual_blocks=4
    )


@pytest.fixture(scope="module")
def batch(deep: Path) -> Batch:
    batch = make_batch(deep, ["a star", "two blue circles"], SIDE)
    features = torch.randn(2, 1, 8, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    return replace(batch, features={FEATURES: list(features)})


def unit(*shape: int) -> Grid:
    values = torch.nn.functional.normalize(torch.randn(*shape), dim=-1)
    return Grid(values, torch.ones(shape[:-1]))


@pytest.mark.parametrize(
    ("distance", "cumulative"), [(0, False), (1, False), (2, False), (2, True), (9, False)]
)
def test_alignment_sums_over_frames_and_neighbours(distance: int, cumulative: bool) -> None:
    torch.manual_seed(0)
    student = unit(2, 4, 3, 5, 7)
    teacher = unit(2, 4, 3, 5, 7)
    frames = 4
    tau = 0.7
    config = CrepaConfig(
        crepa_adjacent_distance=distance,
        crepa_adjacent_tau=tau,
        crepa_cumulative_neighbors=cumulative,
    )
    result = align(student, teacher, neighbours_of(config, frames))
    furthest = min(distance, frames - 1)
    for sample in range(2):
        for frame in range(frames):
            total = 0.0
            weights = 0.0
            for other in range(frames):
                apart = abs(other - frame)
                if apart == 0 or apart == furthest or (cumulative and apart <= furthest):
                    cosines = (student.values[sample, frame] * teacher.values[sample, other]).sum(
                        -1
                    )
                    total += math.exp(-apart / tau) * cosines.mean().item()
                    weights += math.exp(-apart / tau)
            assert result.total[sample, frame].item() == pytest.approx(total, abs=1e-6)
            assert result.score[sample, frame].item() == pytest.approx(total / weights, abs=1e-6)


def test_missing_tokens_are_excluded_from_every_mean() -> None:
    torch.manual_seed(0)
    student = unit(1, 3, 2, 2, 5)
    teacher = unit(1, 3, 2, 2, 5)
    student.present[0, 0, 0] = 0
    student.present[0, 1] = 0
    teacher.present[0, 2, 1, 1] = 0
    result = align(student, teacher, {1: 0.5})
    cosines = (student.values * teacher.values).sum(-1)[0]

    assert result.own[0].tolist() == pytest.approx(
        [cosines[0, 1].mean().item(), 0, cosines[2].flatten()[:3].mean().item()]
    )

    after = (student.values[:, :2] * teacher.values[:, 1:]).sum(-1)[0]
    assert result.total[0, 0].item() == pytest.approx(
        (cosines[0, 1] + 0.5 * after[0, 1]).mean().item()
    )
    assert result.weights[0].tolist() == [1.5, 0, 1]
    assert result.mean(result.score).item() == pytest.approx(
        ((result.score[0, 0] + result.score[0, 2]) / 2).item()
    )


def positions(rope: Tensor, scale: tuple[float, float, float]) -> list[Tensor]:
    """Frame, row and column of every token, `B S`, read from the block's rotary table."""
    # `B S pairs`: 2 pairs of time, 3 of rows, 3 of columns.
    angles = torch.atan2(rope[..., 1, 0], rope[..., 0, 0]).flatten(2)
    # Of every axis, the pair that turns the least, and its exponent.
    slowest = ((1, 1 / 2), (4, 2 / 3), (7, 2 / 3))
    result = []
    for (pair, power), factor in zip(slowest, scale, strict=True):
        result.append((angles[..., pair] * 10000**power * factor).round().long())
    return result


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("size", [(24, 16), (8, 16), (16, 24)])
def test_tokens_are_put_back_on_the_grid_of_their_frames(
    clips: Path, size: tuple[int, int], routed: bool
) -> None:
    """The block's output and the teacher's features both encode a token's true position."""
    rows, columns = size
    frames = 3
    codes = torch.randn(frames, rows, columns, WIDTH, generator=torch.Generator().manual_seed(0))
    # With a mean of 0, so that the projector's normalisation changes only their length.
    codes -= codes.mean(-1, keepdim=True)
    adapter: Any = make_video_adapter(clips, "t2v")
    transformer: Any = adapter.load_transformer(torch.float32)
    tread = Tread(TreadSpec([Route(0.5, 0, 2)]))
    crepa = crepa_of(crepa_adjacent_distance=0)
    techniques = (crepa, tread) if routed else (crepa,)
    site = make_site(adapter, transformer, *techniques)
    for technique in techniques:
        technique.attach(site)
    with torch.no_grad():
        crepa.module()[1].weight.copy_(torch.eye(WIDTH))
        crepa.module()[1].bias.zero_()

    def place(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        where = positions(inputs[3], adapter.rope_scale)
        assert routed or [int(axis.max()) for axis in where] == [frames - 1, rows - 1, columns - 1]
        return codes[tuple(where)] + 0 * output

    transformer.visual_transformer_blocks[BLOCK].register_forward_hook(place, prepend=True)
    latents = torch.randn(1, 16, frames, 2 * rows, 2 * columns)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a ball")])
    given = Batch(latents, embeds, ["x"], features={FEATURES: [codes]})
    noisy = make_noisy(given, torch.tensor([0.5]), torch.randn_like(latents), place=PLACE)
    for technique in techniques:
        noisy = technique.before_forward(noisy, no_forward)
    with site.hidden.open():
        adapter.predict(transformer, noisy)
        assert (site.hidden[BLOCK].shape[1] < frames * rows * columns) == routed
        crepa.extra_losses(noisy, latents)
    score = crepa.metrics()["crepa_alignment_score"]

    assert_close(score, torch.tensor(1.0), terms=WIDTH)


SCHEDULES: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({}, {0: 0.5, 99: 0.5}),
    ({"crepa_warmup_steps": 10}, {0: 0.0, 5: 0.25, 10: 0.5, 50: 0.5}),
    ({"crepa_cutoff_step": 30}, {29: 0.5, 30: 0.0, 99: 0.0}),
    (
        {"crepa_scheduler": "linear", "crepa_warmup_steps": 20},
        {10: 0.25, 20: 0.5, 60: 0.25, 100: 0.0},
    ),
    ({"crepa_scheduler": "linear", "crepa_decay_steps": 40}, {20: 0.25, 40: 0.0, 90: 0.0}),
    (
        {"crepa_scheduler": "cosine", "crepa_lambda_end": 0.1},
        {25: 0.1 + 0.2 * (1 + 0.5**0.5), 50: 0.3, 100: 0.1},
    ),
    ({"crepa_scheduler": "polynomial", "crepa_power": 2}, {50: 0.125, 100: 0.0}),
]


@pytest.mark.parametrize(("settings", "expected"), SCHEDULES)
def test_the_weight_follows_its_schedule(
    settings: dict[str, Any], expected: dict[int, float]
) -> None:
    config = CrepaConfig.model_validate(settings)
    assert {at: scheduled_weight(config, at, 100) for at in expected} == pytest.approx(expected)


def train(assembly: Assembly, batch: Batch, steps: int = 3) -> list[dict[str, float]]:
    return [step.optimizer_step(assembly, Batches(batch), index).metrics for index in range(steps)]


def test_nothing_is_measured_at_weight_zero(deep: Path, batch: Batch) -> None:
    assembly = make_assembly(deep, crepa_of(crepa_lambda=0))

    (metrics,) = train(assembly, batch, 1)

    assert "crepa_alignment_score" not in metrics
    assert all(parameter.grad is None for parameter in assembly.modules["Crepa"].parameters()), (
        "taken part, then cleared"
    )


def test_the_loss_is_added_with_its_weight(deep: Path, batch: Batch) -> None:
    (first,) = train(make_assembly(deep, crepa_of()), batch, 1)

    assert first["optimization_loss"] == pytest.approx(
        first["diffusion_loss"] + first["crepa_loss"]
    )
    assert first["crepa_loss"] == pytest.approx(-0.5 * first["crepa_alignment_sum"])


def test_regularisation_data_is_not_aligned(deep: Path, batch: Batch) -> None:
    assembly = make_assembly(deep, crepa_of(regularised=frozenset({"known"})))
    kept = {
        name: parameter.detach().clone() for name, parameter in assembly.module_parameters.items()
    }
    (metrics,) = train(assembly, replace(batch, dataset_id="known", features={}), 1)

    assert (metrics["crepa_loss"], metrics["crepa_weight"]) == (0, 0)
    assert kept.keys() == assembly.module_parameters.keys()


def gradients_of(
    checkpoint: Path, batch: Batch, crepa: Crepa, **settings: Any
) -> dict[str, Tensor]:
    assembly = make_assembly(checkpoint, crepa, **{"gradient_checkpointing": False, **settings})
    rehearse_micro_step(assembly, batch)
    every = assembly.parameters | assembly.module_parameters
    result = {
        name: parameter.grad.clone()
        for name, parameter in every.items()
        if parameter.grad is not None
    }
    assert len(result) == len(every)
    return result


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (BACKBONE, {"gradient_checkpointing": True}),
        ({}, {"gradient_checkpointing": True}),
        (BACKBONE, {"gradient_checkpointing": True, "enable_group_offload": True}),
    ],
)
def test_memory_and_speed_settings_change_no_gradient(
    deep: Path, batch: Batch, source: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = gradients_of(deep, batch, crepa_of(**source))
    actual = gradients_of(deep, batch, crepa_of(**source), **settings)

    assert distance(actual, expected) < ROTATION
    assert (
        max(
            float(gradient.abs().max())
            for name, gradient in actual.items()
            if name.startswith("Crepa")
        )
        > 1e-3
    )


def test_the_backbones_features_get_no_gradient(deep: Path, batch: Batch) -> None:
    """The alignment trains what comes before the student's block only: the LoRA behind it sees the
    flow loss alone.
    """
    plain, aligned = (make_assembly(deep, *given) for given in ((), (crepa_of(**BACKBONE),)))
    for assembly in (plain, aligned):
        rehearse_micro_step(assembly, batch)
    for name, parameter in plain.parameters.items():
        number = re.search(r"visual_transformer_blocks\.(\d+)\.", name)
        before = number is None or int(number[1]) <= BLOCK
        other = aligned.parameters[name].grad
        if parameter.grad is not None and other is not None and parameter.grad.any():
            assert torch.equal(parameter.grad, other) != before, name


@pytest.mark.parametrize("settings", [{}, {"crepa_spatial_align": False}, BACKBONE])
def test_alignment_works_inside_a_tread_route(
    deep: Path, batch: Batch, settings: dict[str, Any]
) -> None:
    # The route ends at the aligned block, and its hook, which puts skipped tokens back, is
    # registered before that of CREPA.
    route = Tread(TreadSpec([Route(0.5, 0, BLOCK)]))
    assembly = make_assembly(deep, route, crepa_of(**settings))

    losses = train(assembly, batch, 8)

    assert losses[-1]["crepa_alignment_score"] > losses[0]["crepa_alignment_score"] + 0.05


def test_the_moving_average_follows_the_score(deep: Path, batch: Batch) -> None:
    """It starts at the first score; with decay 0.75, a new score counts a quarter."""
    steps = train(make_assembly(deep, crepa_of(crepa_similarity_ema_decay=0.75)), batch, 3)

    scores = [step["crepa_alignment_score"] for step in steps]
    second = 0.75 * scores[0] + 0.25 * scores[1]
    third = 0.75 * second + 0.25 * scores[2]

    assert len(set(scores)) == 3
    assert [step["crepa_alignment_score_ema"] for step in steps] == pytest.approx(
        [scores[0], second, third]
    )


def test_the_score_of_a_frame_is_divided_by_its_weights() -> None:
    """Of a frame that is compared with a neighbour alone, at weight 0.5, and of one without
    tokens.
    """
    alignment = Alignment(
        total=torch.tensor([[0.2, 0.0]]),
        weights=torch.tensor([[0.5, 0.0]]),
        own=torch.tensor([[0.0, 0.0]]),
    )

    assert alignment.score.tolist() == [[pytest.approx(0.4), 0.0]]
    assert alignment.mean(alignment.score).item() == pytest.approx(0.4)


@pytest.mark.parametrize("mode", ["permanent", "recoverable"])
def test_alignment_is_switched_off_at_the_threshold(deep: Path, batch: Batch, mode: str) -> None:
    crepa = crepa_of(
        crepa_similarity_threshold=0.2, crepa_similarity_ema_decay=0.5, crepa_threshold_mode=mode
    )
    assembly = make_assembly(deep, crepa)
    crepa.load_state_dict({"average": 0.9, "off": False})
    steps = train(assembly, batch, 8)
    results = [metrics["crepa_cutoff"] for metrics in steps]

    assert results[0] == 1
    assert [metrics["crepa_weight"] == 0 for metrics in steps] == [
        metrics == 1 for metrics in results
    ], "logged in its step"
    assert (0 in results) == (mode == "recoverable"), (
        "the average of a random projector's score falls to 0"
    )

    saved = crepa.state_dict()
    crepa.load_state_dict({"average": None, "off": False})
    crepa.load_state_dict(saved)

    assert crepa.state_dict() == saved

    crepa.load_state_dict({"average": 0.1, "off": True})
    (step,) = train(assembly, batch, 1)

    assert step["crepa_cutoff"] == (mode == "permanent"), (
        "off for good, whatever the average of another setting was"
    )


@pytest.mark.parametrize(("threshold", "is_off"), [(0.2, True), (0.5, False), (None, False)])
def test_a_permanent_cutoff_lasts_as_long_as_its_threshold(
    deep: Path, batch: Batch, threshold: float | None, is_off: bool
) -> None:
    permanent = {"crepa_threshold_mode": "permanent"}
    before = crepa_of(crepa_similarity_threshold=0.2, **permanent)
    make_assembly(deep, before)
    before.load_state_dict({"average": 0.3, "off": True})

    after = crepa_of(crepa_similarity_threshold=threshold, **permanent)
    assembly = make_assembly(deep, after)
    after.load_state_dict(before.state_dict())
    (step,) = train(assembly, batch, 1)

    assert step["crepa_cutoff"] == is_off


def test_a_cutoff_is_logged_in_its_step(deep: Path, batch: Batch) -> None:
    steps = train(make_assembly(deep, crepa_of(crepa_cutoff_step=2)), batch, 3)
    assert [(metrics["crepa_cutoff"], metrics["crepa_weight"]) for metrics in steps] == [
        (0, 0.5),
        (0, 0.5),
        (1, 0),
    ]


def test_the_plan_counts_the_projector(deep: Path) -> None:
    given = {"crepa_enabled": True, "crepa_block_index": BLOCK, **BACKBONE}
    (spec,) = chosen_techniques(make_config(deep, **given))
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in make_adapter(deep).load_transformer(torch.float32).named_parameters()
    }
    cost = KANDINSKY5_IMAGE.cost.transformer(
        {"axes_dims": [4, 6, 6], "model_dim": WIDTH}, shapes, STOCK
    )
    assembly = make_assembly(deep, crepa_of(**BACKBONE))
    shape = BatchShape(2, 1, 8, 8, 10)
    result = spec.cost(cost, shape)

    assert result.parameters == sum(
        parameter.numel() for parameter in assembly.module_parameters.values()
    )
    hidden = torch.randn(shape.samples, shape.tokens, WIDTH, requires_grad=True)
    (crepa,) = assembly.techniques
    assert isinstance(crepa, Crepa)
    with FlopCounterMode(display=False) as counter:
        crepa._project(hidden).sum().backward()
    assert result.flops == counter.get_total_flops()


def test_batches_without_a_position_are_an_error(batch: Batch) -> None:
    noisy: NoisyBatch = make_noisy(batch, torch.tensor([0.5, 0.5]), torch.zeros_like(batch.latents))
    with pytest.raises(ValueError, match="position in the run"):
        crepa_of().before_forward(noisy, no_forward)
