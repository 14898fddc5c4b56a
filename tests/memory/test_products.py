"""Quantised products: exact except for the rounding of their factors, on every device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.config.precision import QUANTISATIONS, multiplied
from simpletuner.config.schema import PrecisionConfig
from simpletuner.errors import ConfigError
from simpletuner.memory import precision
from simpletuner.memory.offload import attach
from simpletuner.memory.precision import check_device
from simpletuner.memory.quantisation.layers import QuantisedLinear, pack, use_quantised_products
from simpletuner.memory.quantisation.scaled_rows import FEW, ScaledRows
from simpletuner.run.settings import transformer_settings
from simpletuner.speed.compile import FirstGradients
from simpletuner.training.assemble import load_for_sampling
from tests.memory.test_precision import gradients, weight
from tests.tools.assembly import make_assembly, make_batch
from tests.tools.families import CPU, make_adapter, make_config
from tests.tools.streaming import AdversarialCopier
from tests.tools.tolerances import distance

NAMES = ("int8-quanto", "fp8-quanto")


def layer(
    name: str, rows: int = 48, columns: int = 64, dtype: torch.dtype = torch.float32
) -> QuantisedLinear:
    """A layer `rows columns` with quantised products."""
    quantised = QuantisedLinear(
        nn.Linear(columns, rows).to(dtype), pack(weight(rows, columns, dtype), QUANTISATIONS[name])
    )
    use_quantised_products(nn.Sequential(quantised))
    return quantised


def divided(rows: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Rows scaled to a largest number of ±`largest`, and their scales."""
    scale = (rows.float().abs().amax(-1, keepdim=True) / largest).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    return rows / scale, scale


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers with outliers, rows of unequal size and one of zeros."""
    torch.manual_seed(7)
    values = (
        torch.randn(shape)
        * torch.randn(shape).mul(2).exp()
        * torch.logspace(-8, 2, shape[0]).view(-1, 1, 1)
    )
    values[0, 0] = 0
    return values.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_equal_integer_arithmetic_bit_for_bit(dtype: torch.dtype) -> None:
    """Outputs and input gradients against sums of levels in int64."""
    quantised = layer("int8-quanto", dtype=dtype)
    inputs = draw(4, 9, 64, dtype=dtype)
    gradient = draw(4, 9, 48, dtype=dtype)
    levels, scale = quantised.packed
    exact, rows = divided(inputs.detach(), 127.0)
    outputs = quantised(inputs)
    sums = exact.round().long() @ levels.long().t()

    assert torch.equal(
        outputs, (sums.float() * rows * scale.float().t()).to(dtype) + quantised.bias
    )

    exact, rows = divided(gradient.detach() * scale.float().t(), 127.0)
    (actual,) = torch.autograd.grad(outputs, inputs, gradient.detach())

    assert torch.equal(actual, ((exact.round().long() @ levels.long()).float() * rows).to(dtype))
    assert exact.round().abs().amax(-1).unique().tolist() == [0.0, 127.0], (
        "every row uses all levels"
    )


def test_fp8_products_differ_only_by_the_rounding_of_their_factors() -> None:
    """e4m3 rounds a number by up to 2^-4 of itself, near zero 2^-10 of the unit in which 448 is the
    largest; a GPU's kernels write bf16, which rounds by 2^-9."""
    quantised = layer("fp8-quanto")
    inputs = draw(4, 9, 64)
    gradient = draw(4, 9, 48)
    levels = quantised.packed[0].float()
    scale = quantised.packed[1].t()
    outputs = quantised(inputs)
    (actual,) = torch.autograd.grad(outputs, inputs, gradient.detach())
    for product, factor, matrix in (
        (outputs.detach() - quantised.bias.detach(), inputs.detach(), levels.t() * scale),
        (actual, gradient.detach() * scale, levels),
    ):
        rounding = factor.abs() * 2**-4 + divided(factor, 448.0)[1] * 2**-10
        expected = factor @ matrix
        limit = rounding @ matrix.abs() + expected.abs() * 2**-8
        assert (
            (product - expected).abs()
            <= limit + 1e-6 * (limit.amax(-1, keepdim=True) + quantised.bias.abs().max())
        ).all()
        assert (product - expected).norm() > 1e-3 * expected.norm(), "factors are rounded"


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_an_unsupported_size_multiplies_unpacked(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Widths that are not multiples of 16, and too few rows; strided inputs are supported."""
    with caplog.at_level(logging.INFO):
        odd = [layer(name, columns=72), layer(name, rows=40)]

    assert caplog.text.count("0 are multiplied unpacked") == 2

    quantised = layer(name)
    cases = [(quantised, torch.randn(FEW, 64))]  # too few rows
    for unsupported in odd:
        cases.append((unsupported, torch.randn(FEW + 1, unsupported.in_features)))

    for module, inputs in cases:
        assert torch.equal(module(inputs), nn.functional.linear(inputs, module.weight, module.bias))

    inputs = torch.randn(64, FEW + 1)
    assert torch.equal(quantised(inputs.t()), quantised(inputs.t().contiguous()))
    assert not torch.equal(
        quantised(inputs.t()), nn.functional.linear(inputs.t(), quantised.weight, quantised.bias)
    )


@pytest.mark.parametrize("name", NAMES)
def test_compiled_products_are_equal(name: str) -> None:
    quantised = layer(name)
    inputs = draw(4, 9, 64)
    compiled: Any = torch.compile(quantised, backend="aot_eager", fullgraph=True, dynamic=True)
    gradients = [
        torch.autograd.grad(forward(inputs).sin().sum(), inputs)[0]
        for forward in (quantised, compiled)
    ]

    assert torch.equal(*gradients)


class Calls(TorchDispatchMode):
    """Records the operations called and their results."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.results.append((function.overloadpacket.__name__, result))
        return result


@pytest.mark.parametrize("training", [False, True])
def test_int8_products_write_no_needless_float32_numbers(training: bool) -> None:
    """Forward: the scaled rows, the rounded ones, the sums. Backward: the folded gradient first."""
    quantised = layer("int8-quanto", dtype=torch.bfloat16)
    inputs = draw(4, 9, 64, dtype=torch.bfloat16)
    gradient = torch.ones(4, 9, 48, dtype=torch.bfloat16)
    outputs = quantised(inputs)
    with Calls() as calls:
        outputs.backward(gradient) if training else quantised(inputs)
    large = []
    for name, result in calls.results:
        is_float32 = isinstance(result, Tensor) and result.dtype == torch.float32
        if is_float32 and result.numel() >= 36 * 48:  # the size of the output
            large.append(name)

    assert large == (["mul", "div_", "round_"] if training else ["div", "round_", "mul"])


def test_only_forward_products_accumulate_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta`, where, as on a GPU, no product runs in float32."""
    asked: list[bool] = []

    def scaled(
        rows: Tensor, levels: Tensor, *scales: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> Tensor:
        asked.append(use_fast_accum)
        return rows.new_empty((len(rows), levels.shape[1]), dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    quantised = layer("fp8-quanto").to("meta")
    inputs = torch.empty(40, 64, device="meta", requires_grad=True)
    quantised(inputs).sum().backward()

    assert asked == [True, False]


def comparisons_in(records: list[logging.LogRecord]) -> list[str]:
    return [
        record.getMessage() for record in records if "gradients of block 0" in record.getMessage()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_lora(
    t2i_checkpoint: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Near those of unpacked products, the same with and without checkpointing, and the error is
    told once.
    """
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles"], side=8)
    settings: dict[str, Any] = {"mixed_precision": "bf16", "base_model_precision": name}
    unpacked = gradients(make_assembly(t2i_checkpoint, **settings), batch)
    settings["quantized_matmul"] = True
    with caplog.at_level(logging.INFO):
        assembly = make_assembly(t2i_checkpoint, **settings)
        result = gradients(assembly, batch)
        (line,) = comparisons_in(caplog.records)
        again = gradients(assembly, batch)
        assert comparisons_in(caplog.records) == [line]
    error = float(
        line.removeprefix(
            f"{name[:-7]} products: on the first batch, gradients of block 0 differ by up to "
        )[:7]
    )

    assert 1e-4 < error < 0.2
    assert 1e-4 < distance(result, unpacked) < 0.1
    for other in (
        again,
        gradients(make_assembly(t2i_checkpoint, gradient_checkpointing=False, **settings), batch),
    ):
        assert all(torch.equal(result[name], other[name]) for name in result)


@pytest.mark.parametrize(
    "settings",
    [{"dynamo_backend": "aot_eager"}, {"enable_group_offload": True}, {"use_dora": True}],
    ids=str,
)
def test_the_first_gradients_are_compared_without_side_effects(
    t2i_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
) -> None:
    """Equal gradients and as many calls of compiled code without it; streamed, with kept attention
    and with dropout.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(attach, "choose_copier", lambda *place, **settings: AdversarialCopier())
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles"], side=8)
    settings |= {"base_model_precision": "int8", "quantized_matmul": True, "lora_dropout": 0.3}
    results = []
    called = []
    monkeypatch.setattr(
        torch, "compile", lambda piece, **how: lambda *call: (called.append(piece), piece(*call))[1]
    )
    for logs in (FirstGradients._log, lambda *block, **inputs: None):
        monkeypatch.setattr(FirstGradients, "_log", logs)
        assembly = make_assembly(t2i_checkpoint, **settings)
        torch.manual_seed(3)
        results.append(gradients(assembly, batch))

    assert comparisons_in(caplog.records), "it was made once"
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    half = len(called) // 2
    assert called[:half] == called[half:]
    assert bool(called) is ("dynamo_backend" in settings)


def test_sampling_multiplies_as_training_does(t2i_checkpoint: Path) -> None:
    config = make_config(t2i_checkpoint, base_model_precision="int8", quantized_matmul=True)
    model = load_for_sampling(transformer_settings(config), make_adapter(t2i_checkpoint), CPU)
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]

    assert layers
    assert all(
        quantised.form == ScaledRows(rounds_inputs=True, rounds_gradients=True)
        for quantised in layers
    )


FP8 = {"base_model_precision": "fp8-quanto", "quantized_matmul": True}
DYNAMIC = {"text_encoder_1_precision": "int8dq-torchao"}


@pytest.mark.parametrize(
    ("settings", "device", "hip", "capability", "problem"),
    [
        (
            FP8,
            "mps",
            None,
            None,
            "quantized_matmul: needs an NVIDIA GPU, not mps; set it to false.",
        ),
        (
            FP8,
            "cuda",
            "6.4",
            None,
            "quantized_matmul: needs an NVIDIA GPU, not ROCm; set it to false.",
        ),
        (
            FP8,
            "cuda",
            None,
            (8, 6),
            "quantized_matmul: fp8-quanto needs a GPU of compute capability 8.9; this one has "
            "8.6. Set base_model_precision int8-quanto, or quantized_matmul false.",
        ),
        (
            DYNAMIC,
            "mps",
            None,
            None,
            "text_encoder_1_precision: needs an NVIDIA GPU, not mps; set it to int8-torchao.",
        ),
        (
            DYNAMIC,
            "cuda",
            None,
            (7, 0),
            "text_encoder_1_precision: int8dq-torchao needs a GPU of compute capability 7.5; this "
            "one has 7.0. Use int8-torchao.",
        ),
    ],
)
def test_devices_without_quantised_products_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    device: str,
    hip: str | None,
    capability: tuple[int, int],
    problem: str,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    config = PrecisionConfig(**settings)

    with pytest.raises(ConfigError) as raised:
        check_device(config, torch.device(device))
    assert [str(problem) for problem in raised.value.problems] == [problem]

    check_device(config, CPU)
    check_device(PrecisionConfig(), torch.device(device))


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        (
            {"base_model_precision": "fp8-quanto", "quantized_matmul": True},
            "quantized_matmul",
            "Set quantized_matmul false.",
        ),
        ({"base_model_precision": "int8dq-torchao"}, "base_model_precision", "Use int8-torchao."),
    ],
)
def test_a_gpu_that_refuses_the_first_product_is_reported_before_loading(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key: str, remedy: str
) -> None:
    """Like torch on some GPUs whose compute capability allows fp8."""

    def refuse(rows: Tensor, levels: Tensor) -> Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand a stack")

    monkeypatch.setattr(precision, "multiply", refuse)
    stored = multiplied(PrecisionConfig(**settings))[key]
    why = precision.refusal(stored, CPU)

    assert (
        why
        == f"cannot be multiplied by this torch on this GPU (CUBLAS_STATUS_NOT_SUPPORTED). {remedy}"
    )

    monkeypatch.undo()
    assert precision.refusal(stored, CPU) == ""
