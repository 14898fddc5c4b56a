"""Plans `simpletuner sample` and `sweep`: which weights, prompts and settings are rendered.

The source is a run's folder, a checkpoint, a LoRA file or a configuration; there is no training
data. Loads no weights, imports no torch and writes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner.config.json_reader import read_json
from simpletuner.config.load import Layer, canonical
from simpletuner.config.paths import home_path, missing_path
from simpletuner.config.records import without_removed
from simpletuner.config.schema import CHOSEN, NOT_SET_BY_USER
from simpletuner.config.sources import Arguments, Located, config_from_values, locate
from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.files import MediaError, content_hash
from simpletuner.data.pictures import inspect
from simpletuner.data.sample import Sample
from simpletuner.errors import ConfigError, Problems
from simpletuner.hashing import hash_file
from simpletuner.models import lora_checks, lora_layers
from simpletuner.models.spec import Flavour
from simpletuner.planning.build import Rendering, plan_rendering, plan_training
from simpletuner.planning.checkpoint_folder import (
    PIPELINE_FOLDER,
    Checkpoint,
    average_is_stale,
    find_checkpoints,
    open_checkpoint,
    result_step,
)
from simpletuner.planning.plans import Plan, PreviewPlan, SamplePlan
from simpletuner.planning.prompts import ValidationPrompt, file_safe, unique
from simpletuner.planning.resume import decide_seed
from simpletuner.weights import lora_names
from simpletuner.weights.files import tensor_shapes
from simpletuner.weights.part import Part
from simpletuner.weights.published_lora import lora_file, model_in_header

# `offload: auto` chooses again for sampling, except these settings, which change results.
CHOICES_KEPT = ("base_model_precision", "vae_enable_tiling", "validation_decoding")
CACHES = ("cache_dir", "cache_dir_text", "cache_dir_vae")
LONGEST_STEM = 60  # characters of a prompt in the name of a file


@dataclass(frozen=True)
class SampleRequest:
    """A request to render, from the command line.

    Attributes:
        source: an output folder, a checkpoint or a LoRA file; None for a base model.
        checkpoints: steps, names or `latest`; None means the result, in a sweep all checkpoints.
        ema: render with the moving average.
        output: folder for pictures or clips.
        sweeps: compare checkpoints, by default with the run's prompts.
    """

    source: str | None
    output: str
    arguments: Arguments
    prompts: Sequence[str] = ()
    images: Sequence[str] = ()
    strengths: Sequence[float] = (1.0,)
    checkpoints: Sequence[str] | None = None
    ema: bool = False
    sweeps: bool = False

    def flag(self, name: str) -> str:
        """The name of a flag that takes one value in `sample`, and a list in `sweep`."""
        return f"{name}s" if self.sweeps else name


@dataclass(frozen=True)
class Sampled:
    """The weights to sample from.

    Attributes:
        step: training step; None if unknown.
        lora: a LoRA file for the base model.
        transformer: the transformer of a full fine-tune, in place of the base model's.
        content: identifies the weights, see `caching.keys`; empty for a base model.
    """

    name: str
    step: int | None = None
    lora: Path | None = None
    transformer: Part | None = None
    content: str = ""


def plan_samples(request: SampleRequest) -> tuple[SamplePlan, list[Sampled]]:
    """A plan whose previews are the requested pictures or clips, and the weights to render them
    with, in order.

    Raises:
        ConfigError: lists all problems.
    """
    problems = request.arguments.problems
    if not request.prompts and not request.sweeps:
        problems.error("--prompt", "is required; it may be given several times.")
    pictures = _pictures(request, problems)
    weights, run = find_weights(request, problems)
    # Unreadable files are reported here; the checks below need readable ones.
    weights = _readable(weights, problems)
    if not weights:
        canonical(request.arguments.layer(), problems)  # also reports unknown keys
        raise ConfigError(problems)
    _check_strengths(request, weights, problems)
    arguments = replace(
        request.arguments, base=Located(_layers(request, weights[0], run, problems))
    )
    rendering = Rendering(
        request.output, _prompts(request.prompts), pictures, weights[0].transformer
    )
    plan = plan_rendering(arguments, rendering)
    loras = [sampled.lora for sampled in weights if sampled.lora is not None]
    _check_pictures(plan.flavour, problems, given=bool(pictures))
    _check_loras(loras, plan, problems)
    plan.spec.checks.sizes(plan.config, plan.flavour, plan.sizes, {}, problems)
    problems.raise_if_fatal()
    lora_bytes = max((path.stat().st_size for path in loras), default=0)
    warnings = [problem for problem in problems if not problem.fatal]
    samples = SamplePlan(
        **vars(plan),
        seed=decide_seed(plan.config.run.seed, run),
        warnings=warnings,
        datasets=[],
        text_caches=[],
        lora_bytes=lora_bytes,
    )
    return samples, weights


def _readable(weights: Sequence[Sampled], report: Problems) -> list[Sampled]:
    """The weights without LoRA files that cannot be read, which are reported."""
    readable = []
    for sampled in weights:
        if sampled.lora is None or lora_checks.read_shapes("source", sampled.lora, report):
            readable.append(sampled)
    return readable


def _pictures(request: SampleRequest, report: Problems) -> tuple[Sample, ...]:
    """The source pictures as samples at their original size."""
    samples = []
    for path in map(home_path, request.images):
        try:
            facts = inspect(path)
            size = Size(facts.width, facts.height)
            whole = Geometry("", size, size, (0, 0))
            file = ("image", path.name, path.parent, content_hash(path))
            samples.append(Sample(*file, size, whole, conversions=facts.conversions))
        except MediaError as error:
            report.error("--image", f"{str(path)!r} {error}.")
    return tuple(samples)


def _check_loras(paths: Sequence[Path], plan: PreviewPlan, report: Problems) -> None:
    """Check that the LoRA files match the model."""
    modules: dict[str, tuple[int, int]] = {}
    if plan.source.check(Problems()):  # what is wrong has been reported with the plan
        modules = lora_layers.linear_modules(plan.source["transformer"].weight_shapes())
    for path in paths:
        lora_checks.check_lora_file("LoRA", path, modules, plan.spec.name, report)


def _prompts(texts: Sequence[str]) -> list[ValidationPrompt]:
    taken: set[str] = set()
    return [
        ValidationPrompt(unique(file_safe(text[:LONGEST_STEM]), taken), text, text)
        for text in texts
    ]


def _check_strengths(request: SampleRequest, weights: Sequence[Sampled], report: Problems) -> None:
    """Check strengths: only LoRAs have one, and a DoRA between 0 and 1 does not interpolate two
    models.
    """
    flag = request.flag("--strength")
    strengths = request.strengths
    if weights[0].lora is None and list(strengths) != [1.0]:
        is_full = weights[0].transformer is not None
        why = "a full fine-tune replaces the weights, so it" if is_full else "the base model"
        report.error(flag, f"is for LoRAs: {why} has no strength.")
    if set(strengths) != {1.0} and any(
        sampled.lora and _is_dora(sampled.lora) for sampled in weights
    ):
        message = "scales the update of a DoRA but not its magnitudes, as in the stock pipeline."
        report.warn(
            flag, f"{message} At 0 the base model is rendered, unlike in the stock pipeline."
        )


def _is_dora(lora: Path) -> bool:
    return any("magnitude" in (lora_names.role_of(name) or "") for name in tensor_shapes(lora))


def find_weights(
    request: SampleRequest, report: Problems
) -> tuple[list[Sampled], Checkpoint | None]:
    """The weights of a request's source, and a checkpoint with the settings of its run, if it
    belongs to a run.
    """
    if request.source is None:
        if request.sweeps:
            report.error("sweep", "needs the output folder of a run: simpletuner sweep OUTPUT_DIR")
            raise ConfigError(report)
        for flag in _flags_of_runs(request):
            report.error(flag, "needs the output folder of a run: simpletuner sample OUTPUT_DIR")
        return [Sampled("base model")], None
    path = home_path(request.source)
    if not path.exists():
        report.error("source", missing_path(path))
        return [], None
    return (
        _weights_in_file(request, path, report)
        if path.is_file()
        else _weights_of_run(request, path, report)
    )


def _flags_of_runs(request: SampleRequest) -> list[str]:
    """The given flags that choose among the weights of a run."""
    flags = {request.flag("--checkpoint"): request.checkpoints is not None, "--ema": request.ema}
    return [flag for flag, is_given in flags.items() if is_given]


def _weights_in_file(
    request: SampleRequest, path: Path, report: Problems
) -> tuple[list[Sampled], Checkpoint | None]:
    for flag in _flags_of_runs(request):
        report.error(
            flag, f"has no effect on a single file; name the run's folder, not {str(path)!r}."
        )
    # The file may be in a checkpoint, in a checkpoint's folder ema/, or beside the checkpoints.
    run = None
    for folder in path.parents[:2]:
        checkpoints = _checkpoints(folder)
        if checkpoints:
            run = checkpoints[-1]
            break
    return [Sampled(path.stem, lora=path, content=hash_file(path))], run


def _weights_of_run(
    request: SampleRequest, path: Path, report: Problems
) -> tuple[list[Sampled], Checkpoint | None]:
    whole = _checkpoints(path)
    run = whole[-1] if whole else None
    is_full = run is not None and run.manifest.identity.model_type == "full"
    if request.sweeps or request.checkpoints is not None or (run is not None and run.path == path):
        chosen = _choose(request, whole, path, report)
        weights = []
        for checkpoint in chosen:
            weights.append(_weights(checkpoint.path, checkpoint.step, request.ema, is_full, report))
            if not weights[-1].name:
                break  # the others lack it for the same reason
        return weights, run
    result = path / (PIPELINE_FOLDER if is_full else lora_names.LORA_FILE)
    if result.exists():
        step = result_step(path, "full" if is_full else "lora")
        return [
            _weights(
                result if is_full else path, step, request.ema and not is_full, is_full, report
            )
        ], run
    if run is None and lora_file(path).is_file():  # a folder of another program
        return _weights_in_file(request, lora_file(path), report)
    names = ", ".join(checkpoint.path.name for checkpoint in whole)
    advice = (
        f"Its checkpoints: {names}; choose one with --checkpoint."
        if whole
        else "It has no checkpoints either."
    )
    report.error("source", f"{request.source!r} contains no result ({result.name}). {advice}")
    return [], run


def _checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoint at a folder, or else the checkpoints in it."""
    itself = open_checkpoint(folder)
    return [itself] if itself else find_checkpoints(folder)[0]


