"""The promises that every family keeps, checked on a small transformer of random weights."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost_table import Case, Trial, metered_block, structure_of
from benchmarks.models import cost_of
from simpletuner.config.schema import all_options
from simpletuner.models.adapter import load_adapter
from simpletuner.models.cost import NO_ADAPTERS, BatchShape
from simpletuner.models.lora_layers import matching_modules
from simpletuner.models.spec import FamilySpec
from tests.tools.tolerances import MODEL, assert_close


def trial_of(spec: FamilySpec, samples: int = 1) -> Trial:
    frames = 3 if spec.media == "video" else 1
    case = Case(2, 32, 4, frames, 4, 8, 24, samples)
    return Trial(spec.name, case, rows=structure_of(spec.name)["rows"])


def load_of(trial: Trial) -> BatchShape:
    frames, height, width = trial.noisy.noisy_latents.shape[-3:]
    patch = trial.spec.patch_size
    text = trial.numbers["text"] // trial.numbers["sample"]
    return BatchShape(trial.numbers["sample"], frames, height // patch, width // patch, text)


def options(spec: FamilySpec) -> None:
    """Defaults are keys of the schema, flavours are distinct, and sizes are on the grid."""
    assert not {*spec.defaults, *spec.fixed} - {*all_options()}

    names = spec.flavour_names
    assert len(set(names)) == len(names)
    assert len({flavour.base_model for flavour in spec.flavours}) == len(names)
    assert all(spec.cost.published(name) for name in names)

    assert spec.native_sizes
    for sizes in spec.native_sizes.values():
        for size in sizes:
            assert all(side % spec.size_multiple == 0 for side in size)
            assert max(size) <= spec.largest_side
    assert spec.size_multiple % (spec.vae_stride * spec.patch_size) == 0
    assert {"transformer", "vae", "scheduler"} <= {*spec.components}


def adapter(spec: FamilySpec) -> None:
    """The adapter names this family."""
    assert load_adapter(spec).spec is spec


def layout(spec: FamilySpec) -> None:
    """Block lists, LoRA targets, presets and LyCORIS classes name modules of the transformer."""
    trial = trial_of(spec)
    modules = dict(trial.model.named_modules())
    for group, blocks in trial.groups.items():
        assert modules[group] is blocks
    assert trial.reads_tokens

    weighted = {name for name, module in modules.items() if hasattr(module, "weight")}
    last_group = list(trial.groups)[-1]
    for targets in (list(spec.lora_targets), *spec.lora_presets.values(), spec.quantised_layers):
        matched = matching_modules(modules, targets)
        assert any(name.startswith(last_group) for name in matched)
        assert {*matched} <= weighted

    classes = {name: type(module).__name__ for name, module in modules.items()}
    for word, pattern in spec.adapter_classes.items():
        selected = {name for name in modules if re.fullmatch(pattern, name)}
        selected_classes = {classes[name] for name in selected}
        assert len(selected_classes) == 1, word
        is_generic = word not in selected_classes
        assert not (is_generic and word in classes.values()), (
            "a generic word never stands for another class of that name"
        )
        assert selected == {name for name in modules if classes[name] in selected_classes}


def inputs(spec: FamilySpec) -> None:
    """The velocity has the shape of the latents, in float32."""
    trial = trial_of(spec, samples=2)
    prediction = trial.forward()
    assert prediction.shape == trial.noisy.target.shape
    assert prediction.dtype == torch.float32
    assert prediction.std() > 0


def batches(spec: FamilySpec) -> None:
    """A sample does not depend on its batch, whose captions have other lengths."""
    trial = trial_of(spec, samples=2)
    embeds = trial.noisy.batch.embeds
    if not spec.cost.padded_text:
        embeds[0]["prompt_embeds"] = embeds[0]["prompt_embeds"][:-5]
    with torch.no_grad():
        together = trial.forward()
        for index in range(2):
            alone = trial.adapter.predict(trial.model, trial.part(index))
            assert_close(together[index : index + 1], alone, terms=8 * MODEL)


def cost(spec: FamilySpec) -> None:
    """The table gives the exact FLOPs of a forward pass, and the saved bytes of a block to 2 %."""
    trial = trial_of(spec)
    planned = cost_of(spec.cost, trial.model)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trial.forward()
    measured = metered_block(trial, backend=None).bytes["trained"]

    assert planned.forward(load_of(trial)).total == counter.get_total_flops()
    saved = planned.activations(load_of(trial), 4, NO_ADAPTERS).saved
    assert saved == pytest.approx(measured, rel=0.02)


Check = Callable[[FamilySpec], None]
CONTRACT: tuple[Check, ...] = (options, adapter, layout, inputs, batches, cost)
