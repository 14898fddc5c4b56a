"""What every family must hold, checked on a small transformer of random weights."""

from __future__ import annotations

import re
from collections.abc import Callable

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
    """Defaults are keys of the schema, flavours have names and repositories of their own, sizes fit
    the grid.
    """
    assert not {*spec.defaults, *spec.fixed} - {*all_options()}
    assert (
        len({*spec.flavour_names})
        == len(spec.flavours)
        == len({flavour.base_model for flavour in spec.flavours})
    )
    assert all(spec.cost.published(name) for name in spec.flavour_names)
    sides = [side for sizes in spec.native_sizes.values() for size in sizes for side in size]
    assert sides
    assert not any(side % spec.size_multiple or side > spec.largest_side for side in sides)
    assert spec.size_multiple % (spec.vae_stride * spec.patch_size) == 0
    assert {"transformer", "vae", "scheduler"} <= {*spec.components}


def adapter(spec: FamilySpec) -> None:
    """The adapter is of this family, and names no other."""
    assert load_adapter(spec).spec is spec


def layout(spec: FamilySpec) -> None:
    """The repeated blocks are found; the last group holds the tokens; LoRA targets and presets
    match layers in it.
    """
    trial = trial_of(spec)
    names = [name for name, _ in trial.model.named_modules()]
    for group, blocks in trial.groups.items():
        assert trial.model.get_submodule(group) is blocks
    assert trial.reads_tokens
    for targets in (list(spec.lora_targets), *spec.lora_presets.values(), spec.quantised_layers):
        matched = matching_modules(names, targets)
        assert any(name.startswith(next(reversed(trial.groups))) for name in matched)
        linear = {name for name, _ in _weighted(trial)}
        assert {*matched} <= linear
    real = {type(each).__name__ for _, each in trial.model.named_modules()}
    for word, pattern in spec.adapter_classes.items():
        meant = {name for name in names if re.fullmatch(pattern, name)}
        classes = {type(trial.model.get_submodule(name)).__name__ for name in meant}
        assert len(classes) == 1, word
        assert word in classes or word not in real, (
            "a generic word never stands for another class of that name"
        )
        assert meant == {
            name for name, each in trial.model.named_modules() if type(each).__name__ in classes
        }


def _weighted(trial: Trial) -> list[tuple[str, object]]:
    return [(name, each) for name, each in trial.model.named_modules() if hasattr(each, "weight")]


def inputs(spec: FamilySpec) -> None:
    """The velocity has the shape of the latents, in float32, whatever the transformer computes
    in.
    """
    trial = trial_of(spec, samples=2)
    prediction = trial.forward()
    assert prediction.shape == trial.noisy.target.shape
    assert prediction.dtype == torch.float32
    assert prediction.std() > 0


def batches(spec: FamilySpec) -> None:
    """A sample does not depend on the others of its batch, though their captions are of other
    lengths.
    """
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
    """FLOPs of a forward pass to the last one, bytes that a block keeps to 2 %, by the measured
    table.
    """
    trial = trial_of(spec)
    planned = cost_of(spec.cost, trial.model)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trial.forward()
    assert planned.forward(load_of(trial)).total == counter.get_total_flops()
    saved = planned.activations(load_of(trial), 4, NO_ADAPTERS).saved
    assert 0.98 < saved / metered_block(trial, backend=None).bytes["trained"] < 1.02


Check = Callable[[FamilySpec], None]
CONTRACT: tuple[Check, ...] = (options, adapter, layout, inputs, batches, cost)
