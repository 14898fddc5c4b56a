"""What becomes of a whole file: a sample, or the reason why it is none."""

from __future__ import annotations

from .buckets import OutsideLimitsError
from .captions import CaptionError, CaptionSource, captions_for
from .clip_rules import ClipLengthError
from .dataset import Dataset
from .folder import Folder
from .inventory import FileFacts
from .sample import Rejected, Sample


def outcome_of(
    name: str, facts: FileFacts, dataset: Dataset, folder: Folder, captions: CaptionSource
) -> Sample | Rejected:
    """The sample of a picture or clip, or why it is left out.

    Args:
        name: path below the dataset's folder.
        dataset: with its rules; its samples are not looked at.
        captions: where its captions come from.
    """
    rejected = _without_partner(name, dataset)
    if rejected is not None:
        return rejected
    if dataset.config.metadata_backend == "parquet" and name not in captions.table:
        return Rejected(dataset.id, name, "not in the table", "is not in the table")
    try:
        return _sample(name, facts, dataset, folder, captions)
    except OutsideLimitsError as error:
        return Rejected(dataset.id, name, "outside the limits", str(error))
    except ClipLengthError as error:
        return Rejected(dataset.id, name, error.reason, str(error))
    except CaptionError as error:
        return Rejected(dataset.id, name, "no caption", str(error))


def _without_partner(name: str, dataset: Dataset) -> Rejected | None:
    for partners in dataset.partners:
        partner = partners.facts_of(name)
        if partner is None:
            return Rejected(dataset.id, name, "partner unusable", f"has no partner in {partners.dataset_id}")
        if partner.problem is not None:
            detail = f"its partner {partners.name_of(name)} {partner.problem}"
            return Rejected(dataset.id, name, "partner unusable", detail)
    return None


def _sample(name: str, facts: FileFacts, dataset: Dataset, folder: Folder, captions: CaptionSource) -> Sample:
    clips = dataset.clips
    frames = clips.frames_of(facts.clip) if clips and facts.clip else 1
    geometry, partner = dataset.place(name, facts.picture_size, epoch=1, frames=frames)
    return Sample(
        dataset_id=dataset.id,
        name=name,
        path=folder.root / name,
        content=facts.content,
        original_size=facts.picture_size,
        geometry=geometry,
        captions=folder.gone.get(name) or captions_for(name, captions),
        partner=partner,
        frames=frames,
        frame_rate=clips.rate if clips else None,
        is_i2v=clips is not None and clips.is_i2v,
    )
