"""What the precision keys mean before anything is loaded, and what is refused."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from simpletuner.config.precision import (
    check_packages,
    check_quantized_matmul,
    quantisation,
    text_encoder_storage,
    transformer_dtype,
)
from simpletuner.config.schema import PrecisionConfig, all_options
from simpletuner.config.sources import parse_arguments
from simpletuner.planning.build import plan_training
from simpletuner.planning.entries import make_catalogue
from simpletuner.run.train import prepare_machine
from tests.tools.refusals import complaint, complaints, warnings
from tests.tools.reports import found_by
from tests.tools.workspace import Workspace

KEYS = ("base_model_precision", "text_encoder_1_precision", "text_encoder_2_precision")
PACKAGES = [("int8-torchao", "torchao>=0.18,<0.19"), ("nf4-bnb", "bitsandbytes>=0.46,<0.51")]


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As if a package were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == module else find(name, *rest),
    )


@pytest.mark.parametrize("key", KEYS)
def test_every_precision_name_is_accepted_or_refused(key: str) -> None:
    for name in all_options()[key].choices:
        config = PrecisionConfig(**{key: name})
        refused = name in ("int4-torchao", "int8-sdnq", "uint8-sdnq", "int4-sdnq", "uint4-sdnq")
        if not refused:
            scheme = quantisation(name)
            assert scheme is None or scheme.name.partition("-")[0] == name.partition("-")[0]
        assert all(problem.where == key for problem in found_by(check_packages, config))


def test_bare_precision_name_means_quanto() -> None:
    for name in ("int8", "int4", "int2", "fp8", "fp8uz"):
        assert quantisation(name) is quantisation(f"{name}-quanto") is not None


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("name", "instead"), [("int4-torchao", "int4-quanto"), ("uint8-sdnq", "int8-quanto")]
)
def test_unavailable_precisions_are_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], key: str, name: str, instead: str
) -> None:
    workspace.write_config(**{key: name})
    problem = complaint(workspace, capsys)

    assert problem.startswith(f"{key}: '{name}' cannot be used: ")
    assert problem.endswith(f"; the nearest supported value is {instead}.")


@pytest.mark.parametrize(("name", "requirement"), PACKAGES)
def test_missing_package_is_reported_last(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    requirement: str,
) -> None:
    module = requirement.split(">")[0]
    without(monkeypatch, module)
    workspace.write_config(base_model_precision=name, model_flavour="t2i-light", lora_rank=0)
    *others, last = complaints(workspace, capsys)
    install = f"pip install '{requirement}'"

    assert (
        last
        == f"base_model_precision: '{name}' needs the package {module}, which is not installed: "
        f"{install}"
    )
    assert len(others) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"model_type": "full"},
            "base_model_precision: 'int8' cannot be combined with model_type full: a quantised "
            "model cannot be trained in full; use model_type lora, or bf16 and offload auto.",
        ),
        *(
            (
                {"lora_init_type": init},
                f"lora_init_type: '{init}' changes the base, which base_model_precision 'int8' "
                "does not allow. Use default or gaussian.",
            )
            for init in ("pissa", "olora")
        ),
        (
            {"lora_init_type": "loftq"},
            "lora_init_type: 'loftq' is not supported: it replaces the base with a quantised "
            "one; use default.",
        ),
        (
            {"fsdp_enable": True},
            "fsdp_enable: cannot be combined with base_model_precision int8: quantised "
            "weights cannot be sharded.",
        ),
    ],
)
def test_settings_that_a_quantised_base_excludes_are_refused(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    expected: str,
) -> None:
    workspace.write_config(base_model_precision="int8", **settings)
    assert expected in complaints(workspace, capsys)
    workspace.write_config(base_model_precision="fp32")
    if settings.get("lora_init_type") != "loftq":
        assert workspace.run("plan") == 0, "a plain dtype excludes none of it"


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("no_change", "these are not quantised"),
        ("bf16", "these are not quantised"),
        ("int4", "below 8 bits, scales change within a row"),
        ("nf4-bnb", "below 8 bits, scales change within a row"),
        ("fp8uz", "GPUs multiply another float8"),
        ("int8-torchao", "torchao computes its own products"),
        ("int8dq-torchao", "it multiplies in int8 without this key"),
    ],
)
def test_quantized_matmul_is_refused_for_bases_without_it(base: str, reason: str) -> None:
    config = PrecisionConfig(base_model_precision=base, quantized_matmul=True)
    (problem,) = found_by(check_quantized_matmul, config)
    assert str(problem).startswith(
        "quantized_matmul: multiplies weights stored as int8-quanto, fp8-quanto, not "
        f"'{base}': {reason}. Leave it out"
    )


def test_quantized_matmul_needs_a_capable_gpu(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.write_config(quantized_matmul=True, model_type="full")
    assert complaint(workspace, capsys).startswith(
        "quantized_matmul: cannot be combined with model_type full: "
    )
    monkeypatch.setattr("simpletuner.budget.drivers.compute_capability", lambda: (8, 6))
    workspace.write_config(quantized_matmul=True, base_model_precision="fp8", model_type="lora")
    assert complaint(workspace, capsys) == (
        "quantized_matmul: fp8-quanto needs a GPU of compute capability 8.9; this one has 8.6. Set "
        "base_model_precision int8-quanto, or quantized_matmul false."
    )
    assert workspace.run("plan", "--device-memory=24") == 0, "the GPU of another machine"
    assert workspace.run("plan", "base_model_precision=int8") == 0


@pytest.mark.parametrize("precision", ["int8-quanto", "bf16"])
def test_precision_of_a_missing_second_encoder_is_a_warning(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    sana_checkpoint: Any,
    precision: str,
) -> None:
    same = {"text_encoder_1_precision": "bf16"} if precision == "bf16" else {}
    workspace.write_config(text_encoder_2_precision=precision, **same)
    assert warnings(workspace, capsys) == ""
    workspace.write_config(text_encoder_1_precision="no_change")
    settings = {"model_family": "sanavideo", "model_flavour": None, "validation_resolution": None}
    workspace.write_config(pretrained_model_name_or_path=str(sana_checkpoint), **settings)
    printed = warnings(workspace, capsys)
    assert "text_encoder_2_precision: has no effect: Sana Video has one text encoder." in printed


def test_both_text_encoders_must_have_one_dtype(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(text_encoder_2_precision="bf16")  # in a float32 run
    assert complaint(workspace, capsys).startswith(
        "text_encoder_2_precision: 'bf16': the text encoders compute in one"
    )
    workspace.write_config(text_encoder_2_precision="fp32", text_encoder_1_precision="int8")
    assert warnings(workspace, capsys) == ""


@pytest.mark.parametrize(
    ("dtype", "visible", "expected"),
    [("fp32", "0", False), ("bf16", "0", None), ("fp32", "", None), ("fp32", "-1", None)],
)
def test_full_float32_on_a_gpu_changes_the_keys_of_latents(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    visible: str,
    expected: bool | None,
) -> None:
    """Older entries of a GPU were computed in TF32; keys of a CPU and of captions are unchanged."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with workspace.inside():
        catalogue = make_catalogue(plan_training(parse_arguments([f"vae_dtype={dtype}"])))

    assert catalogue is not None
    assert catalogue.vae.tf32 is expected
    assert catalogue.text_encoder.tf32 is None
    assert ("tf32" in catalogue.vae.text) is (expected is False)


