"""Sources of settings: the command line (`key=value`, `--key=value`, `--key value` and bare
`--flag`), environment variables, and files, located by name, as a packaged example, or in the
default locations."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from simpletuner.config.absent import why_absent
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.foreign_files import foreign_config
from simpletuner.config.json_reader import read_json, read_text
from simpletuner.config.load import Layer
from simpletuner.config.paths import home_path
from simpletuner.config.schema import option_names
from simpletuner.config.strays import describe_folder
from simpletuner.config.types import plain_key
from simpletuner.errors import ConfigError, Problem, Problems, did_you_mean, not_one_of

EXTRA_ARGUMENTS = "TRAINER_EXTRA_ARGS"
# A JSON object: settings of a process that the page starts which a command line would show to every
# user.
SECRET_SETTINGS = "SIMPLETUNER_SECRET_SETTINGS"
# Origins of settings that are in no file: the command line, and function arguments.
COMMAND_LINE = "command line"
ARGUMENTS = "config"
# Arguments that select the config and are not settings, mapped to the name they are stored under.
SELECTORS = {
    **{key: key for key in ("env", "example", "config_path", "config_backend")},
    "config": "config_path",
}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Paths in packaged examples start with this and are redirected into the package.
EXAMPLES_ALIAS = "config/examples/"
BACKENDS = ("json", "toml", "env")  # in search order
DATASET_FILE = "multidatabackend.json"
# Launch settings that may come from environment variables, and their keys.
LAUNCH_VARIABLES = {
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    "MIXED_PRECISION": "mixed_precision",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}
ENV_NAME = re.compile(r"[A-Za-z_]\w*")
# Tokens of a shell value; the first matching alternative wins. A # inside a word does not start a
# comment.
SHELL_WORD = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|(?P<comment>(?:^|(?<=\s))#.*)"""
    r"""|(?P<open>['"])|(?P<plain>[^'"\\#]+|.)"""
)
# Expansions outside single quotes. Within double quotes, a backslash escapes only these four
# characters.
VARIABLE = re.compile(
    r"\\(?P<escaped>[\"\\$`])|\$(?P<name>\{\w+\}|[A-Za-z_]\w*)|(?P<command>`|\$[({])"
)
# Variables of shells, libraries and this program's launcher, which are no settings.
SHELL_VARIABLES = frozenset(
    {
        EXTRA_ARGUMENTS,
        "CONFIG_PATH",
        "CONFIG_BACKEND",
        "CONFIG_TYPE",
        "ENV",
        "ACCELERATE_EXTRA_ARGS",
    }
)
SHELL_PREFIXES = (
    "SIMPLETUNER_",
    "HF_",
    "WANDB_",
    "CUDA_",
    "NCCL_",
    "OMP_",
    "TORCH",
    "PYTORCH_",
    "TOKENIZERS_",
    "AWS_",
)
LIKE_A_SETTING = 0.85  # similarity above which a variable is a misspelt setting
ENV_VARIABLES = ("SIMPLETUNER_ENV", "SIMPLETUNER_ENVIRONMENT", "ENV")


@dataclass(frozen=True)
class Located:
    """The layers of a configuration (weakest first), and the folder of its file.

    `extra_arguments` are command line arguments from a config.env in that folder.
    """

    layers: Sequence[Layer]
    folder: Path = Path()
    extra_arguments: str = ""


def config_from_values(values: Mapping[str, Any]) -> Located:
    """A configuration without a file."""
    return Located(
        [
            launch_layer(),
            Layer(ARGUMENTS, [(key, resolve_alias(value)) for key, value in values.items()]),
        ]
    )


class CollectRemote(Protocol):
    """Lists the files of remote datasets by id; `simpletuner.data.entries.Collect` names the types,
    which are above.
    """

    def __call__(
        self, entries: Sequence[Any], context: Any, report: Problems, /
    ) -> Mapping[str, Any]: ...


