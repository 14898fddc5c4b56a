"""What `speed` and its switches decide, and which combinations are refused or noted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config import speed
from simpletuner.config.load import Layer, resolve
from simpletuner.config.option import is_installed
from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.planning.checks import check_config
from tests.tools.refusals import family_complaints

REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}


def make(**settings: Any) -> RunConfig:
    config = resolve([Layer("config.json", list({**REQUIRED, **settings}.items()))], Problems())
    assert config is not None
    return config


def messages_about(**settings: Any) -> dict[str, list[str]]:
    """The messages about a config, errors and hints apart."""
    problems = check_config(make(**settings))
    return {
        "errors": [str(problem) for problem in problems if problem.fatal],
        "hints": [str(problem) for problem in problems if not problem.fatal],
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (True, True, True)),
        ({"speed": "reference"}, (False, False, False)),
        ({"speed": "reference", "speed_keep_attention": True}, (False, False, False)),
        ({"speed_keep_attention": False}, (True, False, True)),
    ],
)
def test_switches_follow_speed_unless_they_are_set(
    settings: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    group = make(**settings).speed
    switches = (
        speed.uses_own_arithmetic(group),
        speed.keeps_attention(group),
        speed.stores_modulation_in_bf16(group),
    )

    assert switches == expected


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cuda", "inductor"),
        ({}, "cpu", None),
        ({}, "mps", None),
        ({"dynamo_backend": "no"}, "cuda", None),
        ({"speed": "reference"}, "cuda", None),
        ({"speed": "reference", "dynamo_backend": "aot_eager"}, "cpu", "aot_eager"),
    ],
)
def test_the_compile_backend_follows_device_and_settings(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str, expected: str | None
) -> None:
    monkeypatch.setattr(speed, "has_compiler", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)

    config = make(**settings)

    assert speed.compile_backend(config.speed, config.launch, device) == expected


def test_without_a_compiler_the_default_is_not_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    config = make()

    assert speed.compile_backend(config.speed, config.launch, "cuda") is None
    assert "needs a C compiler" in messages_about(dynamo_backend="inductor")["errors"][0]
    assert messages_about(dynamo_backend="aot_eager") == {"errors": [], "hints": []}


@pytest.mark.parametrize(
    ("mechanism", "advice"),
    [
        ("flash-attn-2", "pip install flash-attn"),
        ("flash-attn-3", "docs/INSTALL.md"),
        ("flash-attn-4", "pip install 'flash-attn-4>=4.0.0b36,<5'"),
        ("xformers", "pip install xformers"),
    ],
)
def test_a_missing_attention_package_is_named(
    mechanism: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (error,) = messages_about(attention_mechanism=mechanism)["errors"]

    assert error.startswith(f"attention_mechanism: {mechanism!r} ")
    assert advice in error


def test_a_submodule_is_looked_up_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing `flash_attn` imports torch, and its older versions have no `flash_attn.cute`."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "heavy" / "light.py").touch()

    monkeypatch.syspath_prepend(tmp_path)

    assert is_installed("heavy.light")
    assert not is_installed("heavy.cute")
    assert not is_installed("missing.cute")


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"attention_mechanism": "sageattention"}, "errors", "no backward pass"),
        ({"attention_mechanism": "flex"}, "hints", "block-sparse"),
        (
            {"dynamo_backend": "aot_eager", "dynamo_mode": "max-autotune"},
            "errors",
            "a mode of inductor",
        ),
        ({"dynamo_mode": "max-autotun"}, "errors", "Did you mean 'max-autotune'?"),
        ({"dynamo_backend": "no", "dynamo_fullgraph": True}, "hints", "dynamo_backend is 'no'"),
        ({"speed": "reference", "dynamo_dynamic": True}, "hints", "dynamo_backend is not set"),
        (
            {"dynamo_backend": "no", "validation_torch_compile": False},
            "hints",
            "dynamo_backend is 'no'",
        ),
        ({"speed": "reference", "speed_keep_attention": True}, "hints", "speed reference"),
    ],
)
def test_contradicting_speed_settings_are_reported(
    settings: dict[str, Any], kind: str, words: str
) -> None:
    messages = messages_about(**settings)

    assert len(messages["errors"]) + len(messages["hints"]) == 1
    assert words in messages[kind][0]


def test_a_kernel_without_a_fixed_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert not messages_about(attention_mechanism="xformers")["errors"]
    assert not messages_about(attention_mechanism="flash-attn-2", deterministic=True)["errors"]

    (error,) = messages_about(attention_mechanism="xformers", deterministic=True)["errors"]
    assert error == (
        "attention_mechanism: 'xformers' sums in any order: not deterministic; use diffusers."
    )


def test_settings_for_fast_blocks_are_refused_without_them() -> None:
    config = make(speed_keep_attention=True)

    sana_complaints = [str(problem) for problem in family_complaints(config, SANA_VIDEO)]
    image_complaints = [str(problem) for problem in family_complaints(config, KANDINSKY5_IMAGE)]

    assert any(text.startswith("speed_keep_attention: ") for text in sana_complaints)
    assert not any(text.startswith("speed_") for text in image_complaints)
