"""Quantised weights: which layers are packed, how exact they are, and how adapters train."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from simpletuner.config.precision import QUANTISATIONS, quantisation
from simpletuner.memory.quantisation import layers as room
from simpletuner.memory.quantisation.layers import QuantisedLinear, pack, quantise
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.training.state import Assembly
from tests.tools.assembly import fixed_noise, make_assembly, make_batch
from tests.tools.families import CPU
from tests.tools.tiny import build_kandinsky
from tests.tools.tiny_sana import build_sana
from tests.tools.tolerances import ROTATION, assert_close, distance

QUANTO = [name for name, stored in QUANTISATIONS.items() if stored.library == "quanto"]
# Largest relative error (norms) of a row of normal numbers, and bytes per weight of a layer of 256.
LIMITS = {
    "int8-quanto": (0.011, 1.02),
    "int4-quanto": (0.12, 0.54),
    "int2-quanto": (0.6, 0.29),
    "fp8-quanto": (0.032, 1.02),
    "fp8uz-quanto": (0.032, 1.02),
    "int8-torchao": (0.011, 1.04),
    "int8dq-torchao": (0.011, 1.04),
    "fp8-torchao": (0.032, 1.04),
    "nf4-bnb": (0.11, 0.57),
}


def weight(rows: int = 256, columns: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)).to(dtype) * 0.02


def need(name: str) -> None:
    package = QUANTISATIONS[name].package
    if package is not None:
        pytest.importorskip(package.module)


def unpacked(packed: Any) -> Tensor:
    form, tensors = packed
    return form.unpack(*tensors.values())


def quantised(
    model: nn.Module, name: str = "int8", layers: str = r".*", via: Any = "cpu"
) -> nn.Module:
    result = quantisation(name)
    assert result is not None
    quantise(model, layers, result, via=via, accelerator=CPU)
    return model


@pytest.mark.parametrize("name", LIMITS)
def test_error_and_size_of_quantised_weights_are_bounded(name: str) -> None:
    need(name)
    original = weight()
    form, tensors = pack(original, QUANTISATIONS[name])
    again = form.unpack(*tensors.values())
    error, size = LIMITS[name]

    assert again.dtype == original.dtype
    assert 1e-4 < ((again - original).float().norm() / original.float().norm()).item() < error
    assert sum(tensor.nbytes for tensor in tensors.values()) / original.numel() < size


@pytest.mark.parametrize(("name", "columns"), [*product(QUANTO, (256, 160, 40))])
def test_unpacked_weights_equal_those_of_the_library(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; 40 columns have no even groups below 8 bits."""
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qtypes, quantize_weight
    from optimum.quanto.tensor.packed import PackedTensor

    def unpack(packed: PackedTensor) -> torch.Tensor:
        """The library's own operator would compile a C++ extension first, which takes minutes."""
        shifts = range(0, 8, packed._bits)
        values = torch.cat([packed._data >> shift & 2**packed._bits - 1 for shift in shifts])
        return values[: packed.shape[0]]

    monkeypatch.setattr(PackedTensor, "unpack", unpack)
    original = weight(48, columns, torch.float32)
    qtype = qtypes[QUANTISATIONS[name].kind]
    if qtype.bits == 8:
        scale = AbsmaxOptimizer()(original, qtype=qtype, axis=0)
        expected = quantize_weight(original, qtype=qtype, axis=0, scale=scale)
    else:
        group = {256: 128, 160: 32, 40: 40}[columns]
        scale, shift = MaxOptimizer()(original, qtype=qtype, axis=0, group_size=group)
        settings = {"qtype": qtype, "axis": 0, "group_size": group, "optimized": False}
        expected = quantize_weight(original, scale=scale, shift=shift, **settings)

    assert torch.equal(unpacked(pack(original, QUANTISATIONS[name])), expected.dequantize())


@pytest.mark.parametrize("name", QUANTO)
def test_rows_of_zeros_stay_zeros(name: str) -> None:
    original = weight(32, 64)
    original[3] = 0
    again = unpacked(pack(original, QUANTISATIONS[name]))

    assert again.isfinite().all()
    assert not again[3].any()


