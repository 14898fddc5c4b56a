"""Sources of settings: the command line, environment variables, and files.

The command line has the forms `key=value`, `--key=value`, `--key value` and a bare `--flag`. Files
are located by name, as a packaged example, or in the default locations.
"""

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
# Variable with a JSON object: settings that the page passes to a process it starts, since all users
# of a machine can read a command line.
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
# The name of a config, as in env=NAME. \w lacks the vowel signs of Devanagari.
CONFIG_NAME = re.compile(r"\w([\w.-]|[^\x00-\xa0\s])*")
# Launch settings that may come from environment variables, and their keys.
LAUNCH_VARIABLES = {
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    "MIXED_PRECISION": "mixed_precision",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}
ENV_NAME = re.compile(r"[A-Za-z_]\w*")
# Tokens of a shell value; the first alternative that matches counts. A # inside a word does not
# start a comment.
SHELL_WORD = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|(?P<comment>(?:^|(?<=\s))#.*)"""
    r"""|(?P<open>['"])|(?P<plain>[^'"\\#]+|.)"""
)
# Expansions outside single quotes. Within double quotes, a backslash escapes only these four
# characters.
VARIABLE = re.compile(
    r"\\(?P<escaped>[\"\\$`])|\$(?P<name>\{\w+\}|[A-Za-z_]\w*)|(?P<command>`|\$[({])"
)
# Variables of shells, libraries and this program's launcher, which are not settings.
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
    settings = [(key, resolve_alias(value)) for key, value in values.items()]
    return Located([launch_layer(), Layer(ARGUMENTS, settings)])


class CollectRemote(Protocol):
    """Lists the files of remote datasets by id.

    `simpletuner.data.entries.Collect` has the types, which this room must not import.
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
        """The layers of files, environment and command line, and the folder of the config file.

        The weakest layer comes first.
        """
        try:
            located = self.base or locate(self.selectors, report)
        except ConfigError:
            if not self.names_configuration:
                raise
            # That no configuration was found is a consequence of the bare word.
            causes = [problem for problem in report if problem.where != "config"]
            raise ConfigError(causes) from None
        # Arguments from a config.env follow the command line.
        extra = parse_arguments([], located.extra_arguments)
        report.extend(extra.problems)
        layer = self._with_settings(extra.settings).layer()
        return [*located.layers, layer], located.folder

    def with_seed(self, seed: int | None) -> Arguments:
        """These arguments with the seed drawn by another process, if any."""
        return self if seed is None else self._with_settings([("seed", str(seed))])

    def _with_settings(self, settings: Iterable[tuple[str, object]]) -> Arguments:
        return replace(self, settings=[*self.settings, *settings])

    def layer(self) -> Layer:
        """The settings as the layer with the highest priority; `null` unsets a key, as in JSON."""
        values = [(key, None if value == "null" else value) for key, value in self.settings]
        return Layer(self.label, values, last_wins=True)


def parse_arguments(tokens: Sequence[str], extra: str | None = None) -> Arguments:
    """Parse the command line.

    Args:
        extra: arguments that follow it, split at white space; TRAINER_EXTRA_ARGS by default.
    """
    arguments = Arguments()
    if extra is None:
        extra = os.environ.get(EXTRA_ARGUMENTS, "")
    waiting = [*tokens, *extra.split()]
    while waiting:
        token = waiting.pop(0)
        key, equals, value = token.partition("=")
        is_bare_word = not equals and not token.startswith("--")
        if is_bare_word or not key.lstrip("-"):
            choice = _choice_of_configuration(token)
            if choice:
                arguments.names_configuration = True
            arguments.problems.error(token, choice or _why_stray(token))
            continue
        # `--key value`; a bare `--flag` before another setting looks the same.
        if not equals and waiting and _is_value(waiting[0], key):
            equals = "="
            value = waiting.pop(0)
        name = plain_key(key)
        if name not in SELECTORS:
            # As written, for messages; `canonical` resolves the name.
            arguments.settings.append((key, value if equals else True))
        elif equals:
            arguments.selectors[SELECTORS[name]] = value
        else:
            arguments.problems.error(key, "needs a value after it.")
    return arguments


def _choice_of_configuration(token: str) -> str:
    """The end of the message about a bare word that means a configuration; empty for others."""
    files = [f"{token}/config.json", f"config/{token}/config.json"]
    if token.endswith(tuple(f".{backend}" for backend in BACKENDS)):
        files = [token]
    if any(map(os.path.isfile, files)):
        return f"is not a setting. Did you mean env={token}?"
    if token in example_names():
        return f"is not a setting. Did you mean example={token}?"
    folder = home_path(token)
    if not os.path.isdir(folder):  # noqa: PTH112 - Path's may raise
        return ""
    return describe_folder(folder, EXAMPLES)


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
    what = "is not a setting"
    if "/" in token and not os.path.lexists(home_path(token)):
        what = "does not exist, and is not a setting"
    return f"{what}; write key=value, --key value or --flag."


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
    if plain_key(word) in names or plain_key(word) in SELECTORS:
        return False
    # `--prompt a=b` has a value, `--use_ema seed=1` is a flag and a setting.
    option = names.get(plain_key(key))
    return option is None or not option.is_flag


def example_names() -> list[str]:
    """Names of the packaged examples."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/config.json"))


