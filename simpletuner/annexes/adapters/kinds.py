"""LoKr, LoHa and LyCORIS for the plan and the budget: their adapted layers and parameter counts.

The settings file of LyCORIS selects among the family's linear layers (`all-linear`) by the rules of
the library's presets. A class name selects all layers inside modules of that class.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from simpletuner.config.json_reader import read_json
from simpletuner.config.lora import LoraConfig
from simpletuner.config.option import Package, check_installed
from simpletuner.errors import Problems, did_you_mean
from simpletuner.models.adapter_kinds import AdapterKind, Shapes
from simpletuner.models.lora_layers import Targets, matching_modules
from simpletuner.models.spec import FamilySpec
from simpletuner.weights.files import Shape

LYCORIS = Package("lycoris", "lycoris-lora>=4.1,<5")
KEY = "lycoris_config"
CONFIG_FILE = "lycoris_config.json"
ALGOS = ("lora", "locon", "loha", "lokr")
MULTIPLIES = "its update multiplies the weight, and a LoRA cannot hold that"
REFUSED_ALGOS = {
    **dict.fromkeys(("glora", "diag-oft", "boft", "ia3"), MULTIPLIES),
    "tlora": "its files need special pipelines; stock pipelines spoil the picture",
    "full": "it trains whole weights; use model_type full",
    "dylora": "each call draws a new rank, which recomputed blocks and resumed runs cannot repeat",
}
REFUSED_KEYS = {
    "train_norm": "a LoRA cannot hold norms",
    **dict.fromkeys(
        ("rank_dropout", "module_dropout"),
        "its random numbers would not be repeated after a resume",
    ),
}
# Settings of convolutions and of refused algorithms, which linear layers ignore.
UNUSED = ("conv_dim", "conv_alpha", "use_tucker", "block_size", "constraint", "rescaled")
# Settings of a layer, with the library's defaults.
DEFAULTS = {
    "linear_dim": 4,
    "linear_alpha": 1,
    "factor": -1,
    "dropout": 0.0,
    "full_matrix": False,
    "decompose_both": False,
    "unbalanced_factorization": False,
    "use_scalar": False,
    "dora_wd": False,
    "wd_on_output": True,
}
# The ranges of numeric settings; some are integers, some must not be 0.
RANGES = {
    "linear_dim": (0, 1e6),
    "dim": (1, 1e6),
    "factor": (-1, 1e6),
    "linear_alpha": (0, 1e6),
    "alpha": (0, 1e6),
    "dropout": (0, 0.999),
    "multiplier": (-1e3, 1e3),
}
WHOLE_NUMBERS = ("linear_dim", "dim", "factor")
NEVER_ZERO = ("factor", "multiplier")
# The keys of the file, of its algo maps' entries, and of its preset.
FILE_KEYS = ("algo", "bypass_mode", "multiplier", "apply_preset", *DEFAULTS)
LAYER_KEYS = ("algo", "bypass_mode", "dim", "alpha", *DEFAULTS)
MAPS = ("module_algo_map", "name_algo_map")
PRESET_KEYS = (
    "enable_conv",
    "target_module",
    "target_name",
    "exclude_name",
    *MAPS,
    "use_fnmatch",
    "lora_prefix",
)


@dataclass(frozen=True)
class LycorisFile:
    """A settings file, applied to the layers of a family."""

    content: Mapping[str, Any]
    spec: FamilySpec

    @cached_property
    def preset(self) -> Mapping[str, Any]:
        return dict(self.content.get("apply_preset") or {})

    def layers(self, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Any]]:
        """The adapted layers with their settings.

        Args:
            shapes: weight shapes of a transformer, by layer.
        """
        names = matching_modules(shapes, self.spec.lora_presets["all-linear"])
        layers = {name: self._settings(name) for name in names}
        return {name: settings for name, settings in layers.items() if settings is not None}

    def matches(self, target: str, layer: str) -> bool:
        """Whether a name pattern of the file matches a layer."""
        if self.preset.get("use_fnmatch", False):
            return fnmatch.fnmatch(layer, target)
        return layer == target or re.match(target, layer) is not None

    def depth(self, word: str, layer: str) -> int:
        """How many characters of a layer's path name a module of a class; 0 if it is in none."""
        match = re.match(rf"(?:{self.classes[word]})(?=\.|$)", layer)
        return match.end() if match else 0

    @property
    def classes(self) -> Mapping[str, str]:
        """Regular expressions of the paths of modules, by the class names that the file may use."""
        return {**self.spec.adapter_classes, "Linear": ".+"}

    def _settings(self, layer: str) -> dict[str, Any] | None:
        """The settings of a layer; None if the file does not select it."""
        preset = self.preset
        if any(self.matches(pattern, layer) for pattern in preset.get("exclude_name", [])):
            return None
        by_class: Mapping[str, Any] = preset.get("module_algo_map", {})
        by_name: Mapping[str, Any] = preset.get("name_algo_map", {})
        depths = {}
        for word in (*preset.get("target_module", ["Linear"]), *by_class):
            depths[word] = self.depth(word, layer)
        patterns = (*by_name, *preset.get("target_name", []))
        names = [pattern for pattern in patterns if self.matches(pattern, layer)]
        if not any(depths.values()) and not names:
            return None

        # A name takes precedence over a class, and an inner class over an outer one.
        own_settings: Mapping[str, Any] = {}
        names_with_settings = [name for name in names if name in by_name]
        classes_with_settings = [
            (depth, word) for word, depth in depths.items() if depth and word in by_class
        ]
        if names_with_settings:
            own_settings = by_name[names_with_settings[0]]
        elif classes_with_settings:
            _depth, innermost = max(classes_with_settings)
            own_settings = by_class[innermost]
        settings = {**DEFAULTS, **self.content, **own_settings}
        # linear_dim 0 is allowed with full_matrix, which has no rank.
        alias = {"dim": settings["linear_dim"] or 4, "alpha": settings["linear_alpha"]}
        # DoRA normalises the full weight, which bypass mode never materialises.
        return {**alias, "bypass_mode": not settings["dora_wd"], **settings}


