"""Loss masks: read from a file and averaged to latent positions, and their checks.

White is learned, black is not; transparent areas count as black. A mask is resized and cropped like
its picture, but with a box filter: Lanczos would ring at edges and leave weight in black areas.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.data.clips import ClipRules, retry_once
from simpletuner.data.dataset import Dataset, is_stretched
from simpletuner.data.entries import DataContext
from simpletuner.data.file_index import FileFacts
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import fit
from simpletuner.data.sample import Sample
from simpletuner.errors import Problems, counted, shorten

# A mask with a smaller white share teaches almost nothing.
TINY_MASK = 0.01


# Cached: a mask is needed at every use of its sample, and its file would be decoded every time.
@lru_cache(maxsize=256)
def latent_mask(mask: Sample, size: tuple[int, int, int]) -> NDArray[np.float32]:
    """The mean of a mask over each latent position, and over the frames of each latent frame.

    The VAEs encode frame 0 alone and then groups of frames of a fixed size. A mask picture applies
    to all frames.

    Args:
        size: frames, height and width of the latents.

    Returns:
        weights in [0, 1], `1 F H W`; for a segmentation, 1 for every area that is not entirely
        black.

    Raises:
        MediaError: the file is damaged or cannot be read.
    """
    frames, height, width = size

    def averaged_frames() -> NDArray[np.float64]:
        frames = mask.images("black")
        return np.stack([_averaged(frame, mask, height, width) for frame in frames])

    area = retry_once(averaged_frames)  # T H W
    if len(area) == 1:
        mean = area.repeat(frames, axis=0)
    else:
        # Frame 0 is a latent frame by itself; the rest is averaged in groups: 1 + 4k frames become
        # 1 + k latent frames, for instance.
        groups = area[1:].reshape(frames - 1, -1, height, width)
        mean = np.concatenate([area[:1], groups.mean(axis=1)])
    weights = mean > 0 if mask.is_segmentation else mean
    return weights[None].astype(np.float32)


def _averaged(frame: Image.Image, mask: Sample, height: int, width: int) -> NDArray[np.float64]:
    """The mean brightness of each latent position, `height width`, in [0, 1]."""
    luminance = fit(frame.convert("L"), mask.geometry, Image.Resampling.BOX) / 255
    # `H h W w`: H x W latent positions of h x w pixels.
    pixels = luminance.reshape(height, luminance.shape[0] // height, width, -1)
    return pixels.mean(axis=(1, 3))


def measure_masks(dataset: Dataset, masks: Dataset, context: DataContext) -> dict[str, FileFacts]:
    """Facts of the masks in use, by name, with the white share of the trained area.

    Known results are kept. A mask that cannot be read has a problem instead.
    """

    def measure(pair: tuple[Sample, Sample]) -> FileFacts:
        sample, mask = pair
        if dataset.changes_each_epoch:
            # The whole mask, squeezed into the training size, represents the crops of all epochs.
            squeezed = replace(mask.geometry, resized=mask.geometry.size, crop=(0, 0))
            mask = replace(mask, geometry=squeezed)
        size = context.spec.latent_size(*sample.geometry.size, sample.frames)
        return _measured(masks.facts[mask.name], sample, mask, size)

    pairs = [(sample, sample.mask) for sample in dataset.samples if sample.mask]
    with ThreadPoolExecutor(context.caching.max_workers) as pool:
        measured = pool.map(measure, pairs)
        return {mask.name: facts for (_, mask), facts in zip(pairs, measured, strict=True)}


def _measured(
    facts: FileFacts, sample: Sample, mask: Sample, size: tuple[int, int, int]
) -> FileFacts:
    """The facts of a mask with its white share, or with the reason why it cannot be read."""
    # All that the share depends on besides the file: a known share of other settings is not valid.
    settings = (
        f"{mask.geometry} {sample.frames} {mask.frame_rate} {mask.is_segmentation} {sample.is_i2v}"
    )
    if facts.white and facts.white[0] == settings:
        return facts
    try:
        weights = latent_mask(mask, size)
    except MediaError as error:
        # Without content, these facts are not saved, and the next run reads the file again.
        return replace(facts, content="", problem=str(error), reason=error.reason)
    if sample.is_i2v:
        weights = weights[:, 1:]  # frame 0 is a condition, so its part of the mask has no effect
    return replace(facts, white=(settings, float(weights.mean())))


def check_mask_sizes(dataset: Dataset, masks: Dataset, report: Problems) -> None:
    """Report in one error all masks that do not fit their picture or clip."""
    wrong: list[str] = []
    for name, facts in dataset.facts.items():
        mask = masks.facts_for(name)
        if mask is None or not mask.width or not facts.width:  # missing or damaged
            continue
        misfit = _misfit(name, facts, mask, dataset.clips)
        if misfit is not None:
            wrong.append(f"{masks.name_for(name)} {misfit}")
    if wrong:
        count = counted(len(wrong), "mask does", "masks do")
        message = f"{count} not fit the files of {dataset.id}: {shorten(wrong)}."
        report.error(masks.id, message)


def _misfit(name: str, source: FileFacts, mask: FileFacts, rules: ClipRules | None) -> str | None:
    """Why a mask does not fit the file `name`, as text after the mask's name; None if it fits."""
    if is_stretched(source.picture_size, mask.picture_size):
        return f"is {mask.picture_size} and {name} {source.picture_size}, another ratio"
    if mask.clip is None:
        return None
    rate = rules.rate if rules else mask.clip.source_rate
    frames = mask.clip.frames_at(rate)
    needed = 1
    if source.clip is not None:
        needed = source.clip.frames_at(rate)
    if frames == needed:
        return None
    return f"has {frames} frames at {rate:g} fps and {name} {needed}"


def check_masks(dataset: Dataset, report: Problems) -> None:
    """Report masks that leave nothing, or almost nothing, to learn."""
    white = dataset.white_shares
    masks = dataset.masks
    if masks is None or not white:
        return
    black = [name for name, share in white.items() if not share]
    if black:
        besides = ", frame 0 aside," if dataset.clips and dataset.clips.is_i2v else ""
        message = (
            f"black{besides} wherever it is trained, so nothing is learned: "
            f"{counted(len(black), 'mask')}, {shorten(black)}."
        )
        report.error(masks.id, message)
    mean = sum(white.values()) / len(white)
    if mean < TINY_MASK:
        message = f"only {mean:.2%} of masks is white on average"
        report.warn(masks.id, f"{message}; masked_loss_normalise makes up for it.")
