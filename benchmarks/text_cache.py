"""Filling the cache of captions against the stock pipelines, which encode them one by one with everything they have.

The pipelines' `encode_prompt` is the unit: the whole template with each caption, and Qwen's language head. Beside it
stands the whole filling, files included. Templates have their true lengths (129 tokens for clips, 41 for pictures;
Sana's instruction and padding as they are), captions 40 to 200 tokens, evenly spread and in random order. Loading and
the first reading of the template are left out: they happen once for all captions.

A processor is bound by arithmetic, so no more is saved there than tokens that need not be computed, and captions are
encoded one by one; batches pay on a GPU, where one caption is not enough work. Batches are filled up, so a few
captions of many lengths cost more in batches than one by one.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from diffusers import SanaVideoPipeline

from benchmarks.models import build_medium_gemma, build_qwen_of, clock_of, make_config
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from simpletuner.caching.catalogue import TextEntry
from simpletuner.caching.fill import fill_texts
from simpletuner.caching.keys import EncoderIdentity, TextKey
from simpletuner.config.load import RunConfig
from simpletuner.models.adapter import CheckpointSetup, TextEncoder
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.registry import FAMILIES, load_adapter
from simpletuner.models.source import ModelSource
from simpletuner.reporting.events import EventStream, PhaseStarted, RunningPhase
from tests.tiny import PIPELINES, make_checkpoint
from tests.tiny_sana import make_sana_checkpoint

SHORTEST, LONGEST = 40, 200
WORDS = "a red ball rolls over green grass while the camera moves slowly to its left and light falls on old stones"
# What is compared with the bar: clips on a CPU, everything on a GPU.
BAR, GPU_BAR = 0.45, 0.2


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, ("slice", "real"), rounds=5)
    parser.add_argument("--captions", type=int, default=48)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="Sana has no real size")
    options = parser.parse_args()
    if options.size == "real" and "sana" in options.kinds:
        parser.error("sana has no real size; choose --kinds clips pictures")
    torch.set_num_threads(1)
    ratios: list[Ratio] = []
    with tempfile.TemporaryDirectory() as name:
        for kind in options.kinds:
            torch.manual_seed(0)
            ratios += _compare(kind, Path(name) / kind, options)
    show(f"Caching {options.captions} captions in units of the pipeline, one by one", ratios, options)


# (folder, device, real size) -> the pipeline, our encoder, and its tokenizer.
Prepared = tuple[Any, Any, Any]


def _compare(kind: str, folder: Path, options: Any) -> list[Ratio]:
    """The lines of one kind."""
    pipeline, encoder, tokenizer = KINDS[kind](folder / "checkpoint", options.device, options.size == "real")
    captions = make_captions(tokenizer, options.captions)
    targets = (folder / f"cache{number}" for number in count())
    extra = {"complex_human_instruction": encoder.instruction.split("\n")} if kind == "sana" else {}

    @torch.no_grad()
    def stock() -> None:
        for caption in captions:
            pipeline.encode_prompt(caption, **extra)

    batches = (1,) if options.device == "cpu" else (1, 8)
    variants = {"stock": stock, **{str(batch): _filling(captions, encoder, batch, targets) for batch in batches}}
    seconds = interleave(variants, options.rounds, clock_of(options.device))
    bars = {8: GPU_BAR} if options.device == "cuda" else {1: BAR if kind == "clips" else None}
    return [
        compare(f"{kind}: {batch} at a time / pipeline", seconds, str(batch), "stock", bars.get(batch))
        for batch in batches
    ]


def _filling(captions: Sequence[str], encoder: TextEncoder, batch: int, targets: Any) -> Callable[[], None]:
    """Fill an empty cache."""
    phase: Any = RunningPhase(EventStream(), PhaseStarted("Filling"))
    identity = EncoderIdentity("benchmark", "random", "fp32")

    def run() -> None:
        folder = next(targets)
        keys = [TextKey(caption, "", LONGEST, identity) for caption in captions]
        entries = [TextEntry(key, folder, key.caption, "benchmark", compress=False) for key in keys]
        fill_texts(entries, lambda: encoder, batch, phase)

    return run


def make_captions(tokenizer: Any, number: int) -> list[str]:
    """Captions of 40 to 200 tokens, evenly spread, in random order."""
    chance = random.Random(0)
    captions = []
    for index in range(number):
        length = SHORTEST + (LONGEST - SHORTEST) * index // max(1, number - 1)
        words = chance.choices(WORDS.split(), k=length)
        while len(tokenizer(" ".join(words))["input_ids"]) > length:
            words.pop()
        captions.append(" ".join(words))
    chance.shuffle(captions)
    return captions


def _kandinsky(task: str) -> Callable[[Path, str, bool], Prepared]:
    def prepare(folder: Path, device: str, real: bool) -> Prepared:
        make_checkpoint(folder, task)  # type: ignore[arg-type]
        clips = task == "t2v"
        config = make_config("tiny-video" if clips else "tiny", pretrained_model_name_or_path=str(folder))
        encoder = _encoder(config, device, torch.bfloat16 if real else torch.float32)
        encoder.qwen = build_qwen_of("real" if real else "slice", encoder.processor.tokenizer, device)
        pipeline = PIPELINES[task].from_pretrained(folder, tokenizer=load_processor(folder), transformer=None, vae=None)
        pipeline.text_encoder, pipeline.text_encoder_2 = encoder.qwen, encoder.clip
        pipeline.prompt_template = encoder.template.text
        pipeline.prompt_template_encode_start_idx = encoder.template.crop
        return pipeline, encoder, encoder.processor.tokenizer

    return prepare


def _sana(folder: Path, device: str, real: bool) -> Prepared:
    make_sana_checkpoint(folder)
    encoder = _encoder(make_config("tiny-sana", pretrained_model_name_or_path=str(folder)), device, torch.float32)
    encoder.gemma = build_medium_gemma(len(encoder.tokenizer)).requires_grad_(False).eval().to(device)
    pipeline = SanaVideoPipeline.from_pretrained(folder, text_encoder=encoder.gemma, transformer=None, vae=None)
    return pipeline, encoder, encoder.tokenizer


def _encoder(config: RunConfig, device: str, dtype: torch.dtype) -> Any:
    """The text encoder of the checkpoint that a config names."""
    spec = FAMILIES[config.model.model_family]
    flavour = spec.flavour(config.model.model_flavour)
    source = ModelSource.from_config(spec, flavour, config)
    adapter = load_adapter(spec)(CheckpointSetup.of(config, flavour, source))
    return adapter.load_text_encoder(torch.device(device), dtype)


KINDS = {"clips": _kandinsky("t2v"), "pictures": _kandinsky("t2i"), "sana": _sana}


if __name__ == "__main__":
    main()