@dataclass
class Arguments:
    """The parsed command line.

    Attributes:
        settings: keys and values in the order given; a bare flag has the value True.
        selectors: values of `SELECTORS`, such as `env` and `example`.
        collect: downloads remote datasets, see `DataContext.collect`.
        problems: syntax errors; planning adds more problems.
        base: the configuration that the settings override; None to locate one.
        label: origin of the settings in messages.
        names_configuration: a bare word means a configuration; its problem says how to choose it.
        device: the device that a plan is asked about; training uses the device of this machine.
    """

    settings: list[tuple[str, object]] = field(default_factory=list)
    selectors: dict[str, str] = field(default_factory=dict)
    collect: CollectRemote | None = None
    problems: Problems = field(default_factory=Problems)
    base: Located | None = None
    label: str = COMMAND_LINE
    names_configuration: bool = False
    device: AskedDevice = HERE

    def layers(self, report: Problems) -> tuple[list[Layer], Path]:
        """The layers of files, environment and command line, weakest first, and the folder of the
        config file.
        """
        try:
            located = self.base or locate(self.selectors, report)
        except ConfigError:
            if self.names_configuration:  # that none was found is a consequence
                raise ConfigError(
                    problem for problem in report if problem.where != "config"
                ) from None
            raise
        # Arguments from a config.env follow the command line.
        more = parse_arguments([], located.extra_arguments)
        report.extend(more.problems)
        return [
            *located.layers,
            replace(self, settings=[*self.settings, *more.settings]).layer(),
        ], located.folder

    def with_seed(self, seed: int | None) -> Arguments:
        """These arguments with the seed drawn by another process, if any."""
        return (
            self if seed is None else replace(self, settings=[*self.settings, ("seed", str(seed))])
        )

    def layer(self) -> Layer:
        """The settings as the layer with the highest priority; `null` unsets a key, as in JSON."""
        values = [(key, None if value == "null" else value) for key, value in self.settings]
        return Layer(self.label, values, last_wins=True)


def parse_arguments(tokens: Sequence[str], extra: str | None = None) -> Arguments:
    """Parse the command line, followed by TRAINER_EXTRA_ARGS (or `extra` instead), split at white
    space.
    """
    arguments = Arguments()
    waiting = [*tokens, *(os.environ.get(EXTRA_ARGUMENTS, "") if extra is None else extra).split()]
    while waiting:
        token = waiting.pop(0)
        key, equals, value = token.partition("=")
        name = plain_key(key)
        if not key.lstrip("-") or (not equals and not token.startswith("--")):
            choice = _choice_of_configuration(token)
            if choice:
                arguments.names_configuration = True
            arguments.problems.error(token, choice or _why_stray(token))
            continue
        # `--key value`; a bare `--flag` before another setting looks the same.
        if not equals and waiting and _is_value(waiting[0], key):
            equals = "="
            value = waiting.pop(0)
        # As written, for messages; `canonical` resolves the name.
        if name not in SELECTORS:
            arguments.settings.append((key, value if equals else True))
        elif equals:
            arguments.selectors[SELECTORS[name]] = value
        else:
            arguments.problems.error(key, "needs a value after it.")
    return arguments


def _choice_of_configuration(token: str) -> str:
    """How to choose the configuration that a bare word means, as the end of a message; empty for
    other words.
    """
    suffixes = tuple(f".{backend}" for backend in BACKENDS)
    files = (
        [token]
        if token.endswith(suffixes)
        else [f"{token}/config.json", f"config/{token}/config.json"]
    )
    if any(map(os.path.isfile, files)):
        return f"is not a setting. Did you mean env={token}?"
    if token in example_names():
        return f"is not a setting. Did you mean example={token}?"
    folder = home_path(token)
    return describe_folder(folder) if os.path.isdir(folder) else ""  # noqa: PTH112 - Path's may raise


def is_secret(key: str) -> bool:
    """Whether the value of a setting may be a secret, so that it must not be on a command line."""
    option = option_names().get(plain_key(key))
    return option is None or option.may_hold_secret


def secret_settings() -> list[tuple[str, object]]:
    """The settings that were passed to this process apart from its command line."""
    text = os.environ.get(SECRET_SETTINGS)
    return list(json.loads(text).items()) if text else []


