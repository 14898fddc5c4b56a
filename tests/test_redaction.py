"""Secrets of a run: hidden by their values wherever text leaves the process."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from simpletuner.atomic import build_folder
from simpletuner.errors import Problem
from simpletuner.redaction import (
    HIDDEN,
    _known_secrets,
    hidden_for_now,
    hide,
    redact,
    redact_settings,
    redact_texts,
)
from tests.tools.refusals import complaint
from tests.tools.workspace import DATASETS, Workspace

SECRET = "T0P/B0X/opensesame"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def forget_secrets() -> Iterator[None]:
    yield
    _known_secrets.clear()


@pytest.mark.parametrize(
    "webhook",
    [
        {
            "webhook_type": "raw",
            "callback_url": f"ftp://example.org/{SECRET}",
            "auth_token": SECRET,
        },
        [{"callback_url": "https://example.org/{env:MY_HOOK}"}],
        "https://example.org/{env:MY_HOOK}",
    ],
)
def test_errors_never_show_a_webhook_address(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture, webhook: object
) -> None:
    monkeypatch.setenv("MY_HOOK", SECRET)
    workspace.write_config(webhook_config=webhook)

    message = complaint(workspace, capsys)

    assert "webhook_config" in message
    assert "opensesame" not in message


def test_no_file_contains_the_value_of_an_expanded_variable(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("MY_HOOK", SECRET)
    workspace.write_config(
        tracker_run_name="run of {env:MY_HOOK}",
        modelspec_comment="made by {env:MY_HOOK}",
        max_train_steps=1,
        validation_disable=True,
    )
    assert workspace.run("train") == 0

    capsys.readouterr()
    files = [
        path
        for path in workspace.folder.rglob("*")
        if path.is_file() and path.name != "config.json"
    ]
    files += list(workspace.path("output").rglob("config.json"))
    assert any(path.suffix == ".safetensors" for path in files)
    assert [str(path) for path in files if b"opensesame" in path.read_bytes()] == []

    log = workspace.path("debug.log").read_text()
    assert '"learning_rate"' in log, "the debug log holds the settings"
    assert "plan " in log


def test_settings_whose_names_end_in_key_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_KEY", "0123456789abcdef")

    assert redact("with 0123456789abcdef") == "with [hidden]"
    assert redact_settings({"S3_KEY": "abc", "keyboard": "abc"}) == {
        "S3_KEY": "[hidden]",
        "keyboard": "abc",
    }


@pytest.mark.parametrize(
    ("text", "in_run", "in_request"),
    [
        ("https://", False, False),
        ("--------", False, False),
        ("learning_rate", True, False),
        ("hunter22", True, True),
        ("https://example.org/a", True, True),
    ],
)
def test_short_texts_and_words_are_not_hidden(text: str, in_run: bool, in_request: bool) -> None:
    with hidden_for_now():
        hide(text)
        assert (HIDDEN in redact(f"<{text}>")) == in_request
    assert redact(f"<{text}>") == f"<{text}>", "a request is over"

    hide(text)
    assert (HIDDEN in redact(f"<{text}>")) == in_run


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", "tab\tbed", "a\\b"])
def test_a_dataset_id_cannot_leave_the_cache_folder(
    workspace: Workspace, capsys: Capture, name: str
) -> None:
    workspace.write_datasets([{**DATASETS[0], "id": name}, DATASETS[1]])
    message = complaint(workspace, capsys)

    assert "cannot name a folder" in message
    assert "\t" not in message


def test_control_characters_of_names_are_escaped() -> None:
    assert str(Problem("a\x1b[2Jb\n.png", "is \u202egnp.")) == "a\\x1b[2Jb\\n.png: is \\u202egnp."


def test_the_files_of_a_folder_share_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with build_folder(tmp_path / "checkpoint") as folder:
            for name, mode in (("open", 0o666), ("closed", 0o600)):
                (folder / name).write_text("x")
                (folder / name).chmod(mode)
    finally:
        os.umask(before)

    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "checkpoint").iterdir()}

    assert modes == {0o640}


@pytest.mark.parametrize("key", ["cache_dir", "cache_dir_text", "cache_dir_vae"])
def test_a_file_in_place_of_a_cache_folder_is_reported(
    workspace: Workspace, capsys: Capture, key: str
) -> None:
    workspace.path("taken").write_text("x")
    assert (
        complaint(workspace, capsys, "plan", f"{key}=taken")
        == f"{key}: 'taken' cannot be a folder: 'taken' is a file."
    )

    workspace.write_datasets([{**DATASETS[0], "cache_dir_vae": "taken/deeper"}, DATASETS[1]])
    assert "'taken' is a file" in complaint(workspace, capsys)


def test_texts_are_redacted_under_any_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[int] = []
    monkeypatch.setattr("simpletuner.redaction._secrets", lambda: gathered.append(1) or [SECRET])

    values = {
        "key": "init_vae_cache",
        "number": 1.5,
        "deep": [{"token": f"see {SECRET}"}, None],
        "pair": ("a", SECRET),
    }

    assert redact_texts(values) == {
        "key": "init_vae_cache",
        "number": 1.5,
        "deep": [{"token": f"see {HIDDEN}"}, None],
        "pair": ["a", HIDDEN],
    }
    assert redact_settings(values)["key"] == HIDDEN
    assert len(gathered) == 2