def read_lycoris(path: str | None, spec: FamilySpec, report: Problems) -> LycorisFile | None:
    """The settings file; None after a problem."""
    if path is None:
        report.error(KEY, "is required by lora_type lycoris.")
        return None
    content = read_json(Path(path).expanduser(), report)
    if content is None:  # `read_json` has reported the reason
        return None
    reason = _why_malformed(content)
    if reason:
        report.error(KEY, f"{path!r}: {reason}.")
        return None
    return LycorisFile(content, spec)


def _why_malformed(content: Any) -> str:
    """Why the content of a file is invalid; empty if it is valid."""
    preset = (content.get("apply_preset") or {}) if isinstance(content, dict) else None
    if not isinstance(preset, dict):
        return "the file or its apply_preset is not a JSON object"
    for key in ("target_module", "target_name", "exclude_name"):
        names = preset.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return "target_module, target_name and exclude_name must be lists of names"
    for key in MAPS:
        table = preset.get(key, {})
        if not isinstance(table, dict) or not all(
            isinstance(entry, dict) for entry in table.values()
        ):
            return "module_algo_map and name_algo_map must map names to settings"
    for pattern in (
        *preset.get("target_name", []),
        *preset.get("exclude_name", []),
        *preset.get("name_algo_map", {}),
    ):
        try:
            re.compile(fnmatch.translate(pattern) if preset.get("use_fnmatch", False) else pattern)
        except re.error as error:
            return (
                f"{pattern!r} is not a regular expression ({error}); with use_fnmatch true, * "
                "matches anything"
            )
    return ""


def check_lycoris(
    file: LycorisFile, shapes: Mapping[str, Shape], report: Problems, *, quantised: bool
) -> None:
    """Problems of a settings file.

    Args:
        shapes: as for `LycorisFile.layers`; empty if the transformer is not on this machine.
        quantised: whether the base model is quantised.
    """
    content = file.content
    preset = file.preset
    _check_known(content, (*FILE_KEYS, *UNUSED, *REFUSED_KEYS), "key", report)
    _check_known(preset, PRESET_KEYS, "key of apply_preset", report)
    for key in ("algo", "multiplier"):
        if key not in content:
            report.error(KEY, f"{key} is missing.")
    if not content.get("linear_dim") and not content.get("full_matrix"):
        report.error(KEY, "linear_dim or full_matrix is missing.")
    _check_settings(content, quantised, report)
    layer_keys = (*LAYER_KEYS, *UNUSED, *REFUSED_KEYS)
    for key in MAPS:
        for entry in preset.get(key, {}).values():
            _check_known(entry, layer_keys, "setting of an algo map", report)
            _check_settings({**content, **entry}, quantised, report)
    _check_classes(file, shapes, report)