def _why_stray(token: str) -> str:
    """What is wrong with any other bare word, as the end of a message."""
    option = option_names().get(plain_key(token))
    if option is not None:
        return f"needs a value: {token}={'true' if option.is_flag else 'VALUE'}."
    return "is not a setting; write key=value, --key value or --flag."


def _is_value(token: str, key: str) -> bool:
    """Whether a token is the value of the preceding `--key`, not another option or setting.

    A negative number is a value. So is text with an equals sign, unless a known key precedes the
    sign or `key` is a flag, which needs no value.
    """
    if token.startswith("--"):
        return False
    word, equals, _ = token.partition("=")
    if not equals:
        return True
    names = option_names()
    option = names.get(plain_key(key))
    # `--prompt a=b` has a value, `--use_ema seed=1` is a flag and a setting.
    return plain_key(word) not in {*names, *SELECTORS} and not (
        option is not None and option.is_flag
    )


def example_names() -> list[str]:
    """Names of the packaged examples."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/config.json"))


def example_file(name: str, report: Problems) -> Path:
    """config.json of a packaged example.

    Raises:
        ConfigError: the example does not exist.
    """
    names = example_names()
    if name not in names:
        message = (
            f"{name!r} is not a packaged example. Available: "
            f"{', '.join(names)}.{did_you_mean(name, names)}"
        )
        report.error("example", message)
        raise ConfigError(report)
    return EXAMPLES / name / "config.json"


def locate(selectors: Mapping[str, str], report: Problems) -> Located:
    """Locate the requested configuration.

    Search order: `example=`; `env=`; `--config=`; `$SIMPLETUNER_ENV`, `$ENV`; `$CONFIG_PATH`;
    config.json in the working directory, then in config/. Launch variables and a config.env beside
    the file are weaker layers.

    Raises:
        ConfigError: the file does not exist (the message lists every path tried) or cannot be read.
    """
    choosing = [key for key in ("example", "env", "config_path") if key in selectors]
    if len(choosing) > 1:
        report.error(
            choosing[0], f"and {choosing[1]} both choose a configuration; give one of them."
        )
    # What is given on the command line counts for more than the environment.
    variables = () if "config_path" in selectors else ENV_VARIABLES
    name = selectors.get("env")
    for variable in variables:
        name = name or os.environ.get(variable)
    name = None if name == "default" else name
    if "example" in selectors:
        path = example_file(selectors["example"], report)
    else:
        candidates = _candidates(name, selectors, report)
        files = [*filter(os.path.isfile, candidates)]  # unlike Path.is_file, never raises
        if files:
            path = files[0]
        elif name and name.startswith("examples/"):
            path = example_file(name.removeprefix("examples/"), report)
        else:
            report.error("config", _not_found(candidates, name))
            raise ConfigError(report)
    return located_at(path, report)


def located_at(path: Path, report: Problems, draft: Layer | None = None) -> Located:
    """The configuration in a file, or a draft of it, above the launch variables and the config.env
    beside it.

    Raises:
        ConfigError: the file cannot be read.
    """
    layers = [launch_layer()]
    settings = path.with_name("config.env")
    if path.suffix != ".env" and settings.is_file():
        layers.append(read_env_layer(settings, report))
    layers.append(draft or read_config_file(path, report))
    # Read a second time; its problems have been reported.
    extra = (
        read_env_file(settings, Problems()).get(EXTRA_ARGUMENTS, "") if settings.is_file() else ""
    )
    # If train.sh has exported the variable, do not apply it twice.
    return Located(layers, path.parent, "" if EXTRA_ARGUMENTS in os.environ else extra)


def launch_layer() -> Layer:
    """The launch variables of the environment, by the keys they set."""
    # An empty variable counts as unset.
    present = {name: os.environ[name] for name in LAUNCH_VARIABLES if os.environ.get(name)}
    return Layer(
        "environment", [(LAUNCH_VARIABLES[name], value) for name, value in present.items()]
    )


def read_config_file(path: Path, report: Problems) -> Layer:
    """A config file as a layer, by its extension; paths below config/examples/ are redirected into
    the package.

    Raises:
        ConfigError: the file cannot be read, so the run cannot be checked any further.
    """
    readers: dict[str, Callable[[Path, Problems], Layer | None]] = {
        ".env": read_env_layer,
        ".toml": _read_toml_layer,
    }
    fault = foreign_config(path, read_text(path, Problems()) or "")
    if fault:
        report.error(str(path), fault)
        raise ConfigError(report)
    of_file = Problems()
    read = readers.get(path.suffix, read_json_layer)
    layer = read(path, of_file)
    report.extend(of_file)
    # A broken line of a config.env may be any key, so the rest cannot be trusted.
    if layer is None or (path.suffix == ".env" and of_file.are_fatal):
        raise ConfigError(report)
    return Layer(layer.label, [(key, resolve_alias(value)) for key, value in layer.values])


def unwrapped(content: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parsed config.json, which may be nested as
    `{"_metadata": ..., "config": {...}}`.
    """
    inner = content.get("config") if "_metadata" in content else None
    return inner if isinstance(inner, dict) else content


