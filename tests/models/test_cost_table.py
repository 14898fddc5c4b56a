"""A cost table is measured as sums and phases of a peak; what does not fit is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cost_table
from benchmarks.cost_table import BYTES_OF, CASES, Case, Quantity, fit, fit_peak, named
from simpletuner.models.cost import NO_ADAPTERS, BatchShape
from simpletuner.models.cost_table import product_of, sum_of
from simpletuner.models.kandinsky5.cost import IMAGE_COST

SAMPLING = Quantity("new-family in bf16: sampling", "BYTES_OF", BYTES_OF)
ATTENTION = {"token width": 20.0, "text width": 40.0}
FEED_FORWARD = {"token width": 6.0, "token inner": 4.0}


def numbers_of(case: Case) -> dict[str, float]:
    width = case.heads * case.head
    token = case.samples * case.frames * case.height * case.width
    positions = {"token": token, "text": case.samples * case.text, "sample": case.samples}
    return {
        **positions,
        "head": case.head,
        "heads": case.heads,
        "width": width,
        "inner": case.ratio * width,
    }


NUMBERS = [numbers_of(case) for case in CASES]
PRODUCTS = [[product_of(term, numbers) for term in BYTES_OF] for numbers in NUMBERS]


def test_a_peak_at_the_same_moment_in_all_cases_is_one_phase() -> None:
    moments = [[10, int(sum_of(FEED_FORWARD, numbers))] for numbers in NUMBERS]

    phases = fit_peak(SAMPLING, PRODUCTS, moments)

    assert [named(factors) for factors in phases] == [FEED_FORWARD]


def test_a_peak_at_one_of_two_moments_has_a_phase_for_each() -> None:
    moments = [
        [int(sum_of(ATTENTION, numbers)), int(sum_of(FEED_FORWARD, numbers))] for numbers in NUMBERS
    ]

    phases = fit_peak(SAMPLING, PRODUCTS, moments)

    assert [named(factors) for factors in phases] == [ATTENTION, FEED_FORWARD]


def test_a_quantity_that_does_not_fit_is_reported_with_its_worst_case() -> None:
    measured = [sum_of(FEED_FORWARD, numbers) for numbers in NUMBERS]
    measured[3] *= 1.5

    with pytest.raises(ValueError, match="is not a sum") as error:
        fit(SAMPLING, PRODUCTS, measured)

    message = str(error.value)
    beginning = "new-family in bf16: sampling is not a sum of the products in BYTES_OF"
    assert message.startswith(beginning)
    assert str(CASES[3]) in message
    assert "0.2% is allowed" in message
    assert "Add the missing product to BYTES_OF in benchmarks/cost_table.py." in message


def test_only_the_table_of_the_named_family_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_table, "files", lambda package: tmp_path / package.rpartition(".")[2])
    monkeypatch.setattr(
        cost_table, "table_of", lambda specs: {"groups": [spec.name for spec in specs]}
    )
    monkeypatch.setattr("sys.argv", ["cost_table", "--only", "sanavideo"])
    for folder in ("kandinsky5", "sanavideo"):
        (tmp_path / folder).mkdir()

    cost_table.main()

    assert [path.parent.name for path in tmp_path.rglob("cost.json")] == ["sanavideo"]
    assert json.loads((tmp_path / "sanavideo" / "cost.json").read_text()) == {
        "groups": ["sanavideo"]
    }


def test_the_peak_of_a_forward_pass_is_its_largest_phase() -> None:
    cost = IMAGE_COST.of_flavour("t2i-lite-sft")
    bytes_in_bf16 = {**cost.table.bytes["bf16"], "sampling": [ATTENTION, FEED_FORWARD]}
    table = replace(cost.table, bytes={**cost.table.bytes, "bf16": bytes_in_bf16})
    phased = replace(cost, table=table)
    long_text = BatchShape(1, 1, 8, 8, text=10_000)
    short_text = replace(long_text, text=0)

    peaks = [
        phased.activations(batch, 2, NO_ADAPTERS).sampling for batch in (long_text, short_text)
    ]

    # 64 tokens; the feed-forward is 4 times as wide as a token.
    width = cost.hidden
    attention = 64 * width * 20 + 10_000 * width * 40
    feed_forward = 64 * width * 6 + 64 * 4 * width * 4
    assert peaks == [attention, feed_forward]
