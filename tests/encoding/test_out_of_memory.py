"""Encoders that run out of memory: smaller batches, exact savings, then a stop, never a gap."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletuner.caching.entry import list_keys
from simpletuner.encoding import decoding
from simpletuner.encoding.read import CacheStore
from simpletuner.encoding.shrinking import ShrinkingEncoder
from simpletuner.errors import UserError, is_out_of_memory
from simpletuner.models.kandinsky5.image import FluxLatentEncoder
from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder
from simpletuner.models.kandinsky5.video import HunyuanLatentEncoder
from tests.tools.tiny import build_video_vae
from tests.tools.tolerances import VAE, assert_close
from tests.tools.workspace import Workspace

CPU = torch.device("cpu")


def entries_of(workspace: Workspace, folder: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of every entry below a folder, by its key."""
    root = workspace.path(folder)
    stores = [CacheStore(index.parent) for index in root.rglob("index.json")]
    entries: dict[str, dict[str, Tensor]] = {}
    for store in stores or [CacheStore(root)]:
        for key in list_keys(store.folder):
            entries[key] = store.read(key)
    return entries


def limit_pictures(monkeypatch: pytest.MonkeyPatch, most: int, error: BaseException) -> list[int]:
    """Let the encoder raise above a batch size; returns the sizes that it is called with."""
    encode = FluxLatentEncoder.encode
    sizes: list[int] = []

    def limited(encoder: Any, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        sizes.append(len(pixels))
        if len(pixels) > most:
            raise error
        return encode(encoder, pixels, seeds)

    monkeypatch.setattr(FluxLatentEncoder, "encode", limited)
    return sizes


def test_a_batch_that_is_too_large_is_halved_and_latents_are_the_same(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.write_config(vae_batch_size=4)
    assert workspace.run("cache", "fill", "output_dir=plain") == 0

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    sizes = limit_pictures(monkeypatch, 1, error)

    assert workspace.run("cache", "fill") == 0

    # Four of each of two ratios: 4 and 2 are too many, and from then on each comes alone.
    assert sizes == [4, 2, *[1] * 8]
    assert workspace.run("cache", "verify") == 0

    plain = entries_of(workspace, "plain/cache/vae")
    halved = entries_of(workspace, "output/cache/vae")

    assert len(plain) == 8
    assert plain.keys() == halved.keys()

    for key, entry in plain.items():
        assert_close(halved[key]["latents"], entry["latents"], terms=VAE)


def test_a_picture_that_does_not_fit_stops_the_run_with_its_name(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(vae_batch_size=2)
    limit_pictures(monkeypatch, 0, torch.OutOfMemoryError("CUDA out of memory."))

    assert workspace.train() == 2

    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert "pictures/p0.png (80x48) does not fit into memory" in errors
    assert "vae_enable_tiling" in errors
    assert "CUDA out of memory." in errors
    assert workspace.path("datasets/pictures/p0.png").exists(), "it is not the fault of the file"

    metrics = workspace.path("output/training_metrics.jsonl")
    assert not metrics.exists(), "nothing is trained with a gap in the cache"

    monkeypatch.undo()
    assert workspace.train() == 0, "with more memory the run continues"


def test_a_caption_that_does_not_fit_stops_the_run_with_its_name(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode = Kandinsky5TextEncoder.encode
    sizes: list[int] = []

    def limited(encoder: Any, requests: Sequence[Any]) -> Any:
        sizes.append(len(requests))
        if len(requests) > 2 or any("picture 5" in request.caption for request in requests):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
            )
        return encode(encoder, requests)

    monkeypatch.setattr(Kandinsky5TextEncoder, "encode", limited)

    assert workspace.train("text_encoder_batch_size=8") == 2

    assert sizes[:3] == [8, 4, 2]
    assert "pictures/p5.png does not fit into memory" in capsys.readouterr().err


class Batches(ShrinkingEncoder[Any, Any]):
    """Items that are their own names, encoded by a function."""

    def __init__(
        self,
        encode: Callable[[Sequence[Any]], Sequence[Any]],
        relieve: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("Buy more.")
        self._encode = encode
        self._relieve = relieve

    def name(self, item: Any) -> str:
        return str(item)

    def encode(self, items: Sequence[Any]) -> Sequence[Any]:
        return self._encode(items)

    def relieve(self) -> bool:
        return self._relieve()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("unable to mmap 8 bytes from file <a>: Cannot allocate memory (12)"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_errors_of_exhausted_memory_are_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("out of memory"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_exhausted_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_other_errors_are_raised_at_once() -> None:
    def broken(items: Sequence[int]) -> list[int]:
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        Batches(broken)([1, 2])


def test_a_clip_that_does_not_fit_is_encoded_in_slices(caplog: pytest.LogCaptureFixture) -> None:
    """A convolution over a whole clip fails here; over some of its frames it does not."""
    torch.manual_seed(0)
    vae = build_video_vae().eval()
    clip = torch.randn(1, 3, 17, 32, 32)
    expected = HunyuanLatentEncoder(vae, CPU, torch.float32).encode(clip, [1])
    for module in vae.encoder.modules():
        if isinstance(module, nn.Conv3d):
            module.forward = _limited(module.forward)
    encoder = HunyuanLatentEncoder(vae, CPU, torch.float32)
    encode = Batches(lambda items: [encoder.encode(items[0], [1])], encoder.use_less_memory)

    with caplog.at_level(logging.WARNING):
        (latents,) = encode([clip])

    assert_close(latents, expected, terms=VAE)
    assert "in slices" in caplog.text
    assert not encoder.use_less_memory(), "there is nothing else to try"


def _limited(convolve: Any) -> Any:
    """A convolution that takes 9 frames at most."""

    def limited(x: Tensor) -> Tensor:
        if x.shape[2] > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        result: Tensor = convolve(x)
        return result

    return limited


def test_a_picture_that_does_not_fit_while_it_is_decoded_stops_the_run_with_advice(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr(decoding.pictures, "decode", fail)

    assert workspace.train() == 2

    assert "not enough memory to decode it; lower max_workers" in capsys.readouterr().err


@pytest.mark.warns
def test_an_item_that_does_not_fit_alone_is_named_with_advice() -> None:
    def fail(items: Sequence[str]) -> list[str]:
        raise MemoryError

    message = r"^a does not fit into memory, even alone. Buy more. \(MemoryError\)$"
    with pytest.raises(UserError, match=message):
        Batches(fail)(["a", "b", "c"])