def _weights(folder: Path, step: int | None, ema: bool, is_full: bool, report: Problems) -> Sampled:
    """The weights in a checkpoint, an output folder or a published pipeline."""
    if is_full:
        name = "transformer_ema" if ema else "transformer"
    else:
        name = f"ema/{lora_names.LORA_FILE}" if ema else lora_names.LORA_FILE
    path = folder / name
    if ema and not is_full and average_is_stale(folder):
        message = (
            f"{str(path)!r} is not of the result beside it: a later session trained without "
            "use_ema."
        )
        report.error(
            "source", f"{message} Choose a checkpoint of the earlier one with --checkpoint."
        )
        return Sampled("")
    if not path.exists():
        plain = (
            "checkpoints contain the adapter (lora_type) in its native form; only the result is "
            "also a plain LoRA."
        )
        report.error(
            "source", f"{str(path)!r} does not exist: {'the run had no use_ema.' if ema else plain}"
        )
        return Sampled("")
    if not is_full:
        return Sampled(folder.name, step, lora=path, content=hash_file(path))
    part = Part("transformer", "source", str(folder), name, None, None)
    # Path and time instead of a hash: a full transformer has gigabytes.
    return Sampled(
        folder.name, step, transformer=part, content=f"{path.resolve()} {folder.stat().st_mtime_ns}"
    )


