"""The command line itself: help, version, usage errors, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from simpletuner.cli import app
from simpletuner.cli.app import main
from simpletuner.config.schema import all_options
from simpletuner.errors import DiskFullError, Interrupted, NonFiniteError, UserError

Capture = pytest.CaptureFixture[str]
COMMANDS = [
    ["--help"], ["--version"], ["-v"], ["train", "--help"], ["plan", "--help"], ["configure", "--help"],
    ["cache", "--help"], ["cache", "fill", "--help"], ["cache", "verify", "--help"], ["cache", "gc", "--help"],
    ["cache", "explain", "--help"], ["examples", "--help"], ["examples", "copy", "--help"], ["examples", "list"],
]  # fmt: skip


def test_help_of_every_command_meets_neither_torch_nor_what_a_run_needs() -> None:
    script = (
        "import sys; from simpletuner.cli.app import main\n"
        f"for command in {COMMANDS!r}: assert main(command) == 0, command\n"
        "print(sorted({'torch', 'numpy', 'PIL', 'huggingface_hub', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_first_help_does_not_even_read_the_schema() -> None:
    script = "import sys; from simpletuner.cli.app import main; main(['--help']); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_help_lists_every_setting(capsys: Capture) -> None:
    for command in ("train", "plan"):
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert [name for name in all_options() if f"--{name}\n" not in shown] == []


def test_version(capsys: Capture) -> None:
    for flag in ("--version", "-v"):
        assert main([flag]) == 0
        assert capsys.readouterr().out.startswith("simpletuner ")


def test_no_command_shows_the_help(capsys: Capture) -> None:
    main([])
    shown = capsys.readouterr()
    assert "train" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["--nonsense"], ["cache"], ["cache", "explain"], ["examples", "x"]]
)
def test_usage_errors(capsys: Capture, arguments: list[str]) -> None:
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UserError("do this"), 2, "error: do this\n"),
        (DiskFullError("full"), 2, "error: full\n"),
        (NonFiniteError("NaN at step 3"), 1, "NaN at step 3\n"),
        (Interrupted("stopped at step 3"), 130, "stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
)
def test_every_way_to_stop_has_its_exit_code(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, told: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err == told


def test_what_nobody_foresaw_has_a_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(app, "app", fail)
    assert main(["train"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.splitlines()[-1] == "ZeroDivisionError: division by zero"
