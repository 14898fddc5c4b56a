"""LoRA in fewer products: what peft computes but for rounding, with every base, and in files as before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.config.precision import QUANTISATIONS
from simpletuner.memory.precision import QuantisedLinear, pack
from simpletuner.models.blocks import FastBlocks
from simpletuner.training import fused_lora
from simpletuner.training.fused_lora import FusedLora, SharedInput
from tests.closeness import ROTATION, assert_all_close, distance
from tests.complaints import complaints
from tests.memory.test_precision import gradients
from tests.training.assembly import make_assembly, make_batch
from tests.workspace import Workspace

RANK, NAMES = 8, ("query", "key", "value")


class Attention(nn.Module):
    """Layers of unequal widths with one input."""

    fused_projections = False
    shared_inputs: dict[Any, SharedInput]

    def __init__(self, dtype: torch.dtype, quantised: str | None, bias: bool) -> None:
        super().__init__()
        for name, width in zip(NAMES, (32, 48, 64), strict=True):
            layer = nn.Linear(64, width, bias=bias).to(dtype)
            if quantised is not None:
                layer = QuantisedLinear(layer, pack(layer.weight, QUANTISATIONS[quantised]))
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.get_submodule(name)(x) for name in NAMES)


def make_group(
    dtype: torch.dtype,
    *,
    packed: bool,
    rank: int = RANK,
    quantised: str | None = None,
    bias: bool = True,
    adapters: torch.dtype | None = None,
) -> tuple[nn.Module, FusedLora, SharedInput]:
    """A module, with LoRAs whose B is not zero, fused."""
    torch.manual_seed(0)
    module = Attention(dtype, quantised, bias)
    settings = LoraConfig(r=rank, lora_alpha=3, target_modules=list(NAMES), init_lora_weights=False)
    inject_adapter_in_model(settings, module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(adapters or dtype)
    fused = FusedLora(module, FastBlocks({}, shared_inputs=[(module, NAMES)]), pack=packed)
    (group,) = fused.groups
    module(torch.ones(1, 64, dtype=dtype))  # packs
    return module, fused, group


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU packs the weights as a GPU does."""
    monkeypatch.setattr(fused_lora, "PACKED_ON", ("cpu",))


def outputs_and_gradients(group: SharedInput, x: Tensor, call: Any = None) -> dict[str, Tensor]:
    """Of outputs times random numbers, with respect to the input and to every A and B."""
    outputs = (call or group)(x)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in outputs]
    trained = [weight for layer in group.layers for weight in layer.parameters() if weight.requires_grad]
    found = torch.autograd.grad(list(outputs), [x, *trained], directions)
    return {str(index): each.float() for index, each in enumerate((*outputs, *found))}


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_products_equal_those_of_peft(packed: bool, bias: bool) -> None:
    """Outputs and gradients of x, A and B, in float32."""
    _, fused, group = make_group(torch.float32, packed=packed, bias=bias)
    assert (group.packed is not None) is packed
    x = torch.randn(2, 9, 64, requires_grad=True)
    found = outputs_and_gradients(group, x)
    with fused.separate():
        expected = outputs_and_gradients(group, x)
    assert_all_close(found, expected, terms=64)
    assert any(not torch.equal(found[name], expected[name]) for name in found), "other products, other rounding"


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [True, False])
def test_bf16_is_no_further_from_the_exact_products_than_peft(packed: bool, adapters: torch.dtype) -> None:
    """Of 8 bits, a rounding loses up to 2^-9; every number goes through at most five of them (A, B, h, y, scale)."""
    group = make_group(torch.bfloat16, packed=packed, adapters=adapters)[2]
    _, exact_fused, exact_group = make_group(torch.float32, packed=False)
    x = torch.randn(2, 40, 64, dtype=torch.bfloat16, requires_grad=True)
    for exact, rounded in zip(exact_group.layers, group.layers, strict=True):
        exact.load_state_dict({name: each.float() for name, each in rounded.state_dict().items()})
    with exact_fused.separate():
        expected = outputs_and_gradients(exact_group, x.detach().float().requires_grad_())
    for name, found in outputs_and_gradients(group, x).items():
        assert distance({"": found}, {"": expected[name]}) < 5 * 2**-9, name


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("packed", [True, False])
def test_compiled_products_are_equal(packed: bool) -> None:
    """Without graph breaks, for any number of tokens."""
    group = make_group(torch.float32, packed=packed)[2]
    x = torch.randn(2, 9, 64, requires_grad=True)
    compiled: Any = torch.compile(group.__call__, backend="aot_eager", fullgraph=True, dynamic=True)
    expected = outputs_and_gradients(group, x)
    assert_all_close(outputs_and_gradients(group, x, compiled), expected, terms=64)


@pytest.mark.parametrize("name", ["int8-quanto", "fp8-quanto", "int4-quanto"])
def test_quantised_bases_keep_their_own_product(name: str) -> None:
    _, fused, group = make_group(torch.float32, packed=True, quantised=name)
    assert group.packed is None
    x = torch.randn(2, 9, 64, requires_grad=True)
    found = outputs_and_gradients(group, x)
    with fused.separate():
        assert_all_close(found, outputs_and_gradients(group, x), terms=64)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize(("packed", "forward", "backward"), [(True, 2, 4), (False, 7, 11)])
def test_products_of_three_layers(packed: bool, forward: int, backward: int) -> None:
    """Nine in peft, and fifteen for the gradients."""
    _, fused, group = make_group(torch.float32, packed=packed)
    x = torch.randn(2, 9, 64, requires_grad=True)

    def count() -> list[int]:
        with Products() as ahead:
            outputs = group(x)
        with Products() as back:
            torch.cat(list(outputs), dim=-1).sum().backward()
        return [ahead.count, back.count]

    assert count() == [forward, backward]
    with fused.separate():
        assert count() == [9, 15]


