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
from simpletuner.data.files import MediaError
from simpletuner.data.sample import Sample
from simpletuner.errors import ConfigError, Problems
from simpletuner.hashing import hash_file
from simpletuner.models import lora_checks, lora_layers
from simpletuner.models.spec import PICTURE_TASKS
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
from simpletuner.planning.prompt_checks import check_pictures_of_prompts, check_preview_sizes
from simpletuner.planning.prompt_library import open_picture
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
        ema: whether they are the moving average.
    """

    name: str
    step: int | None = None
    lora: Path | None = None
    transformer: Part | None = None
    content: str = ""
    ema: bool = False


def plan_samples(request: SampleRequest) -> tuple[SamplePlan, list[Sampled]]:
    """A plan whose previews are the requested pictures or clips, and the weights for them in order.

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

    layers = _layers(request, weights[0], run, problems)
    arguments = replace(request.arguments, base=Located(layers))
    prompts = _prompts(request.prompts)
    rendering = Rendering(
        request.output,
        prompts,
        pictures,
        weights[0].transformer,
        compares=request.sweeps,
        run=run,
    )
    plan = plan_rendering(arguments, rendering)

    loras = [sampled.lora for sampled in weights if sampled.lora is not None]
    _check_pictures(plan, problems)
    _check_loras(loras, plan, problems)
    check_preview_sizes(plan, {}, problems)
    check_pictures_of_prompts(plan, problems)
    problems.raise_if_fatal()

    samples = SamplePlan(
        **vars(plan),
        seed=decide_seed(plan.config.run.seed, run),
        warnings=[problem for problem in problems if not problem.fatal],
        datasets=[],
        text_caches=[],
        lora_bytes=max((path.stat().st_size for path in loras), default=0),
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
            samples.append(open_picture(path))
        except MediaError as error:
            report.error("--image", f"{str(path)!r} {error}.")
    return tuple(samples)


def _check_loras(paths: Sequence[Path], plan: PreviewPlan, report: Problems) -> None:
    """Check that the LoRA files match the model."""
    modules: dict[str, tuple[int, int]] = {}
    if plan.source.check(Problems()):  # its problems were reported with the plan
        modules = lora_layers.linear_modules(plan.source["transformer"].weight_shapes())
    for path in paths:
        lora_checks.check_lora_file("LoRA", path, modules, plan.spec.name, report)


def _prompts(texts: Sequence[str]) -> list[ValidationPrompt]:
    """Prompts with names for their files."""
    taken: set[str] = set()
    prompts = []
    for text in texts:
        name = unique(file_safe(text[:LONGEST_STEM]), taken)
        prompts.append(ValidationPrompt(name, text, text))
    return prompts


def _check_strengths(request: SampleRequest, weights: Sequence[Sampled], report: Problems) -> None:
    """Check strengths: only LoRAs have one, and in a DoRA it does not scale the magnitudes."""
    flag = request.flag("--strength")
    strengths = request.strengths
    if weights[0].lora is None and list(strengths) != [1.0]:
        is_full = weights[0].transformer is not None
        subject = "the base model"
        if is_full:
            subject = "a full fine-tune replaces the weights, so it"
        report.error(flag, f"is for LoRAs: {subject} has no strength.")
    loras = [sampled.lora for sampled in weights if sampled.lora]
    if set(strengths) != {1.0} and any(map(_is_dora, loras)):
        report.warn(
            flag,
            "scales the update of a DoRA but not its magnitudes, as in the stock pipeline. At 0 "
            "the base model is rendered, unlike in the stock pipeline.",
        )


def _is_dora(lora: Path) -> bool:
    """Whether a LoRA file has magnitudes."""
    roles = (lora_names.role_of(name) or "" for name in tensor_shapes(lora))
    return any("magnitude" in role for role in roles)


def find_weights(
    request: SampleRequest, report: Problems
) -> tuple[list[Sampled], Checkpoint | None]:
    """The weights of a request's source, and a checkpoint with the settings of their run."""
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
    if path.is_file():
        return _weights_in_file(request, path, report)
    return _weights_of_run(request, path, report)


def _flags_of_runs(request: SampleRequest) -> list[str]:
    """The flags of the request that choose among the weights of a run."""
    flags = []
    if request.checkpoints is not None:
        flags.append(request.flag("--checkpoint"))
    if request.ema:
        flags.append("--ema")
    return flags


def _weights_in_file(
    request: SampleRequest, path: Path, report: Problems
) -> tuple[list[Sampled], Checkpoint | None]:
    """A LoRA file, and a checkpoint of its run, if it is in the folder of one."""
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
    """The weights in a folder: of the chosen checkpoints, or else of the result."""
    checkpoints = _checkpoints(path)
    run = checkpoints[-1] if checkpoints else None
    is_full = run is not None and run.manifest.identity.model_type == "full"
    is_checkpoint = run is not None and run.path == path
    if request.sweeps or request.checkpoints is not None or is_checkpoint:
        weights = []
        for checkpoint in _choose(request, checkpoints, path, report):
            sampled = _weights(
                checkpoint.path, checkpoint.step, ema=request.ema, is_full=is_full, report=report
            )
            weights.append(sampled)
            if not sampled.name:
                break  # the following ones are missing for the same reason
        if request.sweeps and request.checkpoints is None and not is_checkpoint and not is_full:
            weights += _uncompared_result(request, path, weights, report)
        return weights, run

    result = path / (PIPELINE_FOLDER if is_full else lora_names.LORA_FILE)
    if result.exists():
        step = result_step(path, "full" if is_full else "lora")
        if is_full:  # a pipeline has one transformer, also with use_ema
            return [_weights(result, step, ema=False, is_full=True, report=report)], run
        return [_weights(path, step, ema=request.ema, is_full=False, report=report)], run
    if run is None and lora_file(path).is_file():  # a folder of another program
        return _weights_in_file(request, lora_file(path), report)

    advice = "It has no checkpoints either."
    if checkpoints:
        names = ", ".join(checkpoint.path.name for checkpoint in checkpoints)
        advice = f"Its checkpoints: {names}; choose one with --checkpoint."
    report.error("source", f"{request.source!r} contains no result ({result.name}). {advice}")
    return [], run


def _uncompared_result(
    request: SampleRequest, path: Path, weights: Sequence[Sampled], report: Problems
) -> list[Sampled]:
    """The LoRA of a run's last step, unless a checkpoint has that step."""
    step = result_step(path, "lora")
    if step is None or any(sampled.step == step or not sampled.name for sampled in weights):
        return []
    if request.ema and (average_is_stale(path) or not (path / "ema").is_dir()):
        return []
    return [_weights(path, step, ema=request.ema, is_full=False, report=report)]


def _checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoint at a folder, or else the checkpoints in it."""
    checkpoint = open_checkpoint(folder)
    if checkpoint:
        return [checkpoint]
    checkpoints, _incomplete = find_checkpoints(folder)
    return checkpoints


def _weights(
    folder: Path, step: int | None, *, ema: bool, is_full: bool, report: Problems
) -> Sampled:
    """The weights in a checkpoint, an output folder or a published pipeline.

    Without a name if they do not exist, which is reported.
    """
    if is_full:
        name = "transformer_ema" if ema else "transformer"
    else:
        name = f"ema/{lora_names.LORA_FILE}" if ema else lora_names.LORA_FILE
    path = folder / name
    if ema and not is_full and average_is_stale(folder):
        report.error(
            "source",
            f"{str(path)!r} is not of the result beside it: a later session trained without "
            "use_ema. Choose a checkpoint of the earlier one with --checkpoint.",
        )
        return Sampled("")
    if not path.exists():
        reason = "the run had no use_ema."
        if not ema:
            reason = (
                "checkpoints contain the adapter (lora_type) in its native form; only the result "
                "is also a plain LoRA."
            )
        report.error("source", f"{str(path)!r} does not exist: {reason}")
        return Sampled("")
    if not is_full:
        return Sampled(folder.name, step, lora=path, content=hash_file(path), ema=ema)
    part = Part("transformer", "source", str(folder), name, None, None)
    # Path and time instead of a hash: a full transformer has gigabytes.
    content = f"{path.resolve()} {folder.stat().st_mtime_ns}"
    return Sampled(folder.name, step, transformer=part, content=content, ema=ema)


def _choose(
    request: SampleRequest, checkpoints: Sequence[Checkpoint], folder: Path, report: Problems
) -> list[Checkpoint]:
    """The checkpoints that a request names by step, by name or as `latest`; else all."""
    by_name: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:  # by step, so the last one is the latest
        names = ("latest", str(checkpoint.step), checkpoint.path.name)
        by_name |= dict.fromkeys(names, checkpoint)
    requested = request.checkpoints
    if requested is None:
        requested = [str(checkpoint.step) for checkpoint in checkpoints]
    if not requested:
        report.error("source", f"{request.source!r} contains no complete checkpoints.")
    chosen: dict[int, Checkpoint] = {}  # so that one named twice (`latest`) is rendered once
    for name in requested:
        if name in by_name:
            checkpoint = by_name[name]
            chosen[checkpoint.step] = checkpoint
            continue
        existing = ", ".join(checkpoint.path.name for checkpoint in checkpoints) or "none"
        message = f"{name!r} is not a complete checkpoint. Checkpoints in {folder}: {existing}."
        report.error(request.flag("--checkpoint"), message)
    return list(chosen.values())


def _layers(
    request: SampleRequest, weights: Sampled, run: Checkpoint | None, report: Problems
) -> list[Layer]:
    """The layers below the command line: of a run, a LoRA's header, or a configuration file."""
    selectors = request.arguments.selectors
    # The lowest layer: a LoRA file or base model without settings counts as a LoRA run.
    layers = [Layer("", [("model_type", "lora")])]
    if run is not None:
        for name in selectors:
            report.error(
                name, f"has no effect: the settings are those of the run {run.path.parent}."
            )
        return [*layers, _layer_of(run, report)]

    # Problems of the arguments are collected later, with those of other layers.
    has_family = "model_family" in canonical(request.arguments.layer(), Problems())
    if weights.lora is not None:
        family, flavour = model_in_header(weights.lora)
        if family and flavour:
            settings = [("model_family", family), ("model_flavour", flavour)]
            layers.append(Layer(str(weights.lora), settings))
            has_family = True
    if selectors or not has_family:
        layers += locate(selectors, report).layers
        _warn_of_result(layers, report)
    return layers


def _warn_of_result(layers: Sequence[Layer], report: Problems) -> None:
    """Warn that a configuration's base model is rendered, not the LoRA that was trained with it."""
    output_dir: str | None = None
    for layer in layers:
        for key, value in layer.values:
            if key == "output_dir":
                output_dir = str(value)
    if output_dir is not None and (home_path(output_dir) / lora_names.LORA_FILE).is_file():
        command = f"simpletuner sample {shlex.quote(output_dir)}"
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
    settings["output_dir"] = str(last.path.parent)
    # A checkpoint from which a branch once began may have moved, and none begins now.
    settings.pop("resume_from_checkpoint", None)
    plan = plan_training(Arguments(collect=arguments.collect, base=config_from_values(settings)))
    evaluation = [dataset for dataset in plan.datasets if not dataset.config.is_trained]
    return replace(plan, datasets=evaluation, prompts=[])


def _layer_of(
    run: Checkpoint, report: Problems, without: Sequence[str] = (*CACHES, "output_dir")
) -> Layer:
    """The explicit settings of a run, without its folders and keys of earlier versions."""
    path = run.path / "config.json"
    # The checkpoint is complete, so the file is valid.
    settings = read_json(path, Problems(), dict) or {}
    origins = run.manifest.identity.origins
    keys = {key for key, origin in origins.items() if origin not in NOT_SET_BY_USER} - {*without}
    keys |= {key for key in CHOICES_KEPT if origins.get(key) == CHOSEN}
    kept = {key: value for key, value in settings.items() if key in keys}
    return Layer(str(path), list(without_removed(kept, str(path), report).items()))


def _check_pictures(plan: PreviewPlan, report: Problems) -> None:
    """Check that source pictures are given exactly if the model starts from them."""
    name = plan.flavour.name
    given = bool(plan.pictures)
    starts_from_picture = plan.flavour.task in PICTURE_TASKS
    # In a sweep, prompts of the run may name their own.
    have_pictures = all(prompt.picture is not None for prompt in plan.prompts)
    if starts_from_picture and not given and not have_pictures:
        report.error("--image", f"is required: {name} starts from a picture.")
    if given and not starts_from_picture:
        report.error("--image", f"has no effect: {name} starts from noise.")
