"""Warns about pictures and clips that are trained, but not as their owner may expect.

They are enlarged, trained twice, read differently than by earlier versions, played at another
speed, or decoded in an unusual way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simpletuner.config.types import Size
from simpletuner.data.clips import SAME_SPEED
from simpletuner.data.dataset import Dataset
from simpletuner.data.file_index import CONVERSIONS_SINCE, index_version
from simpletuner.data.file_names import pair_key
from simpletuner.data.sample import Sample
from simpletuner.errors import Problems, counted, shorten

# A picture enlarged by more than this factor looks blurred at the training size.
NOTICEABLE_ENLARGEMENT = 1.5
REMOVE = "`simpletuner cache gc --remove` deletes it."
INTERLACED = {
    "pyav": "two fields become one frame (bwdif).",
    "decord": (
        "decord does not deinterlace, so the model learns their combs; set video.reader to pyav."
    ),
}


def check_media(dataset: Dataset, model_rate: float | None, report: Problems) -> None:
    """All warnings about the samples of a dataset.

    Args:
        model_rate: frames per second that the model was trained at; None for models of pictures.
    """
    _check_enlarged(dataset, report)
    _check_twins(dataset, report)
    _check_conversions(dataset, report)
    if model_rate is not None:
        _check_speed(dataset, model_rate, report)
    _check_decoding(dataset, report)


def is_converted(sample: Sample) -> bool:
    """Whether a sample or its partner is a picture that earlier versions read differently."""
    return bool(sample.conversions or (sample.partner and sample.partner.conversions))


def _check_enlarged(dataset: Dataset, report: Problems) -> None:
    """Warn once about all samples that are much smaller than their training size."""
    # The width suffices, since resizing keeps the ratio.
    factors = [sample.geometry.resized[0] / sample.original_size[0] for sample in dataset.samples]
    enlarged = [factor for factor in factors if factor > NOTICEABLE_ENLARGEMENT]
    if not enlarged:
        return
    most = dataset.samples[factors.index(max(factors))]
    before = most.original_size
    after = most.geometry.resized
    files = f"{len(enlarged)} of {counted(len(factors), 'file')} enlarged"
    message = f"{files}, {most.name} the most, from {before} to {after}"
    advice = (
        "the model learns their blur. minimum_image_size leaves them out; a smaller resolution "
        "enlarges less."
    )
    report.warn(f"{dataset.id}.resolution", f"{message}: {advice}")


def _check_twins(dataset: Dataset, report: Problems) -> None:
    """Warn once about files that seem to be one in two formats, such as a phone's HEIC and JPG."""
    groups: dict[tuple[str, Size], list[str]] = {}
    for sample in dataset.samples:
        key = (pair_key(sample.name), sample.original_size)
        groups.setdefault(key, []).append(sample.name)
    twins = [names for names in groups.values() if len(names) > 1]
    if not dataset.config.is_trained or not twins:
        return
    shown = shorten([" and ".join(names) for names in twins])
    advice = (
        "If they show the same, it is trained twice as often: list one of each in "
        f"{dataset.config.exclude_files}."
    )
    report.warn(dataset.id, f"files that differ only in their extension: {shown}. {advice}")


def _check_conversions(dataset: Dataset, report: Problems) -> None:
    """Name the files that are encoded again, since earlier versions may have cached them.

    Those read pictures without their colour profile, crop or orientation; clips with rounded
    colours, with the combs of interlaced frames, and in black where they are transparent.
    """
    version = index_version(dataset.latent_dir)
    if version is None or version >= CONVERSIONS_SINCE:
        return
    pictures = [sample.name for sample in dataset.samples if is_converted(sample)]
    if pictures:
        named = f"{counted(len(pictures), 'picture')} ({shorten(pictures, 3)})"
        message = (
            f"the colour profile or crop stored in {named} is applied, which earlier versions did "
            "not do. They are encoded again; what was cached is not used."
        )
        report.warn(dataset.id, f"{message} {REMOVE}")
    clips = sum(sample.clip is not None for sample in dataset.samples)
    if clips:
        message = (
            f"the latents of {counted(clips, 'clip')} are made again: colours are exact now, and "
            "were up to three levels off. What earlier versions cached of them is not used."
        )
        report.warn(dataset.id, f"{message} {REMOVE}")


def _check_speed(dataset: Dataset, model_rate: float, report: Problems) -> None:
    """Warn about clips that play faster, slower or less smoothly than the model's frame rate."""
    rules = dataset.clips
    if rules is None:
        return
    reasons: list[str] = []
    if abs(rules.rate / model_rate - 1) > SAME_SPEED:
        reasons.append(
            f"frames are taken at {rules.rate:g} fps and the model plays {model_rate:g}: "
            f"what it learns moves {model_rate / rules.rate:.2f} times as fast"
        )
    rates = {sample.name: sample.clip.source_rate for sample in dataset.samples if sample.clip}
    # A single frame has the rate 0.
    slow = {name: rate for name, rate in rates.items() if 0 < rate < rules.rate * (1 - SAME_SPEED)}
    if slow:
        slowest = min(slow, key=lambda name: slow[name])
        reasons.append(
            f"fewer than the {rules.rate:g} frames per second that are taken, in {len(slow)} of "
            f"{counted(len(rates), 'clip')} ({slowest} has {slow[slowest]:.4g}): frames are seen "
            f"up to {rules.rate / slow[slowest]:.2f} times"
        )
    if reasons:
        report.warn(f"{dataset.id}.video.frame_rate", f"{'; '.join(reasons)}.")


def _check_decoding(dataset: Dataset, report: Problems) -> None:
    """Announce clips that are interlaced, and those that only decord can read."""
    reader = dataset.clips.keys.reader if dataset.clips else "pyav"
    clips = {sample.name: sample.clip for sample in dataset.samples if sample.clip}
    interlaced = [name for name, clip in clips.items() if clip.is_interlaced]
    by_decord = [name for name, clip in clips.items() if clip.reader == "decord"]
    if interlaced:
        report.warn(dataset.id, f"interlaced: {_some_of(interlaced, clips)}; {INTERLACED[reader]}")
    if by_decord and reader == "pyav":
        message = (
            "decord reads them, with colours that differ by a few levels; re-encode them with "
            "ffmpeg to avoid it."
        )
        report.warn(dataset.id, f"PyAV cannot read {_some_of(by_decord, clips)}; {message}")


def _some_of(names: Sequence[str], clips: Mapping[str, object]) -> str:
    """`2 of 5 clips (a.mp4, b.mp4)`."""
    return f"{len(names)} of {counted(len(clips), 'clip')} ({shorten(names)})"
