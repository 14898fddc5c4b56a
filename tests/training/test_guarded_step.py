"""`optimizer_step` against the same arithmetic in plain torch, and what it refuses to train on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.schema import CheckpointConfig, EmaConfig
from simpletuner.config.types import Size
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.distributed.world import Value, World
from simpletuner.errors import NonFiniteError, UserError
from simpletuner.planning.checkpoint_folder import STATE_FOLDER, Identity
from simpletuner.reporting.events import EventStream
from simpletuner.techniques.base import ExtraPass, Technique
from simpletuner.training import step
from simpletuner.training.checkpoints import CheckpointWriter
from simpletuner.training.ema import Ema
from simpletuner.training.guard import equalise_samples, stop_if_weights_not_finite
from simpletuner.training.losses import Losses, loss_divisor
from simpletuner.training.noise import NoiseSource
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.weight_note import WeightNote
from tests.tools.assembly import fixed_noise, make_assembly, make_batch
from tests.training.test_step import CAPTIONS, Batches, part

SETTINGS: dict[str, Any] = {
    "optimizer": "torch-sgd",
    "lr_scheduler": "constant",
    "lr_warmup_steps": 4,
    "gradient_accumulation_steps": 2,
}
RATES = [0.25, 0.5, 0.75]  # the warm-up to 1
SCALE = 2.0**10


def assembled(checkpoint: Path, **settings: Any) -> Assembly:
    """An assembly with a rate that moves weights by much more than rounding."""
    assembly = make_assembly(checkpoint, **{**SETTINGS, **settings})
    return replace(assembly, settings=replace(assembly.settings, learning_rate=1.0))


def scaled(assembly: Assembly, scale: float = SCALE) -> Assembly:
    """The assembly with a loss scaler, as in float16."""
    return replace(assembly, scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def weights(assembly: Assembly) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in assembly.parameters.items()}


def assert_moved_alike(actual: Tensor, expected: Tensor, start: Tensor) -> None:
    """Assert equal moves, up to the bf16 rounding of gradients of queries and keys."""
    largest = (expected - start).abs().max()
    assert (actual - expected).abs().max() <= 2**-7 * largest + 1e-7


def train_in_plain_torch(
    assembly: Assembly, window: list[Batch], limit: float, method: str
) -> None:
    """Take three optimizer steps in plain torch."""
    parameters = list(assembly.parameters.values())
    samples = sum(len(batch.names) for batch in window)
    for global_step, rate in enumerate(RATES):
        for micro_step, batch in enumerate(window):
            noisy = assembly.adapter.prepare(assembly.noise.add(batch, global_step, micro_step))
            error = assembly.adapter.predict(assembly.transformer, noisy).float() - noisy.target
            (error.square().mean(dim=(1, 2, 3, 4)).sum() / samples).backward()
        if limit and method == "norm":
            nn.utils.clip_grad_norm_(parameters, limit)
        elif limit:
            nn.utils.clip_grad_value_(parameters, limit)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data -= rate * parameter.grad
            parameter.grad = None


@pytest.mark.parametrize(("first", "with_scaler"), [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize(("limit", "method"), [(0.0, "norm"), (0.02, "norm"), (0.001, "value")])
def test_a_step_equals_one_written_in_plain_torch(
    t2i_checkpoint: Path, first: int, with_scaler: bool, limit: float, method: str
) -> None:
    settings = {"max_grad_norm": limit, "grad_clip_method": method, "lora_dropout": 0.2}
    plain, tried = (assembled(t2i_checkpoint, **settings) for _ in range(2))
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    window = [part(batch, slice(0, first)), part(batch, slice(first, 4))]
    start = weights(plain)
    train_in_plain_torch(plain, window, limit, method)
    tried = scaled(tried) if with_scaler else tried
    reports = [step.optimizer_step(tried, Batches(*window), number) for number in range(len(RATES))]

    assert [report.metrics["learning_rate"] for report in reports] == pytest.approx(RATES)
    for name, expected in plain.parameters.items():
        assert_moved_alike(tried.parameters[name], expected, start[name])
        assert not torch.equal(expected, start[name]), name

    sizes = [
        report.metrics["grad_norm" if method == "norm" else "grad_absmax"] for report in reports
    ]
    assert not limit or min(sizes) > 2 * limit, (
        "clipping halves every step at least, a hundred times the tolerance"
    )
    assert all(parameter.grad is None for parameter in tried.parameters.values())


def test_dropout_has_the_configured_rate(t2i_checkpoint: Path) -> None:
    layers = make_assembly(t2i_checkpoint, lora_dropout=0.3).transformer.modules()
    assert {layer.p for layer in layers if isinstance(layer, nn.Dropout)} == {0.3}


@pytest.fixture
def noise_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that depends on the sample alone, so that a batch can be split without effect."""
    monkeypatch.setattr(NoiseSource, "add", lambda source, batch, *place: fixed_noise(batch))


