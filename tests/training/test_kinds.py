"""Adapters of other kinds than LoRA: what they compute, and the LoRA that is published for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from simpletuner.config.schema import EmaConfig
from simpletuner.headers import METADATA, read_header
from simpletuner.training.converted import ConvertedAdapter, low_rank
from simpletuner.training.ema import Ema
from simpletuner.training.manifest import FORWARD_ERROR, LORA_FILE, WEIGHT_ERROR
from simpletuner.training.state import Assembly
from simpletuner.training.step import add_noise, predict_now
from tests.closeness import ROTATION, distance
from tests.fidelity.family import make_adapter
from tests.run.test_publish import make_release
from tests.training.assembly import fixed_noise, make_assembly, make_batch

KINDS: dict[str, dict[str, Any]] = {
    "lokr": {"lora_type": "lokr", "lora_rank": 2, "lora_alpha": 3, "lokr_factor": 4},
    "loha": {"lora_type": "loha", "lora_rank": 2, "lora_alpha": 3},
}
LYCORIS: dict[str, dict[str, Any]] = {
    "lycoris lokr": {"algo": "lokr", "linear_dim": 2, "linear_alpha": 3, "factor": 4},
    "lycoris lokr full": {"algo": "lokr", "full_matrix": True, "factor": 4},
    "lycoris loha": {"algo": "loha", "linear_dim": 2, "linear_alpha": 1},
    "lycoris locon": {"algo": "locon", "linear_dim": 2, "linear_alpha": 1},
    "lycoris dora": {"algo": "lokr", "linear_dim": 2, "linear_alpha": 1, "factor": 4, "dora_wd": True},
}
ATTENTION = {"target_module": ["Attention"], "module_algo_map": {"Attention": {}}}
LAYER = "visual_transformer_blocks.0.self_attention.to_query"


@pytest.fixture(autouse=True)
def lycoris_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings files of LyCORIS, whose multiplier is not 1."""
    for name, settings in LYCORIS.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"multiplier": 0.5, "apply_preset": ATTENTION, **settings}))
        monkeypatch.setitem(KINDS, name, {"lora_type": "lycoris", "lycoris_config": str(path)})


EVERY = [*KINDS, *LYCORIS]


def trained(checkpoint: Path, kind: str, **settings: Any) -> Assembly:
    """An assembly whose adapter is as after some training: every factor moved away from its initial value."""
    assembly = make_assembly(checkpoint, **{**KINDS[kind], **settings})
    with torch.no_grad():
        for index, parameter in enumerate(assembly.parameters.values()):
            generator = torch.Generator().manual_seed(index)
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return assembly


def adapter_of(assembly: Assembly) -> ConvertedAdapter:
    assert isinstance(assembly.trained, ConvertedAdapter)
    return assembly.trained


def predict(assembly: Assembly, checkpoint: Path) -> Tensor:
    assembly.transformer.eval()
    return predict_now(assembly, add_noise(assembly, make_batch(checkpoint, ["a star"]), 0, 0))


@pytest.mark.parametrize("kind", EVERY)
def test_step_0_and_disabled_are_the_base_model(t2i_checkpoint: Path, kind: str) -> None:
    batch = fixed_noise(make_batch(t2i_checkpoint, ["a star"]))
    ours = make_adapter(t2i_checkpoint)
    base = ours.predict(ours.load_transformer(torch.float32).eval(), batch)
    fresh, moved = make_assembly(t2i_checkpoint, **KINDS[kind]), trained(t2i_checkpoint, kind)
    assert distance({"": ours.predict(fresh.transformer.eval(), batch)}, {"": base}) <= (
        ROTATION if kind == "lycoris dora" else 0  # the decomposition rounds
    )
    moved.transformer.eval()
    assert distance({"": ours.predict(moved.transformer, batch)}, {"": base}) > 10 * ROTATION
    with moved.trained.disabled():
        assert torch.equal(ours.predict(moved.transformer, batch), base)


def test_updates_are_those_computed_by_hand(t2i_checkpoint: Path) -> None:
    for kind in ("lokr", "loha"):
        assembly = trained(t2i_checkpoint, kind)
        factors = {name.split(".")[-2]: p.detach() for name, p in assembly.parameters.items() if LAYER in name}
        scale, update = 3 / 2, dict(adapter_of(assembly).updates())[LAYER]
        if kind == "lokr":
            second = factors["lokr_w2_a"] @ factors["lokr_w2_b"] if "lokr_w2_a" in factors else factors["lokr_w2"]
            expected = scale * torch.kron(factors["lokr_w1"], second)
        else:
            first, second = (factors[f"hada_w{n}_a"] @ factors[f"hada_w{n}_b"] for n in (1, 2))
            expected = scale * first * second
        torch.testing.assert_close(update, expected)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("averaged", [False, True])
