"""Checks of the settings that preview prompts have of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simpletuner.config.types import Size
from simpletuner.errors import Problems
from simpletuner.models.spec import PICTURE_TASKS
from simpletuner.planning.plans import Model, PreviewPlan
from simpletuner.planning.prompt_library import LIBRARY
from simpletuner.planning.prompts import ValidationPrompt, of_prompt


def check_guidance_of_prompts(
    model: Model, prompts: Sequence[ValidationPrompt], report: Problems
) -> None:
    """What the family says of a guidance, for prompts with a guidance of their own."""
    library = model.config.validation.user_prompt_library
    key = "validation_guidance"
    for prompt in prompts:
        if prompt.guidance is None:
            continue
        of_family = Problems()
        config = model.config.with_values({key: prompt.guidance}, "")
        model.spec.checks.settings(config, model.flavour, of_family)
        for problem in of_family:
            if problem.where == key:
                report.append(of_prompt(problem, library, prompt, "guidance"))


def check_preview_sizes(
    previews: PreviewPlan, trained: Mapping[str, Sequence[Size]], report: Problems
) -> None:
    """What the family says of the sizes of previews, and of those that are trained.

    Args:
        trained: sizes by dataset id.
    """
    of_sizes = previews.spec.checks.sizes
    of_sizes(previews.config, previews.flavour, previews.sizes, trained, report)
    library = previews.config.validation.user_prompt_library
    for prompt in previews.prompts:
        if prompt.size is None or prompt.size in previews.sizes:
            continue
        of_prompts = Problems()
        # After the first size, which decides how positions are scaled.
        sizes = [*previews.sizes[:1], prompt.size]
        of_sizes(previews.config, previews.flavour, sizes, {}, of_prompts)
        known = Problems()
        of_sizes(previews.config, previews.flavour, sizes[:1], {}, known)
        for problem in of_prompts:
            if problem not in known:
                report.append(of_prompt(problem, library, prompt, "resolution"))


def check_pictures_of_prompts(previews: PreviewPlan, report: Problems) -> None:
    """Warn of pictures of prompts for a model that starts from noise."""
    if previews.flavour.task in PICTURE_TASKS:
        return
    for prompt in previews.prompts:
        if prompt.picture is not None:
            library = previews.config.validation.user_prompt_library
            report.warn(
                LIBRARY,
                f"{library}: 'picture' of {prompt.nickname!r} has no effect: "
                f"{previews.flavour.name} starts from noise, not a picture.",
            )
