"""A catalogue of cache entries below a folder, with an encoder that needs no weights."""

from __future__ import annotations

from pathlib import Path

from simpletuner.caching.catalogue import Catalogue, DatasetCaches
from simpletuner.caching.keys import EncoderIdentity

ENCODER = EncoderIdentity("kandinsky5-video", "c" * 64, "fp32")


def make_catalogue(folder: Path, *dataset_ids: str) -> Catalogue:
    """The catalogue of datasets that share their caches; captions are encoded as they are."""
    texts = folder / "texts"
    caches = DatasetCaches(latents=folder / "latents", texts=texts, compress=True)
    return Catalogue(
        datasets=dict.fromkeys(dataset_ids, caches),
        prompts=texts,
        compress=True,
        vae=ENCODER,
        text_encoder=ENCODER,
        template="",
        max_length=8,
        clean=lambda text: text,
        prompt_holds_picture=False,
    )