def read_json_layer(path: Path, report: Problems) -> Layer | None:
    """config.json as a layer, or None if it cannot be read."""
    content = read_json(path, report, dict, "one JSON object")
    return None if content is None else Layer(str(path), list(unwrapped(content).items()))


def _read_toml_layer(path: Path, report: Problems) -> Layer | None:
    if (text := read_text(path, report)) is None:
        return None
    try:
        return Layer(str(path), list(tomllib.loads(text).items()))
    except (ValueError, RecursionError) as error:
        report.error(str(path), f"is not valid TOML: {error}.")
        return None


def read_env_layer(path: Path, report: Problems) -> Layer:
    """The variables of a config.env that are settings, or meant as such; all others are for the
    shell.
    """
    known = option_names()
    variables = read_env_file(path, report)
    settings = []
    for name, value in variables.items():
        key = LAUNCH_VARIABLES.get(name, name.lower())
        if key in known:
            settings.append((key, value))
        elif _is_meant_as_setting(name, known):
            settings.append((name, value))  # as written, for the message
    return Layer(str(path), settings)


def _is_meant_as_setting(name: str, known: Iterable[str]) -> bool:
    """Whether a variable is a setting of another trainer or an earlier version, or a misspelt
    one.
    """
    if name in SHELL_VARIABLES or name.startswith(SHELL_PREFIXES):
        return False
    key = name.lower()
    return bool(
        why_absent(key, "config")
        or difflib.get_close_matches(key, known, n=1, cutoff=LIKE_A_SETTING)
    )


def read_env_file(path: Path, report: Problems) -> dict[str, str]:
    """Variables by name, from `KEY=VALUE` lines in shell syntax; `export` and `+=` are supported.

    Variables from earlier lines and from the environment expand; commands never run.
    """
    values: dict[str, str] = {}
    for number, line in enumerate((read_text(path, report) or "").splitlines(), start=1):
        # `A+=b`: the key ends with the plus sign.
        key, equals, value = re.sub(r"^export\s+", "", line.strip()).partition("=")
        if key.startswith("#") or not key:
            continue
        name = key.rstrip("+")
        if not equals or not ENV_NAME.fullmatch(name):
            report.warn(
                str(path), f"line {number}, {line.strip()!r:.80}, is not KEY=VALUE and is ignored."
            )
            continue
        try:
            text = expand_shell(value, {**os.environ, **values})
        except ValueError as error:
            # Errors in variables that only the shell uses do not affect the run.
            fatal = name.lower() in option_names() or name in (*LAUNCH_VARIABLES, EXTRA_ARGUMENTS)
            report.append(
                Problem(str(path), f"line {number} cannot be read: {error}.", fatal=fatal)
            )
            continue
        values[name] = values.get(name, "") + text if key.endswith("+") else text
    return values


