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

from simpletuner.annexes.captions.captioner import QwenCaptioner
from simpletuner.annexes.captions.wording import Wording
from simpletuner.annexes.captions.writing import DescriptionRequest
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
TRIGGER = ("--trigger", "zkt")
ONE_AT_A_TIME = "text_encoder_batch_size=1"


@pytest.fixture
def half_captioned(workspace: Workspace) -> Workspace:
    """Four photographs of different sizes without captions, and four pictures with one."""
    for index in range(4):
        size = (64 + 16 * index, 96 - 8 * index)
        photograph(workspace.path(f"{PICTURES}/p{index}.png"), size, seed=index)
    remove_captions(workspace)
    return workspace


def remove_captions(workspace: Workspace) -> None:
    """Remove the captions of the four photographs."""
    for path in workspace.path(PICTURES).glob("p[0-3].txt"):
        path.unlink()


def read_captions(workspace: Workspace) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(workspace.path(PICTURES).glob("*.txt"))}


def deepen_encoder(checkpoint: Path) -> None:
    """Write a text encoder with more layers than stay on the device while they stream."""
    folder = checkpoint / "text_encoder"
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["num_hidden_layers"] = 4
    settings["text_config"]["layer_types"] = ["full_attention"] * 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**settings)).save_pretrained(folder)


def load_captioner(checkpoint: Path) -> QwenCaptioner:
    parts = {
        role: Part(role, "model", str(checkpoint), role, None, None)
        for role in ("text_encoder", "tokenizer")
    }
    return QwenCaptioner(ModelSource(parts), torch.device("cpu"), torch.float32)


def record_requests(monkeypatch: pytest.MonkeyPatch) -> list[DescriptionRequest]:
    """All requests that the captioner gets from now on."""
    recorded: list[DescriptionRequest] = []
    describe = QwenCaptioner.describe

    def record_and_describe(
        self: QwenCaptioner, requests: list[DescriptionRequest], limit: int
    ) -> list[tuple[str, bool]]:
        recorded.extend(requests)
        return describe(self, requests, limit)

    monkeypatch.setattr(QwenCaptioner, "describe", record_and_describe)
    return recorded


def test_preview_shows_captions_and_writes_nothing(
    half_captioned: Workspace, capsys: Capture
) -> None:
    before = read_captions(half_captioned)

    assert half_captioned.run("caption", "--preview", *TRIGGER) == 0

    assert capsys.readouterr().out.count("  zkt, ") == 3, "of four files without a caption"
    assert read_captions(half_captioned) == before


def test_a_limit_bounds_how_many_captions_are_written(half_captioned: Workspace) -> None:
    before = read_captions(half_captioned)

    assert half_captioned.run("caption", "--limit", "1", *TRIGGER) == 0

    assert read_captions(half_captioned).keys() - before.keys() == {"p0.txt"}


def test_only_missing_captions_are_written(half_captioned: Workspace, capsys: Capture) -> None:
    pictures = half_captioned.path(PICTURES)
    (pictures / "p1.txt").write_text("my own")
    before = read_captions(half_captioned)
    # A caption of blanks counts as missing.
    (pictures / "p2.txt").write_text(" \n")
    times = {path: path.stat().st_mtime_ns for path in pictures.iterdir() if path.name != "p2.txt"}

    assert half_captioned.run("caption", *TRIGGER, "--style", "tags") == 0

    after = read_captions(half_captioned)
    new = [after[name] for name in ("p0.txt", "p2.txt", "p3.txt")]
    assert all(text.startswith("zkt, ") and text.endswith("\n") for text in new)
    assert len(set(new)) == 3
    assert {name: after[name] for name in before} == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
    capsys.readouterr()
    assert half_captioned.run("caption") == 0
    assert "Every picture and clip has a caption." in capsys.readouterr().out


