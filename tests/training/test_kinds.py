"""Adapters of other kinds than LoRA: their mathematics, and the LoRA that each publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5T2VPipeline, SanaVideoPipeline
from lycoris import create_lycoris_from_weights
from peft import LoHaConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from simpletuner.annexes.adapters.converted import MOST_LOST, MULTIPLIER, ConvertedAdapter, low_rank
from simpletuner.config.schema import EmaConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.headers import METADATA, read_header
from simpletuner.models.adapter_kinds import planned_adapters
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.lora_layers import weights_of
from simpletuner.planning.checkpoint_folder import ERRORS
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.rehearsal import rehearse_micro_step
from simpletuner.run.settings import assembly_settings
from simpletuner.techniques.tread import Tread
from simpletuner.training.assemble import assemble, make_accelerator
from simpletuner.training.ema import Ema
from simpletuner.training.lora_hooks import applied_loras
from simpletuner.training.meter import weight_shapes
from simpletuner.training.settings import TrainingSpec
from simpletuner.training.state import Assembly
from simpletuner.training.step import optimizer_step, predict_now
from simpletuner.training.trained import AdapterWeights
from simpletuner.weights.lora_names import LORA_FILE
from tests.tools.assembly import fixed_noise, make_assembly, make_batch, make_publication
from tests.tools.families import make_adapter, make_config, make_video_adapter
from tests.tools.sana_family import make_sana_adapter, make_sana_config
from tests.tools.tiny import make_checkpoint
from tests.tools.tiny_sana import make_sana_checkpoint
from tests.tools.tolerances import ELEMENTWISE, MODEL, ROTATION, assert_close, distance
from tests.training.test_step import Batches

WEIGHT_ERROR, FORWARD_ERROR, EFFECT_ERROR = ERRORS

KINDS: dict[str, dict[str, Any]] = {
    "lokr": {"lora_type": "lokr", "lora_rank": 2, "lora_alpha": 3, "lokr_factor": 4},
    "loha": {"lora_type": "loha", "lora_rank": 2, "lora_alpha": 3},
}
LYCORIS: dict[str, dict[str, Any]] = {
    "lycoris lokr": {"algo": "lokr", "full_matrix": True, "factor": 4},
    "lycoris loha": {"algo": "loha", "linear_dim": 2, "linear_alpha": 1},
    "lycoris dora": {"algo": "locon", "linear_dim": 2, "linear_alpha": 1, "dora_wd": True},
}
ATTENTION = {"target_module": ["Attention"], "module_algo_map": {"Attention": {}}}
LAYER = "visual_transformer_blocks.0.self_attention.to_query"


@pytest.fixture(autouse=True)
def lycoris_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the settings files of LyCORIS, whose multiplier is not 1."""
    for name, settings in LYCORIS.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"multiplier": 0.5, "apply_preset": ATTENTION, **settings}))
        monkeypatch.setitem(KINDS, name, {"lora_type": "lycoris", "lycoris_config": str(path)})


EVERY = [*KINDS, *LYCORIS]


def trained(checkpoint: Path, kind: str, **settings: Any) -> Assembly:
    """An assembly whose adapter looks trained: every factor has moved from its initial value."""
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
    return predict_now(assembly, assembly.noise.add(make_batch(checkpoint, ["a star"]), 0, 0))


@pytest.mark.parametrize("kind", EVERY)
def test_step_0_and_disabled_predict_like_the_base_model(t2i_checkpoint: Path, kind: str) -> None:
    batch = fixed_noise(make_batch(t2i_checkpoint, ["a star"]))
    actual = make_adapter(t2i_checkpoint)
    base = actual.predict(actual.load_transformer(torch.float32).eval(), batch)
    fresh = make_assembly(t2i_checkpoint, **KINDS[kind])
    moved = trained(t2i_checkpoint, kind)

    assert distance({"": actual.predict(fresh.transformer.eval(), batch)}, {"": base}) <= (
        ROTATION if kind == "lycoris dora" else 0  # the decomposition rounds
    )

    moved.transformer.eval()
    assert distance({"": actual.predict(moved.transformer, batch)}, {"": base}) > 5 * ROTATION

    with moved.trained.disabled():
        assert torch.equal(actual.predict(moved.transformer, batch), base)


