"""Optimizer in backward: bit-equal weights, and steps that fail half-way."""

from __future__ import annotations

import gc
import io
import math
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.load import Layer, resolve
from simpletuner.config.optimizers import OPTIMIZERS
from simpletuner.config.schema import EmaConfig, OptimizerConfig
from simpletuner.errors import NonFiniteError, Problems
from simpletuner.planning.checks import check_config
from simpletuner.run.rehearsal import rehearse_micro_step, unchanged
from simpletuner.training import step
from simpletuner.training.ema import Ema
from simpletuner.training.optimizer_state import load_state
from simpletuner.training.release import GradientRelease, HostState
from simpletuner.training.state import Assembly
from tests.tools.assembly import make_assembly, make_batch
from tests.training.test_guarded_step import spoil
from tests.training.test_guarded_step import weights as copy_of
from tests.training.test_optimizers import RUNNABLE, build, weights
from tests.training.test_step import Batches

RELEASED = {"optimizer_release_gradients": True}
LOW_BIT = ["ao-adamw8bit", "ao-adamw4bit"]


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Run torchao's update uncompiled; compiling it takes longer than all of these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def full(checkpoint: Path, **settings: Any) -> Assembly:
    return make_assembly(checkpoint, model_type="full", **settings)


def train(
    assembly: Assembly, checkpoint: Path, first: int, last: int, ema: Ema | None = None
) -> list[Mapping[str, Any]]:
    """Train steps with a different batch each; returns their metrics."""
    results = []
    for number in range(first, last):
        batch = make_batch(checkpoint, ["a star", "a tree"][: number % 2 + 1])
        results.append(step.optimizer_step(assembly, Batches(batch), number).metrics)
        if ema is not None:
            ema.update(number + 1)
    return results


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def updated_alike(name: str, dtype: torch.dtype, device: str, *, on_host: bool) -> bool:
    """Whether updating weights one at a time, in backward order, equals updating all at once."""
    whole = weights(dtype)
    single = weights(dtype)
    for parameter in (*whole, *single):
        parameter.data = parameter.data.to(device)
    together = build(name, whole)
    apart = build(name, single)
    host = HostState(apart, torch.device(device)) if on_host else None
    named = {str(number): parameter for number, parameter in enumerate(single)}
    release = GradientRelease(named, apart, OptimizerConfig(optimizer=name), host)
    for number in range(8):
        gradients = []
        for parameter in whole:
            generator = torch.Generator().manual_seed(number)
            gradients.append(torch.randn(parameter.shape, generator=generator).to(parameter))
        for parameter, gradient in zip(whole, gradients, strict=True):
            parameter.grad = gradient.clone().clamp_(-2, 2)
        together.step()
        # The backward pass begins with the last term of the sum.
        terms = [
            (parameter * gradient).sum().float()
            for parameter, gradient in zip(single[::-1], gradients[::-1], strict=True)
        ]
        with release.updating():
            sum(terms).backward()
        release.finish()
        assert all(parameter.grad is None for parameter in single)
    return all(map(torch.equal, whole, single))