@pytest.mark.parametrize(("name", "bias"), [*product(LIMITS, (True, False))])
def test_the_product_and_its_gradient_equal_those_of_the_unpacked_weight(
    name: str, bias: bool
) -> None:
    need(name)
    layer = QuantisedLinear(
        nn.Linear(64, 32, bias=bias), pack(weight(32, 64, torch.float32), QUANTISATIONS[name])
    )
    inputs = torch.randn(3, 5, 64).transpose(0, 1).requires_grad_()
    outputs = layer(inputs)
    expected = functional.linear(inputs, layer.weight, layer.bias)

    assert_close(outputs, expected, terms=64)

    (actual,) = torch.autograd.grad(outputs.sin().sum(), inputs)
    (theirs,) = torch.autograd.grad(expected.sin().sum(), inputs)

    assert_close(actual, theirs, terms=64 * 32)


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("name", [name for name in LIMITS if name != "nf4-bnb"])
def test_a_product_does_not_wait_for_the_device(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` refuses to tell a number or to be copied from; torchao's int8dq formatted its inputs
    in every call.
    """
    need(name)
    layer = QuantisedLinear(
        nn.Linear(64, 32), pack(weight(32, 64, torch.float32), QUANTISATIONS[name])
    ).to("meta")

    def refuse(tensor: Tensor, **settings: Any) -> str:
        raise AssertionError("formatting a tensor copies its numbers from the device")

    monkeypatch.setattr(Tensor, "__repr__", refuse)
    inputs = torch.empty(rows, 64, device="meta", requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8dq_equals_torchaos_quantisation(dtype: torch.dtype) -> None:
    """The weight bit for bit, the product up to the rounding of the inputs; 16 rows, too few for a
    GPU, keep theirs.
    """
    quantization = pytest.importorskip("torchao.quantization")
    of_torchao = nn.Linear(64, 32, bias=False, dtype=dtype)
    of_torchao.weight = nn.Parameter(weight(32, 64, dtype), requires_grad=False)
    quantised = QuantisedLinear(
        of_torchao, pack(of_torchao.weight, QUANTISATIONS["int8dq-torchao"])
    )
    quantization.quantize_(of_torchao, quantization.Int8DynamicActivationInt8WeightConfig())

    assert torch.equal(quantised.weight, of_torchao.weight.dequantize())

    for rows in (16, 17):
        inputs = (
            torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
            .to(dtype)
            .requires_grad_()
        )
        outputs = quantised(inputs)
        exact = functional.linear(inputs, quantised.weight)
        assert torch.equal(outputs, exact) is (rows == 16)
        assert (outputs - exact).norm() <= 1.1 * (of_torchao(inputs) - exact).norm()
        gradients = [
            torch.autograd.grad(outputs_of_layer.sum(), inputs)[0]
            for outputs_of_layer in (outputs, exact)
        ]
        assert torch.equal(*gradients)


@pytest.mark.parametrize(("name", "columns"), [*product(QUANTO, (132, 24))])
def test_products_of_unsupported_widths_and_strides_are_finite(name: str, columns: int) -> None:
    """bfloat16 on a CPU, widths that are no multiple of 16, inputs that are not contiguous."""
    layer = QuantisedLinear(
        nn.Linear(columns, 16), pack(weight(16, columns), QUANTISATIONS[name])
    ).bfloat16()
    outputs = layer(torch.randn(columns, 7, dtype=torch.bfloat16).t())
    assert outputs.isfinite().all()


def test_autograd_never_saves_an_unpacked_weight() -> None:
    model = quantised(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64)))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda saved: saved
    ):
        model(torch.randn(2, 64, requires_grad=True))

    assert torch.int8 in {tensor.dtype for tensor in kept}, "the packed weights are"
    assert not [
        tensor.shape for tensor in kept if tensor.is_floating_point() and tensor.numel() >= 64 * 48
    ]


@pytest.mark.parametrize("build", [build_kandinsky, build_sana])
def test_only_quantisable_layers_of_the_family_are_packed(build: Any) -> None:
    """Modulation, time, embeddings, norms, convolutions and the output keep every bit and their
    dtype.
    """
    spec = KANDINSKY5_IMAGE if build is build_kandinsky else SANA_VIDEO
    model = build().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantised(model, layers=spec.quantised_layers)
    layers = [name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)]

    assert layers

    left = {name: tensor for name, tensor in model.state_dict().items() if ".packed_" not in name}
    assert before.keys() - left.keys() == {f"{name}.weight" for name in layers}
    assert all(
        torch.equal(left[name], before[name]) and left[name].dtype == before[name].dtype
        for name in left
    )

    others = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    blocks = [name for name in others if "transformer_blocks" in name]

    assert all("modulation" in name for name in blocks), (
        "what is linear in a block and kept is modulation"
    )


def test_the_device_of_packing_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build_kandinsky()
    together: dict[str, list[list[str]]] = {}
    states = []
    pack_together = room._quantise_together
    for via in ("cpu", "accelerator", "pipeline"):
        groups = together.setdefault(via, [])

        def record(
            model: nn.Module, names: list[str], *rest: Any, groups: list[list[str]] = groups
        ) -> None:
            groups.append(names)
            pack_together(model, names, *rest)

        monkeypatch.setattr(room, "_quantise_together", record)
        states.append(
            quantised(
                copy.deepcopy(model), "int4", KANDINSKY5_IMAGE.quantised_layers, via
            ).state_dict()
        )

    assert all(
        torch.equal(states[0][name], state[name]) for state in states[1:] for name in states[0]
    )
    assert {len(group) for group in together["cpu"] + together["pipeline"]} == {1}, (
        "one layer at a time"
    )
    assert [{room.block_of(name) for name in group} for group in together["accelerator"]] == [
        {"text_transformer_blocks.0"},
        {"visual_transformer_blocks.0"},
        {"visual_transformer_blocks.1"},
    ], "one block at a time"


def test_a_quantised_model_can_be_copied_saved_and_compiled() -> None:
    model = quantised(nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)), "int4")
    inputs = torch.randn(4, 64, requires_grad=True)
    twin = copy.deepcopy(model)
    for buffer in twin.buffers():
        buffer.zero_()
    twin.load_state_dict(model.state_dict())
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(inputs)
    (gradient,) = torch.autograd.grad(expected.sum(), inputs)

    for other in (twin, compiled):
        assert torch.equal(other(inputs), expected)
        assert torch.equal(torch.autograd.grad(other(inputs).sum(), inputs)[0], gradient)


def test_an_expression_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no linear layer of Sequential matches 'blocks'"):
        quantised(nn.Sequential(nn.Linear(16, 16)), layers="blocks")


def gradients(assembly: Assembly, batch: Any) -> dict[str, Tensor]:
    for name, parameter in assembly.parameters.items():
        generator = torch.Generator().manual_seed(len(name))
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.05
    noisy = fixed_noise(batch)
    loss = (assembly.adapter.predict(assembly.transformer, noisy) - noisy.target).square().mean()
    return dict(
        zip(
            assembly.parameters,
            torch.autograd.grad(loss, [*assembly.parameters.values()]),
            strict=True,
        )
    )


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_gradients_of_a_lora_on_int8(t2i_checkpoint: Path, precision: str) -> None:
    """Close to gradients on the full weights, and equal with and without checkpointing."""
    settings = {"mixed_precision": precision, "learning_rate": 1e-3}
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles"])
    full = gradients(make_assembly(t2i_checkpoint, **settings), batch)
    int8 = make_assembly(t2i_checkpoint, base_model_precision="int8-quanto", **settings)

    assert any(isinstance(module, QuantisedLinear) for module in int8.transformer.modules())
    assert all(
        parameter.requires_grad == (".lora_" in name)
        for name, parameter in int8.transformer.named_parameters()
    )

    result = gradients(int8, batch)
    assert 1e-4 < distance(result, full) < 0.05

    settings["gradient_checkpointing"] = False
    plain = gradients(
        make_assembly(t2i_checkpoint, base_model_precision="int8-quanto", **settings), batch
    )

    assert distance(result, plain) < ROTATION


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"mixed_precision": "bf16"}, torch.bfloat16),
        ({"mixed_precision": "no"}, torch.float32),
        ({"mixed_precision": "bf16", "base_model_default_dtype": "fp32"}, torch.float32),
        ({"mixed_precision": "no", "base_model_default_dtype": "bf16"}, torch.bfloat16),
    ],
)
def test_layers_that_are_not_quantised_keep_their_dtype(
    t2i_checkpoint: Path, settings: dict[str, str], dtype: torch.dtype
) -> None:
    assembly = make_assembly(t2i_checkpoint, base_model_precision="int8", **settings)
    transformer = assembly.transformer

    assert transformer.get_parameter("visual_embeddings.in_layer.weight").dtype == dtype
    assert (
        transformer.get_submodule(
            "visual_transformer_blocks.0.self_attention.to_query.base_layer"
        ).weight.dtype
        == dtype
    )

    modulation = "visual_transformer_blocks.0.visual_modulation.out_layer.weight"
    assert transformer.get_parameter(modulation).dtype == torch.float32, (
        "an island, whatever the dtype around it"
    )