def expand_shell(text: str, variables: Mapping[str, str]) -> str:
    """The value of a shell assignment: handles quotes, escapes, comments and `$NAME`.

    Raises:
        ValueError: an unclosed quote, an unset variable, or a command substitution.
    """

    def expand(match: re.Match[str]) -> str:
        if match["command"]:
            raise ValueError(f"{match['command']!r} would run a command; write its result instead")
        if match["escaped"]:
            return match["escaped"]
        name = match["name"].strip("{}")
        if name not in variables:
            raise ValueError(f"${name} is not set")
        return variables[name]

    result = ""
    for word in SHELL_WORD.finditer(text.strip()):
        match word.lastgroup, word[word.lastgroup or 0]:
            case "comment", _:
                return result.rstrip()
            case "open", _:
                raise ValueError("a quotation mark is not closed")
            case "plain" | "double", part:
                result += VARIABLE.sub(expand, part)
            case _, part:
                result += part
    return result


def dataset_file(configured: str | None, folder: Path, report: Problems) -> Path:
    """The dataset file: `data_backend_config`, else multidatabackend.json beside the config, with a
    warning.
    """
    if configured is not None:
        return Path(resolve_alias(configured)).expanduser()
    path = folder / DATASET_FILE
    report.warn("data_backend_config", f"is not set; {path} is used.")
    return path


def resolve_alias(value: Any) -> Any:
    """Redirect a path below config/examples/ into the package, unless it exists in the working
    directory.
    """
    if isinstance(value, str) and value.startswith(EXAMPLES_ALIAS) and not os.path.lexists(value):
        return str(EXAMPLES / value.removeprefix(EXAMPLES_ALIAS))
    return value


def _candidates(name: str | None, selectors: Mapping[str, str], report: Problems) -> list[Path]:
    """Possible paths of the configuration: of an environment, of an explicit path, or the default
    paths.
    """
    backends = _backends(selectors, report)
    explicit = selectors.get("config_path") or os.environ.get("CONFIG_PATH")
    if name:
        folders = [Path("config") / name, Path(name)]
        if extra := os.environ.get("SIMPLETUNER_CONFIG_DIR"):
            folders.append(Path(extra) / name)
    elif explicit:
        path = home_path(explicit)
        # With or without extension; `/` has no name to extend.
        whole = not path.name or path.suffix.removeprefix(".") in BACKENDS
        return (
            [path]
            if whole
            else [path, *(path.with_name(f"{path.name}.{backend}") for backend in backends)]
        )
    else:
        folders = [Path(), Path("config")]
    # `env=some/folder/config.json` names the file itself.
    itself = [Path(name)] if name and Path(name).suffix.removeprefix(".") in BACKENDS else []
    return [*(folder / f"config.{backend}" for folder in folders for backend in backends), *itself]


def _backends(selectors: Mapping[str, str], report: Problems) -> Sequence[str]:
    """The file types to look for."""
    wanted = (
        selectors.get("config_backend")
        or os.environ.get("CONFIG_BACKEND")
        or os.environ.get("CONFIG_TYPE")
    )
    if wanted and wanted not in BACKENDS:
        report.error("CONFIG_BACKEND", not_one_of(wanted, BACKENDS))
        raise ConfigError(report)
    return (wanted,) if wanted else BACKENDS


def _not_found(candidates: list[Path], name: str | None) -> str:
    """That there is no configuration, where it was looked for, and what to do."""
    # List one file per folder, whatever its type.
    in_folders = {path.parent: path for path in reversed(candidates)}
    paths = reversed(in_folders.values())
    tried = ", ".join(f"{path} (a folder)" if path.is_dir() else str(path) for path in paths)
    what = f"the environment {name!r} was not found" if name else "no configuration was found"
    names = sorted(folder.name for folder in Path("config").glob("*/"))
    given = candidates[0]
    suffix = candidates[0].suffix
    # Of a path, the files beside it; of a folder, those in it.
    files = (
        (given if given.is_dir() else given.parent).glob("*config*.*")
        if len(in_folders) == 1
        else ()
    )
    hint = did_you_mean(name or "", names) or did_you_mean(str(given), map(str, files))
    if names and not hint:
        hint = f" Choose one with env=NAME: {', '.join(names)}."
    elif not hint:
        hint = " Write one with `simpletuner configure`."
        if suffix in (".toml", ".env"):
            hint += f" It writes JSON; write {suffix} files by hand, with the same keys."
    return f"{what}; tried {tried}.{hint}"
