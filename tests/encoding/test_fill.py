"""Filling caches: one encoder at a time, whatever happens to the files."""

from __future__ import annotations

import errno
import gc
import json
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFile
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel as Qwen

from simpletuner.caching import catalogue
from simpletuner.data import files
from simpletuner.diffusion.batch import TextEmbeds
from simpletuner.encoding import decoding
from simpletuner.encoding.read import CacheStore
from simpletuner.errors import DiskFullError
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder
from simpletuner.planning.plans import Plan
from tests.techniques.alignment import SPEC, PatchTeacher
from tests.tools.workspace import DATASETS, Workspace


def test_encoders_are_never_loaded_together(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    load_text = Kandinsky5ImageAdapter.load_text_encoder
    load_latent = Kandinsky5ImageAdapter.load_latent_encoder

    def text(self: Any, *arguments: Any) -> Any:
        encoder: Any = load_text(self, *arguments)
        loaded.append(weakref.ref(encoder.qwen))
        return encoder

    def latent(self: Any, *arguments: Any) -> Any:
        gc.collect()
        assert [reference() for reference in loaded] == [None], "the text encoder is still alive"
        return load_latent(self, *arguments)

    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_text_encoder", text)
    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_latent_encoder", latent)
    workspace.write_config(offload_during_startup=True)

    assert workspace.run("cache", "fill") == 0
    assert len(loaded) == 1


def entries_of(workspace: Workspace) -> dict[str, bytes]:
    """The content of every cache entry, by its path."""
    paths = workspace.folder.rglob("*.zst")
    return {path.relative_to(workspace.folder).as_posix(): path.read_bytes() for path in paths}


def test_shares_of_several_machines_are_together_what_one_machine_encodes(
    tmp_path: Path, t2i_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = Workspace.create(tmp_path / "single", t2i_checkpoint)
    shared = Workspace.create(tmp_path / "shared", t2i_checkpoint)

    assert single.run("cache", "fill") == 0

    expected = entries_of(single)

    assert shared.run("cache", "fill", "--shard", "2/2", "train_batch_size=1") == 0

    second_share = entries_of(shared)
    assert 0 < len(second_share) < len(expected)

    first_count = len(expected) - len(second_share)
    message = f"Share 1 of 2 is complete: {first_count} of {len(expected)} entries."
    for phases in (2, 0):  # the second time, nothing is left to do
        capsys.readouterr()
        assert shared.run("cache", "fill", "--shard=1/2") == 0
        output = capsys.readouterr().out
        assert message in output
        assert output.count("Encoding") == phases
        assert entries_of(shared) == expected


@pytest.mark.parametrize("share", ["0/2", "3/2", "1/0", "x", "1/2/3", "-1/2"])
def test_a_share_that_does_not_exist_is_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], share: str
) -> None:
    assert workspace.run("cache", "fill", f"--shard={share}") == 2

    message = f"--shard {share!r} is not a shard; 1/3 is the first of three, 3/3 the last."
    assert capsys.readouterr().err == f"error: {message}\n"


