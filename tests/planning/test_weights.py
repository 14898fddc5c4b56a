"""Incomplete models and LoRA files are reported by the plan, never completed at random."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from simpletuner.config.load import Layer, resolve
from simpletuner.errors import Problems, UserError
from simpletuner.models.loading import user_errors
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.planning.checks import check_parts
from simpletuner.weights.lora_names import LORA_FILE
from simpletuner.weights.part import Part
from tests.tools.families import CPU, make_adapter
from tests.tools.refusals import complaint, complaints, warnings
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]
MODEL = "pretrained_model_name_or_path"


@pytest.fixture
def model(workspace: Workspace, t2i_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to break; the config of the workspace names it."""
    folder = Path(shutil.copytree(t2i_checkpoint, tmp_path / "model"))
    workspace.write_config(pretrained_model_name_or_path=str(folder))
    return folder


def edit_weights(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    (file,) = folder.glob("*.safetensors")
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def edit_config(folder: Path, file: str = "config.json", /, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def plan_of(folder: Path, family: str) -> str:
    """The problems of a checkpoint, as the plan finds them."""
    spec = FAMILIES[family]
    flavour = spec.flavours[0]
    values = {
        "model_type": "lora",
        "model_family": family,
        "pretrained_model_name_or_path": str(folder),
    }
    config = resolve([Layer("test", list(values.items()))], Problems())
    source = ModelSource.from_settings(spec, flavour, config.flat)
    report = Problems()
    if source.check(report):
        check_parts(spec, flavour, source, report)
    return "\n".join(map(str, report))


def without(words: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {name: weight for name, weight in weights.items() if words not in name}


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_text_encoder_without_its_last_layers_is_refused(
    workspace: Workspace, model: Path, part: str, capsys: Capture
) -> None:
    edit_weights(model / part, without(".layers.1."))
    error = complaint(workspace, capsys)

    assert error.startswith(f"{MODEL}: the {part} in ")
    assert "its files lack layers 1 of 2" in error


def test_transformer_with_fewer_blocks_than_its_config_is_refused(
    workspace: Workspace, model: Path, capsys: Capture
) -> None:
    edit_weights(model / "transformer", without("visual_transformer_blocks.1."))
    assert "is incomplete: its files lack visual_transformer_blocks.1." in complaint(
        workspace, capsys
    )


def test_transformer_with_more_blocks_than_its_config_is_refused(
    workspace: Workspace, model: Path, capsys: Capture
) -> None:
    edit_config(model / "transformer", num_visual_blocks=1)
    error = complaint(workspace, capsys)
    assert "has 2 visual_transformer_blocks, its config.json has num_visual_blocks 1." in error


def test_missing_weights_inside_and_outside_blocks_are_refused(
    workspace: Workspace, model: Path, capsys: Capture
) -> None:
    edit_weights(model / "transformer", without("out_layer.out_layer"))
    assert "lack out_layer.out_layer.bias, out_layer.out_layer.weight." in complaint(
        workspace, capsys
    )
    edit_weights(
        model / "transformer", without("visual_transformer_blocks.1.feed_forward.in_layer")
    )
    assert "visual_transformer_blocks.1.feed_forward.in_layer.weight" in complaint(
        workspace, capsys
    )


def test_weight_of_the_wrong_shape_is_reported_when_it_is_loaded(model: Path) -> None:
    edit_weights(
        model / "transformer",
        lambda weights: {**weights, "out_layer.out_layer.bias": torch.zeros(3)},
    )
    with pytest.raises(UserError, match=r"the transformer in .* cannot be loaded: .*"):
        make_adapter(model).load_transformer(torch.float32)


def test_text_encoder_of_another_family_is_refused(
    workspace: Workspace, model: Path, capsys: Capture
) -> None:
    edit_config(model / "text_encoder", model_type="gemma2")
    assert "is a 'gemma2'; Kandinsky 5 Image has a 'qwen2_5_vl'" in complaint(workspace, capsys)


def test_missing_variant_is_refused(workspace: Workspace, model: Path, capsys: Capture) -> None:
    assert "its weights have no variant 'fp16'" in complaint(
        workspace, capsys, "plan", "variant=fp16"
    )


def test_file_truncated_after_the_check_is_named(model: Path) -> None:
    """safetensors raises an error of its own, which is neither an OSError nor a ValueError."""
    part = Part("vae", "pretrained_vae_model_name_or_path", str(model), "vae", None, None)
    (file,) = (model / "vae").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"the vae in .* cannot be loaded: .*"), user_errors(part):
        load_file(file)


@pytest.mark.parametrize(
    "file",
    [
        "tokenizer/tokenizer.json",
        "tokenizer_2/tokenizer_config.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_junk_in_a_settings_file_is_refused(
    workspace: Workspace, model: Path, file: str, capsys: Capture
) -> None:
    (model / file).write_text("<html>log in</html>")
    assert f"{Path(file).name} cannot be read" in complaint(workspace, capsys)


SCHEDULER = "scheduler/scheduler_config.json"
SMALL = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}


@pytest.mark.parametrize("family", ["kandinsky5-image", "sanavideo"])
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "tokenizer/tokenizer.json",
            {},
            "lacks a usable tokenizer (tokenizer.json holds no vocabulary)",
        ),
        (
            "tokenizer/tokenizer.json",
            [],
            "lacks a usable tokenizer (tokenizer.json cannot be read)",
        ),
        (
            "tokenizer/tokenizer.json",
            {"model": {"vocab": 7}},
            "(tokenizer.json holds no vocabulary)",
        ),
        ("tokenizer/tokenizer.json", SMALL, "tokens, its tokenizer has 1."),
        ("tokenizer/tokenizer_config.json", None, "(tokenizer_config.json cannot be read)"),
        (SCHEDULER, {}, "the scheduler in "),
        (SCHEDULER, {"_class_name": "DDIMScheduler"}, " is a 'DDIMScheduler'; "),
        ("text_encoder/config.json", {}, "the text_encoder in "),
        ("vae/config.json", {}, "the vae in "),
        ("transformer/config.json", {}, "the transformer in "),
    ],
)
def test_settings_file_with_another_kind_of_json_is_refused(
    family: str, file: str, content: Any, words: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(
        "t2i_checkpoint" if family == "kandinsky5-image" else "sana_checkpoint"
    )
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / file).write_text(json.dumps(content))

    assert words in plan_of(folder, family)