@pytest.mark.parametrize("kind", ["lokr", "lycoris lokr"])
def test_other_gpus_are_not_used(
    t2i_checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, `fork_rng` saves the state of all visible GPUs, which takes their memory."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "get_rng_state", lambda device: pytest.fail(f"touches GPU {device}")
    )
    make_assembly(t2i_checkpoint, Tread(TreadSpec([Route(0.5, 1, -1)])), **KINDS[kind])
    low_rank(torch.randn(8, 8), 0.9, 2)


def test_updates_equal_hand_computed_ones(t2i_checkpoint: Path) -> None:
    for kind in ("lokr", "loha"):
        assembly = trained(t2i_checkpoint, kind)
        factors = {
            name.split(".")[-2]: p.detach()
            for name, p in assembly.parameters.items()
            if LAYER in name
        }
        scale = 3 / 2
        update = dict(adapter_of(assembly).updates())[LAYER]
        if kind == "lokr":
            second = (
                factors["lokr_w2_a"] @ factors["lokr_w2_b"]
                if "lokr_w2_a" in factors
                else factors["lokr_w2"]
            )
            expected = scale * torch.kron(factors["lokr_w1"], second)
        else:
            first, second = (factors[f"hada_w{n}_a"] @ factors[f"hada_w{n}_b"] for n in (1, 2))
            expected = scale * first * second
        torch.testing.assert_close(update, expected)