def test_batches_and_streaming_do_not_change_a_caption(
    half_captioned: Workspace, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = half_captioned.path("deep")
    shutil.copytree(t2i_checkpoint, checkpoint)
    deepen_encoder(checkpoint)
    half_captioned.write_config(pretrained_model_name_or_path=str(checkpoint))
    copier = AdversarialCopier()
    monkeypatch.setattr(attach, "choose_copier", lambda *arguments, **settings: copier)

    def write_captions(*settings: str) -> dict[str, str]:
        remove_captions(half_captioned)
        assert half_captioned.run("caption", *settings) == 0
        return read_captions(half_captioned)

    alone = write_captions(ONE_AT_A_TIME)
    batched = write_captions()
    assert not copier.submitted
    streamed = write_captions("group_offload_text_encoder=true")
    assert copier.submitted

    assert batched == alone
    assert streamed == alone


def test_padding_repeats_only_tokens_of_the_prompt(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 lowers the score of a token that stands in the padding alone."""
    captioner = load_captioner(t2i_checkpoint)
    batches = []

    def record(**inputs: torch.Tensor) -> torch.Tensor:
        batches.append(inputs)
        return inputs["input_ids"]

    monkeypatch.setattr(captioner.qwen, "generate", record)
    small = DescriptionRequest([Image.new("RGB", (56, 56))], "say")
    large = DescriptionRequest([Image.new("RGB", (56, 140))], "say")

    captioner.describe([small, large], 8)

    (inputs,) = batches
    masks = inputs["attention_mask"].bool()
    assert not masks.all(), "the prompt of the small picture is shorter"
    for ids, mask in zip(inputs["input_ids"], masks, strict=True):
        padding = set(ids[~mask].tolist())
        assert padding <= set(ids[mask].tolist())


def test_an_interrupted_caption_run_keeps_finished_captions_and_continues(
    half_captioned: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = QwenCaptioner.describe
    calls = []

    def describe_or_stop(
        self: QwenCaptioner, requests: list[DescriptionRequest], limit: int
    ) -> list[tuple[str, bool]]:
        calls.append(len(requests))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return describe(self, requests, limit)

    monkeypatch.setattr(QwenCaptioner, "describe", describe_or_stop)

    assert half_captioned.run("caption", ONE_AT_A_TIME) == 130
    finished = read_captions(half_captioned)
    assert {"p0.txt", "p1.txt"} <= finished.keys()
    assert not {"p2.txt", "p3.txt"} & finished.keys()
    assert not list(half_captioned.path(PICTURES).glob("*.tmp"))

    assert half_captioned.run("caption", ONE_AT_A_TIME) == 0
    assert len(calls) == 3 + 2, "two captions were missing"
    assert read_captions(half_captioned).items() > finished.items()


def test_a_dataset_without_captions_can_be_captioned(
    half_captioned: Workspace, capsys: Capture
) -> None:
    """Although it cannot be trained yet. A broken picture is left out."""
    for path in half_captioned.path(PICTURES).glob("*.txt"):
        path.unlink()
    half_captioned.path(f"{PICTURES}/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "none of its files can be used" in complaint(half_captioned, capsys, "train")
    half_captioned.write_datasets([{**DATASETS[0], "caption_strategy": "filename"}, DATASETS[1]])

    assert half_captioned.run("caption") == 0

    assert "set caption_strategy to textfile" in capsys.readouterr().out
    assert len(read_captions(half_captioned)) == 8


def test_a_captioned_clip_shows_the_trained_second_at_any_frame_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips have two seconds, and 25 frames at 25 frames per second, so one second, are trained."""
    workspace = Workspace.create(
        tmp_path / "run",
        make_checkpoint(tmp_path / "t2v", "t2v"),
        pictures=0,
        model_family="kandinsky5-video",
        model_flavour="t2v-lite-sft-5s",
        train_batch_size=1,
    )
    video = {"num_frames": 25, "min_frames": 25, "frame_rate": 25}
    workspace.write_datasets(
        [{**DATASETS[0], "dataset_type": "video", "video": video}, DATASETS[1]]
    )
    Clip(rate=24).write(workspace.path(f"{PICTURES}/at 24.mp4"))
    Clip(rate=50).write(workspace.path(f"{PICTURES}/at 50.mp4"))
    requests = record_requests(monkeypatch)

    assert workspace.run("caption", "--style", "short") == 0

    assert read_captions(workspace).keys() == {"at 24.txt", "at 50.txt"}
    for request in requests:
        times = [time_in(np.asarray(frame)) for frame in request.frames]
        assert request.seconds == 1
        # Eight frames, an eighth of a second apart, up to one frame at 24 per second.
        assert np.allclose(times, np.arange(8) / 8, atol=0.06)


@pytest.fixture
def frames() -> list[Image.Image]:
    """Four frames of noise."""
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 255, (56, 84, 3), dtype=np.uint8)) for _ in range(4)]


