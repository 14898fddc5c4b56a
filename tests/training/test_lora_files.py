"""LoRA files applied to a model for sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from simpletuner.config.lora import LoraConfig
from simpletuner.training.lora import add_lora
from simpletuner.training.lora_hooks import applied_loras
from tests.tools.assembly import write_lora
from tests.tools.tolerances import SAMPLING, assert_close


@pytest.mark.parametrize(
    ("kind", "form"), [("Linear", "diffusers"), ("Linear", "comfyui"), ("Conv2d", "diffusers")]
)
@pytest.mark.parametrize(("dora", "strength"), [(False, 1.0), (False, 0.5), (True, 1.0)])
def test_an_applied_file_computes_what_peft_does(
    tmp_path: Path, tiny_network: Any, dora: bool, strength: float, kind: str, form: str
) -> None:
    plain = tiny_network(kind)
    trained = tiny_network(kind)
    settings: dict[str, Any] = {
        "lora_rank": 2,
        "use_dora": dora,
        "lora_format": form,
        "lora_init_type": "gaussian",
    }
    adapter: Any = add_lora(trained, LoraConfig(**settings), ["inner"], seed=1, dtype=torch.float32)
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    file = write_lora(adapter, tmp_path)
    x = torch.linspace(-1, 1, 12).view(2, 6)
    if kind != "Linear":  # a convolution
        x = x[..., None, None]
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with torch.no_grad():
        for layer in trained.modules():
            if hasattr(layer, "scale_layer"):
                layer.scale_layer(strength)
        with applied_loras(plain, [(file, strength)], torch.float32, torch.device("cpu")):
            applied = plain(x)
        assert_close(applied, trained(x), terms=SAMPLING)
        assert not torch.allclose(applied, plain(x), atol=1e-3), "and nothing is left afterwards"

    assert all(torch.equal(before[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.fixture
def tiny_network() -> Any:
    from diffusers.loaders import PeftAdapterMixin

    class Network(nn.Module, PeftAdapterMixin):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4) if kind == "Linear" else nn.Conv2d(6, 4, 1)
            self.outer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(torch.tanh(self.inner(x).flatten(1)))

    def build(kind: str) -> Network:
        torch.manual_seed(0)
        return Network(kind)

    return build
