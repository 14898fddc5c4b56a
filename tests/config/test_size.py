"""A size is a pair of numbers that prints itself."""

from __future__ import annotations

import json

from simpletuner.config.types import Size


def test_a_size_prints_as_users_write_it() -> None:
    assert str(Size(768, 512)) == f"{Size(768, 512)}" == "768x512"
    assert Size(768, 512).of_frames(1) == "768x512"
    assert Size(768, 512).of_frames(61) == "768x512@61"


def test_a_size_is_recorded_as_a_pair() -> None:
    assert Size(768, 512) == (768, 512)
    assert json.dumps([Size(768, 512)]) == "[[768, 512]]"
    assert repr([Size(768, 512)]) == "[(768, 512)]"
