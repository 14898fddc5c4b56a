"""Hashes that are stored on disk never change."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.hashing import canonical_json, hash_bytes, hash_file, hash_json, hash_text

OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_a_text_and_bytes_of_the_same_content_have_the_same_hash(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")

    assert hash_file(path) == hash_text("abc") == hash_bytes(b"abc") == OF_ABC


def test_names_that_are_not_utf_8_can_be_hashed() -> None:
    assert hash_text("caf\udce9") != hash_text("caf\udcea")


def test_canonical_json_does_not_depend_on_order() -> None:
    assert (
        canonical_json({"b": [1, 2.5], "a": None, "ä": True})
        == r'{"a":null,"b":[1,2.5],"\u00e4":true}'
    )
    assert hash_json({"b": 1, "a": 2}) == hash_json({"a": 2, "b": 1})


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})
