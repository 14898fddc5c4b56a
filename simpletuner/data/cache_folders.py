"""Which cache entry a dataset uses."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.config.datasets import DatasetConfig
from simpletuner.errors import Problem, did_you_mean


def text_entry_of(config: DatasetConfig, entries: Sequence[DatasetConfig]) -> DatasetConfig | None:
    """The text_embeds entry of a dataset: the one it names, else the default, else the first; None if there is none."""
    texts = [entry for entry in entries if entry.is_text_embeds]
    named = [entry for entry in texts if entry.id == config.text_embeds]
    defaults = [entry for entry in texts if entry.default]
    return next(iter([*named, *defaults, *texts]), None)


def latent_dir_of(config: DatasetConfig, entries: Sequence[DatasetConfig], problems: list[Problem]) -> str | None:
    """Latent folder of an entry whose defaults are filled in: that of the image_embeds entry it names, or its own."""
    if config.image_embeds is None:
        return config.cache_dir_vae
    known = {entry.id: entry for entry in entries if entry.dataset_type == "image_embeds"}
    if config.image_embeds not in known:
        choices = ", ".join(known) or "there are none"
        hint = did_you_mean(config.image_embeds, list(known))
        message = f"{config.image_embeds!r} is not the id of an image_embeds entry ({choices}).{hint}"
        problems.append(Problem(f"{config.id}.image_embeds", message))
        return config.cache_dir_vae
    named = known[config.image_embeds]
    return named.cache_dir or named.cache_dir_vae
