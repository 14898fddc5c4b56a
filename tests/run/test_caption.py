"""`simpletuner caption`, as a user calls it, with a tiny Qwen2.5-VL of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from simpletuner.annexes.captions.captioner import DescriptionRequest, QwenCaptioner
from simpletuner.annexes.captions.wording import Wording
from simpletuner.memory.offload import attach
from simpletuner.models.source import ModelSource
from simpletuner.weights.part import Part
from tests.tools.clips import Clip, time_in
from tests.tools.pictures import photograph
from tests.tools.refusals import complaint
from tests.tools.streaming import AdversarialCopier
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
PICTURES = "datasets/pictures"


@pytest.fixture
def bare(workspace: Workspace) -> Workspace:
    """Four photographs of different sizes without captions, and four pictures with one."""
    for index in range(4):
        photograph(
            workspace.path(f"{PICTURES}/p{index}.png"),
            (64 + 16 * index, 96 - 8 * index),
            seed=index,
        )
    forget(workspace)
    return workspace


def forget(workspace: Workspace) -> None:
    for path in workspace.path(PICTURES).glob("p[0-3].txt"):
        path.unlink()


def captions(workspace: Workspace) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(workspace.path(PICTURES).glob("*.txt"))}


def deepen(checkpoint: Path, layers: int = 4) -> Path:
    """More layers than stay on the device while they stream."""
    folder = checkpoint / "text_encoder"
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"] |= {
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**settings)).save_pretrained(folder)
    return checkpoint


def load_captioner(checkpoint: Path) -> QwenCaptioner:
    parts = {
        role: Part(role, "model", str(checkpoint), role, None, None)
        for role in ("text_encoder", "tokenizer")
    }
    return QwenCaptioner(ModelSource(parts), torch.device("cpu"), torch.float32)


def test_only_missing_captions_are_written(bare: Workspace, capsys: Capture) -> None:
    before = captions(bare)
    files = {path: path.stat().st_mtime_ns for path in bare.folder.rglob("*") if path.is_file()}
    assert bare.run("caption", "--preview", "--trigger", "zkt") == 0
    assert capsys.readouterr().out.count("  zkt, ") == 3, "of four files"
    assert bare.run("caption", "--limit", "1", "--trigger", "zkt") == 0
    assert sorted(captions(bare).keys() - before.keys()) == ["p0.txt"]
    (bare.path(PICTURES) / "p1.txt").write_text("my own")
    (bare.path(PICTURES) / "p2.txt").write_text(" \n")  # an empty caption is none
    assert bare.run("caption", "--trigger", "zkt", "--style", "tags") == 0
    after = captions(bare)
    new = [after[name] for name in ("p0.txt", "p2.txt", "p3.txt")]
    assert all(text.startswith("zkt, ") and text.endswith("\n") for text in new)
    assert len(set(new)) == 3
    assert {name: after[name] for name in before} == before
    assert after["p1.txt"] == "my own"
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert bare.run("caption") == 0
    assert "Every picture and clip has a caption." in capsys.readouterr().out


def test_batches_and_streaming_do_not_change_a_caption(
    bare: Workspace, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(t2i_checkpoint, bare.path("deep"))
    bare.write_config(pretrained_model_name_or_path=str(deepen(bare.path("deep"))))
    written = []
    for settings in (("text_encoder_batch_size=1",), (), ("group_offload_text_encoder=true",)):
        copier = AdversarialCopier()
        monkeypatch.setattr(attach, "choose_copier", lambda *_, copier=copier, **__: copier)
        assert bare.run("caption", *settings) == 0
        written.append(captions(bare))
        assert bool(copier.submitted) == (len(written) == 3)
        forget(bare)
    assert written[0] == written[1] == written[2]


def test_padding_repeats_only_tokens_of_the_prompt(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 lowers the score of a token that stands in the padding alone."""
    captioner = load_captioner(t2i_checkpoint)
    seen = []

    def watched(**inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return inputs["input_ids"]

    monkeypatch.setattr(captioner.qwen, "generate", watched)
    sizes = ((56, 56), (56, 140))
    captioner.describe([DescriptionRequest([Image.new("RGB", size)], "say") for size in sizes], 8)
    for ids, mask in zip(seen[0]["input_ids"], seen[0]["attention_mask"].bool(), strict=True):
        assert set(ids[~mask].tolist()) <= set(ids[mask].tolist())
    assert not seen[0]["attention_mask"].all(), "one prompt is shorter"


def test_an_interrupted_caption_run_keeps_finished_captions_and_continues(
    bare: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = QwenCaptioner.describe
    calls = []

    def stopped(
        self: QwenCaptioner, requests: list[DescriptionRequest], most: int
    ) -> list[tuple[str, bool]]:
        calls.append(len(requests))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return describe(self, requests, most)

    monkeypatch.setattr(QwenCaptioner, "describe", stopped)
    assert bare.run("caption", "text_encoder_batch_size=1") == 130
    first = captions(bare)
    assert {"p0.txt", "p1.txt"} <= first.keys()
    assert not {"p2.txt", "p3.txt"} & first.keys()
    assert not list(bare.path(PICTURES).glob("*.tmp"))
    assert bare.run("caption", "text_encoder_batch_size=1") == 0
    assert len(calls) == 5, "two were left"
    assert captions(bare) | first == captions(bare)


def test_a_dataset_without_captions_can_be_captioned(bare: Workspace, capsys: Capture) -> None:
    for path in bare.path(PICTURES).glob("*.txt"):
        path.unlink()
    bare.path(f"{PICTURES}/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "none of its files can be used" in complaint(bare, capsys, "train")
    bare.write_datasets([{**DATASETS[0], "caption_strategy": "filename"}, DATASETS[1]])
    assert bare.run("caption") == 0
    assert "set caption_strategy to textfile" in capsys.readouterr().out
    assert len(captions(bare)) == 8


def test_a_captioned_clip_shows_the_trained_second_at_any_frame_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frame rates differ, the moments do not; two seconds are there, one is trained."""
    checkpoint = make_checkpoint(tmp_path / "t2v", "t2v")
    settings = {
        "model_family": "kandinsky5-video",
        "model_flavour": "t2v-lite-sft-5s",
        "train_batch_size": 1,
    }
    bare = Workspace.create(tmp_path / "run", checkpoint, pictures=0, **settings)
    video = {"num_frames": 25, "min_frames": 25, "frame_rate": 25}
    bare.write_datasets([{**DATASETS[0], "dataset_type": "video", "video": video}, DATASETS[1]])
    for rate in (24, 50):
        Clip(rate=rate).write(bare.path(f"{PICTURES}/at {rate}.mp4"))
    seen: list[DescriptionRequest] = []
    describe = QwenCaptioner.describe

    def watched(
        self: QwenCaptioner, requests: list[DescriptionRequest], most: int
    ) -> list[tuple[str, bool]]:
        seen.extend(requests)
        return describe(self, requests, most)

    monkeypatch.setattr(QwenCaptioner, "describe", watched)
    assert bare.run("caption", "--style", "short") == 0
    assert sorted(captions(bare)) == ["at 24.txt", "at 50.txt"]
    for request in seen:
        times = [time_in(np.asarray(frame)) for frame in request.frames]
        assert request.seconds == 1
        assert np.allclose(times, np.arange(8) / 8, atol=0.06)


def test_captions_of_clips_depend_on_frame_order_and_speed(t2i_checkpoint: Path) -> None:
    """Order and speed matter, and two equal frames are what Qwen makes of a picture."""
    captioner = load_captioner(t2i_checkpoint)
    random = np.random.default_rng(0)
    frames = [
        Image.fromarray(random.integers(0, 255, (56, 84, 3), dtype=np.uint8)) for _ in range(4)
    ]
    clips = [
        DescriptionRequest(each, "say", seconds)
        for each, seconds in ((frames, 2.0), (frames[::-1], 2.0))
    ]
    clips.append(DescriptionRequest(frames, "say", 20.0))
    told = captioner.describe([*clips, DescriptionRequest(frames[:1], "say")], 8)
    assert len({text for text, _ in told}) == 4
    still, picture = (
        captioner._prepare(
            DescriptionRequest(frames[:1] * count, "say", 1.0 if count > 1 else None)
        )
        for count in (2, 1)
    )
    assert torch.equal(still["pixel_values_videos"], picture["pixel_values"])
    both = captioner._prepare(clips[0])["pixel_values_videos"].unflatten(1, (3, 2, 14, 14))
    last = captioner._prepare(DescriptionRequest(frames[3:], "say"))["pixel_values"].unflatten(
        1, (3, 2, 14, 14)
    )
    assert torch.equal(both[-len(last) :, :, 1], last[:, :, 0])


def test_a_caption_that_was_cut_off_ends_with_a_whole_sentence_or_tag() -> None:
    words = Wording("long", " zkt ")
    assert words.caption('"A cat. It sleeps on a"', is_whole=False) == "zkt, A cat."
    assert words.caption("cat, grey, on a so", is_whole=False) == "zkt, cat, grey"
    assert words.caption("A cat. It sleeps", is_whole=True) == "zkt, A cat. It sleeps"
    assert words.caption(" ", is_whole=True) == ""


def test_a_trigger_that_fills_the_prompt_is_refused(bare: Workspace, capsys: Capture) -> None:
    assert bare.run("caption", "tokenizer_max_length=32", "--trigger", "zkt") == 0
    forget(bare)
    many = " ".join(["word"] * 40)
    assert bare.run("caption", "tokenizer_max_length=32", "--trigger", many) == 2
    assert "leaves" in capsys.readouterr().err


def test_caption_refuses_models_that_cannot_write(
    bare: Workspace, t2i_checkpoint: Path, sana_checkpoint: Path, capsys: Capture
) -> None:
    shutil.copytree(t2i_checkpoint, bare.path("headless"))
    weights = bare.path("headless/text_encoder/model.safetensors")
    save_file(
        {name: each for name, each in load_file(weights).items() if name != "lm_head.weight"},
        weights,
    )
    headless = complaint(
        bare, capsys, "caption", f"pretrained_model_name_or_path={bare.path('headless')}"
    )
    assert headless.startswith("pretrained_model_name_or_path: ")
    assert "has no language head (lm_head.weight)" in headless
    sana = (
        "model_family=sanavideo",
        "model_flavour=null",
        f"pretrained_model_name_or_path={sana_checkpoint}",
    )
    assert "cannot caption pictures" in complaint(bare, capsys, "caption", *sana)
    unknown = complaint(bare, capsys, "caption", "--dataset", "picture")
    assert unknown.startswith("--dataset: 'picture'")
    assert "Did you mean 'pictures'?" in unknown
    assert "--trigger" in complaint(bare, capsys, "caption", "--trigger", "a\nb")
