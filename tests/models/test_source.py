"""The parts of a checkpoint are located, and faults of a folder are reported before loading."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simpletuner.config.load import Layer, resolve
from simpletuner.errors import Problems, UserError
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.source import ModelSource
from simpletuner.weights.files import WeightsError, pickled_shapes, tensor_shapes, weights_fault
from simpletuner.weights.part import looks_like_path
from tests.tools.reports import found_by

BASE = "pretrained_model_name_or_path"


def source(**keys: str) -> ModelSource:
    values = {"model_type": "lora", "model_family": "kandinsky5-image", **keys}
    config = resolve([Layer("test", list(values.items()))], Problems())
    return ModelSource.from_settings(KANDINSKY5_IMAGE, KANDINSKY5_IMAGE.flavour(None), config.flat)


def problems(**keys: str) -> list[str]:
    return [str(problem) for problem in found_by(source(**keys).check)]


def safetensors(path: Path, tensors: dict[str, tuple[int, ...]], *, missing: int = 0) -> Path:
    """A file of zeros in float32, with some bytes missing at its end."""
    header = {}
    end = 0
    for name, shape in tensors.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end - missing))
    return path


@pytest.fixture
def copy(t2i_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to damage."""
    return Path(shutil.copytree(t2i_checkpoint, tmp_path / "model"))


def test_a_complete_checkpoint_has_no_problem(t2i_checkpoint: Path) -> None:
    assert problems(pretrained_model_name_or_path=str(t2i_checkpoint)) == []
    for part in source(pretrained_model_name_or_path=str(t2i_checkpoint)).parts.values():
        assert part.fetch() == t2i_checkpoint / part.folder


def test_without_a_path_the_flavours_repository_is_used() -> None:
    part = source()["transformer"]

    assert part.location == "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"
    assert not part.is_local
    assert problems() == [], "whether the hub has it shows when it is fetched"


def test_keys_replace_single_parts(t2i_checkpoint: Path, i2i_checkpoint: Path) -> None:
    replaced = source(
        pretrained_model_name_or_path=str(t2i_checkpoint),
        pretrained_vae_model_name_or_path=str(i2i_checkpoint),
        qwen_text_encoder_model_name_or_path="nowhere",
        pretrained_transformer_subfolder="other",
    )

    assert replaced["vae"].location == str(i2i_checkpoint)
    assert replaced["tokenizer"].location == "nowhere"
    assert replaced["text_encoder_2"].location == str(t2i_checkpoint)
    assert [str(problem) for problem in found_by(replaced.check)] == [
        f"{BASE}: the model folder '{t2i_checkpoint}' lacks a usable other (it is not there).",
        "qwen_text_encoder_model_name_or_path: the model folder 'nowhere' does not exist.",
    ]


def test_missing_parts_of_a_folder_are_one_problem(copy: Path) -> None:
    shutil.rmtree(copy / "vae")
    shutil.rmtree(copy / "tokenizer_2")
    (problem,) = problems(pretrained_model_name_or_path=str(copy))

    assert problem.endswith("lacks a usable vae (it is not there), tokenizer_2 (it is not there).")


def test_fetching_a_missing_part_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no 'vae' folder"):
        source(pretrained_model_name_or_path=str(tmp_path))["vae"].fetch()


@pytest.mark.parametrize(
    ("location", "is_path"),
    [
        ("org/name", False),
        ("./name", True),
        ("/a/b", True),
        ("~/model", True),
        ("name", True),
        ("a/b/c", True),
        ("../model", True),
    ],
)
def test_paths_are_distinguished_from_hub_ids(location: str, is_path: bool) -> None:
    assert looks_like_path(location) is is_path


def test_an_existing_folder_takes_precedence_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not looks_like_path("models/tiny")

    Path("models/tiny").mkdir(parents=True)

    assert looks_like_path("models/tiny")


def test_a_hub_id_that_resembles_a_folder_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    misspelt = source(pretrained_model_name_or_path="models/tinny")
    assert found_by(misspelt.check_names) == []

    Path("models/tiny").mkdir(parents=True)

    warning = (
        "there is no folder 'models/tinny', so it is treated as a Hugging Face model id. "
        "Did you mean 'models/tiny'?"
    )
    assert [str(problem) for problem in found_by(misspelt.check_names)] == [f"{BASE}: {warning}"]


@pytest.mark.parametrize(
    "location", ["org/na@me", "org/", "-org/name", "org/name-", "a b/c", f"org/{'x' * 200}"]
)
def test_a_malformed_hub_id_is_a_problem(location: str) -> None:
    (problem,) = problems(pretrained_model_name_or_path=location)

    assert "is neither an existing folder nor a valid hub id" in problem
    assert source(pretrained_model_name_or_path=location)["vae"].local_folder() is None