def test_published_as_a_stock_lora(t2i_checkpoint: Path, tmp_path: Path, kind: str, averaged: bool) -> None:
    """What previews show is what the exported file gives in the stock pipeline, up to the error that it states."""
    assembly = trained(t2i_checkpoint, kind)
    adapter, own = adapter_of(assembly), predict(assembly, t2i_checkpoint)
    ema = Ema(assembly.parameters, EmaConfig(), torch.device("cpu")) if averaged else None
    release = make_release(t2i_checkpoint, assembly.adapter, lambda: predict(assembly, t2i_checkpoint))
    message = adapter.publish(tmp_path, release, ema)
    notes = read_header(tmp_path / LORA_FILE)[METADATA]
    weights, forward = float(notes[WEIGHT_ERROR]), float(notes[FORWARD_ERROR])
    assert f"{forward:.1e} of a prediction" in message
    assert forward <= 1e-2
    assert 0 < weights <= 0.1 + ROTATION, "energy .99 is a tenth of the norm"
    stock = make_adapter(t2i_checkpoint)
    pipeline = stock.load_preview_pipeline(stock.load_transformer(torch.float32), torch.device("cpu"), None).pipeline
    pipeline.load_lora_weights(tmp_path)
    batch = add_noise(assembly, make_batch(t2i_checkpoint, ["a star"]), 0, 0)
    with torch.no_grad():
        loaded = stock.predict(pipeline.transformer.eval(), batch)
    assert float((loaded - own).norm() / own.norm()) == pytest.approx(forward, rel=0.05, abs=ROTATION)
    if averaged:
        one, other = (load_file(folder / LORA_FILE) for folder in (tmp_path, tmp_path / "ema"))
        assert all(torch.equal(one[name], other[name]) for name in one), "the average starts as a copy"


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_the_native_file_loads_in_peft(t2i_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    assembly = trained(t2i_checkpoint, kind)
    adapter = adapter_of(assembly)
    adapter.save(tmp_path, ema=None, note={})
    stock: Any = make_adapter(t2i_checkpoint).load_transformer(torch.float32)
    weights = load_file(tmp_path / adapter.native_file)
    if kind == "lokr":
        stock.load_lora_adapter(tmp_path, weight_name=adapter.native_file, adapter_name="default")
    else:
        stock.add_adapter(LoHaConfig(r=2, alpha=3, target_modules=["to_query", "to_key", "to_value"]))
        set_peft_model_state_dict(stock, {name.removeprefix("transformer."): w for name, w in weights.items()})
    batch = add_noise(assembly, make_batch(t2i_checkpoint, ["a star"]), 0, 0)
    with torch.no_grad():
        loaded = assembly.adapter.predict(stock.eval(), batch)
    assert distance({"": loaded}, {"": predict(assembly, t2i_checkpoint)}) < ROTATION


@pytest.mark.parametrize("kind", EVERY)
def test_resume_is_exact(t2i_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    one, other = trained(t2i_checkpoint, kind), make_assembly(t2i_checkpoint, **KINDS[kind])
    (tmp_path / "training_state").mkdir()
    one.trained.save_exact(tmp_path)
    other.trained.load(tmp_path)
    assert all(torch.equal(each, other.parameters[name]) for name, each in one.parameters.items())


def test_rank_and_energy_limit_the_lora() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(24, 24, generator=generator))[0] for _ in range(2))
    sizes = torch.cat([torch.tensor([10.0, 3.0, 1.0]), torch.full((21,), 1e-3)])
    update = left @ torch.diag(sizes) @ right.T
    for energy, most, rank in ((0.9, 64, 1), (0.99, 64, 2), (0.9999, 64, 3), (0.9999, 2, 2)):
        down, up = low_rank(update, energy, most)
        assert down.shape == (rank, 24)
        assert up.shape == (24, rank)
        expected = sizes[rank:].norm()  # Eckart-Young
        assert float((up @ down - update).norm()) == pytest.approx(float(expected), rel=1e-3)
