"""A key changes exactly when the entry would."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from simpletuner.caching.keys import (
    EncoderIdentity,
    FeatureKey,
    LatentKey,
    TextKey,
    provenance_of,
)
from simpletuner.hashing import canonical_json

ENCODER = EncoderIdentity(family="kandinsky5-image", checkpoint="c" * 64, dtype="bf16")
LATENT = LatentKey(
    content="a" * 64, size=(512, 384), resized=(576, 384), crop=(32, 0), encoder=ENCODER
)
TEXT = TextKey(caption="एक लाल सितारा", template="official image", max_length=256, encoder=ENCODER)

LATENT_CHANGES = {
    "content": "b" * 64,
    "size": (384, 512),
    "resized": (575, 384),
    "crop": (0, 32),
    "frames": 61,
    "rate": 24.0,
    "read_as": ("BT.709",),
    "reader": "pyav",
}
TEXT_CHANGES = {"caption": "a red star", "template": "", "max_length": 255, "picture": "d" * 64}
ENCODER_CHANGES = {
    "family": "kandinsky5-video",
    "checkpoint": "e" * 64,
    "dtype": "fp32",
    "quantisation": "int8-quanto",
    "tiling": True,
    "tf32": False,
}


def test_every_field_of_a_key_is_tested() -> None:
    def fields(key: object) -> set[str]:
        return {field.name for field in dataclasses.fields(key)} - {"encoder"}

    assert fields(LATENT) == set(LATENT_CHANGES)
    assert fields(TEXT) == set(TEXT_CHANGES)
    assert fields(ENCODER) == set(ENCODER_CHANGES)


@pytest.mark.parametrize(
    "key",
    [
        LATENT,
        dataclasses.replace(
            LATENT, rate=23.976, frames=5, read_as=('a "b"', "BT.709"), reader="pyav"
        ),
        dataclasses.replace(LATENT, encoder=dataclasses.replace(ENCODER, tf32=False)),
        TEXT,
        dataclasses.replace(TEXT, caption='"quoted"\n\\ \ud800\x7f', picture="d" * 64),
        FeatureKey("crepa", "a" * 64, (("size", 1.5), ("encoder", "é"))),
    ],
)
def test_the_text_of_a_key_is_the_canonical_json_of_its_fields(
    key: LatentKey | TextKey | FeatureKey,
) -> None:
    ingredients = {"kind": key.ingredients()["kind"], "version": 1, **dataclasses.asdict(key)}
    ingredients |= {
        f"encoder.{name}": value for name, value in ingredients.pop("encoder", {}).items()
    }

    for name, absent in (("read_as", ()), ("reader", None), ("encoder.tf32", None)):
        if name in ingredients and ingredients[name] == absent:
            del ingredients[name]

    assert key.text() == canonical_json(ingredients)


@pytest.mark.parametrize(("key", "changes"), [(LATENT, LATENT_CHANGES), (TEXT, TEXT_CHANGES)])
def test_every_field_changes_the_key(key: LatentKey | TextKey, changes: dict[str, object]) -> None:
    changed_keys = [dataclasses.replace(key, **{name: value}) for name, value in changes.items()]
    changed_keys += [
        dataclasses.replace(key, encoder=dataclasses.replace(ENCODER, **{name: value}))
        for name, value in ENCODER_CHANGES.items()
    ]

    digests = {changed.digest() for changed in (key, *changed_keys)}

    assert len(digests) == len(changed_keys) + 1
    assert all(len(digest) == 64 for digest in digests)


def test_keys_never_change() -> None:
    """A change of the formula would orphan all caches of all users; VERSION does so on purpose."""
    assert LATENT.digest() == "ee012cfdf052f27bf9040fbf97fc108f3642d90e9f27dd7b495b312dee925ae4"
    assert TEXT.digest() == "bf93b2ea3d57730c51cfb446effc3bc5775b0783b94d6ac9b3955ae24af9ef8a"


def test_equal_keys_have_equal_digests() -> None:
    again = LatentKey(
        encoder=EncoderIdentity(dtype="bf16", checkpoint="c" * 64, family="kandinsky5-image"),
        crop=(32, 0),
        resized=(576, 384),
        size=(512, 384),
        content="a" * 64,
    )
    assert again.digest() == LATENT.digest()


def test_the_posterior_seed_depends_on_the_entry() -> None:
    assert LATENT.seed() == int("ee012cfdf052f27b", 16) // 2 < 2**63, (
        "the start of its key, so draws stay"
    )
    assert LATENT.seed() != dataclasses.replace(LATENT, crop=(0, 0)).seed()


def test_provenance_is_text_and_holds_the_ingredients() -> None:
    provenance = provenance_of(TEXT, "my set/सितारा.png")

    assert provenance["source"] == "my set/सितारा.png"
    assert provenance["ingredients"] == canonical_json(TEXT.ingredients())
    assert TEXT.ingredients()["encoder.dtype"] == "bf16"


def test_keys_need_no_torch() -> None:
    modules = "keys", "entry", "catalogue"
    code = (
        "; ".join(f"import simpletuner.caching.{name}" for name in modules)
        + "; import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