def _choose(
    request: SampleRequest, whole: Sequence[Checkpoint], folder: Path, report: Problems
) -> list[Checkpoint]:
    """The checkpoints with the wanted steps or names, or `latest`; all checkpoints if none is
    wanted.
    """
    names = ", ".join(checkpoint.path.name for checkpoint in whole) or "none"
    known: dict[str, Checkpoint] = {}
    for checkpoint in whole:  # by step, so the last one is the latest
        known |= dict.fromkeys(("latest", str(checkpoint.step), checkpoint.path.name), checkpoint)
    asked = request.checkpoints
    if asked is None:
        asked = [str(checkpoint.step) for checkpoint in whole]
    if not asked:
        report.error("source", f"{request.source!r} contains no complete checkpoints.")
    for name in asked:
        if name not in known:
            message = f"{name!r} is not a complete checkpoint. Checkpoints in {folder}: {names}."
            report.error(request.flag("--checkpoint"), message)
    # By step, so that a checkpoint named twice (`latest` and its step) is rendered once.
    return list({known[name].step: known[name] for name in asked if name in known}.values())


def _layers(
    request: SampleRequest, weights: Sampled, run: Checkpoint | None, report: Problems
) -> list[Layer]:
    """The layers below the command line: settings of a run, of a LoRA's header, or of a
    configuration file.
    """
    selectors = request.arguments.selectors
    lora = weights.lora
    # The lowest layer: a LoRA file or base model without settings counts as a LoRA run.
    layers = [Layer("", [("model_type", "lora")])]
    if run is not None:
        for name in selectors:
            report.error(
                name, f"has no effect: the settings are those of the run {run.path.parent}."
            )
        return [*layers, _layer_of(run, report)]
    if lora is not None:
        family, flavour = model_in_header(lora)
        if family and flavour:
            layers.append(Layer(str(lora), [("model_family", family), ("model_flavour", flavour)]))
    # Problems of the arguments are collected later, with those of other layers.
    if selectors or not (
        layers[1:] or "model_family" in canonical(request.arguments.layer(), Problems())
    ):
        layers += locate(selectors, report).layers
        _check_result(layers, report)
    return layers


