"""When two float32 results count as equal, whatever kernels, thread counts and alignments computed
them.

Another kernel adds the numbers of a sum in another order, and each addition rounds by up to half of
`EPSILON`. Such roundings add up like a random walk: after `terms` of them in a row the error is
about `sqrt(terms) * EPSILON / 2` of the values that were added. `MARGIN` times that leaves room for
values that partly cancel; what the tests tell apart (a wrong mask, a missing factor, bfloat16 in
between) lies at 1e-3 and above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

EPSILON = torch.finfo(torch.float32).eps
MARGIN = 16

# Roundings in a row on the way to one number. A layer sums its inputs; layers follow one another.
ELEMENTWISE = 4
# two or three blocks of the tiny models: per block some sums of 32 to 64 inputs and 100 to 300 keys
MODEL = 1024
VAE = 4096  # some fifteen convolutions of 3 x 3 or 3 x 3 x 3 by 16 channels in the tiny encoders

SAMPLING = 64  # a handful of operations in each of some ten sampling steps

# A bound on `distance` for Kandinsky's transformer, which rounds rotated queries and keys to
# bfloat16: a last bit of float32 can lift one of the hundreds in a layer to its neighbour, 2^-8
# away.
ROTATION = 2**-10


def limit(terms: int) -> float:
    """The largest difference, as a share of the largest value."""
    return MARGIN * math.sqrt(terms) * EPSILON / 2


def assert_close(found: Tensor, expected: Tensor, *, terms: int) -> None:
    """Equal but for rounding: the largest difference against the largest expected value."""
    assert_all_close({"": found}, {"": expected}, terms=terms)


def assert_all_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, terms: int
) -> None:
    """As `assert_close` for tensors that belong together: a gradient may be 0 but for what the
    others' sums leave.
    """
    assert found.keys() == expected.keys()
    largest = max(float(each.detach().abs().max()) for each in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=limit(terms) * largest,
            msg=lambda told, name=name: f"{name}: {told}",
        )


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far two sets of tensors are apart, as a share of the expected ones (Euclidean norms)."""
    assert found.keys() == expected.keys()
    apart = sum(
        (found[name] - expected[name]).detach().double().square().sum() for name in expected
    )
    whole = sum(expected[name].detach().double().square().sum() for name in expected)
    return math.sqrt(float(apart) / float(whole))