def test_cudnn_attention_is_disabled(workspace: Workspace) -> None:
    """Its gradients of masked attention may be NaN."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    with workspace.inside():
        prepare_machine(plan_training(parse_arguments([])))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("ahead", "expected"), [(True, True), (False, False)])
def test_tf32_is_off_where_a_float32_vae_runs_beside_training(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, ahead: bool, expected: bool, trains: bool
) -> None:
    """A float32 VAE that encodes during training must not use TF32.

    Plans without datasets, of samples, do the same, so that samples equal previews.
    """
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    with workspace.inside():
        plan = plan_training(
            parse_arguments(["vae_dtype=fp32", f"vae_cache_ondemand={not ahead}".lower()])
        )
    prepare_machine(plan if trains else replace(plan, datasets=[]))
    allowed = [place.allow_tf32 for place in places]
    for place, was in zip(places, before, strict=True):
        place.allow_tf32 = was

    assert allowed == [expected] * 2


@pytest.mark.parametrize(
    ("first", "second", "encoders", "expected"),
    [
        ("no_change", "no_change", 2, "no_change"),
        ("fp32", "fp32", 2, "no_change"),
        ("int8", "int8-quanto", 2, "int8-quanto"),
        ("int8", "no_change", 2, "int8-quanto+no_change"),
        ("no_change", "int4", 2, "no_change+int4-quanto"),
        ("fp8", "int4", 1, "fp8-quanto"),
        ("no_change", "int4", 1, "no_change"),
    ],
)
def test_storage_dtype_changes_cache_keys(
    first: str, second: str, encoders: int, expected: str
) -> None:
    config = PrecisionConfig(text_encoder_1_precision=first, text_encoder_2_precision=second)
    assert text_encoder_storage(config, encoders) == expected


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "bf16"),
        ({"base_model_default_dtype": "fp32"}, "bf16"),
        ({"base_model_precision": "fp32", "base_model_default_dtype": "bf16"}, "fp32"),
        ({"base_model_precision": "int8"}, "bf16"),
        ({"base_model_precision": "int8", "mixed_precision": "no"}, "fp32"),
        ({"base_model_precision": "int8", "mixed_precision": "fp16"}, "fp16"),
        ({"base_model_precision": "int8", "base_model_default_dtype": "fp32"}, "fp32"),
    ],
)
def test_transformer_dtype_follows_the_settings(settings: dict[str, Any], dtype: str) -> None:
    assert transformer_dtype(PrecisionConfig(**settings)) == dtype