def _check_classes(file: LycorisFile, shapes: Mapping[str, Shape], report: Problems) -> None:
    """Check that the classes exist, and that the file selects a layer."""
    preset = file.preset
    list_of_classes = f"The classes are: {', '.join(file.classes)}."
    named = dict.fromkeys((*preset.get("target_module", []), *preset.get("module_algo_map", {})))
    unknown = [word for word in named if word not in file.classes]
    for word in unknown:
        hint = did_you_mean(word, file.classes)
        report.error(
            KEY,
            f"{word!r} is not a class with linear layers in {file.spec.title}.{hint} "
            f"{list_of_classes}",
        )
    if shapes and not unknown and not file.layers(shapes):
        report.error(
            KEY, f"apply_preset matches no linear layer of {file.spec.title}. {list_of_classes}"
        )


def _check_settings(settings: Mapping[str, Any], quantised: bool, report: Problems) -> None:
    """Check the settings of a layer."""
    algo = settings.get("algo")
    if algo in REFUSED_ALGOS:
        report.error(
            KEY,
            f"algo {algo!r} is not supported: {REFUSED_ALGOS[algo]}. Use one of "
            f"{', '.join(ALGOS)}.",
        )
    elif algo is not None and algo not in ALGOS:
        report.error(
            KEY, f"algo {algo!r} is not one of {', '.join(ALGOS)}.{did_you_mean(str(algo), ALGOS)}"
        )
    for key, reason in REFUSED_KEYS.items():
        if settings.get(key):
            report.error(KEY, f"{key} is not supported: {reason}.")
    for key in filter(settings.get, UNUSED):
        report.warn(
            KEY, f"{key} has no effect: only linear layers and 1x1 convolutions are adapted."
        )
    for key, value in settings.items():
        allowed = "" if value is None else _values_allowed_instead(key, value)
        if allowed:
            report.error(KEY, f"{key} {value!r} is not {allowed}.")
    bypass = settings.get("bypass_mode")
    dora = settings.get("dora_wd", False)
    if bypass and dora:
        report.error(
            KEY, "dora_wd cannot be combined with bypass_mode: bypassing skips the decomposition."
        )
    elif quantised and (dora or bypass is False):
        reason = (
            "a quantised base model needs bypass_mode true and no dora_wd: its weights are not read"
        )
        report.error(KEY, f"{reason}. Or set base_model_precision no_change.")


def _values_allowed_instead(key: str, value: Any) -> str:
    """The allowed values of a setting, in words; empty if the value is allowed."""
    is_flag = key == "bypass_mode" or isinstance(DEFAULTS.get(key), bool)
    if is_flag:
        return "" if isinstance(value, bool) else "true or false"
    if key not in RANGES:
        return ""
    lowest, highest = RANGES[key]
    must_be_whole = key in WHOLE_NUMBERS
    must_not_be_zero = key in NEVER_ZERO
    is_allowed = type(value) in (int, float) and lowest <= value <= highest
    if is_allowed and must_be_whole:
        is_allowed = value % 1 == 0
    if is_allowed and must_not_be_zero:
        is_allowed = value != 0
    if is_allowed:
        return ""
    number = "whole number" if must_be_whole else "number"
    exception = ", but not 0" if must_not_be_zero else ""
    return f"a {number} from {lowest:.10g} to {highest:.10g}{exception}"


def _check_known(
    given: Mapping[str, Any], known: tuple[str, ...], what: str, report: Problems
) -> None:
    """Report keys that LyCORIS does not have."""
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or f" There are: {', '.join(known)}."
            report.error(KEY, f"{key!r} is not a {what} of LyCORIS.{hint}")


# Two factors of a width.
Pair = tuple[int, int]


def lokr(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes) -> dict[str, int]:
    """Trained parameters by layer."""
    parameters = {}
    for name in matching_modules(shapes, targets):
        rows = factorise(shapes[name][0], config.lokr_factor)
        columns = factorise(shapes[name][1], config.lokr_factor)
        parameters[name] = lokr_parameters(rows, columns, config.lora_rank)
    return parameters


