"""Consent to a run that would train for days on a CPU."""

from __future__ import annotations

from dataclasses import replace

from simpletuner.annexes.fitting.ready import check_gpu, needs_consent, with_warnings
from simpletuner.budget.budget import Budget
from simpletuner.cli.process import without_gc
from simpletuner.errors import ConfigError, Problems


def with_consent(budget: Budget, *, yes: bool) -> Budget:
    """The budget, with its warnings about a missing GPU settled by torch and the user.

    Args:
        yes: consent was given on the command line.

    Raises:
        ConfigError: the run would train for days on a CPU, without consent.
    """
    slow = Problems()
    check_gpu(budget, slow)
    if not slow:
        return budget
    remaining = [warning for warning in budget.plan.warnings if warning not in slow]
    # At the wall: most runs on a machine without a GPU are refused here, and all others need torch.
    with without_gc():
        import torch
    # There is a GPU that the plan did not see, since some containers have no nvidia-smi.
    if torch.accelerator.is_available():
        return with_warnings(budget, remaining)
    if needs_consent(budget) and not yes:
        raise ConfigError(replace(warning, fatal=True) for warning in slow)
    consented = Problems()
    check_gpu(budget, consented, yes=yes)
    return with_warnings(budget, [*remaining, *consented])