BAD_FACTORS: list[Any] = [
    0,
    1e-30,
    -1,
    None,
    "0.36",
    [0.36],
    True,
    math.nan,
    math.inf,
    1e30,
]
BAD_DEVIATIONS: list[Any] = [0, [0.0] * 16, [-1] * 16, ["1"] * 16, {}, "1" * 16]
BAD_MEANS: list[Any] = [5, [None] * 16, [math.nan] * 16, [1e30] * 16]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *(("kandinsky5-image", "scaling_factor", value) for value in BAD_FACTORS),
        ("kandinsky5-image", "shift_factor", "a"),
        ("kandinsky5-image", "shift_factor", math.nan),
        *(("sanavideo", "latents_std", value) for value in BAD_DEVIATIONS),
        *(("sanavideo", "latents_mean", value) for value in BAD_MEANS),
    ],
)
def test_vae_values_that_would_spoil_latents_are_refused(
    family: str, key: str, value: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(
        "t2i_checkpoint" if family == "kandinsky5-image" else "sana_checkpoint"
    )
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    assert plan_of(folder, family) == ""
    edit_config(folder / "vae", **{key: value})
    assert f" has {key} {repr(value)[:60]}, not a " in plan_of(folder, family)


def test_vae_with_non_finite_weights_is_refused(model: Path) -> None:
    edit_weights(
        model / "vae",
        lambda weights: {**weights, "decoder.conv_out.bias": torch.full((3,), torch.nan)},
    )
    with pytest.raises(
        UserError, match=r"the vae in .* NaN or infinite values in decoder.conv_out.bias"
    ):
        make_adapter(model).load_latent_encoder(CPU, torch.float32)


def test_scheduler_with_wrong_types_is_refused(model: Path) -> None:
    edit_config(model / "scheduler", "scheduler_config.json", num_train_timesteps="many")
    adapter = make_adapter(model)
    with pytest.raises(UserError, match=r"the scheduler in .* cannot be loaded: 'str' object"):
        adapter.load_preview_pipeline(adapter.load_transformer(torch.float32), CPU, None)


def test_shapes_are_compared_before_anything_is_encoded(
    workspace: Workspace, model: Path, capsys: Capture
) -> None:
    edit_weights(
        model / "vae", lambda weights: {**weights, "decoder.conv_out.bias": torch.zeros(7)}
    )
    error = complaint(workspace, capsys, "train")

    assert error.startswith(f"{MODEL}: the vae in ")
    assert error.endswith("does not fit its config.json: its files lack decoder.conv_out.bias [3].")
    assert not list(workspace.folder.rglob("*.zst"))


def test_loading_initialises_nothing_at_random(model: Path) -> None:
    edit_weights(model / "text_encoder", without("embed_tokens"))
    edit_weights(model / "vae", without("encoder.conv_in.bias"))
    adapter = make_adapter(model)
    with pytest.raises(
        UserError, match=r"the text_encoder in .* is incomplete: .*embed_tokens.weight"
    ):
        adapter.load_text_encoder(CPU, torch.float32)
    with pytest.raises(
        UserError, match=r"the vae in .* (is incomplete|cannot be loaded): .*encoder.conv_in.bias"
    ):
        adapter.load_latent_encoder(CPU, torch.float32)


class TestInitLora:
    """A LoRA to start from."""

    def write(self, workspace: Workspace, blocks: int = 2, rank: int = 4) -> Path:
        targets = ("to_query", "to_key", "to_value")
        names = [f"text_transformer_blocks.0.self_attention.{target}" for target in targets]
        for block in range(blocks):
            for kind in ("self", "cross"):
                names += [
                    f"visual_transformer_blocks.{block}.{kind}_attention.{target}"
                    for target in targets
                ]
        path = workspace.path(LORA_FILE)
        tensors = {f"transformer.{name}.lora_A.weight": torch.zeros(rank, 32) for name in names}
        save_file(
            tensors
            | {f"transformer.{name}.lora_B.weight": torch.zeros(32, rank) for name in names},
            path,
        )
        return path

    def test_init_lora_may_have_every_layer(self, workspace: Workspace, capsys: Capture) -> None:
        path = self.write(workspace)
        assert "init_lora" not in warnings(workspace, capsys, f"init_lora={path}", "lora_rank=4")

    def test_official_init_lora_shows_its_trigger(
        self, workspace: Workspace, capsys: Capture
    ) -> None:
        folder = workspace.path("official")
        folder.mkdir()
        weights = {
            f"base_model.model.{name.removeprefix('transformer.')}": tensor
            for name, tensor in load_file(self.write(workspace)).items()
        }
        save_file(weights, folder / "lora.safetensors", metadata={"trigger": "microwave,"})
        printed = warnings(workspace, capsys, f"init_lora={folder}", "lora_rank=4")

        assert "captions that begin with 'microwave,'" in printed

    def test_init_lora_may_have_some_layers(self, workspace: Workspace, capsys: Capture) -> None:
        printed = warnings(
            workspace, capsys, f"init_lora={self.write(workspace, blocks=1)}", "lora_rank=4"
        )
        assert (
            "trained layers; the others start untrained (visual_transformer_blocks.1."
            in " ".join(printed.split())
        )

    def test_init_lora_of_another_rank_is_refused(
        self, workspace: Workspace, capsys: Capture
    ) -> None:
        error = complaint(
            workspace, capsys, "plan", f"init_lora={self.write(workspace, rank=8)}", "lora_rank=4"
        )
        assert error.endswith("has rank 8, lora_rank is 4.")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"not a lora", "is not a complete safetensors file"),
            (b"\x80\x04\x95\x10\x00\x00\x00", "is not a complete safetensors file"),
            (None, "is not a complete safetensors file"),
        ],
    )
    def test_init_lora_must_be_a_lora_file(
        self, workspace: Workspace, content: bytes | None, words: str, capsys: Capture
    ) -> None:
        path = self.write(workspace)
        path.write_bytes(path.read_bytes()[:-5] if content is None else content)
        assert words in complaint(workspace, capsys, "plan", f"init_lora={path}", "lora_rank=4")

    def test_init_lora_is_refused_in_a_full_fine_tune(
        self, workspace: Workspace, capsys: Capture
    ) -> None:
        settings = ("model_type=full", "use_dora=true", f"init_lora={self.write(workspace)}")
        (error,) = complaints(workspace, capsys, "plan", *settings)
        assert error.startswith(
            "init_lora: needs model_type lora: model_type full trains every weight and no LoRA."
        )


def test_resolution_meant_in_megapixels_is_refused(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_datasets(
        [{**DATASETS[0], "resolution": 1, "resolution_type": "pixel"}, DATASETS[1]]
    )
    errors = complaints(workspace, capsys)
    assert any("for megapixels set resolution_type area" in error for error in errors)


def test_learning_rate_far_above_the_usual_is_a_warning(
    workspace: Workspace, capsys: Capture
) -> None:
    assert "learning_rate: 5 is far above" in warnings(workspace, capsys, "learning_rate=5")
