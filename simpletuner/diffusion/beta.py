"""The beta distribution's inverse CDF, which torch does not have."""

from __future__ import annotations

import math

TINY = 1e-300
BISECTIONS = 60  # halvings of [0, 1]: to the end of double precision


def beta_quantile(share: float, alpha: float, beta: float) -> float:
    """The x in [0, 1] below which `share` of a Beta(alpha, beta) lies, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if beta_cdf(middle, alpha, beta) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def beta_cdf(x: float, alpha: float, beta: float) -> float:
    """The regularised incomplete beta function I_x(alpha, beta), for alpha and beta > 0.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22 (continued fraction) and 8.17.4 (symmetry).
    """
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    # The fraction converges quickly on this side of the mean only.
    if x > (alpha + 1) / (alpha + beta + 2):
        return 1 - beta_cdf(1 - x, beta, alpha)
    log_front = alpha * math.log(x) + beta * math.log1p(-x)
    log_front += math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return math.exp(log_front) / (alpha * _continued_fraction(x, alpha, beta))


def _continued_fraction(x: float, a: float, b: float, limit: int = 1000, tolerance: float = 1e-15) -> float:
    """1 + d1/(1 + d2/(1 + ...)) of DLMF 8.17.22, evaluated from the front by Lentz's method."""
    value = numerators = 1.0
    denominators = 0.0
    for n in range(1, limit):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominators = 1 / ((1 + d * denominators) or TINY)
        numerators = (1 + d / numerators) or TINY
        value *= numerators * denominators
        if abs(numerators * denominators - 1) < tolerance:
            break
    return value