def test_captions_of_one_length_share_a_batch_and_each_batch_is_full(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels round by length and number of rows, which must not depend on what is missing."""
    batches: list[list[int]] = []
    rows: list[int] = []
    encode = Kandinsky5TextEncoder.encode
    forward = Qwen.forward

    def encode_noted(
        encoder: Kandinsky5TextEncoder, requests: Sequence[TextRequest]
    ) -> list[TextEmbeds]:
        batches.append([encoder.padded_length(request) for request in requests])
        return encode(encoder, requests)

    def forward_noted(model: Any, *arguments: Any, **settings: Any) -> Any:
        hidden = forward(model, *arguments, **settings)
        rows.append(len(hidden.last_hidden_state))
        return hidden

    monkeypatch.setattr(Kandinsky5TextEncoder, "encode", encode_noted)
    monkeypatch.setattr(Qwen, "forward", forward_noted)
    for index in range(8):
        caption = f"{index} " + "very " * (5 * index % 8) + "red"
        workspace.path(f"datasets/pictures/p{index}.txt").write_text(caption)
    workspace.write_config(text_encoder_batch_size=3)

    assert workspace.run("cache", "fill") == 0

    for batch in batches:
        assert len(batch) == 3
        assert len(set(batch)) == 1
    assert set(rows) == {1, 3}, "1 for the template alone"

    lengths = [batch[0] for batch in batches]
    assert len(set(lengths)) > 1
    assert lengths == sorted(lengths, reverse=True)


def fail_to_decode(workspace: Workspace, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pixels of a picture be damaged, which only decoding shows."""
    decode = decoding.pictures.decode
    damaged = workspace.path(name).read_bytes()

    def fail(source: Any) -> Image.Image:
        if source == damaged:
            raise files.MediaError("its pixels are damaged")
        return decode(source)

    monkeypatch.setattr(decoding.pictures, "decode", fail)


def test_a_file_that_does_not_decode_is_left_out_and_kept(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_decode(workspace, "datasets/pictures/p3.png", monkeypatch)

    assert workspace.train() == 0

    captured = capsys.readouterr()
    assert "pictures/p3.png" in captured.err + captured.out
    assert workspace.path("datasets/pictures/p3.png").exists()

    report = workspace.path("output/training_report.html").read_text()
    assert "its pixels are damaged" in report


@pytest.mark.warns
def test_quarantine_moves_files_that_do_not_decode(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_decode(workspace, "datasets/pictures/p3.png", monkeypatch)
    workspace.write_config(delete_problematic_images="true")

    assert workspace.train() == 0

    assert not workspace.path("datasets/pictures/p3.png").exists()
    assert workspace.path("output/quarantine/p3.png").exists()

    reasons = workspace.path("output/quarantine/reasons.jsonl").read_text().splitlines()
    assert "its pixels are damaged" in json.loads(reasons[0]).values()


def test_an_unexpected_decoding_error_leaves_out_one_file_and_moves_none(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ImageFile.ImageFile.load
    size = (61, 53)
    Image.new("RGB", size).save(workspace.path("datasets/pictures/p3.png"))

    def fail(self: ImageFile.ImageFile) -> Any:
        if self.size == size:
            raise RuntimeError("nobody expects this")
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    workspace.write_config(delete_problematic_images="true")

    assert workspace.run("cache", "fill") == 0

    first = capsys.readouterr()
    assert workspace.run("cache", "fill") == 0

    second = capsys.readouterr()

    message = "pictures/p3.png is left out: it cannot be decoded: nobody expects this"
    assert message in first.err + first.out
    assert "1 unsuitable (p3.png)" in second.err + second.out
    assert workspace.path("datasets/pictures/p3.png").exists()


def test_a_full_disk_keeps_complete_entries_and_the_next_run_continues(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = CacheStore.write
    written: list[Any] = []

    def fail(store: CacheStore, *arguments: Any) -> None:
        if len(written) >= 5:
            raise DiskFullError("no space left on the disk")
        write(store, *arguments)
        written.append(arguments[0])

    monkeypatch.setattr(CacheStore, "write", fail)
    assert workspace.train() == 2
    assert "no space left" in capsys.readouterr().err

    monkeypatch.undo()
    assert workspace.run("cache", "verify") == 0
    assert 5 <= len(list(workspace.path("cache").rglob("*.zst"))) < 12
    assert workspace.train() == 0


@pytest.mark.slow(1)
def test_training_continues_from_the_caches_without_the_files(workspace: Workspace) -> None:
    assert workspace.train() == 0

    for path in workspace.path("datasets/pictures").iterdir():
        path.unlink()

    assert workspace.train("max_train_steps=6", "--ignore_missing_files") == 0

    assert [line["step"] for line in workspace.metrics()] == [1, 2, 3, 4, 5, 6]


def test_scan_for_errors_restores_damaged_entries_before_training(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(trained.path("output/cache/vae").rglob("*.zst"))
    entry.write_bytes(entry.read_bytes()[:-5])
    trained.write_datasets([{**DATASETS[0], "scan_for_errors": True}, DATASETS[1]])
    capsys.readouterr()

    assert trained.train("max_train_steps=5") == 0
    assert "1 picture" in capsys.readouterr().out
    assert trained.run("cache", "verify") == 0


def test_long_captions_are_cut_with_a_warning(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.path("datasets/pictures/p0.txt").write_text("start " + "and so on " * 60 + "the end")
    workspace.write_config(tokenizer_max_length=32)

    assert workspace.train() == 0
    assert "too long" in capsys.readouterr().err


def test_a_vae_that_overflows_fills_no_cache(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Kandinsky5ImageAdapter.load_latent_encoder

    def broken(self: Any, *arguments: Any) -> Any:
        encoder = load(self, *arguments)
        encoder.vae.encoder.conv_in.weight.fill_(float("inf"))
        return encoder

    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_latent_encoder", broken)

    assert workspace.train() == 2

    assert "not finite for pictures/p" in capsys.readouterr().err
    assert not list(workspace.path("output/cache/vae").rglob("*.safetensors*"))


def test_a_text_encoder_that_overflows_fills_no_cache(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode = Kandinsky5TextEncoder.encode

    def broken(encoder: Any, requests: Any) -> Any:
        embeds = encode(encoder, requests)
        for tensor in embeds[-1].values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return embeds

    monkeypatch.setattr(Kandinsky5TextEncoder, "encode", broken)

    assert workspace.run("cache", "fill") == 2

    assert "The text encoder's output is not finite for pictures/p" in capsys.readouterr().err
    assert not list(workspace.path("output/cache/text").rglob("*.zst"))
    assert not list(workspace.path("cache/text").rglob("*.zst"))


def test_features_that_are_not_finite_are_not_cached(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Plan, "techniques", property(lambda plan: (SPEC,)))
    monkeypatch.setattr(
        PatchTeacher, "encode", lambda self, latents: torch.full((4, 16), torch.nan)
    )

    assert workspace.run("cache", "fill") == 2
    assert "alignment: the encoder's output is not finite for pictures/p" in capsys.readouterr().err
    assert len([*workspace.path("output/cache/vae").rglob("*.zst")]) == 8, "the latents alone"


def test_a_picture_changed_after_the_plan_is_not_stored_under_its_old_hash(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Kandinsky5ImageAdapter.load_latent_encoder

    def change_file(adapter: Any, *arguments: Any) -> Any:
        Image.new("RGB", (64, 64), "red").save(workspace.path("datasets/pictures/p1.png"))
        return load(adapter, *arguments)

    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_latent_encoder", change_file)
    assert workspace.run("cache", "fill") == 2
    assert "p1.png has changed since the plan" in capsys.readouterr().err

    monkeypatch.undo()
    assert workspace.run("cache", "fill") == 0
    assert workspace.run("cache", "verify") == 0


def test_an_error_of_the_device_while_encoding_is_not_blamed_on_the_file(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "p1.png":
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    load = Kandinsky5ImageAdapter.load_latent_encoder

    def then_fail(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(Path, "read_bytes", failing)
        return load(self, *arguments)

    monkeypatch.setattr(files, "RETRY_DELAYS", (0.0,))
    workspace.write_config(delete_problematic_images=True)
    monkeypatch.setattr(Kandinsky5ImageAdapter, "load_latent_encoder", then_fail)

    assert workspace.run("cache", "fill") == 2
    assert "p1.png: Input/output error" in capsys.readouterr().err

    monkeypatch.undo()
    assert workspace.run("cache", "fill") == 0
    assert len(list(workspace.path("output/cache/vae").rglob("*.zst"))) == 8


@pytest.mark.parametrize("batch_size", [None, 3])
def test_entries_do_not_depend_on_which_others_are_missing(
    workspace: Workspace, batch_size: int | None
) -> None:
    """After a kill in the middle, entries are encoded beside others than at first."""
    workspace.write_config(text_encoder_batch_size=batch_size)
    assert workspace.run("cache", "fill") == 0

    expected = entries_of(workspace)
    for name in sorted(expected)[::3]:
        workspace.path(name).unlink()

    assert workspace.run("cache", "fill") == 0

    assert entries_of(workspace) == expected


def test_a_start_lists_each_folder_once(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workspace.run("cache", "fill") == 0

    counts = Counter[Path]()
    list_keys = catalogue.list_keys

    def count_listing(folder: Path) -> Iterator[str]:
        counts[folder] += 1
        return list_keys(folder)

    monkeypatch.setattr(catalogue, "list_keys", count_listing)

    assert workspace.train() == 0

    assert list(counts.values()) == [1, 1], "of captions and of latents"


def test_an_entry_records_the_size_of_its_batch(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(vae_batch_size=4)
    assert workspace.run("cache", "fill") == 0

    assert workspace.run("cache", "explain", "pictures/p1.png") == 0

    assert "encoded_together: 4" in capsys.readouterr().out


def test_a_change_that_leaves_size_and_time_is_detected_by_the_next_start(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.path("datasets/pictures/p1.png").unlink()
    path = workspace.path("datasets/pictures/p1.bmp")
    Image.new("RGB", (64, 64), "red").save(path)

    assert workspace.run("cache", "fill") == 0

    before = path.stat()
    Image.new("RGB", (64, 64), "blue").save(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for entry in workspace.path("output/cache/vae").rglob("*.zst"):
        entry.unlink()

    assert workspace.run("cache", "fill") == 2

    assert "p1.bmp has changed" in capsys.readouterr().err
    assert workspace.run("cache", "fill") == 0
