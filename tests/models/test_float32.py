"""Layers and models that need full float32 have it, whether the process allows TF32 or not.

torch has these settings on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from simpletuner.models.kandinsky5.blocks import store_in_bf16
from simpletuner.models.loading import full_float32, full_linear, keep_full_float32
from tests.tools.sana_family import make_sana_adapter
from tests.tools.tiny import WIDTH, build_kandinsky

SETTINGS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
ALLOWED = [True, True]
FULL = [False, False]


@pytest.fixture(autouse=True)
def users_settings() -> Iterator[None]:
    """TF32 is allowed, and is so again after each test."""
    before = allowed()
    for setting in SETTINGS:
        setting.allow_tf32 = True
    yield
    assert allowed() == ALLOWED, "restored"
    for setting, value in zip(SETTINGS, before, strict=True):
        setting.allow_tf32 = value


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """The settings in each product and convolution, in their order."""
    settings_in_products: list[list[bool]] = []

    def noted(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute_and_note(*inputs: Any, **settings: Any) -> Tensor:
            settings_in_products.append(allowed())
            return compute(*inputs, **settings)

        return compute_and_note

    for name in ("linear", "conv2d", "conv3d"):
        monkeypatch.setattr(functional, name, noted(getattr(functional, name)))
    return settings_in_products


def allowed() -> list[bool]:
    return [setting.allow_tf32 for setting in SETTINGS]


@full_float32()
def fail() -> None:
    assert allowed() == FULL
    raise ZeroDivisionError


def test_the_users_tf32_settings_are_restored_after_an_error() -> None:
    torch.backends.cudnn.allow_tf32 = False
    with pytest.raises(ZeroDivisionError):
        fail()
    assert allowed() == [True, False]
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_full_linear_equals_linear_with_full_gradients(
    bias: bool, compiled: bool, products: list[list[bool]]
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 8), torch.randn(5, 8)]
    if bias:
        inputs.append(torch.randn(5))
    full: Any = full_linear
    if compiled:
        full = torch.compile(full_linear, backend="aot_eager", fullgraph=True)

    results = []
    linear: Any = functional.linear
    for product in (linear, full):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = product(*leaves) if bias else product(*leaves, None)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])

    expected, result = results
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    # The stock forward pass; the full one, and its gradients of input and weight.
    assert products == [ALLOWED, FULL, FULL, FULL]


def test_float32_layers_compute_without_tf32(products: list[list[bool]]) -> None:
    """Time and modulation of Kandinsky, stored in bf16 or not; other layers keep the setting."""
    torch.manual_seed(0)
    model: Any = build_kandinsky().requires_grad_(False)
    modulation = model.visual_transformer_blocks[0].visual_modulation
    times = torch.tensor([500.0])
    stored = modulation.out_layer.weight
    stored.data = torch.randn_like(stored).bfloat16().float()
    inputs = torch.randn(1, modulation.out_layer.in_features)
    expected = modulation(inputs), model.time_embeddings(times)
    store_in_bf16(model)
    assert stored.dtype == torch.bfloat16
    keep_full_float32(model)
    products.clear()
    torch.testing.assert_close((modulation(inputs), model.time_embeddings(times)), expected)
    assert products == [FULL] * 3
    model.visual_transformer_blocks[0].feed_forward(torch.randn(1, 4, WIDTH))
    assert products[3:] == [ALLOWED] * 2
    layers = {name for name, module in model.named_modules() if "forward" in vars(module)}

    assert {name.split(".")[-2] for name in layers} == {
        "time_embeddings",
        "text_modulation",
        "visual_modulation",
        "modulation",
    }


@pytest.mark.parametrize(
    ("device", "dtype"), [("cuda", "float32"), ("cuda", "bfloat16"), ("cpu", "float32")]
)
def test_a_float32_vae_on_a_gpu_computes_without_tf32(
    sana_checkpoint: Path,
    device: str,
    dtype: str,
    products: list[list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the settings mean nothing, and changing them would make blocks compile again."""
    monkeypatch.setattr(nn.Module, "to", lambda module, *place: module)  # there is no GPU
    numbers = getattr(torch, dtype)
    vae = make_sana_adapter(sana_checkpoint).load_latent_encoder(torch.device(device), numbers).vae
    latents = vae.encode(torch.zeros(1, 3, 1, 32, 32, dtype=numbers)).latent_dist.mode()
    half = len(products)
    vae.decode(latents)
    is_full = (device, dtype) == ("cuda", "float32")

    assert 0 < half < len(products)
    assert products == [FULL if is_full else ALLOWED] * len(products)
