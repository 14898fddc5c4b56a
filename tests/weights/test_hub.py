"""What is downloaded from the hub: one format and one variant of each part, and nothing twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from diffusers import Kandinsky5Transformer3DModel
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel

from simpletuner.config.load import Layer, resolve
from simpletuner.errors import Problems, UserError
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.loading import load_scheduler, load_whole
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.checks import check_weights
from simpletuner.weights.hub import ask_hub, best_selection
from simpletuner.weights.part import Part, folder_fault
from tests.tools.hub import FakeHub, Repository, used_hub
from tests.tools.reports import found_by
from tests.tools.tiny import make_checkpoint

BASE = "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers"
ORIGINAL = "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-10s"
FLAVOUR = "t2v-pro-sft-10s-hd"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub whose downloads go to a cache of this test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with used_hub(monkeypatch) as hub:
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        ask_hub.cache_clear()
        monkeypatch.setattr("simpletuner.weights.hub.ask_hub", ask_hub)
        yield hub
        ask_hub.cache_clear()


def publish(hub: FakeHub, name: str, folder: Path, prefix: str = "") -> Repository:
    """Put the files of a folder into a repository of the hub."""
    repository = hub.repositories.setdefault(name, Repository(private=False, commits=[{}]))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            repository.files[f"{prefix}{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return repository


def downloads(hub: FakeHub) -> set[str]:
    """The files that the hub was asked for."""
    prefix = "FILE "
    return {request.removeprefix(prefix) for request in hub.requests if request.startswith(prefix)}


def source_of(spec: FamilySpec = KANDINSKY5_IMAGE, **keys: str) -> ModelSource:
    values = {"model_type": "lora", "model_family": spec.name, **keys}
    config = resolve([Layer("test", list(values.items()))], Problems())
    return ModelSource.from_settings(spec, spec.flavour(keys.get("model_flavour")), config.flat)


COPIES = (
    "model.fp16.safetensors",
    "model.bf16-00001-of-00002.safetensors",
    "pytorch_model.bin",
    "pytorch_model.fp16.bin",
    "tf_model.h5",
    "flax_model.msgpack",
    "openvino_model.onnx",
)


@pytest.mark.parametrize(
    ("variant", "files", "weights"),
    [
        (None, ["model.safetensors", *COPIES], ["model.safetensors"]),
        (
            None,
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", *COPIES],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        ("fp16", ["model.safetensors", *COPIES], ["model.fp16.safetensors"]),
        ("bf16", ["model.safetensors", *COPIES], ["model.bf16-00001-of-00002.safetensors"]),
        (
            None,
            ["pytorch_model.bin", "pytorch_model.fp16.bin", "tf_model.h5"],
            ["pytorch_model.bin"],
        ),
    ],
)
def test_one_format_and_one_variant_of_a_part_is_selected(
    variant: str | None, files: list[str], weights: list[str]
) -> None:
    settings = [
        "config.json",
        "model.safetensors.index.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    part = [f"text_encoder/{name}" for name in [*settings, *files]]
    repository = [*part, "vae/config.json", "vae/model.safetensors", "README.md"]

    selection = best_selection(repository, "text_encoder", variant)

    expected = {f"text_encoder/{name}" for name in [*settings, *weights]}
    assert set(selection.pick(repository)) == expected


def test_a_download_leaves_out_the_other_copies_of_the_weights(
    hub: FakeHub, t2i_checkpoint: Path, tmp_path: Path
) -> None:
    repository = publish(hub, "someone/tiny", t2i_checkpoint)
    name = "text_encoder_2/model.safetensors"
    copies = {f"text_encoder_2/{copy}" for copy in COPIES}
    for copy in copies:
        repository.files[copy] = repository.files[name] + b"copy"
    part = source_of(pretrained_model_name_or_path="someone/tiny")["text_encoder_2"]

    planned_size = part.download_size()
    folder = part.fetch()

    assert not downloads(hub) & copies
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert planned_size == sum(path.stat().st_size for path in folder.iterdir())
    assert part.local_folder() == folder
    assert part.download_size() == 0


def test_pickled_weights_are_fetched_if_there_are_no_others(
    hub: FakeHub, t2i_checkpoint: Path
) -> None:
    repository = publish(hub, "someone/old", t2i_checkpoint)
    name = "text_encoder_2/model.safetensors"
    del repository.files[name]
    weights = load_file(t2i_checkpoint / name)
    pickled = t2i_checkpoint.parent / "old.bin"
    torch.save(weights, pickled)
    repository.files["text_encoder_2/pytorch_model.bin"] = pickled.read_bytes()

    part = source_of(pretrained_model_name_or_path="someone/old")["text_encoder_2"]

    assert (part.fetch() / "pytorch_model.bin").is_file()
    assert part.weight_shapes() == {key: tuple(value.shape) for key, value in weights.items()}


def test_a_misspelt_repository_is_reported_before_a_download(hub: FakeHub) -> None:
    misspelt = "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Difusers"
    part = source_of(pretrained_model_name_or_path=misspelt)["vae"]

    message = part.absence() or ""

    suggestion = "Did you mean 'kandinskylab/Kandinsky-5.0-T2I-Lite-sft"
    assert message.startswith(f"is not on the hub, or not public. {suggestion}")
    assert "login" not in message
    with pytest.raises(UserError, match="is not on the hub, or not public"):
        part.fetch()


def test_a_repository_of_the_family_that_is_gone_may_need_a_login(hub: FakeHub) -> None:
    assert "`hf auth login`" in (source_of()["vae"].absence() or "")


def test_every_flavour_is_in_a_table_with_the_evidence_of_its_id() -> None:
    from simpletuner.config.json_reader import read_toml

    table = read_toml("simpletuner.models.kandinsky5", "flavours.toml")

    flavours: list[str] = []
    for spec in FAMILIES.values():
        if spec.name.startswith("kandinsky5"):
            flavours += [flavour.name for flavour in spec.flavours]

    assert flavours == list(table)
    assert all(row["evidence"] for row in table.values())
    assert {name for name, row in table.items() if "original" in row} == {
        "t2v-pro-sft-10s-hd",
        "t2v-pro-pretrain-5s-hd",
        "t2v-pro-pretrain-10s-hd",
    }


class TestOriginalForm:
    """A transformer whose repository has no diffusers form."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return make_checkpoint(tmp_path / "t2v", "t2v")

    @pytest.fixture
    def weights(self, hub: FakeHub, checkpoint: Path) -> Path:
        """The weights of a transformer that is published in its original form.

        The related checkpoint is published, too.
        """
        (file,) = (checkpoint / "transformer").glob("*.safetensors")
        publish(hub, BASE, checkpoint)
        original = hub.repositories.setdefault(ORIGINAL, Repository(private=False, commits=[{}]))
        original.files["model/kandinsky5pro_t2v_sft_10s.safetensors"] = file.read_bytes()
        return file

    def test_it_is_downloaded_with_the_config_of_the_related_checkpoint(
        self, hub: FakeHub, weights: Path
    ) -> None:
        source = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)
        part = source["transformer"]
        planned_size = part.download_size()

        folder = part.fetch()

        assert planned_size == weights.stat().st_size
        assert part.read_config() == json.loads((folder / "config.json").read_text())
        assert part.fetch() == folder
        assert part.download_size() == 0
        assert source["vae"].location == BASE

        related_weights = f"transformer/{weights.name}"
        assert related_weights not in downloads(hub), "they are not needed"

    def test_it_is_known_to_be_absent_and_available(self, hub: FakeHub, weights: Path) -> None:
        part = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)["transformer"]

        assert part.local_folder() is None
        assert part.absence() is None

    def test_it_loads_with_the_values_of_the_publisher(self, hub: FakeHub, weights: Path) -> None:
        part = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)["transformer"]

        model = Kandinsky5Transformer3DModel.from_pretrained(part.fetch())

        stored = load_file(weights)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
        assert model.config.attention_P == 0.7
        assert model.config.attention_wT == 11

    def test_the_diffusers_form_is_used_where_the_hub_has_it(
        self, hub: FakeHub, weights: Path, checkpoint: Path
    ) -> None:
        publish(hub, f"{ORIGINAL}-Diffusers", checkpoint)
        part = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)["transformer"]
        folder = part.fetch()

        assert f"{Path(ORIGINAL).name}-Diffusers" in str(folder)
        assert (folder / weights.name).is_file()

    def test_the_id_of_the_missing_diffusers_form_stands_for_the_flavour(self) -> None:
        by_flavour = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)
        by_id = source_of(
            KANDINSKY5_VIDEO,
            model_flavour=FLAVOUR,
            pretrained_model_name_or_path=f"{ORIGINAL}-Diffusers",
        )

        assert by_id == by_flavour

    def test_a_folder_of_the_user_is_used_as_it_is(self, checkpoint: Path) -> None:
        source = source_of(
            KANDINSKY5_VIDEO, model_flavour=FLAVOUR, pretrained_model_name_or_path=str(checkpoint)
        )
        assert source["transformer"].fetch() == checkpoint / "transformer"

    def test_a_copied_cache_is_enough_without_a_connection(
        self, hub: FakeHub, weights: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)["transformer"]
        shutil.rmtree(part.fetch())
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

        assert part.absence() is None
        assert Kandinsky5Transformer3DModel.load_config(part.fetch())["attention_P"] == 0.7

    @pytest.mark.parametrize("is_absolute", [False, True], ids=["relative link", "absolute link"])
    def test_a_cache_that_was_moved_after_the_download_is_still_complete(
        self,
        hub: FakeHub,
        weights: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        is_absolute: bool,
    ) -> None:
        part = source_of(KANDINSKY5_VIDEO, model_flavour=FLAVOUR)["transformer"]
        link = part.fetch() / weights.name

        assert not link.readlink().is_absolute()

        if is_absolute:  # as earlier versions made it
            blob = link.resolve()
            link.unlink()
            link.symlink_to(blob)
        moved = (tmp_path / "hub").rename(tmp_path / "moved")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(moved))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

        folder = part.fetch()

        assert folder.is_relative_to(moved)
        assert (folder / weights.name).read_bytes() == weights.read_bytes()


