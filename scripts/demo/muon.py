"""Muon for tiny models: momentum whose matrices are made orthogonal before they are applied.

The update is the one described by K. Jordan and others, "Muon: An optimizer for hidden layers in
neural networks" (2024). On models of a million weights it reaches a loss in about a third of the
steps that Adam needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices with singular values near 1, by the quintic Newton-Schulz iteration.

    Shape: B rows columns. The iteration is on the smaller of the two Gram matrices.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    # Half precision changes the result by less than the iteration's own error.
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Muon for matrices and convolutions, whose trailing dimensions are flattened into one."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the weights; the scale sqrt(rows / columns) moves all layers' outputs alike."""
        for group in self.param_groups:
            # Weights of one shape are updated together: with tiny matrices one by one, the overhead
            # of the calls would take most of the time.
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append(weight)
            for weights in by_shape.values():
                ahead = [self._look_ahead(weight, group["momentum"]) for weight in weights]
                updates = orthogonalise(torch.stack(ahead))
                scale = max(1.0, updates.shape[1] / updates.shape[2]) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.sub_(update.view_as(weight), alpha=group["lr"] * scale)

    def _look_ahead(self, weight: Tensor, decay: float) -> Tensor:
        """Nesterov's mixture of gradient and running mean, as a matrix."""
        momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        momentum.lerp_(weight.grad, 1 - decay)
        return weight.grad.lerp(momentum, decay).flatten(1)


def split_parameters(model: torch.nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The weights for Muon (matrices and convolutions) and those for AdamW (biases, gains)."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.ndim >= 2]
    vectors = [weight for weight in weights if weight.ndim < 2]
    return matrices, vectors
