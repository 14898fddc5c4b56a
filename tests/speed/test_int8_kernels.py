"""Int8 products of compiled blocks: which kernels inductor chooses among, on which devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.kernel.mm import aten__int_mm, aten_addmm, aten_mm, mm_template
from torch._inductor.virtualized import V

from simpletuner.config.launch import LaunchConfig
from simpletuner.speed.compile import can_tune_int8
from simpletuner.speed.int8_kernels import KERNELS, OPTIONS, Int8Kernels, tuning_int8
from simpletuner.training import assemble
from tests.tools.assembly import CPU, make_assembly

CUDA = torch.device("cuda")
INT8 = {"base_model_precision": "int8", "quantized_matmul": True}


@pytest.mark.parametrize(
    ("name", "offered", "kept"),
    [
        ("int_mm", [aten__int_mm, mm_template], [aten__int_mm, mm_template]),
        ("mm", [aten_mm, mm_template], [aten_mm]),
        ("addmm", [mm_template], []),
        ("addmm", [aten_addmm, aten_mm], [aten_addmm]),
    ],
)
def test_only_int8_products_choose_among_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, offered: list[Any], kept: list[Any]
) -> None:
    """Others would round differently with another choice."""
    asked: list[Any] = []
    monkeypatch.setattr(
        InductorChoices,
        "get_template_configs",
        lambda self, inputs, templates, name, **named: asked.append(templates),
    )

    KERNELS.get_template_configs(None, offered, name, kwarg_overrides={})

    assert asked == [kept]


@pytest.mark.parametrize(
    ("backend", "mode", "device", "count", "expected"),
    [
        ("inductor", None, CUDA, 82, True),
        ("inductor", None, CUDA, 68, True),
        ("inductor", None, CUDA, 67, False),
        ("inductor", "max-autotune-no-cudagraphs", CUDA, 82, False),
        ("aot_eager", None, CUDA, 82, False),
        ("inductor", None, CPU, 82, False),
    ],
)
def test_kernels_are_tuned_where_inductor_writes_them(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    mode: Any,
    device: torch.device,
    count: int,
    expected: bool,
) -> None:
    properties = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    assert can_tune_int8(backend, LaunchConfig(dynamo_mode=mode), device) is expected


def test_a_deterministic_run_depends_on_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=82)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)

    assert not can_tune_int8("inductor", LaunchConfig(), CUDA)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (INT8, OPTIONS),
        ({"base_model_precision": "int8"}, None),
        ({**INT8, "base_model_precision": "fp8"}, None),
    ],
    ids=str,
)
def test_blocks_with_int8_products_are_compiled_with_tuning(
    t2i_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    expected: Any,
) -> None:
    options: list[Any] = []

    def record(function: Any, **named: Any) -> Any:
        options.append(named.get("options"))
        return function

    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr(assemble, "can_tune_int8", lambda *where: True)

    make_assembly(t2i_checkpoint, dynamo_backend="inductor", **settings)

    assert options
    assert all(given == expected for given in options)


def test_inductor_knows_the_options() -> None:
    torch.compile(torch.neg, options=dict(OPTIONS))

    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(torch.neg, options={**OPTIONS, "max_autotune_int8": True})


def test_choices_hold_only_while_a_tuned_function_runs() -> None:
    before = V.choices.__class__

    def compiler(function: Any, *, options: dict[str, Any]) -> Any:
        return function

    tuned = tuning_int8(compiler)(lambda: V.choices.__class__)

    assert tuned() is Int8Kernels
    assert V.choices.__class__ is before