@pytest.mark.parametrize("name", [*RUNNABLE, *LOW_BIT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updating_one_weight_at_a_time_equals_updating_all_at_once(
    name: str, dtype: torch.dtype
) -> None:
    """For every optimizer declared `per_weight`, in any order of weights, and only for those."""
    assert updated_alike(name, dtype, "cpu", on_host=False) is OPTIMIZERS[name].per_weight


def test_the_model_is_freed_after_the_run(t2i_checkpoint: Path) -> None:
    """The garbage collector does not see references from hooks of weights."""
    assembly = full(t2i_checkpoint, **RELEASED)
    freed = [weakref.ref(weight) for weight in assembly.parameters.values()]
    del assembly
    gc.collect()

    assert {weight() for weight in freed} == {None}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", "ao-adamw8bit"])
def test_released_gradients_train_alike_on_a_gpu(name: str, on_host: bool) -> None:
    with torch.compiler.set_stance("default"):
        assert updated_alike(name, torch.bfloat16, "cuda", on_host=on_host)


@pytest.mark.parametrize(
    ("settings", "on_host"),
    [
        ({"max_grad_norm": 0.01, "gradient_checkpointing": False}, False),
        ({"mixed_precision": "bf16", "max_grad_norm": 0.01}, True),
        ({"grad_clip_method": "norm", "max_grad_norm": 0, "optimizer": "muon"}, True),
        ({"mixed_precision": "bf16", "max_grad_norm": 0, "optimizer": "ao-adamw8bit"}, False),
    ],
    ids=["fp32", "bf16", "norm", "8bit"],
)
def test_a_full_fine_tune_with_released_gradients_is_bit_equal(
    t2i_checkpoint: Path, settings: dict[str, Any], on_host: bool
) -> None:
    """Weights, average and metrics; also after a resume with the state elsewhere."""
    plain = full(t2i_checkpoint, **settings)
    others: tuple[dict[str, Any], ...] = (
        {**RELEASED, "offload_optimizer_state": on_host},
        {**RELEASED, "offload_optimizer_state": not on_host},
        {},
    )
    halves = [full(t2i_checkpoint, **settings, **more) for more in others]
    averages = [
        Ema(assembly.parameters, EmaConfig(), torch.device("cpu")) for assembly in (plain, *halves)
    ]
    expected = train(plain, t2i_checkpoint, 0, 3, averages[0])
    actual = train(halves[0], t2i_checkpoint, 0, 2, averages[1])
    torch.save(halves[0].optimizer.state_dict(), buffer := io.BytesIO())
    for half, average in zip(halves[1:], averages[2:], strict=True):
        for name, weight in halves[0].parameters.items():
            half.parameters[name].data.copy_(weight)
        buffer.seek(0)
        spec = OPTIMIZERS[half.settings.optimizer_name]
        host = half.release and half.release.host
        load_state(half.optimizer, torch.load(buffer, weights_only=True), spec, host)
        average.load_state_dict(averages[1].state_dict())
        assert actual + train(half, t2i_checkpoint, 2, 3, average) == expected

    assert actual + train(halves[0], t2i_checkpoint, 2, 3, averages[1]) == expected
    for half, average in zip(halves, averages[1:], strict=True):
        assert_same(copy_of(half), copy_of(plain))
        assert_same(average.average, averages[0].average)


def test_state_on_the_host_is_on_the_device_only_during_an_update(t2i_checkpoint: Path) -> None:
    """The state keeps its place in host memory; the device has a copy only during the update."""
    assembly = full(
        t2i_checkpoint, **RELEASED, offload_optimizer_state=True, optimizer="torch-adam"
    )
    optimizer: Any = assembly.optimizer
    addresses: list[set[int]] = []
    step_of = optimizer.step

    def watched() -> None:
        addresses.append({moment.data_ptr() for moment in moments_of(optimizer)})
        step_of()

    def moments_of(optimizer: Any) -> list[Tensor]:
        states = (
            optimizer.state.get(parameter, {})
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return [state["exp_avg"] for state in states if state]

    train(assembly, t2i_checkpoint, 0, 2)
    kept = {moment.data_ptr() for moment in moments_of(optimizer)}
    optimizer.step = watched
    train(assembly, t2i_checkpoint, 2, 4)

    assert sum(map(len, addresses)) == 2 * len(kept), "each moment goes up once a step"
    assert not set().union(*addresses) & kept
    assert {moment.data_ptr() for moment in moments_of(optimizer)} == kept


def test_the_next_state_is_prefetched_during_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefetched in the last step's order; also correct if a step skips or reorders weights."""
    whole = weights(torch.float32)
    single = weights(torch.float32)
    together = build("adamw", whole)
    apart = build("adamw", single)
    names = {parameter: str(index) for index, parameter in enumerate(single)}
    log: list[str] = []
    host = HostState(apart, torch.device("cpu"))
    fetch = HostState._fetch
    bring = HostState.bring_to_device
    monkeypatch.setattr(
        HostState,
        "_fetch",
        lambda self, parameter: log.append(f"copy {names[parameter]}") or fetch(self, parameter),
    )
    monkeypatch.setattr(
        HostState,
        "bring_to_device",
        lambda self, parameter: log.append(f"need {names[parameter]}") or bring(self, parameter),
    )
    release = GradientRelease(
        {name: parameter for parameter, name in names.items()}, apart, OptimizerConfig(), host
    )
    logs = []
    for order in ((0, 1, 2), (0, 1, 2), (0, 2), (2, 1, 0)):
        for index in order:
            whole[index].grad = torch.full_like(whole[index], (index + 1) / 2)
        together.step()
        together.zero_grad()
        # The backward pass begins with the last term of the sum.
        terms = [(single[index] * ((index + 1) / 2)).sum() for index in order[::-1]]
        with release.updating():
            torch.stack(terms).sum().backward()
        release.finish()
        logs.append(" ".join(log))
        log.clear()

    assert logs[0] == "need 0 need 1 need 2", "there is no state yet"
    assert logs[1] == "need 0 copy 0 copy 1 need 1 copy 2 need 2"
    assert all(map(torch.equal, whole, single))


def test_a_non_finite_gradient_stops_the_run_and_names_the_weights(
    t2i_checkpoint: Path,
) -> None:
    assembly = full(t2i_checkpoint, **RELEASED)
    first, last = (
        spoil(assembly, f"visual_transformer_blocks.{n}.feed_forward.in_layer")[0] for n in (0, 1)
    )

    with pytest.raises(
        NonFiniteError, match="partly updated and are not saved: continue from the last"
    ) as failure:
        train(assembly, t2i_checkpoint, 0, 1)
    assert str(failure.value).index(last) < str(failure.value).index(first), (
        "the backward pass begins at the last one"
    )
    assert "d/0" in str(failure.value)

    assert assembly.release is not None
    assert assembly.release.is_halfway


def test_a_non_finite_loss_updates_no_weight(t2i_checkpoint: Path) -> None:
    assembly = full(t2i_checkpoint, **RELEASED)
    before = copy_of(assembly)
    batch = make_batch(t2i_checkpoint, ["a star"])
    batch.latents.fill_(math.nan)

    with pytest.raises(NonFiniteError, match="The weights were not updated"):
        step.optimizer_step(assembly, Batches(batch), 0)
    assert_same(copy_of(assembly), before)


def test_backward_passes_outside_a_step_only_drop_gradients(t2i_checkpoint: Path) -> None:
    """Gradients of a technique's module are kept for the usual update."""
    assembly = full(t2i_checkpoint, **RELEASED)
    before = copy_of(assembly)
    with unchanged(assembly.optimizer, assembly.techniques):
        rehearse_micro_step(assembly, make_batch(t2i_checkpoint, ["a star"]))
        assert all(parameter.grad is None for parameter in assembly.parameters.values())

    assert_same(copy_of(assembly), before)
    assert not assembly.optimizer.state


@pytest.mark.parametrize("name", LOW_BIT)
def test_stochastic_rounding_depends_only_on_seed_step_and_weight(name: str) -> None:
    """bf16 weights move by updates that rounding to the nearest would lose, as much as they should
    on average.
    """

    def updated(seed: int, drawn: int) -> Tensor:
        weight, other = (nn.Parameter(torch.ones(16, 256, dtype=torch.bfloat16)) for _ in range(2))
        optimizer = build(name, [weight, other], lr=1e-4, adam_weight_decay=0.0)
        torch.manual_seed(drawn)
        for number in range(20):
            weight.grad = torch.ones_like(weight)
            other.grad = torch.ones_like(other)
            optimizer.param_groups[0]["seed"] = seed + 1000 * number
            optimizer.step()
        assert not torch.equal(weight, other)
        return weight.detach()

    assert torch.equal(updated(1, drawn=5), updated(1, drawn=6))
    assert not torch.equal(updated(1, drawn=5), updated(2, drawn=5))
    assert 1 - updated(1, drawn=5).float().mean().item() == pytest.approx(20 * 1e-4, rel=0.15)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "cannot be combined with gradient_accumulation_steps 2: .* Use train_batch",
        ),
        (
            {"grad_clip_method": "norm"},
            "cannot be combined with grad_clip_method norm: .* Use value, or max_grad_norm 0",
        ),
        (
            {"mixed_precision": "fp16", "optimizer": "adamw"},
            "cannot be combined with mixed_precision fp16",
        ),
        ({"num_processes": 2}, "cannot be combined with num_processes 2: .* Leave it out"),
        (
            {"optimizer": "prodigy"},
            "cannot be combined with optimizer 'prodigy': it may not update each weight",
        ),
        (
            {"optimizer": "adamw_schedulefree"},
            "cannot be combined with optimizer 'adamw_schedulefree'",
        ),
    ],
)
def test_settings_that_need_all_gradients_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    values = {"model_type": "full", "model_family": "kandinsky5-image", **RELEASED}
    for more, messages in (({}, []), (settings, [reason])):
        problems = Problems()
        config = resolve([Layer("config.json", list({**values, **more}.items()))], problems)
        results = [
            str(problem)
            for problem in check_config(config)
            if problem.where == "optimizer_release_gradients"
        ]
        assert len(results) == len(messages), problems
        assert all(
            re.search(message, problem) for message, problem in zip(messages, results, strict=True)
        )
