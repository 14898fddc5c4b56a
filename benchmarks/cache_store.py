"""The cache store against raw safetensors files: entries written and read, plain and compressed."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from benchmarks.timing import arguments, compare, interleave, show
from simpletuner.caching.read import CacheStore

Writer = Callable[[str, dict[str, Tensor]], None]

# A latent of a 512 x 512 picture, a caption of 128 tokens, and what is said of them.
LATENT = (16, 1, 64, 64)
CAPTION = (128, 896)
PROVENANCE = {"source": "pictures/a.png", "ingredients": '{"kind":"latent","size":[512,512]}' * 8}


class _RawFiles:
    """The least that keeps tensors by key: one file each, no checksum, not atomic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, key: str, tensors: dict[str, Tensor]) -> None:
        path = self.folder / key[:2] / f"{key}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(save(tensors))

    def read(self, key: str) -> dict[str, Tensor]:
        return load((self.folder / key[:2] / f"{key}.safetensors").read_bytes())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--entries", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keys = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(options.entries)]
    kinds = {"latent": {"latents": torch.randn(LATENT)}, "text": {"prompt_embeds": torch.randn(CAPTION)}}
    forms: dict[str, Callable[[Path], Writer]] = {
        "raw": lambda folder: _RawFiles(folder).write,
        "plain": lambda folder: partial(CacheStore(folder, False).write, provenance=PROVENANCE),
        "zstd": lambda folder: partial(CacheStore(folder, True).write, provenance=PROVENANCE),
    }
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        for kind, tensors in kinds.items():
            folder = Path(name) / kind
            writes = {form: _write_anew(make, folder / form, keys, tensors) for form, make in forms.items()}
            written = interleave(writes, options.rounds, time.process_time)
            first = {form: folder / form / "0" for form in forms}
            reads = {
                "raw": _each(keys, _RawFiles(first["raw"]).read),
                "plain": _each(keys, CacheStore(first["plain"]).read),
                "zstd": _each(keys, CacheStore(first["zstd"]).read),
            }
            read = interleave(reads, options.rounds, time.process_time)
            for form in ("plain", "zstd"):
                for verb, seconds in (("write", written), ("read", read)):
                    rate = f"{options.entries / min(seconds[form]):.0f} entries per CPU second"
                    ratios.append(compare(f"{verb} {kind}, {form} / raw", seconds, form, "raw", note=rate))
    sizes = ", ".join(f"{kind} {next(iter(each.values())).nbytes / 1e3:.0f} kB" for kind, each in kinds.items())
    show(f"Cache store in units of raw safetensors files ({sizes})", ratios, options)


def _write_anew(
    make: Callable[[Path], Writer], folder: Path, keys: list[str], tensors: dict[str, Tensor]
) -> Callable[[], None]:
    """Write all keys into a folder of their own each time."""
    numbers = itertools.count()

    def run() -> None:
        write = make(folder / str(next(numbers)))
        for key in keys:
            write(key, tensors)

    return run


def _each(keys: list[str], read: Callable[[str], object]) -> Callable[[], None]:
    def run() -> None:
        for key in keys:
            read(key)

    return run


if __name__ == "__main__":
    main()
