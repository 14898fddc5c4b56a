"""Find the configuration of a run: by name, as a packaged example, or in the usual places."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import ConfigError, Problem, did_you_mean

from .load import Layer, read_json_layer
from .schema import all_options

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Paths in packaged examples are written as if they lay here, and are led into the package.
EXAMPLES_ALIAS = "config/examples/"
BACKENDS = ("json", "toml", "env")
DATASET_FILE = "multidatabackend.json"
ENV_VARIABLES = ("SIMPLETUNER_ENV", "SIMPLETUNER_ENVIRONMENT", "ENV")


@dataclass(frozen=True)
class Located:
    """The layers that were found (weakest first), and the folder beside whose files they lie."""

    layers: list[Layer]
    folder: Path


def example_names() -> list[str]:
    """Names of the packaged examples."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/config.json"))


def example_file(name: str) -> Path:
    """config.json of a packaged example.

    Raises:
        ConfigError: there is none of that name.
    """
    path = EXAMPLES / name / "config.json"
    if path.parent.parent != EXAMPLES or not path.is_file():
        names = example_names()
        message = f"{name!r} is not a packaged example. There are: {', '.join(names)}.{did_you_mean(name, names)}"
        raise ConfigError([Problem("example", message)])
    return path


def locate(selectors: Mapping[str, str], problems: list[Problem]) -> Located:
    """The configuration that was asked for.

    In this order: `example=`; `env=`, `$SIMPLETUNER_ENV`, `$ENV`; `$CONFIG_PATH`; config.json here, then in config/.
    config/config.env is read as a weaker layer where it is present.

    Raises:
        ConfigError: it does not exist; the message lists every path that was tried.
    """
    if "example" in selectors:
        return _packaged(selectors["example"], problems)
    name = selectors.get("env") or _environment_name()
    if name and name.startswith("examples/"):
        return _packaged(name.removeprefix("examples/"), problems)
    path = _first_file(_candidates(name, selectors), name)
    layers = [read_config_file(path, problems)]
    settings = path.parent / "config.env"
    if path.suffix != ".env" and settings.is_file():
        layers.insert(0, read_env_layer(settings))
    return Located(layers, path.parent)


def read_config_file(path: Path, problems: list[Problem]) -> Layer:
    """A config file as a layer, by its ending."""
    if path.suffix == ".env":
        return read_env_layer(path)
    if path.suffix == ".toml":
        try:
            return Layer(str(path), list(tomllib.loads(path.read_text(encoding="utf-8")).items()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(Problem(str(path), f"is not valid TOML: {error}."))
            return Layer(str(path), [])
    return read_json_layer(path, problems)


def read_env_layer(path: Path) -> Layer:
    """`KEY=VALUE` lines (`export` and `+=` are understood); lines that name no setting are for the shell."""
    values: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or key.startswith("#"):
            continue
        text = " ".join(shlex.split(value, comments=True))
        name = key.rstrip("+").strip().lower()
        values[name] = f"{values[name]} {text}" if key.endswith("+") and name in values else text
    options = all_options()
    known = {alias for option in options.values() for alias in (option.name, *option.aliases)}
    return Layer(str(path), [(name, value) for name, value in values.items() if name in known])


def dataset_file(configured: str | None, folder: Path, problems: list[Problem]) -> Path:
    """The dataset file: `data_backend_config`, else multidatabackend.json beside the config, with a warning."""
    if configured is not None:
        return Path(resolve_alias(configured)).expanduser()
    path = folder / DATASET_FILE
    problems.append(Problem("data_backend_config", f"is not set; {path} is used.", fatal=False))
    return path


def resolve_alias(value: Any) -> Any:
    """Lead a path below config/examples/ into the package, unless such a file exists where the user is."""
    if isinstance(value, str) and value.startswith(EXAMPLES_ALIAS) and not Path(value).exists():
        return str(EXAMPLES / value.removeprefix(EXAMPLES_ALIAS))
    return value


def _packaged(name: str, problems: list[Problem]) -> Located:
    path = example_file(name)
    layer = read_json_layer(path, problems)
    return Located(
        [Layer(f"example {name}", [(key, resolve_alias(value)) for key, value in layer.values])], path.parent
    )


def _environment_name() -> str | None:
    name = next((os.environ[variable] for variable in ENV_VARIABLES if os.environ.get(variable)), None)
    return None if name == "default" else name


def _candidates(name: str | None, selectors: Mapping[str, str]) -> list[Path]:
    given = selectors.get("config_path") or os.environ.get("CONFIG_PATH")
    if given and not name:
        path = Path(given).expanduser()
        return [path, *(path.with_name(f"{path.name}.{backend}") for backend in BACKENDS)]
    wanted = selectors.get("config_backend") or os.environ.get("CONFIG_BACKEND") or os.environ.get("CONFIG_TYPE")
    backends = (wanted,) if wanted else BACKENDS
    if wanted and wanted not in BACKENDS:
        raise ConfigError([Problem("CONFIG_BACKEND", f"{wanted!r} is not one of: {', '.join(BACKENDS)}.")])
    files = [f"config.{backend}" for backend in backends]
    if name:
        extra = os.environ.get("SIMPLETUNER_CONFIG_DIR")
        folders = [Path("config") / name, Path(name), *([Path(extra) / name] if extra else [])]
        return [folder / file for folder in folders for file in files]
    return [folder / file for folder in (Path(), Path("config")) for file in files]


def _first_file(candidates: list[Path], name: str | None) -> Path:
    for path in candidates:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in candidates)
    what = f"the environment {name!r}" if name else "no configuration"
    message = f"{what} was not found; tried {tried}." if name else f"{what} was found; tried {tried}."
    raise ConfigError([Problem("config", f"{message} Write one with `simpletuner configure`.")])
