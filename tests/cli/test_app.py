"""The command line itself: help, version, usage errors, exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.cli import app
from simpletuner.cli.app import COMMANDS, load_command, main
from simpletuner.cli.help import settings_help
from simpletuner.cli.train import keep_compiled
from simpletuner.config.datasets import dataset_options
from simpletuner.config.schema import all_options
from simpletuner.config.sections import EVERYDAY_WORDS
from simpletuner.errors import DiskFullError, Interrupted, NonFiniteError, UserError

Capture = pytest.CaptureFixture[str]
INSPECTED = [
    ["--version"],
    *([name, "--help"] for name in COMMANDS),
    ["examples", "list"],
    ["help", "resolution"],
]


def imported_by(commands: list[list[str]], packages: set[str]) -> str:
    """Which of some packages a process has imported once it has run these commands."""
    script = (
        "import sys; from simpletuner.cli.app import main\n"
        f"for command in {commands!r}: assert main(command) == 0, command\n"
        f"print(sorted({packages!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_help_of_every_command_needs_no_torch() -> None:
    assert imported_by(INSPECTED, {"torch", "diffusers", "transformers"}) == "[]"


def test_the_first_help_imports_no_command() -> None:
    heavy = {"pydantic", "numpy", "PIL", "starlette", *(module for module, _ in COMMANDS.values())}
    assert imported_by([["--help"], ["-h"], ["--version"]], heavy) == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_help_repeats_the_help_of_commands(name: str) -> None:
    first, _, _ = load_command(name).help.partition("\n\n")
    assert COMMANDS[name][1] == " ".join(first.split())


def test_help_of_train_fits_a_screen_and_leads_to_every_setting(capsys: Capture) -> None:
    shown: dict[str, str] = {}
    for command in ("train", "plan"):
        for flag in ("--help", "-h"):
            assert main([command, flag]) == 0
            shown[command] = capsys.readouterr().out
            assert len(shown[command].splitlines()) < 40
    assert "--device-memory" in shown["plan"]
    assert "--config FILE" in shown["train"]

    listed = ""
    for section in dict.fromkeys(option.section for option in all_options().values()):
        assert re.sub(r"\s+", " ", section) in re.sub(r"\s+", " ", shown["train"])
        assert main(["help", section]) == 0
        listed += capsys.readouterr().out
    assert [
        name for name in all_options() if f"--{name}\n" not in listed and f"{name}  (" not in listed
    ] == []


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (
            ["train", "--exmple", "demo"],
            "--exmple is neither an option nor a setting. Did you mean '--example'?",
        ),
        (
            ["start", "cat", "--triger=zkt"],
            "--triger is neither an option nor a setting. Did you mean '--trigger'?",
        ),
        (
            ["start", "cat", "trigger=zkt"],
            "trigger is neither an option nor a setting. Did you mean '--trigger'?",
        ),
        (["start"], "Missing argument 'folder'. See `"),
        (["cache", "clean"], "Did you mean `simpletuner cache gc --remove`?"),
        (["cache", "frobnicate"], "cache -h`."),
        (
            ["caption", "--style", "poem"],
            "Invalid value for '--style': 'poem' is not one of 'short', 'long', 'tags'.",
        ),
        (["sample", "--steps", "4"], "--prompt: is required"),
        (
            ["sweep"],
            "sweep: needs the output folder of a run: simpletuner sweep OUTPUT_DIR\n1 "
            "problem to fix",
        ),
        (
            ["train", "env=dmeo"],
            "the environment 'dmeo' was not found; tried config/dmeo/config.json",
        ),
        (["train", "env=dmeo"], "Did you mean 'demo'?"),
        (["help", "--flikcer"], "no setting mentions '--flikcer'. Did you mean 'flicker'?"),
        (["publish", "confg"], "'confg' does not exist. Did you mean 'config'?"),
        (["help", "flikcer"], "no setting mentions 'flikcer'. Did you mean 'flicker'?"),
        (["help", "mixflow_enabled"], "'mixflow_enabled' was removed in 0.2.0: "),
        (["help", "soap"], "'soap' is a value of optimizer that was removed in 0.2.0: "),
        (["help", "aws_bucket_name"], "'aws_bucket_name' was removed in 0.2.0 with type aws."),
        (["help", "deepspeed"], "'deepspeed' is not a key here: DeepSpeed is not supported"),
    ],
)
def test_a_misspelt_command_gets_a_suggestion(
    arguments: list[str],
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config/demo").mkdir(parents=True)
    Path("config/demo/config.json").write_text("{}")

    assert main(arguments) == 2
    assert printed in capsys.readouterr().err


def test_paragraphs_of_help_are_wrapped(capsys: Capture) -> None:
    assert main(["sample", "--help"]) == 0
    assert re.search(r"--guidance, --seed, --negative-prompt", capsys.readouterr().out)


@pytest.mark.parametrize(
    "command",
    [
        ["cache"],
        ["cache", "fill"],
        ["cache", "verify"],
        ["cache", "gc"],
        ["cache", "explain"],
        ["convert"],
        ["configure"],
        ["sample"],
    ],
)
def test_a_wide_terminal_shows_every_paragraph_of_help_on_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    assert main([*command, "--help"]) == 0

    help_text, *tables = capsys.readouterr().out.split("╭─ ")
    paragraphs = re.split(r"\n\s*\n", help_text.strip())
    rows = [row for table in tables for row in table.splitlines()]
    assert [paragraph for paragraph in paragraphs if "\n" in paragraph] == []
    assert [row for row in rows if row.startswith("│     ")] == []


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("CUDA_DEVICE_ORDER", None, "PCI_BUS_ID"),  # GPUs are counted as the plan counts them
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "FASTEST_FIRST"),
        ("GOMP_SPINCOUNT", None, "10000"),
        ("GOMP_SPINCOUNT", "7", "7"),
    ],
)
def test_variables_of_native_libraries_keep_the_users_values(
    monkeypatch: pytest.MonkeyPatch, key: str, given: str | None, expected: str
) -> None:
    seen: list[str] = []
    monkeypatch.setenv(key, given or "")
    if given is None:
        monkeypatch.delenv(key)
    monkeypatch.setattr(app, "main", lambda: seen.append(os.environ[key]))

    with pytest.raises(SystemExit):
        app.run()
    assert seen == [expected]


def test_help_of_a_key_has_choices_and_defaults(capsys: Capture) -> None:
    for name, option in all_options().items():
        shown = re.sub(r"\s+", " ", " ".join(settings_help(name)))
        assert all(choice in shown for choice in option.choices)
        assert "Default: " in shown

    assert main(["help", "validation-guidance"]) == 0
    assert "sanavideo 6.0" in capsys.readouterr().out
    assert main(["help", "checkpointing_steps"]) == 0
    assert "checkpoint_step_interval" in capsys.readouterr().out, "another spelling of a key"


EVERYDAY = [
    "vram",
    "OOM",
    "flicker",
    "blurry",
    "too strong",
    "forgets",
    "captions",
    "folder",
    "steps",
    "fps",
    "cfg",
    "nan",
]


@pytest.mark.parametrize("words", EVERYDAY)
def test_help_understands_everyday_words(words: str, capsys: Capture) -> None:
    assert main(["help", *words.split()]) == 0

    (keys,) = [keys for known, keys in EVERYDAY_WORDS.items() if words.lower() in known]
    shown = [
        line.lstrip("-")
        for line in capsys.readouterr().out.splitlines()
        if not line.startswith(" ")
    ]
    assert [*dict.fromkeys(shown)][: len(keys)] == keys


def test_help_understands_the_everyday_words_of_a_sentence(capsys: Capture) -> None:
    assert main(["help", "my", "cat", "looks", "burned"]) == 0

    shown = capsys.readouterr().out
    assert shown.startswith("--max_train_steps\n")
    assert "See docs/TROUBLESHOOTING.md: Overfitting; Previews are black, noisy or burnt." in shown


def test_everyday_words_name_keys_that_exist() -> None:
    known = {*all_options(), *dataset_options()}
    assert not [key for keys in EVERYDAY_WORDS.values() for key in keys if key not in known]


def test_help_knows_the_keys_of_datasets(capsys: Capture) -> None:
    assert main(["help", "num_frames"]) == 0
    assert "video.num_frames  (Dataset file)" in capsys.readouterr().out
    assert main(["help", "resolution"]) == 0

    shown = capsys.readouterr().out
    assert shown.index("(Dataset defaults)") < shown.index("(Dataset file)"), "a key of both places"


def test_help_searches_in_names_and_texts(capsys: Capture) -> None:
    assert main(["help", "offload"]) == 0

    shown = capsys.readouterr().out
    assert "See also: " in shown
    assert "group_offload_to_disk_path" in shown
    assert main(["help", "host", "memory"]) == 0
    assert "--enable_group_offload" in capsys.readouterr().out
    assert main(["help", "lerning_rate"]) == 2
    assert "Did you mean 'learning_rate'?" in capsys.readouterr().err
    assert main(["help"]) == 0
    assert "Optimizer (" in capsys.readouterr().out


COMPLETIONS = {
    "bash": ".bash_completions/simpletuner.sh",
    "zsh": ".zfunc/_simpletuner",
    "fish": ".config/fish/completions/simpletuner.fish",
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion_installs_and_completes(shell: str, tmp_path: Path) -> None:
    script = "import sys; sys.argv[0] = 'simpletuner'; from simpletuner.cli.app import run; run()"
    environment = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-c", script]

    subprocess.run(
        [*command, "--install-completion", shell],
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )
    assert f"complete_{shell}" in (tmp_path / COMPLETIONS[shell]).read_text()

    typed = {
        "COMP_WORDS": "simpletuner conf",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "simpletuner conf",
    }
    action = {
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_SIMPLETUNER_COMPLETE": f"complete_{shell}",
    }
    done = subprocess.run(
        command,
        env=os.environ | environment | typed | action,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "configure" in done.stdout


def test_version_is_printed(capsys: Capture) -> None:
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
def test_usage_errors_have_no_traceback(capsys: Capture, arguments: list[str]) -> None:
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError("do this"), 2, "error: do this\n"),
        (DiskFullError("full"), 2, "error: full\n"),
        (NonFiniteError("NaN at step 3"), 1, "NaN at step 3\n"),
        (Interrupted("stopped at step 3"), 130, "stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (OSError(errno.EIO, "Input/output error", "a/b"), 2, "error: a/b: Input/output error.\n"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            1,
            "error: out of memory: libtorch_cpu.so: failed to map segment from shared object. "
            "Free memory, or lift a limit on it (ulimit -v, or the container's).\n",
        ),
    ],
)
def test_every_kind_of_error_has_its_exit_code(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, printed: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(app, "get_command", lambda commands: fail)

    assert main(["train"]) == code
    assert capsys.readouterr().err == printed


def test_unforeseen_errors_have_a_traceback(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(app, "get_command", lambda commands: fail)
    assert main(["train"]) == 1

    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_compiled_code_is_cached_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/theirs")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    keep_compiled(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/theirs"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")

    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    keep_compiled(tmp_path)
    assert "TRITON_CACHE_DIR" not in os.environ, "torch keeps it elsewhere"
