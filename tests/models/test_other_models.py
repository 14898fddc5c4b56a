"""Models that are not trained here are named in a sentence: what they are, and what is nearest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simpletuner.config.json_reader import read_toml
from simpletuner.models.other_models import (
    PACKAGE,
    REPOSITORIES,
    SPELLED,
    why_not_trained,
    why_not_trained_from,
)
from simpletuner.models.registry import FAMILIES
from tests.tools.refusals import complaint
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
TABLE = read_toml(PACKAGE, "other_models.toml")


@pytest.mark.parametrize(
    ("names", "words", "nearest"),
    [
        ("kandinsky6 Kandinsky-6.0-lite", "clips with sound", "kandinsky5-video"),
        ("kandinsky2.2 kandinsky-3", "makes? pictures", "kandinsky5-image"),
        ("wan wan2.2 wan22_14b wan-vace wanvideo", "Wan makes clips", "kandinsky5-video"),
        ("wan_s2v s2v-14b-2.2 Wan2.2-S2V-14B", "a picture and speech", "kandinsky5-video"),
        ("ltx-video ltxvideo", "LTX-Video makes clips", "kandinsky5-video"),
        ("ltx2 ltxvideo2", "with sound", "kandinsky5-video"),
        ("flux flux2 FLUX.1-dev flux-kontext", "FLUX makes pictures", "kandinsky5-image"),
        ("sd15 sd3 sd1x", "Stable Diffusion makes", "kandinsky5-image"),
        ("sdxl", "Stable Diffusion XL", "kandinsky5-image"),
        ("qwen_image z-image zimage", "makes .*pictures", "kandinsky5-image"),
        ("sana sana1.5", "not Sana Video", "kandinsky5-image"),
        ("sanavideo2 sana-video-2.0", "another architecture", "sanavideo"),
        ("longsana 2b-480p-longlive", "block by block", "sanavideo"),
    ],
)
def test_a_model_of_others_is_named_with_the_nearest_family(
    names: str, words: str, nearest: str
) -> None:
    for name in names.split():
        why = why_not_trained(name)

        assert re.search(words, why), name
        assert why.startswith("cannot be trained here: ")
        assert why.endswith(f" The nearest family is {nearest}.")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sana_video", "model_family sanavideo"),
        ("sana-video-2b", "model_family sanavideo"),
        ("SANA-Video_2B_720p", "model_family sanavideo, model_flavour 2b-720p"),
        ("kandinsky-5-i2i", "model_family kandinsky5-image, model_flavour i2i-lite-sft"),
        ("kandinsky5_i2v", "model_family kandinsky5-video, model_flavour i2v-lite-5s"),
        ("Kandinsky-5.0-T2V-Pro", "model_family kandinsky5-video"),
        ("kandinsky5", "kandinsky5-image for pictures, kandinsky5-video for clips"),
    ],
)
def test_another_name_of_a_family_is_answered_with_its_name(name: str, remedy: str) -> None:
    assert remedy in why_not_trained(name)


def test_the_table_names_families_and_flavours_that_exist() -> None:
    flavours = {name for spec in FAMILIES.values() for name in spec.flavour_names}
    assert TABLE.keys() - {SPELLED, REPOSITORIES} == FAMILIES.keys()

    for remedy in TABLE[SPELLED].values():
        for key, known in (("model_family", FAMILIES), ("model_flavour", flavours)):
            for name in re.findall(rf"{key} ([\w-]+)", remedy):
                assert name in known

    assert all(map(why_not_trained, TABLE[REPOSITORIES].values()))


@pytest.mark.parametrize("name", ["wander", "sandy", "fluxx", "kandinsky5-vido", "t2v-lite-5s-sd"])
def test_other_words_are_not_taken_for_a_model(name: str) -> None:
    assert why_not_trained(name) == ""


def test_no_flavour_and_no_checkpoint_of_a_family_is_refused() -> None:
    for spec in FAMILIES.values():
        for flavour in spec.flavours:
            assert why_not_trained(flavour.name) == ""
            assert why_not_trained_from(flavour.repository) == ""


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("black-forest-labs/FLUX.1-dev", "FLUX makes pictures"),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "Wan makes clips"),
        ("Wan-AI/Wan2.2-S2V-14B", "a picture and speech"),
        ("kandinskylab/Kandinsky-6.0-Pro-5s-Diffusers", "Kandinsky 6"),
        ("models/SANA-Video_2.0_5B_720p/", "another architecture"),
        ("/data/SANA-Video_2B_480p_LongLive_diffusers", "block by block"),
        ("https://huggingface.co/Efficient-Large-Model/SANA-Video_2.0/tree/main", "another arch"),
        ("hf.co/Efficient-Large-Model/LongSANA_2B_480p_ode", "block by block"),
        ("me/my-flux-style", ""),
        ("models/wanderer", ""),
    ],
)
def test_a_published_model_is_known_by_its_id_or_the_name_of_its_folder(
    location: str, words: str
) -> None:
    why = why_not_trained_from(location)

    assert words in why
    assert bool(why) == bool(words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model_family=kandinsky6", "model_family: 'kandinsky6' cannot be trained here"),
        ("model_family=kandinsky5-i2i", "model_family: 'kandinsky5-i2i' is not the name"),
        ("model_flavour=s2v-14b-2.2", "model_flavour: 's2v-14b-2.2' cannot be trained here"),
        (
            "pretrained_model_name_or_path=Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            "pretrained_model_name_or_path: 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers' cannot be trained",
        ),
        (
            "pretrained_model_name_or_path=https://huggingface.co/Wan-AI/Wan2.1-T2V-14B",
            "'https://huggingface.co/Wan-AI/Wan2.1-T2V-14B' cannot be trained here: Wan makes",
        ),
        (
            "pretrained_model_name_or_path=https://huggingface.co/kandinskylab/Some-Model",
            "is the address of a page; set 'kandinskylab/Some-Model', the hub id.",
        ),
        (
            "pretrained_model_name_or_path=https://civitai.com/models/1",
            "'https://civitai.com/models/1' is an address; name a model folder, or a hub id",
        ),
    ],
)
def test_a_plan_refuses_it_in_one_sentence(
    workspace: Workspace, capsys: Capture, setting: str, words: str
) -> None:
    assert words in complaint(workspace, capsys, "plan", setting)


def test_a_folder_with_a_model_of_the_family_may_have_any_name(
    workspace: Workspace, t2i_checkpoint: Path
) -> None:
    workspace.path("wan2-cats").symlink_to(t2i_checkpoint)

    assert workspace.run("plan", "pretrained_model_name_or_path=wan2-cats") == 0