def test_damaged_files_of_a_checkpoint_are_reported(copy: Path) -> None:
    (vae,) = (copy / "vae").glob("*.safetensors")
    (transformer,) = (copy / "transformer").glob("*.safetensors")
    (text_encoder,) = (copy / "text_encoder").glob("*.safetensors")
    vae.unlink()
    os.truncate(transformer, transformer.stat().st_size - 1)
    text_encoder.write_text("version https://git-lfs.github.com/spec/v1\n")
    (copy / "text_encoder_2" / "config.json").write_text("{")

    (problem,) = problems(pretrained_model_name_or_path=str(copy))

    assert f"transformer ({transformer.name} is not a complete safetensors file" in problem
    assert "vae (it contains no weights)" in problem
    assert "download it again, if by git then with git lfs" in problem
    assert "text_encoder_2 (config.json cannot be read)" in problem


def test_shapes_are_read_from_the_safetensors_header(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m.safetensors", {"a.weight": (2, 3), "a.bias": (2,)})

    assert tensor_shapes(path) == {"a.weight": (2, 3), "a.bias": (2,)}
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        tensor_shapes(safetensors(path, {"a.weight": (2, 3)}, missing=1))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10) + b'{"a": {}} ',
        struct.pack("<Q", 14) + b'{"a": [1, 2]} ',
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
    ],
)
def test_a_damaged_header_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="is not a complete safetensors file"):
        tensor_shapes(tmp_path / "m.safetensors")


def test_a_missing_shard_is_reported_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "m-1-of-2.safetensors", {"a": (1,)})
    index = tmp_path / "m.safetensors.index.json"
    weight_map = {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert weights_fault(tmp_path) == "it lacks m-2-of-2.safetensors"
    index.write_text("[]")
    assert weights_fault(tmp_path) == "m.safetensors.index.json cannot be read"
    index.unlink()

    assert weights_fault(tmp_path) is None


@pytest.mark.parametrize(
    ("role", "name", "of_parameters"),
    [("transformer", "diffusion_pytorch_model", True), ("text_encoder", "pytorch_model", False)],
)
def test_pickled_weights_have_the_shapes_of_safetensors(
    copy: Path, role: str, name: str, of_parameters: bool
) -> None:
    part = source(pretrained_model_name_or_path=str(copy))[role]
    expected = part.weight_shapes()
    (file,) = (copy / role).glob("*.safetensors")
    weights = load_file(file)
    file.unlink()

    if of_parameters:
        parameters = {key: torch.nn.Parameter(tensor) for key, tensor in weights.items()}
        torch.save(parameters, copy / role / f"{name}.bin")
    else:
        torch.save(OrderedDict(weights), copy / role / f"{name}.bin")
    torch.save({"lr": 0.1}, copy / role / "training_args.bin")

    assert expected
    assert part.weight_shapes() == expected


def test_shapes_of_a_pickled_state_dict_are_read(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "pytorch_model.bin")

    assert pickled_shapes(tmp_path / "pytorch_model.bin") == {"weight": (3, 2), "bias": (3,)}


@pytest.mark.parametrize(
    "mark", [b"PK\x01\x02", b"PK\x03\x04"], ids=["the list of files", "a file"]
)
def test_shapes_of_a_damaged_pickle_are_empty(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.nn.Linear(2, 3).state_dict(), path)

    path.write_bytes(path.read_bytes().replace(mark, b"XXXX", 1))

    assert pickled_shapes(path) == {}


class Evil:
    """Runs a function when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("evil"),)


@pytest.mark.parametrize("content", [Evil(), {"a": Evil()}, {"a": 1}, [torch.zeros(2)]])
def test_pickled_code_is_not_run(
    content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "pytorch_model.bin")
    assert pickled_shapes(Path("pytorch_model.bin")) == {}
    Path("pytorch_model.bin").write_bytes(b"PK no archive")

    assert pickled_shapes(Path("pytorch_model.bin")) == {}
    assert not Path("evil").exists()


def test_the_offline_error_explains_how_to_get_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    part = source()["vae"]
    command = f"`hf download {part.location} --local-dir FOLDER`"
    advice = f"Download it on another one with {command}, and set {BASE} to that folder."
    message = (
        f"is not on this machine, and the hub is offline (HF_HUB_OFFLINE). {advice} Or unset "
        "HF_HUB_OFFLINE."
    )

    assert part.absence() == message
    with pytest.raises(UserError) as refused:
        part.fetch()
    assert str(refused.value) == f"{part.location!r} {message}"
    with pytest.raises(
        UserError, match=rf"^model_index.json of '{part.location}' is not on this machine"
    ):
        part.fetch_index()


def test_without_a_network_the_error_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    discard_port = "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", discard_port)
    part = replace(source()["vae"], revision="abc")
    assert part.absence() is None
    with pytest.raises(UserError) as refused:
        part.fetch()
    message = str(refused.value)
    reason = "is not on this machine, and the hub cannot be reached ("
    assert message.startswith(f"{part.location!r} {reason}")
    assert f"`hf download {part.location} --revision abc --local-dir FOLDER`" in message
    assert "\n" not in message