def example_file(name: str, report: Problems) -> Path:
    """config.json of a packaged example.

    Raises:
        ConfigError: the example does not exist.
    """
    names = example_names()
    if name in names:
        return EXAMPLES / name / "config.json"
    available = f"Available: {', '.join(names)}.{did_you_mean(name, names)}"
    report.error("example", f"{name!r} is not a packaged example. {available}")
    raise ConfigError(report)


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
        message = f"chooses a configuration, and so does {choosing[1]}; give one of them."
        report.error(choosing[0], message)
    if "example" in selectors:
        return located_at(example_file(selectors["example"], report), report)

    name = _environment_name(selectors)
    candidates = _candidates(name, selectors, report)
    for path in candidates:
        if os.path.isfile(path):  # noqa: PTH113 - unlike Path's, never raises
            return located_at(path, report)
    if name and name.startswith("examples/"):
        return located_at(example_file(name.removeprefix("examples/"), report), report)
    report.error("config", _not_found(candidates, name))
    raise ConfigError(report)


def lacks_configuration(arguments: Arguments) -> bool:
    """Whether nothing chooses a configuration, and none is where one is looked for."""
    chooses = arguments.settings or arguments.selectors or arguments.base
    if chooses or _environment_name({}) or os.environ.get("CONFIG_PATH"):
        return False
    return not any(map(os.path.isfile, _candidates(None, {}, Problems())))


def _environment_name(selectors: Mapping[str, str]) -> str | None:
    """The name of the environment that is asked for; None for the default configuration."""
    name = selectors.get("env")
    # A path on the command line overrides the name in a variable.
    if "config_path" not in selectors:
        for variable in ENV_VARIABLES:
            if not name:
                name = os.environ.get(variable)
    return None if name == "default" else name


def located_at(path: Path, report: Problems, draft: Layer | None = None) -> Located:
    """The configuration in a file, above the launch variables and the config.env beside it.

    Args:
        draft: the content of the file, as a wizard would write it; by default the file is read.

    Raises:
        ConfigError: the file cannot be read.
    """
    layers = [launch_layer()]
    settings = path.with_name("config.env")
    if path.suffix != ".env" and settings.is_file():
        layers.append(read_env_layer(settings, report))
    layers.append(draft or read_config_file(path, report))
    extra = ""
    # If train.sh has exported the variable, it must not be applied twice.
    if settings.is_file() and EXTRA_ARGUMENTS not in os.environ:
        # Read a second time; its problems have been reported.
        extra = read_env_file(settings, Problems()).get(EXTRA_ARGUMENTS, "")
    return Located(layers, path.parent, extra)


def launch_layer() -> Layer:
    """The launch variables of the environment, by the keys they set."""
    settings = []
    for name, key in LAUNCH_VARIABLES.items():
        value = os.environ.get(name)
        if value:  # an empty variable counts as unset
            settings.append((key, value))
    return Layer("environment", settings)


def read_config_file(path: Path, report: Problems) -> Layer:
    """A config file as a layer; paths below config/examples/ are redirected into the package.

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
    """The settings of a config.json, perhaps wrapped as `{"_metadata": ..., "config": {...}}`."""
    inner = content.get("config") if "_metadata" in content else None
    return inner if isinstance(inner, dict) else content


def read_json_layer(path: Path, report: Problems) -> Layer | None:
    """config.json as a layer, or None if it cannot be read."""
    content = read_json(path, report, dict, "one JSON object")
    return None if content is None else Layer(str(path), list(unwrapped(content).items()))


def _read_toml_layer(path: Path, report: Problems) -> Layer | None:
    text = read_text(path, report)
    if text is None:
        return None
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        report.error(str(path), f"is not valid TOML: {error}.")
        return None
    return Layer(str(path), list(content.items()))


def read_env_layer(path: Path, report: Problems) -> Layer:
    """The variables of a config.env that are settings, or meant as such; others are the shell's."""
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
    """Whether a variable is misspelt, or a setting of another trainer or an earlier version."""
    if name in SHELL_VARIABLES or name.startswith(SHELL_PREFIXES):
        return False
    key = name.lower()
    if why_absent(key, "config"):
        return True
    return bool(difflib.get_close_matches(key, known, n=1, cutoff=LIKE_A_SETTING))


