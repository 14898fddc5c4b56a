"""Where the parts of a checkpoint are, and what is wrong with a folder before anything is
loaded.
"""

from __future__ import annotations

import json
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
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end - missing))
    return path


@pytest.fixture
def copy(t2i_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own, to break."""
    return Path(shutil.copytree(t2i_checkpoint, tmp_path / "model"))


def test_a_complete_checkpoint_has_no_problem(t2i_checkpoint: Path) -> None:
    assert problems(pretrained_model_name_or_path=str(t2i_checkpoint)) == []
    for part in source(pretrained_model_name_or_path=str(t2i_checkpoint)).parts.values():
        assert part.fetch() == t2i_checkpoint / part.folder


def test_without_a_path_the_flavours_repository_is_used() -> None:
    part = source()["transformer"]
    assert (part.location, part.is_local) == (
        "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
        False,
    )
    assert problems() == [], "what the hub has is seen when it is fetched"


def test_keys_replace_single_parts(t2i_checkpoint: Path, i2i_checkpoint: Path) -> None:
    found = source(
        pretrained_model_name_or_path=str(t2i_checkpoint),
        pretrained_vae_model_name_or_path=str(i2i_checkpoint),
        qwen_text_encoder_model_name_or_path="nowhere",
        pretrained_transformer_subfolder="other",
    )
    assert found["vae"].location == str(i2i_checkpoint)
    assert found["tokenizer"].location == "nowhere"
    assert found["text_encoder_2"].location == str(t2i_checkpoint)
    assert [str(problem) for problem in found_by(found.check)] == [
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
    named = source(pretrained_model_name_or_path="models/tinny")
    assert [*found_by(named.check_names)] == []
    Path("models/tiny").mkdir(parents=True)
    assert looks_like_path("models/tiny")
    warning = (
        "there is no folder 'models/tinny', so it is treated as a Hugging Face model id. "
        "Did you mean 'models/tiny'?"
    )
    assert [str(doubt) for doubt in found_by(named.check_names)] == [f"{BASE}: {warning}"]


@pytest.mark.parametrize(
    "location", ["org/na@me", "org/", "-org/name", "org/name-", "a b/c", f"org/{'x' * 200}"]
)
def test_a_malformed_hub_id_is_a_problem(location: str) -> None:
    (problem,) = problems(pretrained_model_name_or_path=location)
    assert "is neither an existing folder nor a valid hub id" in problem
    assert source(pretrained_model_name_or_path=location)["vae"].local_folder() is None


def test_damaged_weights_are_reported_before_a_download(copy: Path) -> None:
    next((copy / "vae").glob("*.safetensors")).unlink()
    transformer = next((copy / "transformer").glob("*.safetensors"))
    os.truncate(transformer, transformer.stat().st_size - 1)
    next((copy / "text_encoder").glob("*.safetensors")).write_text(
        "version https://git-lfs.github.com/spec/v1\n"
    )
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
    index.write_text(
        json.dumps({"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}})
    )
    assert weights_fault(tmp_path) == "it lacks m-2-of-2.safetensors"
    index.write_text("[]")
    assert weights_fault(tmp_path) == "m.safetensors.index.json cannot be read"
    index.unlink()
    assert weights_fault(tmp_path) is None


def test_pickled_weights_have_the_shapes_of_safetensors(copy: Path) -> None:
    model = source(pretrained_model_name_or_path=str(copy))
    for role, name in {
        "transformer": "diffusion_pytorch_model",
        "text_encoder": "pytorch_model",
    }.items():
        expected = model[role].weight_shapes()
        (file,) = (copy / role).glob("*.safetensors")
        weights = {key: torch.nn.Parameter(each) for key, each in load_file(file).items()}
        torch.save(
            weights if role == "transformer" else OrderedDict(load_file(file)),
            copy / role / f"{name}.bin",
        )
        torch.save({"lr": 0.1}, copy / role / "training_args.bin")
        file.unlink()
        assert model[role].weight_shapes() == expected != {}


def test_shapes_of_a_damaged_pickle_are_empty(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "pytorch_model.bin")
    assert pickled_shapes(tmp_path / "pytorch_model.bin") == {"weight": (3, 2), "bias": (3,)}
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    for number, mark in enumerate(
        (b"PK\x01\x02", b"PK\x03\x04")
    ):  # of its list of files, and of a file
        (tmp_path / f"{number}.bin").write_bytes(content.replace(mark, b"XXXX", 1))
        assert pickled_shapes(tmp_path / f"{number}.bin") == {}


class Evil:
    """Runs a function where it is unpickled."""

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
    told = (
        f"is not on this machine, and the hub is offline (HF_HUB_OFFLINE). {advice} Or unset "
        "HF_HUB_OFFLINE."
    )
    assert part.absence() == told
    with pytest.raises(UserError) as refused:
        part.fetch()
    assert str(refused.value) == f"{part.location!r} {told}"
    with pytest.raises(
        UserError, match=rf"^model_index.json of '{part.location}' is not on this machine"
    ):
        part.fetch_index()


def test_without_a_network_the_error_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
    )  # the discard port
    part = replace(source()["vae"], revision="abc")
    assert part.absence() is None
    with pytest.raises(UserError) as refused:
        part.fetch()
    told = str(refused.value)
    assert told.startswith(
        f"{part.location!r} is not on this machine, and the hub cannot be reached ("
    )
    assert f"`hf download {part.location} --revision abc --local-dir FOLDER`" in told
    assert "\n" not in told
