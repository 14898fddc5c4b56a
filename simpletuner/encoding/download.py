"""Downloads the parts of a model and an initial LoRA, and checks what the plan could not."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.errors import Problems
from simpletuner.models.loading import check_shapes
from simpletuner.models.lora_checks import check_init_lora
from simpletuner.models.lora_layers import linear_modules
from simpletuner.planning.checks import check_block_numbers, check_parts
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.reporting.events import EventStream
from simpletuner.weights.part import Part
from simpletuner.weights.published_lora import find_lora, is_on_hub


def fetch(plan: SamplePlan, events: EventStream) -> None:
    """Download missing parts of the model.

    Raises:
        UserError: a part is not available, or the parts do not match.
    """
    absent = [part for part in plan.source.parts.values() if part.local_folder() is None]
    encoders = []
    for technique in plan.techniques:
        for kind in technique.features:
            if kind.encoder:
                encoders.append(kind.encoder)
    absent += [encoder.part for encoder in encoders if encoder.local() is None]
    if absent:
        download(absent, events)
        # The plan could check only parts that were already on this machine. Now the number of
        # blocks is known, too.
        problems = Problems()
        check_parts(plan.spec, plan.flavour, plan.source, problems)
        check_block_numbers(plan.config, plan.spec, plan.source, problems)
        for encoder in encoders:
            encoder.check(problems)
        problems.raise_if_fatal()
    for role in ("transformer", "vae"):
        check_shapes(plan.source[role])
    if isinstance(plan, Plan):
        fetch_lora(plan, check_again=bool(absent))


def fetch_lora(plan: Plan, *, check_again: bool) -> None:
    """Download the LoRA that the run starts from, and check what the plan could not.

    Args:
        check_again: the model's layers were unknown when the plan was made.

    Raises:
        UserError: the LoRA cannot be downloaded, or does not fit.
    """
    lora = plan.config.lora
    if lora.init_lora is not None and is_on_hub(lora.init_lora):
        find_lora(lora.init_lora, fetch=True)
        check_again = True  # now that the file is on this machine
    if check_again:
        modules = linear_modules(plan.source["transformer"].weight_shapes())
        problems = Problems()
        check_init_lora(lora, modules, plan.lora_targets, plan.spec.name, problems)
        problems.raise_if_fatal()


def download(parts: Sequence[Part], events: EventStream) -> None:
    """Download parts of a model."""
    title = "Downloading the model"
    with events.phase(title, len(parts), "parts", stage="init_download_model") as phase:
        for part in parts:
            part.fetch()
            phase.advance(1, f"{part.location}/{part.folder}")