@pytest.mark.parametrize(
    ("kind", "steps"), [*((kind, 0) for kind in EVERY), ("lokr", 8), ("lycoris lokr", 8)]
)
def test_every_kind_publishes_a_stock_lora(
    t2i_checkpoint: Path, tmp_path: Path, kind: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What previews show is what the exported file gives in the stock pipeline, up to the error
    that it states.
    """
    assembly = (
        make_assembly(t2i_checkpoint, **KINDS[kind]) if steps else trained(t2i_checkpoint, kind)
    )
    batch = make_batch(t2i_checkpoint, ["a star", "x"])
    averaged = bool(steps)
    for step in range(steps):
        optimizer_step(assembly, Batches(batch), step)
    adapter = adapter_of(assembly)
    own = predict(assembly, t2i_checkpoint)
    adapter.ema = Ema(assembly.parameters, EmaConfig(), torch.device("cpu")) if averaged else None
    publication = make_publication(
        t2i_checkpoint, assembly.adapter, lambda: predict(assembly, t2i_checkpoint)
    )
    message = adapter.publish(tmp_path, publication)
    notes = read_header(tmp_path / LORA_FILE)[METADATA]
    weights = float(notes[WEIGHT_ERROR])
    forward = float(notes[FORWARD_ERROR])
    with adapter.disabled():
        base = predict(assembly, t2i_checkpoint)

    assert f"of a prediction, {notes[EFFECT_ERROR]} of what the adapter changes" in message
    assert ("(for a multiplier of 0.5)" in message) is kind.startswith("lycoris")

    native = read_header(tmp_path / adapter.native_file)[METADATA]
    assert native.get(MULTIPLIER) == ("0.5" if kind.startswith("lycoris") else None)

    effect = float(notes[EFFECT_ERROR])
    assert effect * float((own - base).norm()) == pytest.approx(
        forward * float(own.norm()), rel=0.02
    )
    assert ("lacks" in caplog.text) is (effect > MOST_LOST)
    assert forward <= 1e-2
    assert 0 < weights <= 0.1 + ROTATION, "energy .99 is a tenth of the norm"

    stock = make_adapter(t2i_checkpoint)
    previews: Any = stock.load_preview_pipeline(
        stock.load_transformer(torch.float32), torch.device("cpu"), None
    )
    pipeline = previews.pipeline
    noisy = assembly.noise.add(make_batch(t2i_checkpoint, ["a star"]), 0, 0)
    plain = pipeline.transformer.eval()
    with (
        torch.no_grad(),
        applied_loras(plain, [(tmp_path, 1.0)], torch.float32, torch.device("cpu")),
    ):
        applied = stock.predict(plain, noisy)
    pipeline.load_lora_weights(tmp_path)
    with torch.no_grad():
        loaded = stock.predict(pipeline.transformer.eval(), noisy)

    assert_close(applied, loaded, terms=MODEL)
    assert float((loaded - own).norm() / own.norm()) == pytest.approx(
        forward, rel=0.05, abs=ROTATION
    )

    if averaged:
        weights = load_file(tmp_path / LORA_FILE)
        average = load_file(tmp_path / "ema" / LORA_FILE)
        assert all(torch.equal(weights[name], average[name]) for name in weights), (
            "the average starts as a copy"
        )


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_the_native_file_loads_in_peft(t2i_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    assembly = trained(t2i_checkpoint, kind)
    adapter = adapter_of(assembly)
    adapter.native({}).write_into(tmp_path)
    stock: Any = make_adapter(t2i_checkpoint).load_transformer(torch.float32)
    weights = load_file(tmp_path / adapter.native_file)
    if kind == "lokr":
        stock.load_lora_adapter(tmp_path, weight_name=adapter.native_file, adapter_name="default")
    else:
        stock.add_adapter(
            LoHaConfig(r=2, alpha=3, target_modules=["to_query", "to_key", "to_value"])
        )
        set_peft_model_state_dict(
            stock, {name.removeprefix("transformer."): w for name, w in weights.items()}
        )
    batch = assembly.noise.add(make_batch(t2i_checkpoint, ["a star"]), 0, 0)
    with torch.no_grad():
        loaded = assembly.adapter.predict(stock.eval(), batch)

    assert distance({"": loaded}, {"": predict(assembly, t2i_checkpoint)}) < ROTATION


@pytest.mark.parametrize("kind", ["lycoris lokr", "lycoris dora"])
def test_the_native_file_loads_in_lycoris(t2i_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    assembly = trained(t2i_checkpoint, kind)
    adapter_of(assembly).native({}).write_into(tmp_path)
    stock: Any = make_adapter(t2i_checkpoint).load_transformer(torch.float32).eval()
    noisy = assembly.noise.add(make_batch(t2i_checkpoint, ["a star"]), 0, 0)
    with torch.no_grad():
        network, _ = create_lycoris_from_weights(
            0.5, str(tmp_path / "lycoris_weights.safetensors"), stock
        )
        network.eval().apply_to()
        loaded = assembly.adapter.predict(stock, noisy)

    assert distance({"": loaded}, {"": predict(assembly, t2i_checkpoint)}) < ROTATION


@pytest.mark.parametrize("kind", EVERY)
def test_every_kind_resumes_bit_exactly(t2i_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    one = trained(t2i_checkpoint, kind)
    average = make_assembly(t2i_checkpoint, **KINDS[kind])
    (tmp_path / "training_state").mkdir()
    assert isinstance(one.trained, AdapterWeights)
    one.trained.exact_draft().write_into(tmp_path)
    average.trained.load(tmp_path)

    assert all(
        torch.equal(parameter, average.parameters[name])
        for name, parameter in one.parameters.items()
    )


@pytest.mark.parametrize("kind", EVERY)
def test_the_plan_counts_the_trained_numbers(t2i_checkpoint: Path, kind: str) -> None:
    assembly = make_assembly(t2i_checkpoint, **KINDS[kind])
    shapes = weights_of(weight_shapes(assembly.transformer))
    config = make_config(t2i_checkpoint, **KINDS[kind]).lora
    planned = planned_adapters(
        config, assembly.adapter.spec, ["to_query", "to_key", "to_value"], shapes
    )

    assert sum(planned.products.values()) == sum(
        parameter.numel() for parameter in assembly.parameters.values()
    )
    assert planned.products == assembly.trained.adapters.products


@pytest.mark.parametrize("kind", ["lokr", "lycoris dora"])
@pytest.mark.parametrize(
    "settings", [{"enable_group_offload": True}, {"gradient_checkpointing": False}]
)
def test_offload_and_checkpointing_change_nothing(
    t2i_checkpoint: Path, kind: str, settings: dict[str, Any]
) -> None:
    batch = make_batch(t2i_checkpoint, ["a star"])
    gradients = []
    for changes in ({}, settings):
        assembly = trained(t2i_checkpoint, kind, **changes)
        rehearse_micro_step(assembly, batch)
        gradients.append({name: parameter.grad for name, parameter in assembly.parameters.items()})
        assert all(gradient is not None and gradient.any() for gradient in gradients[-1].values())

    assert all(torch.equal(one, gradients[1][name]) for name, one in gradients[0].items())


@pytest.mark.warns
@pytest.mark.parametrize("kind", ["lokr", "lycoris lokr"])
def test_a_quantised_base_is_published_as_a_lora(
    t2i_checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    assembly = trained(t2i_checkpoint, kind, base_model_precision="int8-quanto")
    publication = make_publication(
        t2i_checkpoint, assembly.adapter, lambda: predict(assembly, t2i_checkpoint)
    )
    adapter_of(assembly).publish(tmp_path, publication)

    assert 0 < float(read_header(tmp_path / LORA_FILE)[METADATA][FORWARD_ERROR]) <= 1e-2


@pytest.mark.usefixtures("traced_only", "one_size")
def test_compiled_blocks_give_the_same_gradients(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, ["a star"])
    gradients = []
    for changes in ({}, {"dynamo_backend": "aot_eager", "dynamo_fullgraph": True}):
        assembly = trained(t2i_checkpoint, "lycoris lokr", **changes)
        rehearse_micro_step(assembly, batch)
        gradients.append({name: parameter.grad for name, parameter in assembly.parameters.items()})

    assert distance(gradients[1], gradients[0]) < ROTATION


def sana(folder: Path, settings: dict[str, Any]) -> tuple[Assembly, Any]:
    checkpoint = make_sana_checkpoint(folder)
    config = make_sana_config(checkpoint, **settings)
    adapter = make_sana_adapter(checkpoint, **settings)
    return assembled(config, adapter, "to_q"), SanaVideoPipeline.from_pretrained(checkpoint)


def kandinsky_video(folder: Path, settings: dict[str, Any]) -> tuple[Assembly, Any]:
    checkpoint = make_checkpoint(folder, "t2v")
    config = make_config(checkpoint, **settings)
    adapter = make_video_adapter(checkpoint, "t2v", **settings)
    pipeline = Kandinsky5T2VPipeline.from_pretrained(
        checkpoint, tokenizer=load_processor(checkpoint)
    )
    return assembled(config, adapter, "to_query"), pipeline


def assembled(config: Any, adapter: Any, target: str) -> Assembly:
    intent = TrainingSpec(lora_targets=[target], seed=3, total_steps=10, learning_rate=1e-2)
    return assemble(assembly_settings(config, intent), adapter, [], make_accelerator())


@pytest.mark.parametrize("make", [sana, kandinsky_video])
@pytest.mark.parametrize("kind", ["lokr", "lycoris"])
def test_video_families_load_every_kind(tmp_path: Path, make: Any, kind: str) -> None:
    """With LyCORIS also their feed-forward layers, which are pointwise convolutions in Sana
    Video.
    """
    path = tmp_path / "all.json"
    preset = {"target_module": ["Attention", "FeedForward"]}
    path.write_text(
        json.dumps({"algo": "loha", "multiplier": 1, "linear_dim": 2, "apply_preset": preset})
    )
    kinds = {
        "lokr": KINDS["lokr"],
        "lycoris": {"lora_type": "lycoris", "lycoris_config": str(path)},
    }
    assembly, pipeline = make(tmp_path / "checkpoint", {"mixed_precision": "no", **kinds[kind]})
    adapter = adapter_of(assembly)
    with torch.no_grad():
        for parameter in assembly.parameters.values():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    publication = make_publication(tmp_path / "checkpoint", assembly.adapter, lambda: torch.ones(1))
    adapter.publish(tmp_path, publication)
    pipeline.load_lora_weights(tmp_path)
    missing = 0.0
    whole = 0.0
    with torch.no_grad():
        for name, update in adapter.updates():
            loaded = pipeline.transformer.get_submodule(name).get_delta_weight("default_0")
            missing = missing + float((loaded - update).square().sum())
            whole = whole + float(update.square().sum())

    assert whole > 0
    assert missing <= (1 - 0.99) * whole * 1.01


def test_lora_plus_trains_b_at_a_multiple_of_the_rate(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, ["a star"])
    moves = {}
    for ratio in (None, 1.0, 16.0):
        settings = {} if ratio is None else {"lora_plus_ratio": ratio}
        assembly = make_assembly(t2i_checkpoint, optimizer="torch-sgd", **settings)
        before = {
            name: parameter.detach().clone() for name, parameter in assembly.parameters.items()
        }
        optimizer_step(assembly, Batches(batch), 0)
        moves[ratio] = {
            name: parameter.detach() - before[name]
            for name, parameter in assembly.parameters.items()
        }

    for name, plain in moves[None].items():
        assert torch.equal(moves[1.0][name], plain)
        assert_close(moves[16.0][name], plain * (16 if "lora_B" in name else 1), terms=ELEMENTWISE)


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
