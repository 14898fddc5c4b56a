"""`simpletuner convert`: another program computes with the converted file what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletuner.annexes.adapters.convert import convert, why_not
from simpletuner.annexes.adapters.converted import ProductAdapter
from simpletuner.annexes.adapters.rewrite import decoded
from simpletuner.cli.app import main
from simpletuner.errors import UserError
from simpletuner.headers import METADATA, read_header
from simpletuner.planning.checkpoint_folder import (
    NOTE_FILE,
    Identity,
    Manifest,
    describe_files,
    write_manifest,
)
from simpletuner.training.lora_files import read_lora_file, verify_file
from simpletuner.weights.lora_names import LORA_FILE, METADATA_KEY, STEP_NOTE, LoraForm
from simpletuner.weights.published_lora import COMPANIONS
from tests.tools.assembly import lora_of, make_assembly, write_lora
from tests.tools.families import make_adapter
from tests.tools.refusals import complaints
from tests.tools.tolerances import ELEMENTWISE, assert_close
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
LAYER = "visual_transformer_blocks.0.self_attention.to_query"
NOTE = {
    STEP_NOTE: "3",
    "modelspec.architecture": "kandinsky5-image/t2i-lite-sft/lora",
    "trigger": "zkt, ",
}
PRODUCTS: dict[str, dict[str, Any]] = {
    "lokr of products": {"lora_type": "lokr", "lora_rank": 2, "lora_alpha": 3, "lokr_factor": 4},
    "lokr in full": {"lora_type": "lokr", "lora_rank": 1000, "lora_alpha": 300, "lokr_factor": 4},
    "loha": {"lora_type": "loha", "lora_rank": 2, "lora_alpha": 3},
}


def shifted(checkpoint: Path, **settings: Any) -> Any:
    """An assembly whose adapter is as after some training."""
    assembly = make_assembly(checkpoint, **settings)
    with torch.no_grad():
        for index, parameter in enumerate(assembly.parameters.values()):
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(index)
            )
    return assembly


def comfyui_update(weights: dict[str, Tensor], layer: str) -> Tensor:
    """What ComfyUI adds to the weight of a layer, for a file without alphas."""
    parts = {
        name.removeprefix(f"diffusion_model.{layer}."): tensor for name, tensor in weights.items()
    }

    def product(name: str) -> Tensor:
        return parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"]

    if "lora_A.weight" in parts:
        return parts["lora_B.weight"] @ parts["lora_A.weight"]
    if "hada_w1_a" in parts:
        return product("hada_w1") * product("hada_w2")
    return torch.kron(product("lokr_w1"), product("lokr_w2"))


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.7])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_comfyui_computes_the_trained_update_of_a_lokr_or_loha(
    t2i_checkpoint: Path, tmp_path: Path, kind: str, strength: float
) -> None:
    assembly = shifted(t2i_checkpoint, **PRODUCTS[kind])
    trained = assembly.trained
    assert isinstance(trained, ProductAdapter)
    trained.native(NOTE).write_into(tmp_path)

    result = convert(
        tmp_path / trained.native_file, "comfyui", tmp_path / "for.safetensors", strength
    )

    weights = load_file(result.path)
    assert not [name for name in weights if name.endswith("alpha")]
    for layer, update in trained.updates():
        assert_close(comfyui_update(weights, layer), strength * update, terms=32)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_native_file_of_a_comfyui_run_loads_in_comfyui(
    t2i_checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    trained = shifted(t2i_checkpoint, **PRODUCTS[kind], lora_format="comfyui").trained

    trained.native(NOTE).write_into(tmp_path)

    weights = load_file(tmp_path / trained.native_file)
    for layer, update in trained.updates():
        assert_close(comfyui_update(weights, layer), update, terms=32)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_lokr_and_loha_survive_the_round_trip_to_comfyui(
    t2i_checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    trained = shifted(t2i_checkpoint, **PRODUCTS[kind]).trained
    trained.native(NOTE).write_into(tmp_path)
    comfyui_file = convert(tmp_path / trained.native_file, "comfyui").path

    restored = convert(comfyui_file, "diffusers").path

    settings = json.loads(read_header(restored)[METADATA][METADATA_KEY])
    assert settings["transformer.alpha"] == settings["transformer.r"]
    renamed = {
        f"diffusion_model.{name.removeprefix('transformer.')}": tensor
        for name, tensor in load_file(restored).items()
    }
    assert all(
        torch.equal(tensor, renamed[name]) for name, tensor in load_file(comfyui_file).items()
    )


@pytest.mark.parametrize(("form", "target"), [("diffusers", "comfyui"), ("comfyui", "diffusers")])
def test_converted_lora_equals_one_written_in_that_format(
    t2i_checkpoint: Path, tmp_path: Path, form: LoraForm, target: LoraForm
) -> None:
    lora = lora_of(shifted(t2i_checkpoint, lora_rank=4, lora_alpha=6))
    lora.form = target
    expected = write_lora(lora, tmp_path / "expected", **NOTE).read_bytes()
    lora.form = form
    write_lora(lora, tmp_path / "my-lora", **NOTE)

    result = convert(tmp_path / "my-lora", target)

    assert result.path == tmp_path / "my-lora" / f"my-lora-step3-{target}.safetensors"
    assert result.path.read_bytes() == expected


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
@pytest.mark.parametrize("place", ["header", "alphas", *COMPANIONS])
def test_alpha_of_a_foreign_lora_is_multiplied_into_its_matrices(
    tmp_path: Path, place: str, form: LoraForm
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"base_model.model.{LAYER}.lora_A.weight": torch.randn(4, 8, generator=generator),
        f"base_model.model.{LAYER}.lora_B.weight": torch.randn(8, 4, generator=generator),
    }
    settings = {"r": 4, "lora_alpha": 3.0, "use_rslora": place != "alphas"}
    notes: dict[str, str] = {}
    if place == "header":
        notes[METADATA_KEY] = json.dumps(settings)
    elif place == "alphas":
        weights[f"base_model.model.{LAYER}.alpha"] = torch.tensor(3.0)
    else:
        (tmp_path / place).write_text(json.dumps(settings))
    save_file(weights, tmp_path / "theirs.safetensors", notes)
    expected = read_lora_file(tmp_path / "theirs.safetensors", [LAYER])

    path = convert(
        tmp_path / "theirs.safetensors", form, tmp_path / "ours" / "lora.safetensors"
    ).path

    assert read_lora_file(path, [LAYER]).keys() == expected.keys()
    for name, tensor in read_lora_file(path, [LAYER]).items():
        assert_close(tensor, expected[name], terms=ELEMENTWISE)


def test_full_fine_tune_is_converted_to_one_file(t2i_checkpoint: Path, tmp_path: Path) -> None:
    transformer = Kandinsky5Transformer3DModel.from_pretrained(
        t2i_checkpoint, subfolder="transformer"
    )
    transformer.save_pretrained(tmp_path / "pipeline/transformer", max_shard_size="50KB")
    (tmp_path / "pipeline" / NOTE_FILE).write_text(json.dumps({"modelspec.title": "mine"}))
    assert len(list((tmp_path / "pipeline/transformer").glob("*.safetensors"))) > 2

    result = convert(tmp_path, "comfyui", tmp_path / "one.safetensors")

    weights = load_file(result.path)
    expected = transformer.state_dict()
    assert weights.keys() == expected.keys(), "by plain names, which original programs read"
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert read_header(result.path)[METADATA]["modelspec.title"] == "mine"
    assert result.place == "models/diffusion_models"


def test_full_fine_tune_with_a_missing_shard_is_refused(
    t2i_checkpoint: Path, tmp_path: Path
) -> None:
    transformer = Kandinsky5Transformer3DModel.from_pretrained(
        t2i_checkpoint, subfolder="transformer"
    )
    transformer.save_pretrained(tmp_path / "transformer", max_shard_size="50KB")
    next((tmp_path / "transformer").glob("*00002-of*.safetensors")).unlink()

    with pytest.raises(UserError, match="is incomplete: it lacks"):
        convert(tmp_path, "comfyui", tmp_path / "one.safetensors")

    assert not (tmp_path / "one.safetensors").exists()


def write(path: Path, names: list[str], architecture: str = "", **notes: str) -> Path:
    """Write a LoRA of one layer, and more tensors of these names."""
    weights = {f"transformer.{LAYER}.lora_A.weight": torch.ones(4, 8)}
    weights[f"transformer.{LAYER}.lora_B.weight"] = torch.ones(8, 4)
    weights |= {name: torch.ones(8) for name in names}
    note = {STEP_NOTE: "3", "modelspec.architecture": architecture} if architecture else {}
    save_file(weights, path, {**note, **notes})
    return path


@pytest.mark.parametrize(
    ("names", "architecture", "strength", "words"),
    [
        ([], "sanavideo/2b-480p/lora", 1.0, "it has no built-in Sana Video"),
        (
            [],
            "kandinsky5-image/i2i-lite-sft/lora",
            1.0,
            "it cannot run Kandinsky 5 Image i2i-lite-sft",
        ),
        (
            [f"transformer.{LAYER}.lora_magnitude_vector"],
            "",
            1.0,
            "The magnitudes of a DoRA differ",
        ),
        ([f"transformer.{LAYER}.diff"], "", 1.0, "is not a plain LoRA"),
        (["lora_unet_visual_transformer_blocks_0.alpha"], "", 1.0, "Kohya's names"),
        (["lycoris_visual_transformer_blocks_0.lokr_w1"], "", 1.0, "convert the LoRA beside it"),
        ([f"transformer.{LAYER}.lokr_w1"], "", 1.0, "does not state its rank and alpha"),
    ],
)
def test_refused_conversion_gives_the_reason_and_writes_nothing(
    tmp_path: Path, names: list[str], architecture: str, strength: float, words: str
) -> None:
    path = write(
        tmp_path / "lora.safetensors", [name for name in names if "alpha" not in name], architecture
    )
    if any("alpha" in name for name in names):
        save_file({**load_file(path), **{name: torch.tensor(1.0) for name in names}}, path)

    with pytest.raises(UserError, match=words):
        convert(path, "comfyui", None, strength)

    assert list(tmp_path.iterdir()) == [path]


def test_page_does_not_offer_comfyui_for_an_i2i_lora(tmp_path: Path) -> None:
    path = write(tmp_path / LORA_FILE, [], "kandinsky5-image/i2i-lite-sft/lora")

    obstacle = why_not(path, "comfyui")

    assert obstacle == "ComfyUI cannot use it: it cannot run Kandinsky 5 Image i2i-lite-sft."
    assert why_not(path, "diffusers") == ""


def test_damaged_lora_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / LORA_FILE).write_bytes(bytes(100))

    obstacle = why_not(tmp_path / LORA_FILE, "comfyui")

    assert obstacle == "The file is damaged: its header cannot be read."


def test_plan_refuses_comfyui_format_for_i2i(workspace: Workspace, capsys: Capture) -> None:
    message = complaints(
        workspace, capsys, "plan", "lora_format=comfyui", "model_flavour=i2i-lite-sft"
    )

    assert (
        "lora_format: 'comfyui': ComfyUI cannot run Kandinsky 5 Image i2i-lite-sft; use diffusers."
        in message
    )


def test_convert_replaces_a_file_only_with_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "star.safetensors", [])
    command = ["convert", "star.safetensors", "--to", "comfyui"]

    assert main(command) == 0
    assert "Put it into ComfyUI's folder models/loras." in capsys.readouterr().out
    first = (tmp_path / "star-comfyui.safetensors").read_bytes()
    write(tmp_path / "star.safetensors", [], title="another")
    assert main(command) == 2
    assert "star-comfyui.safetensors exists already" in capsys.readouterr().err
    assert (tmp_path / "star-comfyui.safetensors").read_bytes() == first
    assert main([*command, "--overwrite"]) == 0
    assert (tmp_path / "star-comfyui.safetensors").read_bytes() != first


def test_a_strength_is_in_the_weights_and_in_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "star.safetensors", [])

    assert main(["convert", "star.safetensors", "--to", "comfyui", "--strength", "0.5"]) == 0

    assert "The strength 0.5 is in the file: load it at strength 1." in capsys.readouterr().out
    weights = load_file(tmp_path / "star-strength0.5-comfyui.safetensors")
    up = weights[f"diffusion_model.{LAYER}.lora_B.weight"]
    assert torch.equal(up, torch.full((8, 4), 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strength", [0.5, 0.75, -1.5, 100.0, 1e-3])
def test_a_strength_is_multiplied_as_torch_would(
    tmp_path: Path, dtype: torch.dtype, strength: float
) -> None:
    matrix = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    names = [f"transformer.{LAYER}.lora_{side}.weight" for side in "AB"]
    weights = {names[0]: matrix.T.contiguous(), names[1]: matrix}
    save_file(weights, tmp_path / "a.safetensors")

    path = convert(tmp_path / "a.safetensors", "diffusers", None, strength).path

    up = load_file(path)[names[1]]
    assert torch.equal(up, matrix.to(up.dtype) * strength)
    assert up.dtype in (dtype, torch.float32)
    assert torch.equal(load_file(path)[names[0]], matrix.T)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_decoded_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}[dtype]

    values = torch.from_numpy(decoded(codes.numpy().tobytes(), name).copy())

    assert torch.equal(values.nan_to_num(7e7), codes.view(dtype).float().nan_to_num(7e7))


@pytest.mark.parametrize("strength", [0.75, -2.0])
@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_a_file_at_a_strength_acts_as_the_lora_at_that_strength(
    t2i_checkpoint: Path, tmp_path: Path, form: LoraForm, strength: float
) -> None:
    write_lora(lora_of(shifted(t2i_checkpoint, lora_rank=4, lora_alpha=6)), tmp_path, **NOTE)
    trained = updates_in(load_file(tmp_path / LORA_FILE), "transformer.")

    path = convert(tmp_path, form, None, strength).path

    prefix = {"diffusers": "transformer.", "comfyui": "diffusion_model."}[form]
    folded = updates_in(load_file(path), prefix)
    assert folded.keys() == trained.keys()
    for layer, update in folded.items():
        assert_close(update, strength * trained[layer], terms=4)
    if form == "diffusers":
        pipeline = make_adapter(t2i_checkpoint).load_bare_pipeline()
        verify_file(path, load_file(path), form, pipeline)
    assert read_header(path)[METADATA]["simpletuner.strength"] == f"{strength:g}"


def updates_in(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The update of every layer of a LoRA whose file states no strength."""
    layers = {name.removeprefix(prefix).partition(".lora_")[0] for name in weights}
    return {
        layer: weights[f"{prefix}{layer}.lora_B.weight"].float()
        @ weights[f"{prefix}{layer}.lora_A.weight"].float()
        for layer in layers
    }


