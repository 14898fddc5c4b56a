"""int8 products with their scales in the epilogue: the bits of torch's sums, scaled afterwards."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from simpletuner.config.precision import QUANTISATIONS
from simpletuner.config.schema import PrecisionConfig
from simpletuner.errors import ConfigError
from simpletuner.memory.precision import QuantisedLinear, check_device, multiply, pack, use_quantised_products
from tests.complaints import complaint
from tests.memory.test_precision import weight
from tests.workspace import Workspace

# Sizes that no tile divides, weights in both layouts, with and without scales of columns. Where a GPU rounds to the
# nearest bfloat16 (cvt.rn.bf16x2), Triton's interpreter cuts float32 off.
INTERPRETED = """
import torch
from simpletuner.memory.int8_kernel import scaled_product
from tests.memory.test_int8_kernel import cut_off, emulated
for m, k, n in ((40, 64, 48), (130, 80, 144), (1200, 16, 16)):
    rows, levels = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((m, k), (n, k)))
    scale, columns = torch.rand(m, 1), torch.rand(1, n)
    for inputs in ((rows, levels.t(), scale, columns), (rows, levels.t().contiguous(), scale, None)):
        exact = emulated(*inputs, torch.float32)
        assert torch.equal(scaled_product(*inputs, torch.float32), exact), (m, k, n)
        rounded = scaled_product(*inputs, torch.bfloat16)
        assert torch.equal(rounded, cut_off(exact)) or torch.equal(rounded, exact.bfloat16()), (m, k, n)
"""


def emulated(rows: Tensor, levels: Tensor, scale: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The kernel's arithmetic, with sums in int64."""
    scaled = (rows.long() @ levels.long()).float() * scale
    return (scaled if columns is None else scaled * columns).to(dtype)


def cut_off(values: Tensor) -> Tensor:
    """The upper half of the bits of float32."""
    return (values.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_the_kernel_under_tritons_interpreter() -> None:
    root = Path(__file__).parents[2]
    # A process of its own: Triton reads the variable when it is imported first.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, cwd=root, env=environment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_the_same_bits_with_either_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and input gradients, with the kernel emulated; it gets weights in the layout in which they are stored."""
    layouts = []

    def kernel(rows: Tensor, levels: Tensor, scale: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        layouts.append(levels.untyped_storage().data_ptr())
        return emulated(rows, levels, scale, columns, dtype)

    monkeypatch.setattr("simpletuner.memory.precision.pkgutil.resolve_name", lambda name: kernel)
    found = QuantisedLinear(nn.Linear(64, 48).to(dtype), pack(weight(48, 64, dtype), QUANTISATIONS["int8-quanto"]))
    inputs = (torch.randn(4, 9, 64) * torch.logspace(-6, 2, 9).view(-1, 1)).to(dtype).requires_grad_()
    results = []
    for name in ("torch", "triton"):
        use_quantised_products(nn.Sequential(found), name)
        outputs = found(inputs)
        results.append((outputs, torch.autograd.grad(outputs.sin().sum(), inputs)[0]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert layouts == [found.packed[0].untyped_storage().data_ptr()] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_both_kernels_of_a_gpu_give_the_same_bits(compiled: bool) -> None:
    from simpletuner.memory.int8_kernel import scaled_product

    ours = torch.compile(multiply) if compiled else multiply
    rows = torch.randn(4097, 256, device="cuda", dtype=torch.bfloat16)
    levels = torch.randint(-127, 128, (512, 256), device="cuda", dtype=torch.int8).t()
    columns = torch.rand(1, 512, device="cuda")
    for scales in (columns, None):
        assert torch.equal(ours(rows, levels, columns=scales, product=scaled_product),
                           multiply(rows, levels, columns=scales))  # fmt: skip


def test_what_is_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"base_model_precision": "int8", "quantized_matmul": True, "quantized_matmul_kernel": "triton"}
    config = PrecisionConfig.model_validate(settings)
    with pytest.raises(
        ConfigError, match="quantized_matmul_kernel: 'triton' needs an NVIDIA GPU of compute capability 8"
    ):
        check_device(config, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="'triton' needs an NVIDIA GPU of compute capability 8"):
        check_device(config, torch.device("cuda"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest, find=importlib.util.find_spec: (
        None if name == "triton" else find(name, *rest)))  # fmt: skip
    workspace.write_config(**settings)
    assert complaint(workspace, capsys) == (
        "quantized_matmul_kernel: 'triton' needs Triton, which comes with torch for CUDA and is not installed; "
        "set it to torch."
    )
