"""When two float32 results count as equal, whatever kernels, threads and alignments were used.

Another kernel adds the numbers of a sum in another order, and each addition rounds by up to half of
`EPSILON`. Such roundings add up like a random walk: after `terms` of them in a row the error is
about `sqrt(terms) * EPSILON / 2` of the values that were added. `MARGIN` times that leaves room for
values that partly cancel; the faults that tests look for (a wrong mask, a missing factor, bfloat16
in between) lie at 1e-3 and above.
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
# A handful of operations in each of about ten sampling steps.
SAMPLING = 64
# Two or three blocks of the tiny models: per block some sums of 32 to 64 inputs and 100 to 300
# keys.
MODEL = 1024
# About fifteen convolutions of 3 x 3 or 3 x 3 x 3 by 16 channels in the tiny encoders.
VAE = 4096

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
    """As `assert_close`, against the largest value of all tensors.

    So a gradient that would be 0, but for rounding in the sums of the others, counts as 0.
    """
    assert found.keys() == expected.keys()
    largest = max(float(tensor.detach().abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=0,
            atol=limit(terms) * largest,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far two sets of tensors are apart, as a share of the expected ones (Euclidean norms)."""
    assert found.keys() == expected.keys()
    squared_distance = 0.0
    squared_norm = 0.0
    for name, tensor in expected.items():
        squared_distance += float((found[name] - tensor).detach().double().square().sum())
        squared_norm += float(tensor.detach().double().square().sum())
    return math.sqrt(squared_distance / squared_norm)