class TestWholeModels:
    """transformers loads a text encoder from a whole CLIP, and so does the plan."""

    TEXT: ClassVar = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    VISION: ClassVar = {**TEXT, "num_hidden_layers": 3, "image_size": 28, "patch_size": 14}

    @pytest.mark.parametrize("kind", KANDINSKY5_IMAGE.components["text_encoder_2"].kinds)
    def test_every_accepted_kind_loads_with_equal_weights(self, tmp_path: Path, kind: str) -> None:
        if kind == "clip":
            config = CLIPConfig(text_config=self.TEXT, vision_config=self.VISION, projection_dim=16)
            model = CLIPModel(config)
            expected = model.text_model.state_dict()
        else:
            model = CLIPTextModel(CLIPTextConfig(**self.TEXT))
            expected = model.state_dict()
        model.save_pretrained(tmp_path / "text_encoder_2")
        part = Part(
            role="text_encoder_2",
            key="pretrained_model_name_or_path",
            location=str(tmp_path),
            folder="text_encoder_2",
            revision=None,
            variant=None,
        )

        loaded = load_whole(CLIPTextModel, part).state_dict()

        assert part.read_config()["model_type"] == kind
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())

    def test_a_checkpoint_with_a_whole_clip_passes_its_checks(
        self, t2i_checkpoint: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "model"
        shutil.copytree(t2i_checkpoint, folder)
        encoder = folder / "text_encoder_2"
        text = json.loads((encoder / "config.json").read_text())
        shutil.rmtree(encoder)
        sizes = {key: text[key] for key in (*self.TEXT, "vocab_size", "max_position_embeddings")}
        config = CLIPConfig(text_config=sizes, vision_config=self.VISION)
        CLIPModel(config).save_pretrained(encoder)
        source = source_of(pretrained_model_name_or_path=str(folder))

        problems = found_by(check_weights, KANDINSKY5_IMAGE, KANDINSKY5_IMAGE.flavours[0], source)

        assert problems == []


@pytest.mark.parametrize(
    "name",
    [
        "scheduler_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "preprocessor_config.json",
    ],
)
def test_a_part_without_weights_is_there_if_one_of_its_files_is(name: str, tmp_path: Path) -> None:
    assert folder_fault(tmp_path) == "it is not there"

    (tmp_path / name).write_text("{}")

    assert folder_fault(tmp_path) is None


def test_a_scheduler_is_downloaded_when_it_is_loaded(hub: FakeHub, t2i_checkpoint: Path) -> None:
    publish(hub, "someone/tiny", t2i_checkpoint)
    part = Part(
        role="scheduler",
        key="pretrained_model_name_or_path",
        location="someone/tiny",
        folder="scheduler",
        revision=None,
        variant=None,
    )

    scheduler = load_scheduler(part, shift=3.0)

    assert type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert scheduler.config.shift == 3.0
    assert downloads(hub) == {"model_index.json", "scheduler/scheduler_config.json"}
