"""Prompts, their file names and their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpletuner.config.load import build_group
from simpletuner.config.schema import ValidationConfig
from simpletuner.config.types import Size
from simpletuner.errors import Problem, Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.planning.prompts import (
    BUILT_IN,
    ValidationPrompt,
    collect_prompts,
    file_safe,
    fit_prompts,
    fit_sizes,
    like_those_of_run,
    rendered_sizes,
)


def collect(**settings: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """Short names and prompts, and the problems."""
    problems = Problems()
    prompts = collect_prompts(ValidationConfig(**settings), problems)
    return [(prompt.short_name, prompt.prompt) for prompt in prompts], [
        str(problem) for problem in problems
    ]


def library(folder: Path, content: Any) -> str:
    path = folder / "library.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def sizes(value: str, *, lenient: bool = False) -> tuple[list[Size], list[Problem]]:
    problems = Problems()
    config = build_group(ValidationConfig, {"validation_resolution": value}, problems)
    wanted = config.validation_resolution or ()
    return fit_sizes(wanted, KANDINSKY5_IMAGE, problems, lenient=lenient), problems


def test_empty_prompt_is_rendered_if_it_is_the_only_one() -> None:
    assert collect() == ([("unconditional", "")], [])
    assert collect(validation_disable_unconditional=True) == ([], [])
    assert collect(
        validation_disable=True, validation_prompt="x", user_prompt_library="none.json"
    ) == ([], [])


def test_empty_prompt_beside_others_must_be_requested() -> None:
    assert collect(validation_prompt="x") == ([("validation", "x")], [])
    asked = collect(validation_prompt="x", validation_disable_unconditional=False)
    assert asked == ([("unconditional", ""), ("validation", "x")], [])


def test_primary_prompt_follows_the_libraries(tmp_path: Path) -> None:
    path = library(tmp_path, {"a cat": "one", "dog": {"prompt": "two"}})
    prompts, problems = collect(
        validation_prompt="three", user_prompt_library=path, validation_prompt_library=True
    )

    assert problems == []
    assert [name for name, _ in prompts] == [*BUILT_IN, "a_cat", "dog", "validation"]
    assert prompts[-3:] == [("a_cat", "one"), ("dog", "two"), ("validation", "three")]


def test_equal_file_names_are_numbered(tmp_path: Path) -> None:
    path = library(
        tmp_path, {"a<b>": "1", "a(b)": "2", "A b": "3", "validation": "4", "unconditional": "5"}
    )
    prompts, _ = collect(
        validation_prompt="mine", user_prompt_library=path, validation_disable_unconditional=False
    )
    names = [name for name, _ in prompts]

    assert len({name.lower() for name in names}) == len(names) == 7
    assert ("validation", "mine") in prompts, "a library cannot take our own names away"
    assert prompts[0] == ("unconditional", "")


@pytest.mark.parametrize(
    ("nickname", "name"),
    [
        ("anime_<token>", "anime_token"),
        ("हिन्दी बिल्ली", "हिन्दी_बिल्ली"),
        ("猫 在 睡觉", "猫_在_睡觉"),
        ("../../etc/passwd", "etc_passwd"),
        (r"C:\x", "C_x"),
        ("a\nb\tc", "a_b_c"),
        ("🐈", "prompt"),
        ("", "prompt"),
        ("...", "prompt"),
        ("v1.5-x_y", "v1.5-x_y"),
    ],
)
def test_nicknames_become_safe_file_names(nickname: str, name: str) -> None:
    assert file_safe(nickname) == name


@pytest.mark.parametrize("letter", ["a", "न", "猫", "नि"])
def test_long_nickname_is_cut_between_characters(letter: str) -> None:
    name = file_safe(letter * 300)
    assert 100 <= len(name.encode()) <= 120
    assert (letter * 300).startswith(name)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[1]", "must hold one object of nickname to prompt, not a list."),
        ("null", "must hold one object of nickname to prompt, not null."),
        ('{"a": 1', "is not valid JSON: "),
        ({"a": ""}, "the prompt 'a' is empty or not text."),
        ({"a": {"text": "x"}}, "'text' of 'a' is not a known key (prompt, seed, guidance,"),
        ({"a": 5}, "the prompt 'a' is empty or not text."),
        ('{"a": "x", "a": "y"}', "contains 'a' twice: 'x' and 'y'."),
    ],
)
def test_invalid_prompt_library_is_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    _, problems = collect(user_prompt_library=library(tmp_path, content))
    (problem,) = problems

    assert complaint in problem
    assert "library.json" in problem


def test_removed_adapter_strength_is_ignored_with_a_warning(
    tmp_path: Path,
) -> None:
    content = {"a": {"prompt": "x", "adapter_strength": 2}}

    prompts, (problem,) = collect(user_prompt_library=library(tmp_path, content))

    assert prompts == [("a", "x")]
    assert (
        "'adapter_strength' of 'a' was removed in 0.2.0 with validation_adapter_path. It is "
        "ignored." in problem
    )


def test_missing_prompt_library_is_refused() -> None:
    assert collect(user_prompt_library="none.json")[1] == [
        "user_prompt_library: 'none.json' does not exist."
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1024", [(1024, 1024)]),
        ("1024.0", [(1024, 1024)]),
        ("512x768", [(512, 768)]),
        (" 720X1280 , 832x480 ", [(720, 1280), (832, 480)]),
        ("128", [(128, 128)]),
    ],
)
def test_preview_sizes_are_parsed(value: str, expected: list[tuple[int, int]]) -> None:
    assert sizes(value) == (expected, [])


def test_preview_size_is_rounded_to_the_grid_of_the_model() -> None:
    fitting, (problem,) = sizes("480x854")
    assert fitting == [(480, 848)]
    assert not problem.fatal
    assert "480x848 is rendered" in problem.message


def test_preview_size_that_looks_like_megapixels_is_refused() -> None:
    fitting, (problem,) = sizes("1.0")
    assert fitting == []
    assert problem.fatal
    assert "sizes are pixels, not megapixels" in problem.message
    assert sizes("96x96", lenient=True) == ([(96, 96)], [])


@pytest.mark.parametrize(
    "value", ["x", "1024x", "1x2x3", "abc", "-512", "0.5", ",", "1e3", "9" * 400, "१०२४", "nan"]
)
def test_invalid_preview_size_is_refused(value: str) -> None:
    fitting, (problem,) = sizes(value)
    assert fitting == []
    assert problem.fatal


def test_preview_size_beyond_the_limit_of_the_model_is_refused() -> None:
    _, problems = sizes("4096x1024")
    assert any(problem.fatal and "larger than 2048 px" in problem.message for problem in problems)


def prompts_of(folder: Path, content: Any) -> tuple[list[ValidationPrompt], list[str]]:
    """The prompts of a library with this content, and their problems."""
    problems = Problems()
    config = ValidationConfig(user_prompt_library=library(folder, content))
    return collect_prompts(config, problems), [str(problem) for problem in problems]


def test_a_prompt_may_have_its_own_seed_guidance_and_size(tmp_path: Path) -> None:
    settings = {"seed": 7, "guidance": 3.5, "resolution": "768x512"}

    prompts, problems = prompts_of(tmp_path, {"a": {"prompt": "one", **settings}, "b": "two"})

    assert problems == []
    assert prompts == [
        ValidationPrompt("a", "a", "one", 7, 3.5, Size(768, 512)),
        ValidationPrompt("b", "b", "two"),
    ]


def test_a_prompt_may_name_the_picture_that_it_starts_from(tmp_path: Path) -> None:
    Image.new("RGB", (96, 64)).save(tmp_path / "cat.png")

    (prompt,), problems = prompts_of(
        tmp_path, {"a": {"prompt": "one", "picture": str(tmp_path / "cat.png")}}
    )

    assert problems == []
    assert prompt.picture is not None
    assert prompt.picture.original_size == (96, 64)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"seed": -1}, "'seed' of 'a': -1 is below 0."),
        ({"seed": 1.5}, "'seed' of 'a': 1.5 is not a whole number."),
        ({"seed": True}, "'seed' of 'a': True is not a whole number."),
        ({"guidance": 0.5}, "'guidance' of 'a': 0.5 is not between 1 and 100."),
        ({"resolution": "wide"}, "'resolution' of 'a': 'wide' is not a size such as 1024"),
        ({"resolution": "512,768"}, "'resolution' of 'a': '512,768' has several sizes"),
        ({"picture": ""}, "'picture' of 'a': '' names no file."),
        ({"picture": "no.png"}, "'picture' of 'a': 'no.png' does not exist."),
        ({"picture": "/"}, "'picture' of 'a': '/' "),
        ({"picture": "a" * 300}, "'picture' of 'a': 'aaa"),  # too long for a file system
        ({"sead": 1}, "'sead' of 'a' is not a known key (prompt, seed, guidance, resolution,"),
    ],
)
def test_a_wrong_setting_of_a_prompt_is_named_by_file_entry_and_key(
    tmp_path: Path, setting: dict[str, Any], complaint: str
) -> None:
    _, (problem,) = prompts_of(tmp_path, {"a": {"prompt": "one", **setting}})

    assert complaint in problem
    assert problem.startswith(f"user_prompt_library: {tmp_path / 'library.json'}: ")


def test_all_wrong_settings_of_a_library_are_reported_at_once(tmp_path: Path) -> None:
    wrong = {"prompt": "", "seed": -1, "guidance": 0}

    _, problems = prompts_of(tmp_path, {"a": wrong, "b": wrong})

    assert len(problems) == 6


def test_null_leaves_a_setting_to_the_run(tmp_path: Path) -> None:
    settings = {"seed": None, "guidance": None, "resolution": None, "picture": None}

    prompts, problems = prompts_of(tmp_path, {"a": {"prompt": "one", **settings}})

    assert prompts == [ValidationPrompt("a", "a", "one")]
    assert problems == []


def test_the_size_of_a_prompt_is_rounded_to_the_grid_of_the_model() -> None:
    problems = Problems()
    prompt = ValidationPrompt("a", "a", "one", size=Size(700, 500))

    (fitted,) = fit_prompts([prompt], "own.json", KANDINSKY5_IMAGE, problems, lenient=False)

    assert fitted.size == (704, 496)
    assert [str(problem) for problem in problems] == [
        "user_prompt_library: own.json: 'resolution' of 'a': 700x500 is not a multiple of 16 px; "
        "704x496 is rendered."
    ]
    assert problems[0].remedy == {}, "it would set the size of all prompts"


def test_compared_prompts_have_the_settings_that_the_previews_had() -> None:
    of_run = ValidationPrompt("cat", "cat", "a cat", 7, 3.0, Size(512, 768))
    asked = [ValidationPrompt("a_cat", "a cat", "a cat"), ValidationPrompt("x", "x", "a dog")]

    cat, dog = like_those_of_run(asked, [of_run])

    assert cat == ValidationPrompt("a_cat", "a cat", "a cat", 7, 3.0, Size(512, 768))
    assert dog == asked[1]


@pytest.mark.parametrize(
    ("own", "rendered"),
    [
        ([None, None], [(512, 512), (768, 512)]),
        ([None, Size(64, 64)], [(512, 512), (768, 512), (64, 64)]),
        ([Size(64, 64), Size(64, 64)], [(64, 64)]),
        ([None, Size(512, 512)], [(512, 512), (768, 512)]),
        ([], [(512, 512), (768, 512)]),
    ],
)
def test_sizes_of_prompts_are_rendered_after_those_of_the_run(
    own: list[Size | None], rendered: list[Size]
) -> None:
    prompts = [ValidationPrompt("a", "a", "one", size=size) for size in own]

    assert rendered_sizes(prompts, [Size(512, 512), Size(768, 512)]) == rendered
