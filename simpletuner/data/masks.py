"""Loss masks: read from a file and averaged to latent positions, and their checks.

White is learned, black is not; transparent areas count as black. A mask is resized and cropped like
its picture, but with a box filter: Lanczos would ring at edges and leave some weight in black
areas.
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


# A mask is needed at every use of its sample; without a cache, its file would be decoded in every
# step.
@lru_cache(maxsize=256)
def latent_mask(mask: Sample, size: tuple[int, int, int]) -> NDArray[np.float32]:
    """The mean of a mask over the area of each latent position, and over the frames of each latent
    frame.

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
    area = retry_once(
        lambda: np.stack([_averaged(image, mask, height, width) for image in mask.images("black")])
    )
    if len(area) == 1:
        mean = area.repeat(frames, axis=0)
    else:
        # T H W -> F H W, such as 1 + 4k frames to 1 + k
        mean = np.concatenate(
            [area[:1], area[1:].reshape(frames - 1, -1, height, width).mean(axis=1)]
        )
    weights = mean > 0 if mask.is_segmentation else mean
    return weights[None].astype(np.float32)


def _averaged(frame: Image.Image, mask: Sample, height: int, width: int) -> NDArray[np.float64]:
    luminance = fit(frame.convert("L"), mask.geometry, Image.Resampling.BOX) / 255
    # H h W w, with h x w pixels to a latent position
    return luminance.reshape(height, luminance.shape[0] // height, width, -1).mean(axis=(1, 3))


def measure_masks(dataset: Dataset, masks: Dataset, context: DataContext) -> dict[str, FileFacts]:
    """Facts of the masks in use, by name, with the white share of the trained area or the reason
    for a failure.

    Known results are kept. If crops change each epoch, the whole mask is measured.
    """

    def measure(sample: Sample, mask: Sample) -> FileFacts:
        facts = masks.facts[mask.name]
        if dataset.changes_each_epoch:
            # The whole mask, squeezed into the training size, represents the crops of all epochs.
            mask = replace(
                mask, geometry=replace(mask.geometry, resized=mask.geometry.size, crop=(0, 0))
            )
        # All that the share depends on besides the file; a known share is valid only for the same
        # settings.
        way = (
            f"{mask.geometry} {sample.frames} {mask.frame_rate} {mask.is_segmentation} "
            f"{sample.is_i2v}"
        )
        if facts.white and facts.white[0] == way:
            return facts
        try:
            size = context.spec.latent_size(*sample.geometry.size, sample.frames)
            # Frame 0 of i2v is a condition, so its part of the mask has no effect.
            learned = latent_mask(mask, size)[:, 1 if sample.is_i2v else 0 :]
        except MediaError as error:
            return replace(
                facts, content="", problem=str(error), reason=error.reason
            )  # not saved, so read again
        return replace(facts, white=(way, float(learned.mean())))

    pairs = [(sample, sample.mask) for sample in dataset.samples if sample.mask]
    with ThreadPoolExecutor(context.caching.max_workers) as pool:
        measured = pool.map(lambda pair: measure(*pair), pairs)
        return {mask.name: facts for (_, mask), facts in zip(pairs, measured, strict=True)}


def check_mask_sizes(dataset: Dataset, masks: Dataset, report: Problems) -> None:
    """Report in one error all masks that do not fit their picture or clip."""
    pairs = [
        (name, facts, masks.facts_for(name)) for name, facts in dataset.facts.items() if facts.width
    ]
    reasons = {
        name: _misfit(name, facts, mask, dataset.clips)
        for name, facts, mask in pairs
        if mask and mask.width
    }
    wrong = [f"{masks.name_for(name)} {why}" for name, why in reasons.items() if why]
    if wrong:
        report.error(
            masks.id, f"{len(wrong)} masks do not fit the files of {dataset.id}: {shorten(wrong)}."
        )


def _misfit(name: str, source: FileFacts, mask: FileFacts, rules: ClipRules | None) -> str | None:
    if is_stretched(source.picture_size, mask.picture_size):
        return (
            f"is {mask.width}x{mask.height} and {name} {source.width}x{source.height}, "
            "another ratio"
        )
    if mask.clip is None:
        return None
    rate = rules.rate if rules else mask.clip.source_rate
    frames = mask.clip.frames_at(rate)
    needed = source.clip.frames_at(rate) if source.clip else 1
    return (
        None
        if frames == needed
        else f"has {frames} frames at {rate:g} a second and {name} {needed}"
    )


def check_masks(dataset: Dataset, report: Problems) -> None:
    """Report masks that leave nothing, or almost nothing, to learn."""
    white = dataset.white
    masks = dataset.masks
    if masks is None or not white:
        return
    black = [name for name, share in white.items() if not share]
    if black:
        besides = ", frame 0 aside," if dataset.clips and dataset.clips.is_i2v else ""
        message = (
            f"black{besides} wherever it is trained, so nothing is learned: "
            f"{counted(len(black), 'mask')}, "
        )
        report.error(masks.id, f"{message}{shorten(black)}.")
    mean = sum(white.values()) / len(white)
    if mean < TINY_MASK:
        report.warn(
            masks.id,
            f"only {mean:.2%} of masks is white on average; masked_loss_normalise makes up for it.",
        )