def read_env_file(path: Path, report: Problems) -> dict[str, str]:
    """Variables by name, from `KEY=VALUE` lines in shell syntax; `export` and `+=` are supported.

    Variables from earlier lines and from the environment expand; commands never run.
    """
    values: dict[str, str] = {}
    content = read_text(path, report) or ""
    for number, line in enumerate(content.splitlines(), start=1):
        assignment = re.sub(r"^export\s+", "", line.strip())
        key, equals, value = assignment.partition("=")
        if not key or key.startswith("#"):
            continue
        name = key.rstrip("+")  # of `NAME+=value`
        if not equals or not ENV_NAME.fullmatch(name):
            message = f"line {number}, {line.strip()!r:.80}, is not KEY=VALUE and is ignored."
            report.warn(str(path), message)
            continue
        try:
            text = expand_shell(value, {**os.environ, **values})
        except ValueError as error:
            # Errors in variables that only the shell uses do not affect the run.
            is_used = name.lower() in option_names() or name in (*LAUNCH_VARIABLES, EXTRA_ARGUMENTS)
            message = f"line {number} cannot be read: {error}."
            report.append(Problem(str(path), message, fatal=is_used))
            continue
        if key.endswith("+"):
            text = values.get(name, "") + text
        values[name] = text
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
        kind = word.lastgroup or ""  # the alternative of SHELL_WORD that matched
        part = word[kind or 0]
        if kind == "comment":
            return result.rstrip()
        if kind == "open":
            raise ValueError("a quotation mark is not closed")
        if kind in ("plain", "double"):
            part = VARIABLE.sub(expand, part)
        result += part
    return result


def dataset_file(configured: str | None, folder: Path, report: Problems) -> Path:
    """The path of the dataset file.

    Args:
        configured: value of `data_backend_config`; without one, the file is multidatabackend.json
            beside the config, with a warning.
        folder: the folder of the config.
    """
    if configured is not None:
        return Path(resolve_alias(configured)).expanduser()
    path = folder / DATASET_FILE
    report.warn("data_backend_config", f"is not set; {path} is used.")
    return path


def resolve_alias(value: Any) -> Any:
    """Redirect a path below config/examples/ into the package, unless it exists here."""
    if isinstance(value, str) and value.startswith(EXAMPLES_ALIAS) and not os.path.lexists(value):
        return str(EXAMPLES / value.removeprefix(EXAMPLES_ALIAS))
    return value


def _candidates(name: str | None, selectors: Mapping[str, str], report: Problems) -> list[Path]:
    """Possible paths of the configuration, in search order.

    Args:
        name: the environment, if one was asked for.
    """
    backends = _backends(selectors, report)
    explicit = selectors.get("config_path") or os.environ.get("CONFIG_PATH")
    if explicit and not name:
        return _explicit_candidates(home_path(explicit), backends)
    folders = [Path(), Path("config")]
    if name:
        folders = [Path("config") / name, Path(name)]
        extra = os.environ.get("SIMPLETUNER_CONFIG_DIR")
        if extra:
            folders.append(Path(extra) / name)
    paths = [folder / f"config.{backend}" for folder in folders for backend in backends]
    if name and _has_suffix_of_config(Path(name)):
        paths.append(Path(name))  # `env=some/folder/config.json` names the file itself
    return paths


def _explicit_candidates(path: Path, backends: Sequence[str]) -> list[Path]:
    """A path that may lack its extension; `/` has no name to extend."""
    if not path.name or _has_suffix_of_config(path):
        return [path]
    return [path, *(path.with_name(f"{path.name}.{backend}") for backend in backends)]


def _has_suffix_of_config(path: Path) -> bool:
    return path.suffix.removeprefix(".") in BACKENDS


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
    # List the first file of each folder: the types of files need not be repeated.
    first_in_folders: dict[Path, Path] = {}
    for path in candidates:
        first_in_folders.setdefault(path.parent, path)
    tried = ", ".join(
        f"{path} (a folder)" if path.is_dir() else str(path) for path in first_in_folders.values()
    )
    missing = f"the environment {name!r} was not found" if name else "no configuration was found"
    names = sorted({file.parent.name for file in Path("config").glob("*/config.*")})
    first = candidates[0]
    hint = did_you_mean(name or "", names)
    if not hint and len(first_in_folders) == 1:  # the user named a path
        folder = first if first.is_dir() else first.parent
        hint = did_you_mean(str(first), map(str, folder.glob("*config*.*")))
    if not hint:
        hint = _how_to_get_one(names, first.suffix)
    return f"{missing}; tried {tried}.{hint}"


def _how_to_get_one(names: Sequence[str], suffix: str) -> str:
    """Advice for a user without a configuration.

    Args:
        names: environments that could be chosen.
        suffix: file type that was looked for.
    """
    if names:
        return f" Choose one with env=NAME: {', '.join(names)}."
    advice = " Write one with `simpletuner configure`."
    if suffix in (".toml", ".env"):
        advice += f" It writes JSON; write {suffix} files by hand, with the same keys."
    return advice