def write_run(folder: Path) -> None:
    """Write a run with checkpoints of two steps, each with an average; it has no result yet."""
    identity = Identity("kandinsky5-image", "t2i-lite-sft", "lora", 1, 0, "", {})
    for step in (2, 4):
        checkpoint = folder / f"checkpoint-{step}"
        for place in (checkpoint, checkpoint / "ema"):
            place.mkdir(parents=True)
            write(place / LORA_FILE, [], "kandinsky5-image/t2i-lite-sft/lora", place=place.name)
        write_manifest(checkpoint, Manifest(step, 0, identity, describe_files(checkpoint)))


@pytest.mark.parametrize(
    ("source", "more", "place", "name"),
    [
        ("cats", ["--checkpoint", "2"], "checkpoint-2", "cats-step2-comfyui"),
        ("cats", ["--checkpoint", "latest"], "checkpoint-4", "cats-step4-comfyui"),
        ("cats", ["--checkpoint", "checkpoint-2"], "checkpoint-2", "cats-step2-comfyui"),
        ("cats", ["--checkpoint", "2", "--ema"], "ema", "cats-step2-ema-comfyui"),
        ("cats/checkpoint-2", [], "checkpoint-2", "cats-step2-comfyui"),
        (
            "cats",
            ["--checkpoint", "2", "--strength", "0.75"],
            "checkpoint-2",
            "cats-step2-strength0.75-comfyui",
        ),
    ],
)
def test_a_checkpoint_is_written_beside_the_checkpoints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    more: list[str],
    place: str,
    name: str,
) -> None:
    """A file in the folder of a checkpoint would be deleted with it."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "cats")

    assert main(["convert", source, "--to", "comfyui", *more]) == 0

    notes = read_header(tmp_path / "cats" / f"{name}.safetensors")[METADATA]
    assert notes["place"] == place


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "contains no result. Its checkpoints: checkpoint-2, checkpoint-4; choose one with"),
        (["--checkpoint", "3"], "'3' is not a complete checkpoint. Checkpoints in cats:"),
        (["--checkpoint", "checkpoint2"], "Did you mean checkpoint-2?"),
        (["--checkpoint", "2", "--strength", "0"], "--strength: 0 is the untrained model"),
    ],
)
def test_weights_that_do_not_exist_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    more: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "cats")

    assert main(["convert", "cats", "--to", "comfyui", *more]) == 2

    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("cats/*.safetensors"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--strength", "much"], "--strength: 'much' is not a number"),
        (["--output", "lora.bin"], "--output: 'lora.bin' is neither a folder nor a name"),
    ],
)
def test_convert_names_an_invalid_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, more: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "star.safetensors", [])

    assert main(["convert", "star.safetensors", "--to", "comfyui", *more]) == 2
    assert words in capsys.readouterr().err
