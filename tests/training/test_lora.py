"""LoRA files: written, read and refused forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from simpletuner.config.lora import LoraConfig
from simpletuner.errors import UserError
from simpletuner.headers import METADATA, read_header
from simpletuner.models.lora_checks import check_init_lora
from simpletuner.training.lora import LoraAdapter, rounding_error, start_from
from simpletuner.training.lora_files import read_lora_file, verify_file
from simpletuner.weights.lora_names import METADATA_KEY
from tests.tools.assembly import fixed_noise, lora_of, make_assembly, make_batch, write_lora
from tests.tools.families import make_adapter
from tests.tools.reports import found_by
from tests.tools.tolerances import ELEMENTWISE, ROTATION, assert_close, distance


def trained(checkpoint: Path, **settings: object) -> LoraAdapter:
    """An adapter whose B is not zero."""
    assembly = make_assembly(checkpoint, **settings)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(assembly.parameters.items()):
            if "lora_B" in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                )
    return lora_of(assembly)


def test_the_frozen_base_is_bf16_and_the_lora_float32(t2i_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(t2i_checkpoint, tmp_path / "model"))
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = {
        name: weight.bfloat16().float() if "modulation" in name else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    settings = {"mixed_precision": "bf16", "optimizer": "adamw"}
    assembly = make_assembly(folder, **settings)

    assert {parameter.dtype for parameter in assembly.parameters.values()} == {torch.float32}

    base = {
        name: parameter.dtype
        for name, parameter in assembly.transformer.named_parameters()
        if not parameter.requires_grad
    }
    linear = [
        name for name in base if "feed_forward" in name or "modulation.out_layer.weight" in name
    ]

    assert linear
    assert {base[name] for name in linear} == {torch.bfloat16}


def test_files_have_the_published_form(t2i_checkpoint: Path, tmp_path: Path) -> None:
    adapter = trained(t2i_checkpoint, lora_rank=4, lora_alpha=6)
    path = write_lora(adapter, tmp_path, **{"modelspec.title": "name"})
    weights = load_file(path)

    assert all(name.startswith("transformer.") and ".lora_" in name for name in weights)

    header = read_header(path)[METADATA]
    settings = json.loads(header[METADATA_KEY])

    assert settings["transformer.lora_alpha"] == settings["transformer.r"] == 4
    assert header["modelspec.title"] == "name"

    raw = adapter.state_dict()
    for name, tensor in raw.items():
        factor = 1.5 if ".lora_B." in name else 1.0
        assert torch.equal(weights[f"transformer.{name}"], tensor * factor)


@pytest.mark.parametrize("settings", [{"lora_rank": 4, "lora_alpha": 6}, {"lora_rank": 16}])
def test_stock_transformer_with_the_file_equals_the_trained_one(
    t2i_checkpoint: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    adapter = trained(t2i_checkpoint, **settings)
    write_lora(adapter, tmp_path)
    batch = fixed_noise(make_batch(t2i_checkpoint, ["a star"]))
    actual = make_adapter(t2i_checkpoint)
    stock = make_adapter(t2i_checkpoint)
    actual.load_transformer(torch.float32)
    pristine = stock.load_transformer(torch.float32)
    base = stock.predict(pristine, batch)
    previews: Any = stock.load_preview_pipeline(pristine, torch.device("cpu"), None)
    pipeline = previews.pipeline
    pipeline.load_lora_weights(tmp_path)
    adapter.transformer.eval()
    pristine.eval()
    expected = stock.predict(adapter.transformer, batch)
    loaded = stock.predict(pristine, batch)

    assert (expected - base).abs().max() > 1e-2, "the LoRA changes something"
    assert distance({"": loaded}, {"": expected}) < ROTATION


def test_verification_detects_a_wrong_file(t2i_checkpoint: Path, tmp_path: Path) -> None:
    adapter = trained(t2i_checkpoint)
    path = write_lora(adapter, tmp_path)
    verify_file(
        path,
        adapter.file_weights(),
        adapter.form,
        make_adapter(t2i_checkpoint).load_bare_pipeline(),
    )
    weights = load_file(path)
    name = next(iter(weights))
    changed = {**weights, name: weights[name] + 1}
    save_file(changed, path, metadata=read_header(path)[METADATA])

    with pytest.raises(RuntimeError, match="does not load as it was saved"):
        verify_file(
            path,
            adapter.file_weights(),
            adapter.form,
            make_adapter(t2i_checkpoint).load_bare_pipeline(),
        )


@pytest.mark.parametrize(
    "form", ["transformer.", "base_model.model.", "diffusion_model.", "lora_unet_"]
)
def test_files_of_other_programs_are_read(t2i_checkpoint: Path, tmp_path: Path, form: str) -> None:
    adapter = trained(t2i_checkpoint, lora_rank=4)
    weights = {}
    for name, tensor in adapter.state_dict().items():
        if form == "lora_unet_":
            module, _, kind = name.partition(".lora_")
            stem = form + module.replace(".", "_")
            weights[f"{stem}.lora_{'down' if kind[0] == 'A' else 'up'}.weight"] = tensor
            weights[f"{stem}.alpha"] = torch.tensor(2.0)
        else:
            weights[form + name] = tensor
    path = tmp_path / "other.safetensors"
    save_file(weights, path)
    fresh = lora_of(make_assembly(t2i_checkpoint, lora_rank=4))
    start_from(fresh, path)
    strength = 0.5 if form == "lora_unet_" else 1.0  # alpha 2 of rank 4
    for name, tensor in adapter.state_dict().items():
        expected = tensor * strength if ".lora_B." in name else tensor
        assert_close(fresh.state_dict()[name], expected, terms=ELEMENTWISE)


def test_a_file_of_another_model_is_refused(t2i_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"unet.down.lora_A.weight": torch.zeros(4, 4)}, path)

    with pytest.raises(UserError, match="no key of"):
        read_lora_file(path, ["visual_transformer_blocks.0.self_attention.to_query"])
    with pytest.raises(UserError, match="does not exist"):
        read_lora_file(tmp_path / "nowhere", [])


def test_untrained_lora_changes_nothing(t2i_checkpoint: Path) -> None:
    batch = fixed_noise(make_batch(t2i_checkpoint, ["a star", "b"]))
    plain = make_adapter(t2i_checkpoint)
    base = plain.predict(plain.load_transformer(torch.float32), batch)
    for init in ("default", "gaussian"):
        assembly = make_assembly(t2i_checkpoint, lora_init_type=init)
        assert torch.equal(assembly.adapter.predict(assembly.transformer, batch), base)


def test_dora_file_loads_or_is_refused(t2i_checkpoint: Path, tmp_path: Path) -> None:
    adapter = trained(t2i_checkpoint, use_dora=True, lora_rank=4)
    path = write_lora(adapter, tmp_path)

    assert any("magnitude" in name for name in load_file(path))

    verify_file(
        path,
        adapter.file_weights(),
        adapter.form,
        make_adapter(t2i_checkpoint).load_bare_pipeline(),
    )


@pytest.mark.parametrize("use_dora", [False, True])
def test_comfyui_computes_the_weight_that_was_trained(
    t2i_checkpoint: Path, tmp_path: Path, use_dora: bool
) -> None:
    adapter = trained(
        t2i_checkpoint, lora_rank=4, lora_alpha=6, lora_format="comfyui", use_dora=use_dora
    )
    path = write_lora(adapter, tmp_path)
    verify_file(
        path,
        adapter.file_weights(),
        adapter.form,
        make_adapter(t2i_checkpoint).load_bare_pipeline(),
    )
    stock: dict[str, torch.Tensor] = (
        make_adapter(t2i_checkpoint).load_transformer(torch.float32).state_dict()
    )
    weights = load_file(path)
    modules = {key.partition(".lora_")[0] for key in weights if ".lora_" in key}

    assert modules

    for key in modules:
        module = key.removeprefix("diffusion_model.")
        layer = adapter.transformer.get_submodule(module)
        layer.merge()
        base = stock[f"{module}.weight"]
        merged = base + weights[f"{key}.lora_B.weight"] @ weights[f"{key}.lora_A.weight"]
        if use_dora:
            scale = weights[f"{key}.dora_scale"]
            assert scale.shape == (len(base), 1), "rows, by ComfyUI's rule"
            merged = merged * scale / base.norm(dim=1, keepdim=True)
        assert_close(merged, layer.get_base_layer().weight, terms=32)
        assert (merged - base).abs().max() > 1e-2, "the LoRA changes something"
    settings = json.loads(read_header(path)[METADATA][METADATA_KEY])

    assert settings["diffusion_model.lora_alpha"] == settings["diffusion_model.r"] == 4


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_init_lora_reads_what_was_written(
    t2i_checkpoint: Path, tmp_path: Path, form: str, use_dora: bool
) -> None:
    first = trained(t2i_checkpoint, lora_rank=4, lora_alpha=6, lora_format=form, use_dora=use_dora)
    with torch.no_grad():
        for name, parameter in first.transformer.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
    path = write_lora(first, tmp_path)
    second = lora_of(make_assembly(t2i_checkpoint, lora_rank=4, lora_alpha=2, use_dora=use_dora))
    start_from(second, path)
    strength = first.scale / second.scale
    for name, tensor in first.state_dict().items():
        expected = tensor * strength if ".lora_B." in name else tensor
        assert_close(second.state_dict()[name], expected, terms=ELEMENTWISE)


def test_a_dora_does_not_start_a_lora(t2i_checkpoint: Path, tmp_path: Path) -> None:
    """The plan sees it in the header, whichever program wrote the file."""
    for form in ("diffusers", "comfyui"):
        path = write_lora(
            trained(t2i_checkpoint, lora_rank=4, use_dora=True, lora_format=form), tmp_path / form
        )
        for use_dora in (False, True):
            config = LoraConfig(init_lora=str(path), lora_rank=4, use_dora=use_dora)
            problems = found_by(check_init_lora, config, {}, [], "kandinsky5-image")
            if use_dora:
                assert not problems
            else:
                (problem,) = problems
                assert "set use_dora" in str(problem)


def test_verification_detects_a_name_unknown_to_comfyui(
    t2i_checkpoint: Path, tmp_path: Path
) -> None:
    adapter = trained(t2i_checkpoint, lora_format="comfyui")
    path = write_lora(adapter, tmp_path)
    weights = load_file(path)
    name = next(iter(weights))
    weights[name.replace("blocks.0", "blocks.9")] = weights.pop(name)
    save_file(weights, path)

    with pytest.raises(RuntimeError, match="does not load as it was saved"):
        verify_file(
            path,
            adapter.file_weights(),
            adapter.form,
            make_adapter(t2i_checkpoint).load_bare_pipeline(),
        )


def test_a_bf16_lora_is_folded_without_rounding(t2i_checkpoint: Path, tmp_path: Path) -> None:
    """1.5 times a bf16 number may need more bits; the rounding of a bf16 pipeline is measured."""
    adapter = trained(
        t2i_checkpoint, lora_rank=4, lora_alpha=6, mixed_precision="bf16", optimizer="optimi-adamw"
    )
    raw = adapter.state_dict()
    saved = load_file(write_lora(adapter, tmp_path))
    for name, tensor in raw.items():
        assert tensor.dtype == torch.bfloat16
        factor = 1.5 if ".lora_B." in name else 1.0
        assert torch.equal(saved[f"transformer.{name}"].double(), factor * tensor.double())

    assert rounding_error(adapter, torch.float32) < 1e-6
    assert 1e-4 < rounding_error(adapter, torch.bfloat16) < 5e-3

    exact = trained(
        t2i_checkpoint, lora_rank=4, lora_alpha=8, mixed_precision="bf16", optimizer="optimi-adamw"
    )
    assert rounding_error(exact, torch.bfloat16) == 0.0
    assert {weight.dtype for weight in exact.file_weights().values()} == {torch.bfloat16}


def test_disabled_predicts_like_the_base_for_every_init(t2i_checkpoint: Path) -> None:
    batch = fixed_noise(make_batch(t2i_checkpoint, ["a star"]))
    plain = make_adapter(t2i_checkpoint)
    base = plain.predict(plain.load_transformer(torch.float32), batch)
    for init in ("default", "pissa"):
        assembly = make_assembly(t2i_checkpoint, lora_init_type=init)
        with torch.no_grad():
            for parameter in assembly.parameters.values():
                parameter.add_(0.05)
            moved = assembly.adapter.predict(assembly.transformer, batch)
            with assembly.trained.disabled():
                back = assembly.adapter.predict(assembly.transformer, batch)
            torch.testing.assert_close(back, base, rtol=0, atol=1e-3)
            assert torch.equal(assembly.adapter.predict(assembly.transformer, batch), moved)
        assert (moved - base).abs().max() > 0.02


def test_the_alpha_of_an_official_lora_is_read_from_the_file_beside_it(tmp_path: Path) -> None:
    module = "visual_transformer_blocks.0.feed_forward.in_layer"
    down = torch.randn(4, 8)
    up = torch.randn(16, 4)
    names = (f"base_model.model.{module}.lora_{part}.default.weight" for part in "AB")
    save_file(dict(zip(names, (down, up), strict=True)), tmp_path / "lora.safetensors")
    (tmp_path / "config_lora.json").write_text(json.dumps({"r": 4, "lora_alpha": 2}))
    for path in (tmp_path, tmp_path / "lora.safetensors"):
        weights = read_lora_file(path, [module])
        assert torch.equal(weights[f"{module}.lora_A.weight"], down)
        assert torch.equal(weights[f"{module}.lora_B.weight"], up / 2)
