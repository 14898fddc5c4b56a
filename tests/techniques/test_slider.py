"""Sliders: the strength of the LoRA depends on the dataset, and is restored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from simpletuner.diffusion.batch import Batch
from simpletuner.models.lora_layers import matching_modules
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.techniques.preservation import PreservationSpec
from simpletuner.planning.techniques.slider import SliderSpec
from simpletuner.techniques.preservation import Preservation
from simpletuner.techniques.slider import Slider
from simpletuner.training import step
from tests.techniques.test_preservation import gradients, moved
from tests.tools.assembly import make_batch
from tests.tools.refusals import warnings
from tests.tools.runs import assert_same_run
from tests.tools.tolerances import ROTATION, distance
from tests.tools.workspace import DATASETS, Workspace

STRENGTH = -1.5


@pytest.fixture(scope="module")
def batch(t2i_checkpoint: Path) -> Batch:
    return replace(make_batch(t2i_checkpoint, ["an old tree", "a tree"]), dataset_id="old")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "enable_group_offload": True},
    ],
    ids=["plain", "checkpointed", "streamed"],
)
def test_the_lora_acts_with_the_strength_of_its_dataset(
    t2i_checkpoint: Path, batch: Batch, settings: dict[str, Any]
) -> None:
    """As one with B times the strength; checkpointing computes blocks again when the forward pass
    is long over.
    """
    other = moved(t2i_checkpoint, lora_alpha=8)
    with torch.no_grad():
        for name, parameter in other.parameters.items():
            parameter.mul_(STRENGTH if ".lora_B." in name else 1.0)
    expected = gradients(other, batch)
    slider = moved(
        t2i_checkpoint, Slider(SliderSpec({"old": STRENGTH, "new": 1.0})), lora_alpha=8, **settings
    )
    actual = gradients(slider, batch)

    assert distance(
        actual,
        {
            name: gradient * (STRENGTH if ".lora_B." in name else 1)
            for name, gradient in expected.items()
        },
    ) < (ROTATION)


@pytest.mark.slow(3)
@pytest.mark.usefixtures("traced_only", "one_size")
def test_compiled_blocks_follow_the_strength(t2i_checkpoint: Path, batch: Batch) -> None:
    """From one micro-batch to the next; preservation runs at the usual strength."""
    torch.compiler.reset()
    batch = replace(batch, other_embeds=batch.embeds[::-1])
    ends = [replace(batch, dataset_id=name) for name in ("old", "new")]
    actual, expected = (
        gradients(
            moved(
                t2i_checkpoint,
                Slider(SliderSpec({"old": STRENGTH, "new": 1.0})),
                Preservation(PreservationSpec(1.0, 1.0)),
                gradient_accumulation_steps=len(ends),
                **settings,
            ),
            *ends,
        )
        for settings in ({"dynamo_backend": "aot_eager"}, {})
    )

    assert distance(actual, expected) < ROTATION


def test_datasets_without_a_strength_train_as_usual(t2i_checkpoint: Path, batch: Batch) -> None:
    neutral = replace(batch, dataset_id="neutral")
    result, plain = (
        gradients(moved(t2i_checkpoint, *given), neutral)
        for given in ([Slider(SliderSpec({"old": -1.0}))], [])
    )
    assert all(torch.equal(result[name], plain[name]) for name in plain)


@pytest.mark.parametrize("part", ["micro_loss", "_backward", ""])
def test_the_strength_is_restored(
    t2i_checkpoint: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    slider = Slider(SliderSpec({"old": STRENGTH}))
    assembly = moved(t2i_checkpoint, slider)
    usual = [dict(layer.scaling) for layer in slider._layers]
    during: list[float] = []

    def fail(*arguments: Any) -> None:
        during.extend(scale for layer in slider._layers for scale in layer.scaling.values())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(step, part or "loss_divisor", fail)

    with pytest.raises(RuntimeError, match="out of memory"):
        gradients(assembly, batch)
    assert set(during) == {STRENGTH}
    assert [dict(layer.scaling) for layer in slider._layers] == usual


def slider_run(folder: Path, checkpoint: Path, **settings: Any) -> Workspace:
    run = Workspace.create(
        folder,
        checkpoint,
        pictures=4,
        max_train_steps=6,
        checkpoint_step_interval=2,
        slider_lora_target=True,
        **settings,
    )
    run.write_datasets(
        [
            {**DATASETS[0], "id": name, "slider_strength": strength}
            for name, strength in (("old", 1), ("new", -1))
        ]
        + [{**DATASETS[0], "id": "neutral"}, DATASETS[1]]
    )
    return run


@pytest.mark.slow
def test_runs_resume_bit_for_bit(tmp_path: Path, t2i_checkpoint: Path) -> None:
    straight = slider_run(tmp_path / "straight", t2i_checkpoint)
    assert straight.train() == 0
    # Stopped before the first batch without a strength.
    broken = straight.stopped(tmp_path / "broken", 2)
    assert broken.train() == 0
    assert_same_run(straight, broken)

    names = load_file(straight.path("output/pytorch_lora_weights.safetensors"))
    assert names
    assert all("visual_transformer_blocks" in name and "self_attention" in name for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_targets_exclude_text_layers(family: str) -> None:
    spec = FAMILIES[family]
    modules = [
        name.removesuffix(".weight") for name in spec.cost.of_flavour(spec.flavours[0].name).shapes
    ]
    chosen = matching_modules(modules, spec.lora_presets["slider"])

    assert len({name.rsplit(".", 1)[0] for name in chosen}) >= 20
    assert not any(
        "text" in name or "cross" in name or "attn2" in name or "ff" in name for name in chosen
    )


@pytest.mark.parametrize(
    ("settings", "keys", "expected"),
    [
        ({"model_type": "full", "learning_rate": 1e-5}, {}, "needs model_type lora"),
        ({"use_dora": True}, {}, "cannot be combined with use_dora"),
        (
            {"lora_init_type": "pissa", "base_model_precision": "fp32"},
            {},
            "cannot be combined with lora_init_type pissa",
        ),
        ({}, {"is_regularisation_data": True}, "cannot be combined with is_regularisation_data"),
        (
            {"slider_lora_target": True, "peft_lora_target_modules": "all-linear"},
            {},
            "both choose layers",
        ),
    ],
)
def test_invalid_settings_are_reported(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    keys: dict[str, Any],
    expected: str,
) -> None:
    workspace.write_config(**settings)
    workspace.write_datasets([{**DATASETS[0], "slider_strength": 1, **keys}, DATASETS[1]])
    assert workspace.run("plan") == 2
    captured = capsys.readouterr()
    assert expected in " ".join((captured.out + captured.err).split())


def test_slider_targets_without_a_slider_cause_a_warning(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key still chooses the layers, so the message must not call it without effect."""
    message = (
        "slider_lora_target: no dataset sets slider_strength: "
        "the run trains an ordinary LoRA, on a slider's layers."
    )

    assert message in warnings(workspace, capsys, "slider_lora_target=true")

    workspace.write_datasets([{**DATASETS[0], "slider_strength": 1}, DATASETS[1]])
    assert message not in warnings(workspace, capsys, "slider_lora_target=true")