def _check_result(layers: Sequence[Layer], report: Problems) -> None:
    """Warn that the base model of a configuration is rendered, not the LoRA that was trained with
    it.
    """
    folders = [str(value) for layer in layers for key, value in layer.values if key == "output_dir"]
    if folders and (home_path(folders[-1]) / lora_names.LORA_FILE).is_file():
        command = f"simpletuner sample {shlex.quote(folders[-1])}"
        report.warn(
            "source", f"the base model is rendered; for the result of this configuration: {command}"
        )


def plan_evaluation(run: Path, arguments: Arguments) -> Plan:
    """The plan of a run with only its evaluation datasets: no training, no previews.

    Args:
        arguments: their `collect` lists remote datasets.

    Raises:
        ConfigError: the run can no longer be planned, for example because its files are gone.
    """
    last = _checkpoints(run)[-1]
    settings = dict(_layer_of(last, Problems(), without=()).values)
    content = {**settings, "output_dir": str(last.path.parent)}
    plan = plan_training(Arguments(collect=arguments.collect, base=config_from_values(content)))
    return replace(
        plan, datasets=[data for data in plan.datasets if not data.config.is_trained], prompts=[]
    )


def _layer_of(
    run: Checkpoint, report: Problems, without: Sequence[str] = (*CACHES, "output_dir")
) -> Layer:
    """The explicit settings of a run, without its folders and without what earlier versions had."""
    path = run.path / "config.json"
    origins = run.manifest.identity.origins
    settings = (
        read_json(path, Problems(), dict) or {}
    )  # the checkpoint is complete, so the file is valid
    keys = {key for key, origin in origins.items() if origin not in NOT_SET_BY_USER} - {*without}
    keys |= {key for key in CHOICES_KEPT if origins.get(key) == CHOSEN}
    chosen = {key: value for key, value in settings.items() if key in keys}
    return Layer(str(path), list(without_removed(chosen, str(path), report).items()))


def _check_pictures(flavour: Flavour, report: Problems, *, given: bool) -> None:
    if (flavour.task in ("i2i", "i2v")) != given:
        why = (
            "has no effect: {} starts from noise."
            if given
            else "is required: {} starts from a picture."
        )
        report.error("--image", why.format(flavour.name))