@pytest.mark.usefixtures("noise_by_sample")
@pytest.mark.parametrize("first", [1, 3])
def test_unequal_batches_equal_the_larger_batch(t2i_checkpoint: Path, first: int) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    whole = assembled(t2i_checkpoint, gradient_accumulation_steps=1)
    parts = assembled(t2i_checkpoint)
    start = weights(whole)
    expected = step.optimizer_step(whole, Batches(batch), 0).metrics
    actual = step.optimizer_step(
        parts, Batches(part(batch, slice(0, first)), part(batch, slice(first, 4))), 0
    ).metrics

    assert actual == pytest.approx(expected, rel=1e-5)
    assert actual["optimization_loss"] == pytest.approx(actual["train_loss"], rel=1e-6)
    for name, parameter in parts.parameters.items():
        assert_moved_alike(parameter, whole.parameters[name], start[name])


def test_equal_batches_are_divided_by_their_number() -> None:
    """Their gradients are not rescaled, so that no run changes in its last bit."""
    for counts in ([1] * 7, [3] * 3, [5] * 10):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([0.1])
        equalise_samples([parameter], counts)
        assert parameter.grad.item() == torch.tensor(0.1).item()
        assert {loss_divisor(counts[:done], len(counts)) for done in range(1, len(counts) + 1)} == {
            len(counts)
        }


def spoil(assembly: Assembly, *names: str) -> list[str]:
    """Make gradients NaN; returns the full names of the weights."""
    results = [name for name in assembly.parameters if any(part in name for part in names)]
    for name in results:
        assembly.parameters[name].register_hook(lambda gradient: gradient * math.nan)
    return results


@pytest.mark.parametrize("method", ["value", "norm"])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_non_finite_gradient_never_updates_a_weight(
    t2i_checkpoint: Path, method: str, limit: float
) -> None:
    assembly = make_assembly(t2i_checkpoint, max_grad_norm=limit, grad_clip_method=method)
    before = weights(assembly)
    spoilt = spoil(assembly, "to_value.lora_B")

    with pytest.raises(NonFiniteError) as failure:
        step.optimizer_step(assembly, Batches(make_batch(t2i_checkpoint, CAPTIONS[:2])), 0)

    message = str(failure.value)
    assert "d/0, d/1" in message
    assert message.index(spoilt[-1]) < message.index(spoilt[-2]), (
        "the backward pass begins at the last layer"
    )
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in assembly.parameters.items()
    )


class Constant(Technique):
    """Adds a number on which no weight depends."""

    def __init__(self, value: float, *, later: bool) -> None:
        self.value = value
        self.later = later

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> dict[str, Tensor]:
        return {} if self.later else {"constant": 0 * prediction.sum() + self.value}

    def extra_passes(self, noisy: NoisyBatch) -> list[ExtraPass]:
        return (
            [lambda predict: {"constant": 0 * predict(noisy).sum() + self.value}]
            if self.later
            else []
        )


@pytest.mark.parametrize("later", [False, True], ids=["extra loss", "extra pass"])
def test_a_non_finite_loss_stops_every_process_and_updates_no_weight(
    t2i_checkpoint: Path, later: bool
) -> None:
    """Also if the gradients are finite: they become NaN, and so does their sum over processes."""
    batch = make_batch(t2i_checkpoint, CAPTIONS[:1])
    message = r"The loss is (inf|nan)\. The weights were not .*: d/0"
    for value in (math.inf, math.nan):
        assembly = replace(make_assembly(t2i_checkpoint), techniques=[Constant(value, later=later)])
        before = weights(assembly)
        with pytest.raises(NonFiniteError, match=message):
            step.optimizer_step(assembly, Batches(batch), 0)
        assert all(
            torch.equal(parameter, before[name]) for name, parameter in assembly.parameters.items()
        )
        assert all(
            parameter.grad is None or parameter.grad.isnan().all()
            for parameter in assembly.parameters.values()
        )
        assert not assembly.optimizer.state