def test_captions_of_clips_depend_on_frame_order_and_speed(
    t2i_checkpoint: Path, frames: list[Image.Image]
) -> None:
    captioner = load_captioner(t2i_checkpoint)
    requests = [
        DescriptionRequest(frames, "say", seconds=2.0),
        DescriptionRequest(frames[::-1], "say", seconds=2.0),
        DescriptionRequest(frames, "say", seconds=20.0),
        DescriptionRequest(frames[:1], "say"),
    ]

    captions = {caption for caption, _ in captioner.describe(requests, 8)}

    assert len(captions) == 4


def test_a_picture_is_a_clip_of_two_equal_frames(
    t2i_checkpoint: Path, frames: list[Image.Image]
) -> None:
    """Qwen merges two frames in time, and shows itself a picture twice."""
    captioner = load_captioner(t2i_checkpoint)
    still = captioner._prepare(DescriptionRequest(frames[:1] * 2, "say", seconds=1.0))
    picture = captioner._prepare(DescriptionRequest(frames[:1], "say"))
    assert torch.equal(still["pixel_values_videos"], picture["pixel_values"])

    # Patches are (channel, time, height, width). The last ones of a clip hold its last two frames.
    patch = (3, 2, 14, 14)
    clip = captioner._prepare(DescriptionRequest(frames, "say", seconds=2.0))
    last_picture = captioner._prepare(DescriptionRequest(frames[3:], "say"))
    clip_patches = clip["pixel_values_videos"].unflatten(1, patch)
    last_patches = last_picture["pixel_values"].unflatten(1, patch)
    assert torch.equal(clip_patches[-len(last_patches) :, :, 1], last_patches[:, :, 0])


@pytest.mark.parametrize(
    ("text", "is_complete", "caption"),
    [
        ('"A cat. It sleeps on a"', False, "zkt, A cat."),
        ("cat, grey, on a so", False, "zkt, cat, grey"),
        ("A cat. It sleeps", True, "zkt, A cat. It sleeps"),
        (" ", True, ""),
    ],
)
def test_a_caption_that_was_cut_off_ends_with_a_whole_sentence_or_tag(
    text: str, is_complete: bool, caption: str
) -> None:
    wording = Wording("long", " zkt ")

    assert wording.caption(text, is_whole=is_complete) == caption


def test_a_trigger_that_fills_the_prompt_is_refused(
    half_captioned: Workspace, capsys: Capture
) -> None:
    long_trigger = " ".join(["word"] * 40)
    short_prompt = "tokenizer_max_length=32"

    assert half_captioned.run("caption", short_prompt, "--trigger", long_trigger) == 2
    assert "leaves" in capsys.readouterr().err

    assert half_captioned.run("caption", short_prompt, *TRIGGER) == 0


def test_an_encoder_without_a_language_head_cannot_caption(
    half_captioned: Workspace, t2i_checkpoint: Path, capsys: Capture
) -> None:
    checkpoint = half_captioned.path("headless")
    shutil.copytree(t2i_checkpoint, checkpoint)
    path = checkpoint / "text_encoder/model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path)

    message = complaint(
        half_captioned, capsys, "caption", f"pretrained_model_name_or_path={checkpoint}"
    )

    assert message.startswith("pretrained_model_name_or_path: ")
    assert "has no language head (lm_head.weight)" in message


def test_a_family_without_a_captioner_is_refused(
    half_captioned: Workspace, sana_checkpoint: Path, capsys: Capture
) -> None:
    half_captioned.write_config(
        model_family="sanavideo",
        model_flavour=None,
        pretrained_model_name_or_path=str(sana_checkpoint),
    )

    assert "cannot caption pictures" in complaint(half_captioned, capsys, "caption")


def test_mistakes_of_a_caption_command_are_reported(
    half_captioned: Workspace, capsys: Capture
) -> None:
    dataset = complaint(half_captioned, capsys, "caption", "--dataset", "picture")
    assert dataset.startswith("--dataset: 'picture'")
    assert "Did you mean 'pictures'?" in dataset

    assert "--trigger" in complaint(half_captioned, capsys, "caption", "--trigger", "a\nb")
