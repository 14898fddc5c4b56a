"""Filling the caches against the encoders alone: what decoding, writing and bookkeeping add.

The bar is about wall seconds, since decoding and writing run beside the encoder in threads; it means something only
where cores are free for them. Beside it stands the CPU time of everything in units of decoding and encoding alone,
which tells what our own code adds on a busy machine, too.

Pictures are real files of two megapixels, half JPEG and half PNG, cached at 256 px. The VAE is an eighth as wide as
Flux's, so that encoding a picture on one thread takes a few times as long as decoding its file on one core, as on a
machine whose GPU encodes while its cores decode; the table says how many. Loading the encoder is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.models import build_medium_qwen, build_vae, make_config
from benchmarks.timing import arguments, compare, interleave, show
from simpletuner.caching.catalogue import LatentEntry, TextEntry
from simpletuner.caching.fill import fill_latents, fill_texts, prepared_picture, to_pixels
from simpletuner.config.arguments import parse_arguments
from simpletuner.config.schema import CachingConfig
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.image import FluxLatentEncoder
from simpletuner.plan.build import make_plan
from simpletuner.plan.entries import list_entries, make_catalogue
from simpletuner.reporting.events import EventStream, PhaseStarted, RunningPhase
from simpletuner.run.caches import build_adapter
from tests.tiny import make_checkpoint
from tests.workspace import DATASETS, Workspace

PICTURE = (1600, 1200)
RESOLUTION = 256


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, ("medium",), rounds=5)
    parser.add_argument("--pictures", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as name:
        texts, latents, text_encoder = _prepare(Path(name), options.pictures, device)
        vae: Any = build_vae().requires_grad_(False).eval().to(device)
        encoder = FluxLatentEncoder(vae, device, torch.float32)
        targets = (Path(name) / f"cache{number}" for number in count())
        phase: Any = RunningPhase(EventStream(), PhaseStarted("Filling"))

        def config(**settings: Any) -> CachingConfig:
            return make_config(**settings).caching

        def fill(compress: bool) -> Callable[[], None]:
            caching = config(compress_disk_cache=compress)

            def run() -> None:
                folder = next(targets)
                entries = [replace(entry, folder=folder) for entry in latents]
                failures = fill_latents(entries, lambda: encoder, caching, phase)
                if failures:
                    raise RuntimeError(failures)

            return run

        def fill_text(batch: int) -> Callable[[], None]:
            def run() -> None:
                folder = next(targets)
                fill_texts([replace(entry, folder=folder) for entry in texts], lambda: text_encoder, batch, phase)

            return run

        size = config().vae_batch_size
        ready = [
            (torch.stack([to_pixels(np.asarray(prepared_picture(entry.sample))) for entry in group]), group)
            for group in (latents[start : start + size] for start in range(0, len(latents), size))
        ]

        def encode() -> None:
            for pixels, group in ready:
                encoder.encode(pixels, [entry.key.seed() for entry in group])

        def decode() -> None:
            for entry in latents:
                prepared_picture(entry.sample)

        def encode_texts() -> None:
            for entry in texts:
                text_encoder.encode([TextRequest(entry.caption)])

        variants = {"encode": encode, "decode": decode, "zstd": fill(True), "plain": fill(False)}
        seconds = interleave(variants, options.rounds, time.perf_counter)
        spent = interleave(variants, options.rounds, time.process_time)
        spent["both"] = [sum(pair) for pair in zip(spent["encode"], spent["decode"], strict=True)]
        text_seconds = interleave(
            {"encode": encode_texts, "one": fill_text(1), "eight": fill_text(8)}, options.rounds, time.process_time
        )
    ratios = [
        compare("latents: fill, compressed / encoder", seconds, "zstd", "encode", 1.15),
        compare("latents: fill, uncompressed / encoder", seconds, "plain", "encode", 1.15),
        compare("latents: CPU of fill, compressed / encoder and decoding", spent, "zstd", "both", 1.15),
        compare("latents: CPU of fill, uncompressed / encoder and decoding", spent, "plain", "both", 1.15),
        compare("decoding / encoder, CPU", spent, "decode", "encode", note="what the threads hide"),
        compare("texts: CPU of fill / encoder, one by one", text_seconds, "one", "encode", 1.15),
        compare("texts: CPU of fill in eights / encoder, one by one", text_seconds, "eight", "encode"),
    ]
    show(f"Filling caches in units of the encoders' own time, {len(latents)} pictures", ratios, options)


def _prepare(
    folder: Path, pictures: int, device: torch.device
) -> tuple[Sequence[TextEntry], Sequence[LatentEntry], Any]:
    """Entries of a run on pictures of our making, and its text encoder with a larger Qwen."""
    run = Workspace.create(folder / "run", make_checkpoint(folder / "checkpoint"), pictures=0)
    run.write_datasets([{**DATASETS[0], "resolution": RESOLUTION}, *DATASETS[1:]])
    write_pictures(run.path("datasets/pictures"), pictures)
    with run.inside():
        problems: list[Any] = []
        plan = make_plan(parse_arguments([], problems), problems)
        catalogue = make_catalogue(plan)
        assert catalogue is not None
        listing = list_entries(plan, catalogue)
        encoder: Any = build_adapter(plan).load_text_encoder(device, torch.float32)
    encoder.qwen = build_medium_qwen(encoder.processor.tokenizer).requires_grad_(False).eval().to(device)
    root = run.folder
    found = [replace(entry, sample=replace(entry.sample, root=root / entry.sample.root)) for entry in listing.latents]
    return [*listing.texts], found, encoder


def write_pictures(folder: Path, number: int) -> None:
    """Smooth pictures with some grain, as JPEG and PNG by turns, with a caption each."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        coarse = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize(PICTURE, Image.BICUBIC)
        grain = random.normal(0, 4, (PICTURE[1], PICTURE[0], 1))
        picture = Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8))
        picture.save(folder / f"p{index}.{'png' if index % 2 else 'jpg'}")
        (folder / f"p{index}.txt").write_text(f"picture {index}, " + "soft colours flow into each other " * (index % 4))


if __name__ == "__main__":
    main()
