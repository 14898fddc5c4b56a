"""The calculation of what 8-bit products gain by card."""

from __future__ import annotations

import pytest

from benchmarks.products import CASES, CHIPS, Products, make_step, ratio, rows
from simpletuner.models.cost import Layer

TOKENS = 10
WEIGHTS = 3 * 5


@pytest.mark.parametrize(
    ("name", "backward", "expected"),
    [
        ("feed_forward.in_layer", False, TOKENS * (3 * 5 - 5) - WEIGHTS),
        ("self_attention.to_key", False, TOKENS * -5 - WEIGHTS),
        ("self_attention.to_key", True, TOKENS * (3 * 3 - 3) - WEIGHTS + 2 * WEIGHTS),
    ],
)
def test_bytes_around_a_product(name: str, backward: bool, expected: float) -> None:
    layer = Layer(f"blocks.0.{name}", "blocks.0.", "token", (3, 5))
    results = 5 if backward else 3

    scaled = Products(2.0, scaled=True)
    unscaled = Products(2.0, scaled=False)

    assert scaled.traffic(layer, TOKENS, backward=backward) == expected
    assert unscaled.traffic(layer, TOKENS, backward=backward) == expected + 8 * TOKENS * results


def test_sums_that_are_written_cost_data_centre_cards_the_gain() -> None:
    ratios = {}
    for card in ("4090", "l40s", "h100"):
        step = make_step(CASES["Image"], card)
        speed = 0.8 * CHIPS[card].int8
        ratios[card] = [ratio(step, Products(speed, scaled)) for scaled in (False, True)]

    assert ratios["4090"][0] < 0.9
    assert min(ratios["l40s"][0], ratios["h100"][0]) > 0.9
    assert all(scaled < 0.9 for _, scaled in ratios.values())


def test_the_table_has_no_ratio_where_a_card_lacks_the_products() -> None:
    table = {row.split(" | ")[0]: row for row in rows()}

    assert table["| RTX 3060"].count("–") == 4
    assert table["| RTX 4070"].count("–") == 2
    assert table["| A100"].count("–") == 2
    assert "–" not in table["| H100"]