def loha(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes) -> dict[str, int]:
    """Trained parameters by layer."""
    names = matching_modules(shapes, targets)
    return {name: loha_parameters(config.lora_rank, shapes[name]) for name in names}


def lycoris(
    config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes
) -> dict[str, int]:
    """Trained parameters by layer, for the layers that the settings file selects."""
    file = read_lycoris(config.lycoris_config, spec, Problems())
    layers = file.layers(shapes) if file else {}
    return {name: _lycoris_parameters(shapes[name], settings) for name, settings in layers.items()}


def _lycoris_parameters(shape: Shape, settings: Mapping[str, Any]) -> int:
    """The number of trained parameters of a LyCORIS layer."""
    rank = int(settings["dim"])
    width_out, width_in, *_ = shape
    if settings["algo"] == "lokr":
        # LyCORIS puts the smaller factor first.
        small_out, large_out = sorted(factorise(width_out, int(settings["factor"])))
        small_in, large_in = sorted(factorise(width_in, int(settings["factor"])))
        rows = (small_out, large_out)
        if settings["unbalanced_factorization"]:
            rows = (large_out, small_out)
        parameters = lokr_parameters(
            rows,
            (small_in, large_in),
            rank,
            full=settings["full_matrix"],
            both=settings["decompose_both"],
        )
    elif settings["algo"] == "loha":
        parameters = loha_parameters(rank, shape)
    else:
        parameters = rank * (width_out + width_in)
    if settings["dora_wd"]:  # magnitudes
        parameters += width_out if settings["wd_on_output"] else width_in
    if settings["use_scalar"]:
        parameters += 1
    return parameters


def lokr_parameters(
    rows: Pair, columns: Pair, rank: int, *, full: bool = False, both: bool = False
) -> int:
    """The number of trained parameters of a LoKr: of W1 (a, m) and of W2 (k, n).

    Either is full, or a product of two thin matrices.

    Args:
        rows: (a, k), whose product is the layer's output width.
        columns: (m, n), whose product is the layer's input width.
        full: W1 and W2 are full.
        both: W1 may be a product too.
    """
    a, k = rows
    m, n = columns
    first = a * m
    second = k * n
    # As in LyCORIS and peft: a product only if the rank is below half of the longer side.
    if both and not full and rank < max(a, m) / 2:
        first = rank * (a + m)
    if not full and rank < max(k, n) / 2:
        second = rank * (k + n)
    return first + second


def loha_parameters(rank: int, shape: Shape) -> int:
    """The number of trained parameters of a LoHa: two pairs of matrices."""
    return 2 * rank * (shape[0] + shape[1])


def factorise(width: int, factor: int) -> Pair:
    """A width as a product of two numbers.

    Args:
        factor: the first number, if it divides the width; otherwise an upper limit of the first,
            smaller number. -1 sets no limit, so that the two are as close as possible.
    """
    if factor > 0 and width % factor == 0:
        return factor, width // factor
    limit = math.isqrt(width)  # the smaller of two factors is at most the root
    if factor >= 0:
        limit = min(max(factor, 1), limit)
    small = max(number for number in range(1, limit + 1) if width % number == 0)
    return small, width // small


def lycoris_layers(
    config: LoraConfig, spec: FamilySpec, shapes: Shapes, quantised: bool, report: Problems
) -> list[str]:
    """The layers that the settings file selects; none, with a problem, if it is invalid.

    Args:
        shapes: weight shapes by layer; empty if the transformer is not on this machine.
        quantised: whether the base model is quantised.
    """
    problems = Problems()
    check_installed(LYCORIS, "lora_type", "lycoris", problems)
    file = read_lycoris(config.lycoris_config, spec, problems)
    if file is not None:
        check_lycoris(file, shapes, problems, quantised=quantised)
    report.extend(problems)
    if file is None or problems.are_fatal:
        return []
    return list(file.layers(shapes))


by_peft = partial(AdapterKind, "simpletuner.annexes.adapters.converted:add_product")
KINDS = {
    "lokr": by_peft(lokr, takes_any_rank=True),
    "loha": by_peft(loha),
    "lycoris": AdapterKind(
        "simpletuner.annexes.adapters.converted:add_lycoris",
        lycoris,
        lycoris_layers,
        settings_file=KEY,
        no_slider="needs lora_type standard, lokr or loha, not lycoris",
    ),
}
