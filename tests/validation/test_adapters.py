"""Previews with further LoRAs: what they add, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from simpletuner.config.lora import LoraConfig
from simpletuner.training.lora import add_lora
from simpletuner.training.lora_files import applied_loras
from tests.closeness import SAMPLING, assert_close
from tests.training.assembly import write_lora
from tests.workspace import Workspace

Capture = pytest.CaptureFixture[str]
LORA = "output/pytorch_lora_weights.safetensors"


@pytest.mark.parametrize(("kind", "form"), [("Linear", "diffusers"), ("Linear", "comfyui"), ("Conv2d", "diffusers")])
@pytest.mark.parametrize(("dora", "strength"), [(False, 1.0), (False, 0.5), (True, 1.0)])
def test_a_file_at_a_strength_does_what_peft_does(
    tmp_path: Path, tiny_network: Any, dora: bool, strength: float, kind: str, form: str
) -> None:
    plain, trained = tiny_network(kind), tiny_network(kind)
    settings: dict[str, Any] = {"lora_rank": 2, "use_dora": dora, "lora_format": form, "lora_init_type": "gaussian"}
    adapter: Any = add_lora(trained, LoraConfig(**settings), ["inner"], seed=1, dtype=torch.float32)
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    file = write_lora(adapter, tmp_path)
    x = torch.linspace(-1, 1, 12).view(2, 6, *[1] * (plain.inner.weight.dim() - 2))
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


@pytest.mark.slow(3)
def test_previews_with_further_loras_change_nothing_else(workspace: Workspace) -> None:
    other = {"lora_rank": 2, "learning_rate": 0.05, "peft_lora_target_modules": ["to_query", "feed_forward.in_layer"]}
    workspace.write_config(**other, output_dir="other", max_train_steps=2)
    assert workspace.train() == 0
    workspace.write_config(lora_rank=4, learning_rate=1e-3, peft_lora_target_modules=None, max_train_steps=4)
    previews = {"validation_disable": False, "disable_benchmark": True, "validation_disable_unconditional": True}
    workspace.write_config(**previews, output_dir="output")
    assert workspace.train("output_dir=plain") == 0
    library = {"strong": {"prompt": "a red square", "adapter_strength": 2.0}}
    workspace.path("config/library.json").write_text(json.dumps(library))
    runs = ["other", {"label": "both!", "adapters": [{"path": "other"}, {"path": "other", "strength": 0.5}]}]
    extra = {"validation_adapter_path": "other", "validation_adapter_name": "mine", "validation_adapter_config": runs}
    workspace.write_config(**extra, user_prompt_library="config/library.json", validation_adapter_strength=2.0)
    assert workspace.train() == 0
    expected, found = (load_file(workspace.path(f"{name}/{Path(LORA).name}")) for name in ("plain", "output"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    pictures = {path.name: path.read_bytes() for path in workspace.path("output/validation_images").iterdir()}
    names = ("validation", "validation_mine", "validation_other", "validation_both")
    shown = [pictures[f"step_4_{name}_0_128x128.png"] for name in names]
    assert len(set(shown)) == 4
    plain = workspace.path("plain/validation_images/step_4_validation_0_128x128.png").read_bytes()
    assert shown[0] == plain, "the LoRAs are gone afterwards"
    assert pictures["step_4_strong_mine_0_128x128.png"] == shown[1]
    assert pictures["step_4_strong_other_0_128x128.png"] == shown[1], "at the strength of the prompt"


def test_mistakes_are_told_before_anything_is_loaded(workspace: Workspace, capsys: Capture) -> None:
    name = "visual_transformer_blocks.0.self_attention.to_query"
    pair = {f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(32, 2)}
    save_file({**pair, f"{name}.lora_magnitude_vector": torch.ones(32)}, workspace.path("dora.safetensors"))
    workspace.write_config(
        validation_adapter_path="dora.safetensors", validation_adapter_config=["absent", {"label": "empty"}]
    )
    assert workspace.train("--dry-run", "validation_torch_compile=true") == 2
    error = capsys.readouterr().err
    for message in (
        "is a DoRA",
        "'absent' does not exist",
        "[1]: names no LoRA",
        "validation_torch_compile: cannot be combined",
    ):
        assert message in error