@dataclass(frozen=True)
class Logged(World):
    """Records when values are gathered."""

    log: list[str] = field(default_factory=list)

    def gather(self, value: Value) -> list[Value]:
        self.log.append("gather")
        return [value]


def test_weights_are_updated_before_records_are_gathered(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the device works while the host waits for other processes."""
    assembly = make_assembly(t2i_checkpoint)
    world = Logged()
    merged = Losses.merged
    update = assembly.optimizer.step
    log = world.log
    monkeypatch.setattr(assembly.optimizer, "step", lambda: log.append("update") or update())
    monkeypatch.setattr(Losses, "merged", lambda parts: log.append("merge") or merged(parts))
    step.optimizer_step(
        replace(assembly, world=world), Batches(make_batch(t2i_checkpoint, CAPTIONS[:1])), 0
    )

    assert log == ["update", "gather", "merge"]


def test_the_scaler_skips_overflowing_steps_until_its_scale_is_below_one(
    t2i_checkpoint: Path,
) -> None:
    assembly = scaled(make_assembly(t2i_checkpoint), scale=2.0)
    before = weights(assembly)
    batch = make_batch(t2i_checkpoint, CAPTIONS[:1])
    spoil(assembly, "lora_B")
    for number, scale in enumerate((1.0, 0.5)):
        step.optimizer_step(assembly, Batches(batch), number)
        assert assembly.scaler.get_scale() == scale

    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        step.optimizer_step(assembly, Batches(batch), 2)
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in assembly.parameters.items()
    )


def test_non_finite_weights_are_named() -> None:
    sound = {"a": torch.full((3,), 3e38), "b": torch.zeros(2, dtype=torch.bfloat16)}
    stop_if_weights_not_finite(sound)
    with pytest.raises(NonFiniteError, match=r"1 of 3 trained tensors .* not saved: c"):
        stop_if_weights_not_finite({**sound, "c": torch.tensor([0.0, -math.inf])})


@pytest.mark.parametrize("part", ["weight", "average", "module"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_non_finite_weights_are_never_saved(
    tmp_path: Path, t2i_checkpoint: Path, kind: str, part: str
) -> None:
    assembly = make_assembly(t2i_checkpoint, model_type=kind)
    assembly.modules["Projector"] = nn.Linear(2, 2)
    assembly.trained.ema = ema = Ema(assembly.parameters, EmaConfig(), torch.device("cpu"))
    name = list(assembly.parameters)[3]
    spoilt = {
        "weight": assembly.parameters[name],
        "average": ema.average[name],
        "module": assembly.modules["Projector"].bias,
    }
    spoilt[part].data.view(-1)[0] = math.nan
    named = {"weight": name, "average": f"EMA of {name}", "module": "Projector.bias"}[part]
    identity = Identity(
        "kandinsky5-image", "t2i-lite-sft", kind, 1, seed=1, datasets="", versions={}
    )
    loader: Any = None  # never asked
    writer = CheckpointWriter(
        tmp_path,
        CheckpointConfig(),
        loader,
        identity,
        {},
        EventStream(print),
        WeightNote("kandinsky5-image/t2i-lite-sft", "a run", Size(64, 64)),
    )

    with pytest.raises(NonFiniteError, match=f"not saved: {re.escape(named)}"):
        writer.write(tmp_path / "checkpoint-1", assembly, TrainState(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_non_finite_weights_are_never_loaded(
    tmp_path: Path, t2i_checkpoint: Path, kind: str
) -> None:
    assembly = make_assembly(t2i_checkpoint, model_type=kind)
    name, parameter = list(assembly.parameters.items())[3]
    parameter.data.view(-1)[0] = math.inf
    (tmp_path / STATE_FOLDER).mkdir()
    for draft in assembly.trained.drafts({}):
        draft.write_into(tmp_path)
    parameter.data.zero_()

    with pytest.raises(
        UserError, match=f"NaN or infinite values in {re.escape(name)}; choose an earlier"
    ):
        assembly.trained.load(tmp_path)
    assert not parameter.any(), "nothing was loaded"