@pytest.mark.usefixtures("packing")
def test_packed_weights_follow_b_and_share_memory_with_the_base() -> None:
    """Whoever writes to B: the next forward pass of the model reads it. A saved graph stays usable."""
    module, fused, group = make_group(torch.float32, packed=True)
    x = torch.randn(1, 9, 64, requires_grad=True)
    first = group(x)
    module(x)
    torch.autograd.grad(first[0].sum(), x)
    for layer in group.layers:
        layer.lora_B["default"].weight.data.mul_(-2)
    module(x)
    with fused.separate():
        assert_all_close(dict(zip(NAMES, group(x), strict=True)), dict(zip(NAMES, module(x), strict=True)), terms=64)
        expected = group(x)
    assert_all_close(dict(zip(NAMES, group(x), strict=True)), dict(zip(NAMES, expected, strict=True)), terms=64)
    assert group.packed is not None
    storages = {layer.base_layer.weight.untyped_storage().data_ptr() for layer in group.layers}
    assert storages == {group.packed.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("settings", "on", "packed"),
    [
        ({}, "cpu", True),
        ({}, "cuda", False),
        ({"lora_alpha": 3, "gradient_checkpointing": False}, "cpu", True),
        ({"lora_init_type": "pissa"}, "cpu", False),
        ({"base_model_precision": "int8", "quantized_matmul": True}, "cpu", False),
        ({"enable_group_offload": True}, "cuda", False),
    ],
    ids=str,
)
def test_gradients_of_a_model(
    t2i_checkpoint: Path, settings: dict[str, Any], on: str, packed: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Those of separate products but for rounding, and the log says how far apart they are."""
    monkeypatch.setattr(fused_lora, "PACKED_ON", (on,))
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles"], side=8)
    found = []
    for fused in (False, True):
        assembly = make_assembly(t2i_checkpoint, **settings, speed_fused_lora=fused)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found.append(gradients(assembly, batch))
    attention: Any = assembly.transformer.get_submodule("visual_transformer_blocks.0.cross_attention")
    assert {group.packed is not None for group in attention.shared_inputs.values()} == {packed}
    assert distance(found[1], found[0]) < ROTATION
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])
    (line,) = (each.getMessage() for each in caplog.records if each.getMessage().startswith("fused LoRA: "))
    error = line.removeprefix("fused LoRA: after the first update, gradients of block 0 differ by up to ").split()[0]
    assert 0 < float(error) < 8 * ROTATION


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_writes_the_same_keys(tmp_path: Path, t2i_checkpoint: Path) -> None:
    settings = {"speed_fused_lora": True, "max_train_steps": 4, "checkpoint_step_interval": 2}
    whole, parts, plain = (Workspace.create(tmp_path / name, t2i_checkpoint, **{**settings, "speed_fused_lora": fused})
                           for name, fused in (("whole", True), ("parts", True), ("plain", False)))  # fmt: skip
    assert whole.train() == plain.train() == 0
    assert parts.train("max_train_steps=2") == 0
    assert parts.train() == 0
    name = "output/pytorch_lora_weights.safetensors"
    assert parts.path(name).read_bytes() == whole.path(name).read_bytes()
    ours, theirs = (load_file(each.path(name)) for each in (whole, plain))
    assert distance(ours, theirs) < 0.05, "trained by other roundings"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"use_dora": True}, "cannot be combined with use_dora: DoRA scales the sum of base and update"),
        ({"lora_dropout": 0.1}, "cannot be combined with lora_dropout: each layer drops different inputs"),
        ({"lora_type": "lokr"}, "needs lora_type standard: other updates are no product of two matrices"),
        ({"model_type": "full"}, "needs model_type lora"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], problem: str
) -> None:
    workspace.write_config(speed_fused_lora=True, **settings)
    assert any("speed_fused_lora" in line and problem in line for line in complaints(workspace, capsys))


@pytest.mark.usefixtures("packing")
def test_rows_stay_aligned() -> None:
    """64 columns and three times 4 are no multiple of 8."""
    assert make_group(torch.float32, packed=True, rank=4)[2].packed is None


def test_without_adapters_the_base_computes() -> None:
    """As the teacher of techniques, bit for bit."""
    group = make_group(torch.float32, packed=False)[2]
    x = torch.randn(1, 9, 64)
    for layer in group.layers:
        layer.enable_adapters(False)
    assert all(torch.equal(one, layer.base_layer(x)) for one, layer in zip(group(x), group.layers, strict=True))


def test_a_lora_that_shares_no_input_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module = Attention(torch.float32, None, True)
    FusedLora(module, FastBlocks({}, shared_inputs=[(module, NAMES)]), pack=True)
    assert "speed_fused_lora has no effect" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["no", "inductor"])
def test_a_gpu_packs_weights(t2i_checkpoint: Path, backend: str) -> None:
    """Gradients as far from those of separate products as bf16 rounds: rotation and five products of 2^-9 each."""
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles"], side=8).to(torch.device("cuda"))
    settings = {"mixed_precision": "bf16", "dynamo_backend": backend}
    plain, fused = (make_assembly(t2i_checkpoint, **settings, speed_fused_lora=each) for each in (False, True))
    assert distance(gradients(fused, batch), gradients(plain, batch)) < 8 * 2**-9
    attention: Any = fused.transformer.get_submodule("visual_transformer_blocks.0.self_attention")
    assert all(group.packed.is_cuda for group in attention.shared_inputs.values())
