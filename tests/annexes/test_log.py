"""What is logged to the console and to the file, without secrets."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simpletuner.annexes.display.log import setup_logging
from simpletuner.errors import UserError
from simpletuner.redaction import HIDDEN, _known_secrets, hide, redact, redact_settings

our_logger = logging.getLogger("simpletuner.somewhere")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_debug_file_logs_everything_and_console_only_what_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(debug_file=tmp_path / "debug.log")
    our_logger.debug("detail")
    our_logger.info("caches are complete")
    our_logger.warning("careful")
    logging.getLogger("noisy.library").info("chatter")

    logging.getLogger("noisy.library").warning("trouble")
    console = capsys.readouterr().err.splitlines()
    assert console == ["caches are complete", "WARNING careful", "WARNING trouble"]

    file = (tmp_path / "debug.log").read_text()
    assert all(
        text in file for text in ("detail", "caches are complete", "careful", "chatter", "trouble")
    )


def test_second_setup_appends_without_duplicating_lines(tmp_path: Path) -> None:
    for word in ("first", "second"):
        setup_logging(debug_file=tmp_path / "debug.log")
        our_logger.info(word)
    lines = (tmp_path / "debug.log").read_text().splitlines()

    assert [line.split()[-1] for line in lines] == ["first", "second"]


def test_log_lines_name_their_process(tmp_path: Path) -> None:
    for process in ("[0] ", "[1] "):
        setup_logging(debug_file=tmp_path / "debug.log", process=process)
        our_logger.warning("careful")
    assert [line.split()[2] for line in (tmp_path / "debug.log").read_text().splitlines()] == [
        "[0]",
        "[1]",
    ]


def test_log_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIMPLETUNER_LOG_LEVEL", "warning")
    setup_logging(debug_file=None)
    our_logger.info("hidden")

    our_logger.warning("shown")

    assert capsys.readouterr().err == "WARNING shown\n"


@pytest.mark.parametrize(
    "name",
    [
        "torchao.kernel.intmm",
        "torch.utils._pytree",
        "diffusers.quantizers.torchao.torchao_quantizer",
        "py.warnings",
    ],
)
def test_warnings_during_imports_are_hidden(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None)
    logging.getLogger(name).warning("no triton here")
    logging.getLogger("diffusers.models").warning("a weight is missing")

    logging.getLogger(name).error("cannot go on")

    assert capsys.readouterr().err.splitlines()[0].endswith("a weight is missing")


def test_unknown_log_level_suggests_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLETUNER_LOG_LEVEL", "WARNIG")
    with pytest.raises(UserError, match=r"SIMPLETUNER_LOG_LEVEL: 'WARNIG'.*Did you mean 'WARNING'"):
        setup_logging(None)


def test_unwritable_debug_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(debug_file=tmp_path / "absent" / "debug.log")
    assert "there is no debug log" in capsys.readouterr().err


def test_library_handlers_are_replaced_so_that_lines_appear_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    setup_logging(debug_file=None)

    logger.warning("once")

    assert capsys.readouterr().err == "WARNING once\n"


SECRETS = [
    "hf_" + "a1B2" * 8,
    "Authorization: Bearer abcdef1234567890",
    "{'Authorization': 'Basic dXNlcjpwYXNz'}",
    "X-API-Key: 9f8e7d6c5b4a",
    "https://discord.com/api/webhooks/123456/AbCdEf-token",
    "https://user:geheim99@example.org/hook",
    "https://example.org/hook?token=abcdef123456",
    '{"auth_token": "s3cr3t-value-1"}',
    "webhook_url=https://example.org/abc",
    "sk-proj-" + "x" * 24,
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_recognised_by_their_shape(text: str) -> None:
    redacted = redact(f"before {text} after")

    assert HIDDEN in redacted
    assert redacted.startswith("before ")
    assert "after" in redacted
    for part in ("a1B2", "abcdef", "dXNl", "9f8e", "AbCdEf", "geheim", "s3cr3t", "org/abc", "xxxx"):
        assert part not in redacted
    assert redact(redacted) == redacted


HARMLESS = [
    "tokenizer_max_length=256, max_tokens: 12345678",
    "a photo of a sks token, very secret place",
    "revision 0123456789abcdef0123456789abcdef01234567",
    "https://huggingface.co/kandinskylab/Kandinsky-5.0",
    "step 40: loss 0.25",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_environment_and_declared_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    hide("https://own.example/hook")
    try:
        assert (
            redact("key 0123456789abcdef to https://own.example/hook.")
            == f"key {HIDDEN} to {HIDDEN}."
        )
    finally:
        _known_secrets.clear()


def test_secrets_in_arguments_and_tracebacks_do_not_reach_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(debug_file=tmp_path / "debug.log")

    try:
        raise RuntimeError("refused api_key=abcdef123456")
    except RuntimeError:
        our_logger.exception("upload with %s failed", {"auth_token": "s3cr3t-value-1"})

    for text in (capsys.readouterr().err, (tmp_path / "debug.log").read_text()):
        assert "RuntimeError: refused" in text
        assert "abcdef123456" not in text
        assert "s3cr3t" not in text


def test_secret_settings_are_hidden_by_name_and_by_content() -> None:
    settings = {
        "tokenizer_max_length": 256,
        "hub_token": "x",
        "webhook_config": [
            {"webhook_url": "https://example.org/1", "auth_token": "abc", "message_prefix": "me"}
        ],
        "note": "use hf_" + "a" * 30,
        "api_key": None,
    }

    assert redact_settings(settings) == {
        "tokenizer_max_length": 256,
        "hub_token": HIDDEN,
        "webhook_config": [{"webhook_url": HIDDEN, "auth_token": HIDDEN, "message_prefix": "me"}],
        "note": f"use {HIDDEN}",
        "api_key": None,
    }
    assert settings["hub_token"] == "x"


def test_reporting_imports_without_torch() -> None:
    modules = [
        "simpletuner.config.publishing",
        "simpletuner.reporting.events",
        "simpletuner.reporting.metrics",
        "simpletuner.reporting.pace",
        "simpletuner.reporting.record",
        "simpletuner.annexes.figures",
        "simpletuner.annexes.payloads",
        "simpletuner.annexes.display.log",
        "simpletuner.annexes.display.progress",
        "simpletuner.annexes.display.terminal",
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nheavy = "
        "{'torch', 'wandb', 'tensorboard', 'numpy', 'diffusers', 'transformers'} & "
        "set(sys.modules)\nsys.exit(', '.join(sorted(heavy)) or 0)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
