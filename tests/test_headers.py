"""Headers of safetensors files: what is read, what is refused, and the bytes that are written."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from simpletuner.headers import (
    LONGEST_HEADER,
    METADATA,
    join_header,
    read_head,
    read_header,
    with_metadata,
)


def file_of(text: bytes) -> BytesIO:
    return BytesIO(len(text).to_bytes(8, "little") + text)


def test_the_position_of_the_file_is_left_at_the_data() -> None:
    file = BytesIO(save({"a": torch.tensor([1.5, 2.5])}))

    head, header = read_head(file)

    assert header["a"]["shape"] == [2]
    assert header[METADATA] == {}
    assert file.read() == torch.tensor([1.5, 2.5]).numpy().tobytes()
    assert file.tell() == len(head) + 8


@pytest.mark.parametrize("metadata", ["", '"__metadata__": null'])
def test_a_header_without_metadata_has_none(metadata: str) -> None:
    _, header = read_head(file_of(f"{{{metadata}}}".encode()))

    assert header == {METADATA: {}}


@pytest.mark.parametrize("text", [b"[1]", b"null", b"{", b"\xff"])
def test_what_is_not_an_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_head(file_of(text))


def test_a_header_that_claims_too_much_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((LONGEST_HEADER + 1).to_bytes(8, "little") + b"{}")

    with pytest.raises(ValueError, match="it has no header"):
        read_header(tmp_path / "a.safetensors")


def test_equal_content_is_written_as_equal_bytes() -> None:
    one = join_header({"b": 1, "a": {"d": 2, "c": "ключ"}}, b"data")
    other = join_header({"a": {"c": "ключ", "d": 2}, "b": 1}, b"data")

    assert one == other
    text = '{"a":{"c":"ключ","d":2},"b":1}'.encode()
    assert one[8:].startswith(text + b" ")
    assert int.from_bytes(one[:8], "little") % 8 == 0
    assert one.endswith(b" data")


def test_metadata_is_replaced_and_tensors_stay() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3)}
    blob = save(tensors, metadata={"old": "1"})

    replaced = with_metadata(blob, {"new": "2"})

    length = int.from_bytes(replaced[:8], "little")
    assert json.loads(replaced[8 : 8 + length])[METADATA] == {"new": "2"}
    assert torch.equal(load(replaced)["a"], tensors["a"])
