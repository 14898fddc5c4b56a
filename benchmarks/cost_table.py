"""Measure the cost of each family's transformer, and write it beside the family as `cost.json`.

    python -m benchmarks.cost_table [--only FAMILY]

The plan reads the tables without torch (`models/cost_table.py`). Shapes come from the classes at
the published dimensions, on the meta device. Everything else is measured in small transformers of
the same classes on the CPU: which weights are applied to tokens, text or samples, which of them
need the gradient of their input, FLOPs of attention, and bytes of activations. These grow linearly
with a few widths, so some small models give factors that hold at any size.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode as Nothing
from torch._inductor.virtualized import V
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import SHAPES, RandomAdapter, make_batch, make_config, small_size
from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.diffusion.flow import make_noisy
from simpletuner.models.cost_table import numbered, product_of
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.speed.compile import configure_compiler
from tests.tools.peak_memory import Peak, attention
from tests.tools.saved_tensors import saved_bytes

# The terms of the fitted sums: products of numbers of a micro-batch and of the model (see
# `Trial.numbers`).
BYTES_OF = (
    "token width",
    "token inner",
    "token heads",
    "token head",
    "token",
    "text width",
    "text",
    "sample width",
    "sample width head",
)
FLOPS_OF = {
    "large": ("token token width", "token text width", "token head width", "token width"),
    "small": ("text text width",),
}
# The terms of the traffic of compiled blocks. Modulations and text are left out, of which the cases
# have little; so the error may be larger.
TRAFFIC_OF = ("token width", "token inner")
# Largest relative errors of a sum.
LARGEST_ERROR = 0.002
TRAFFIC_ERROR = 0.02
WHOLE = 0.05  # a factor that is closer to a whole number is rounded to it
LORA_RANK = 4
# A block that this backend compiles saves what inductor chooses to save; no code is generated.
GRAPHS_OF_INDUCTOR = "aot_eager_decomp_partition"


@dataclass(frozen=True)
class Case:
    """A small model and a micro-batch.

    Attributes:
        head: width of a head.
        ratio: width of the feed-forward in units of the model's.
        frames, height, width: tokens by axis.
        text: tokens of the caption.
    """

    heads: int
    head: int
    ratio: int
    frames: int
    height: int
    width: int
    text: int
    samples: int = 1


CASES = (
    Case(2, 64, 4, 4, 16, 8, 24),
    Case(4, 64, 4, 3, 16, 16, 40),
    Case(2, 128, 4, 4, 8, 16, 12),
    Case(2, 64, 5, 5, 8, 16, 24),
    Case(4, 32, 4, 3, 16, 16, 60),
    Case(3, 64, 5, 4, 16, 8, 32),
    Case(2, 32, 4, 7, 8, 16, 16),
    Case(6, 32, 5, 3, 16, 16, 8),
    Case(1, 64, 4, 4, 16, 16, 16),
    Case(2, 96, 4, 3, 16, 16, 20),
    Case(3, 32, 5, 9, 8, 8, 30),
    Case(5, 32, 4, 4, 16, 16, 12),
    Case(1, 128, 5, 6, 16, 8, 10),
)


# With many tokens, so that only what grows with them counts.
TRAFFIC_CASES = (
    Case(4, 64, 4, 4, 32, 32, 8),
    Case(4, 64, 5, 4, 32, 32, 8),
    Case(3, 64, 6, 4, 32, 32, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_table")
    parser.add_argument(
        "--only", choices=[*FAMILIES], help="measure this family and those in the same folder"
    )
    only = parser.parse_args().only
    for package, specs in packages().items():
        if only is not None and package != FAMILIES[only].cost.package:
            continue
        path = Path(str(files(package) / "cost.json"))
        path.write_text(written(table_of(specs)), encoding="utf-8")
        print(path)


def written(table: Mapping[str, Any]) -> str:
    """The content of a `cost.json`."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, json.dumps(table, indent=1)) + "\n"


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"


def packages() -> dict[str, list[FamilySpec]]:
    """Families by the package with their table; families of one package share a class."""
    specs_by_package: dict[str, list[FamilySpec]] = {}
    for spec in FAMILIES.values():
        specs_by_package.setdefault(spec.cost.package, []).append(spec)
    return specs_by_package


def table_of(specs: Sequence[FamilySpec], *, compiled: bool = True) -> dict[str, Any]:
    """All measurements of a class; `compiled` takes most of the time."""
    family = specs[0].name
    structure = structure_of(family)
    return {
        **structure,
        "flops": flops_of(family, structure["rows"]),
        "bytes": bytes_of(family, structure["rows"], compiled=compiled),
        "published": [published for spec in specs for published in shapes_of(spec)],
    }


class Trial:
    """A small transformer of random weights with a micro-batch, run as training runs it."""

    def __init__(
        self,
        family: str,
        case: Case,
        dtype: torch.dtype = torch.float32,
        *,
        has_first_frame: bool = False,
        rows: Mapping[str, str] | None = None,
    ) -> None:
        size = small_size(family, case.heads, case.head, case.ratio)
        self.spec = FAMILIES[family]
        patch = self.spec.patch_size
        height = patch * case.height
        width = patch * case.width
        if self.spec.media == "video":
            latents = (case.frames, height, width)
        else:  # a picture has the tokens of all frames, one below the other
            latents = (1, case.frames * height, width)
        text = self.spec.cost.padded_text or case.text
        with mock.patch.dict(SHAPES, {"trial": replace(size, latents=latents, caption=text)}):
            self.adapter = RandomAdapter(make_config("trial"), "trial", "cpu")
            self.model: Any = self.adapter.load_transformer(dtype).train().requires_grad_(False)
            batch = make_batch("trial", case.samples)
        if has_first_frame:
            batch = replace(batch, condition=batch.latents[:, :, :1].clone())
        sigmas = torch.full((case.samples,), 0.5)
        self.noisy = self.adapter.prepare(
            make_noisy(batch, sigmas, torch.randn_like(batch.latents))
        )
        self.rows = rows or {}
        self.numbers = {
            "token": case.samples * case.frames * case.height * case.width,
            "text": case.samples * text,
            "sample": case.samples,
            "head": case.head,
            "heads": case.heads,
            "width": case.heads * case.head,
            "inner": max((module.weight.shape[0] for module in self.reads_tokens), default=0),
        }

    @property
    def groups(self) -> Mapping[str, nn.ModuleList]:
        return self.adapter.block_layout(self.model).groups

    @property
    def reads_tokens(self) -> list[Any]:
        """Layers of a large block that are applied to tokens."""
        groups = list(self.groups)
        layers = []
        for name, module in weighted(self.large[-1]):
            generic_name = numbered(f"{groups[-1]}.0.{name}", groups)
            if self.rows.get(generic_name) == "token":
                layers.append(module)
        return layers

    @property
    def large(self) -> nn.ModuleList:
        """The blocks that tokens pass through: the last group."""
        return list(self.groups.values())[-1]

    def add_lora(self) -> None:
        self.model.add_adapter(LoraConfig(r=LORA_RANK, target_modules=list(self.spec.lora_targets)))

    def part(self, index: int) -> NoisyBatch:
        """One sample of the micro-batch."""
        row = slice(index, index + 1)
        batch = self.noisy.batch
        sample = replace(
            batch, latents=batch.latents[row], embeds=batch.embeds[row], names=batch.names[row]
        )
        noisy = make_noisy(sample, self.noisy.sigmas[row], self.noisy.noise[row])
        return self.adapter.prepare(noisy)

    def forward(self) -> Tensor:
        return self.adapter.predict(self.model, self.noisy)


def weighted(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules that multiply with a weight."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def structure_of(family: str) -> dict[str, Any]:
    """What holds at any size.

    The names of groups of blocks, what each weight is applied to, and where no gradient flows.
    """
    # Numbers of samples, of text and of other tokens differ, so they identify what a weight meets.
    case = Case(2, 64, 3, 2, 4, 8, 24, samples=3)
    trial = Trial(family, case)
    groups = list(trial.groups)
    rows: dict[str, str] = {}
    without_gradient: dict[str, set[str]] = {}
    for kind in ("lora", "full"):
        trial = Trial(family, case)
        watched = {name: _watch(module) for name, module in weighted(trial.model)}
        if kind == "lora":
            trial.add_lora()
        else:
            trial.model.requires_grad_(True)
        trial.forward()
        axis_of_count = {trial.numbers[axis]: axis for axis in ("sample", "text", "token")}
        without_gradient[kind] = set()
        for name, (positions, needs_gradient) in watched.items():
            rows[numbered(name, groups)] = axis_of_count[positions[0]]
            if not needs_gradient[0]:
                without_gradient[kind].add(name)
    return {
        "groups": groups,
        "float32": sorted(trial.model._keep_in_fp32_modules or ()),
        "rows": rows,
        "no_gradient": {
            kind: _first_or_all(names, groups) for kind, names in without_gradient.items()
        },
        "keeps_attention": trial.spec.fast_blocks,
    }


def _watch(module: Any) -> tuple[list[int], list[bool]]:
    """Two lists that get an item at each call of a module.

    To how many positions it is applied, and whether its input needs a gradient.
    """
    positions: list[int] = []
    flows: list[bool] = []

    def look(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        positions.append(output.numel() // module.weight.shape[0])
        flows.append(inputs[0].requires_grad)

    module.register_forward_hook(look)
    return positions, flows


def _first_or_all(names: set[str], groups: Sequence[str]) -> list[str]:
    """Names with `#` for the block's number if they hold in every block, else with the number 0."""
    second = {name for name in names if re.match(rf"({'|'.join(groups)})\.1\.", name)}
    all_blocks = {numbered(name, groups) for name in second}
    first = {name for name in names - second if numbered(name, groups) not in all_blocks}
    return sorted(all_blocks | first)


def flops_of(family: str, table: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """FLOPs of a block besides products with weights, as factors.

    `large` blocks are those of the last group, `small` ones those of the other groups.

    Raises:
        ValueError: see `fit`.
    """
    names = [f"{size} {term}" for size in FLOPS_OF for term in FLOPS_OF[size]]
    rows = []
    measured = []
    for case in CASES:
        trial = Trial(family, case)
        large = len(trial.large)
        all_blocks = sum(map(len, trial.groups.values()))
        groups = list(trial.groups)
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            trial.forward()
        products = sum(
            2 * trial.numbers[table[numbered(name, groups)]] * module.weight.numel()
            for name, module in weighted(trial.model)
        )
        counts = {"large": large, "small": all_blocks - large}
        row = []
        for size, terms in FLOPS_OF.items():
            row += [counts[size] * product_of(term, trial.numbers) for term in terms]
        rows.append(row)
        measured.append(counter.get_total_flops() - products)

    factors = fit(Quantity(f"{family}: FLOPs of attention", "FLOPS_OF", names), rows, measured)
    factor_of = dict(zip(names, factors, strict=True))
    flops: dict[str, dict[str, float]] = {}
    for size, terms in FLOPS_OF.items():
        flops[size] = {}
        for term in terms:
            factor = factor_of[f"{size} {term}"]
            if factor:
                flops[size][term] = factor
    return flops


def bytes_of(family: str, rows: Mapping[str, str], *, compiled: bool) -> dict[str, dict[str, Any]]:
    """Bytes of a large block as factors, by dtype.

    With ` given` behind the dtype, the first frame is given and has another timestep.

    Raises:
        ValueError: see `fit`.
    """
    tables = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        make_trial = partial(Trial, family, dtype=dtype, rows=rows)
        tables[name] = bytes_in(f"{family} in {name}", make_trial, compiled=compiled)
        if FAMILIES[family].cost.guided_together:
            make_trial = partial(Trial, family, dtype=dtype, rows=rows, has_first_frame=True)
            title = f"{family} in {name} given"
            tables[f"{name} given"] = bytes_in(title, make_trial, compiled=compiled)
    return tables


def bytes_in(what: str, make_trial: Callable[[Case], Trial], *, compiled: bool) -> dict[str, Any]:
    """The bytes of a large block in one dtype; `what` names it in errors."""
    backend = GRAPHS_OF_INDUCTOR if compiled else None
    trials = [make_trial(case) for case in CASES]
    metered = [metered_block(trial, backend=backend) for trial in trials]
    products = [[product_of(term, trial.numbers) for term in BYTES_OF] for trial in trials]
    table: dict[str, Any] = {"reads": metered[0].reads}
    for name in metered[0].bytes:
        quantity = Quantity(f"{what}: {name}", "BYTES_OF", BYTES_OF)
        measured = [block.bytes[name] for block in metered]
        table[name] = named(fit(quantity, products, measured))
    sampling = Quantity(f"{what}: sampling", "BYTES_OF", BYTES_OF)
    phases = fit_peak(sampling, products, [block.moments for block in metered])
    table["sampling"] = [named(factors) for factors in phases]
    if compiled:
        table |= traffic_factors(what, [make_trial(case) for case in TRAFFIC_CASES])
    return table


def named(factors: Sequence[float]) -> dict[str, float]:
    """The factors that are not zero, by their products."""
    return {term: factor for term, factor in zip(BYTES_OF, factors, strict=True) if factor}


def traffic_factors(what: str, trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Bytes that the kernels of a compiled block move, forward and backward, as factors."""
    traffic = [compiled_traffic(trial) for trial in trials]
    products = [[product_of(term, trial.numbers) for term in TRAFFIC_OF] for trial in trials]
    table = {}
    for direction in ("forward", "backward"):
        quantity = Quantity(
            name=f"{what}: compiled {direction}",
            constant="TRAFFIC_OF",
            terms=TRAFFIC_OF,
            cases=TRAFFIC_CASES,
            largest_error=TRAFFIC_ERROR,
        )
        factors = fit(quantity, products, [moved[direction] for moved in traffic])
        table[f"compiled {direction}"] = dict(zip(TRAFFIC_OF, factors, strict=True))
    return table


def compiled_traffic(trial: Trial) -> dict[str, int]:
    """Bytes that inductor's kernels read and write in a block without adapters, by direction.

    Inductor counts them for the kernels that it fuses; their code is not generated. Products and
    attention are not among them.
    """
    block, inputs, settings = _with_arguments(trial)
    moved: Counter[str] = Counter()
    _compile(trial, block, counting(moved))
    block(*inputs, **settings)
    return moved


def counting(moved: Counter[str]) -> Any:
    """A backend that makes inductor's graphs, adds up their traffic, and runs them uncompiled."""
    return aot_autograd(
        fw_compiler=partial(_count_kernels, moved, "forward"),
        bw_compiler=partial(_count_kernels, moved, "backward"),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )


def _count_kernels(moved: Counter[str], direction: str, graph: Any, inputs: Sequence[Any]) -> Any:
    """Add up the bytes that the kernels of a graph would move, and return the graph uncompiled.

    The steps are those of inductor's `compile_fx`, up to the scheduler, which fuses kernels.
    """
    fake: Any = detect_fake_mode(inputs)
    with V.set_fake_mode(fake):
        fake_tensor_prop(graph, inputs)
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=fake.shape_env)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                if not node.is_extern() and not isinstance(node, Nothing):
                    moved[direction] += node.get_read_write_buffers_sizes()
    return graph.forward


@dataclass(frozen=True)
class Quantity:
    """A quantity of the table, which is a sum of products.

    Attributes:
        name: with family and dtype.
        constant: name of the constant with its products.
        terms: these products.
        cases: the models in which it is measured.
        largest_error: of the sum, relative.
    """

    name: str
    constant: str
    terms: Sequence[str]
    cases: Sequence[Case] = CASES
    largest_error: float = LARGEST_ERROR

    def misfit(
        self, factors: Sequence[float], measurements: Sequence[float], errors: Sequence[float]
    ) -> str:
        """The message about a sum that does not fit: its worst case, and what can be done."""
        worst = max(range(len(errors)), key=lambda index: abs(errors[index]))
        measured = measurements[worst]
        fitted = measured * (1 - errors[worst])
        nearest = " + ".join(
            f"{factor:g} {term}" for factor, term in zip(factors, self.terms, strict=True) if factor
        )
        return (
            f"{self.name} is not a sum of the products in {self.constant}; "
            f"the nearest is {nearest}. "
            f"For {self.cases[worst]} that is {fitted:.6g} instead of {measured:.6g}, "
            f"{abs(errors[worst]):.1%} off ({self.largest_error:.1%} is allowed). Add the missing "
            f"product to {self.constant} in benchmarks/cost_table.py."
        )


def fit(
    quantity: Quantity, rows: Sequence[Sequence[float]], measured: Sequence[float]
) -> list[float]:
    """Factors of a sum of products.

    Args:
        rows: the products of each case.
        measured: the quantity in each case.

    Raises:
        ValueError: the quantity is not such a sum.
    """
    factors, errors = solve(rows, measured)
    if max(map(abs, errors)) > quantity.largest_error:
        raise ValueError(quantity.misfit(factors, measured, errors))
    return factors


def fit_peak(
    quantity: Quantity, rows: Sequence[Sequence[float]], moments: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Factors of the phases of a peak.

    What is alive at one moment consists of whole tensors, so it is always a sum of products. The
    largest of several moments need not be one, if the cases have their peaks at different moments.
    Then each of these moments is a phase.

    Args:
        moments: bytes after every operation, by case.

    Raises:
        ValueError: see `fit`.
    """
    peaks = [max(case) for case in moments]
    _, errors = solve(rows, peaks)
    is_sum = max(map(abs, errors)) <= quantity.largest_error
    operations = {len(case) for case in moments}
    if is_sum or len(operations) > 1:
        return [fit(quantity, rows, peaks)]
    phases = []
    operations_with_peak = {case.index(peak) for case, peak in zip(moments, peaks, strict=True)}
    for number in sorted(operations_with_peak):
        name = f"{quantity.name} after operation {number} of {len(moments[0])}"
        phase = replace(quantity, name=name)
        phases.append(fit(phase, rows, [case[number] for case in moments]))
    return phases


def solve(
    rows: Sequence[Sequence[float]], measured: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Factors of a sum of products by least squares on relative errors, and these errors.

    Most factors are whole numbers: bytes and operations of whole tensors. So the factor with the
    largest share is rounded and subtracted, and the rest is fitted again without it, until no
    factor is left.
    """
    matrix = np.array(rows) / np.array(measured)[:, None]
    factors = np.zeros(matrix.shape[1])
    rest = np.ones(len(measured))
    open_columns = list(np.flatnonzero(matrix.any(0)))
    while open_columns:
        solution = np.linalg.lstsq(matrix[:, open_columns], rest, rcond=None)[0]
        shares = np.abs(matrix[:, open_columns] * solution).mean(0)
        largest = int(shares.argmax())
        column = open_columns.pop(largest)
        factors[column] = _rounded(solution[largest])
        rest = rest - matrix[:, column] * factors[column]
    return [float(factor) for factor in factors], [float(error) for error in rest]


def _rounded(factor: float) -> float:
    """The nearest whole number if it is near, else four decimals."""
    whole = round(factor)
    return whole if abs(factor - whole) < WHOLE else round(factor, 4)


@dataclass(frozen=True)
class Metered:
    """The measurements of a block.

    Attributes:
        bytes: by the name of the quantity.
        moments: bytes after every operation of a forward pass without gradients.
        reads: layers whose input only an adapter would keep, with the first layer that reads the
            same tensor.
    """

    bytes: Mapping[str, float]
    moments: Sequence[int]
    reads: Mapping[str, str]


def metered_block(trial: Trial, *, backend: Any = GRAPHS_OF_INDUCTOR) -> Metered:
    """Measure the last block, with the arguments that it has in a LoRA run but without adapters.

    Args:
        backend: measure the block compiled by it, too, which takes most of the time.
    """
    block, inputs, settings = _with_arguments(trial)
    hidden, *conditions = _tensors((inputs, settings))
    # What a block does not save itself: weights, and tensors that exist before it runs.
    existing = [*block.parameters(), *block.buffers(), hidden, *conditions]

    reads, saved = _saved_and_read(block, inputs, settings, existing)
    with mock.patch.object(nn.functional, "scaled_dot_product_attention", _flash):
        with Peak(existing) as peak:
            out = block(*inputs, **settings)
            out.backward(torch.empty_like(out))
        del out
        with torch.no_grad(), Peak(existing) as sampling:
            block(*inputs, **settings)
    with torch.no_grad(), mock.patch.object(nn.functional, "rms_norm", _norm), Traffic() as traffic:
        block(*inputs, **settings)

    quantities: dict[str, float] = {"saved": saved, "transient": peak.most - saved}
    quantities |= _trained(trial)
    if backend is not None:
        _compile(trial, block, backend)
        quantities["compiled"] = _kept_again(block, inputs, settings)
    # Conditions that are views of one tensor share its storage, which is counted once.
    storages = [tensor.untyped_storage() for tensor in conditions]
    bytes_by_storage = {storage._cdata: storage.nbytes() for storage in storages}
    quantities["outside"] = sum(bytes_by_storage.values())
    quantities["traffic"] = traffic.bytes
    return Metered(quantities, sampling.moments, reads)


def _trained(trial: Trial) -> dict[str, float]:
    """What a block saves in a full fine-tune, and the additional memory of its backward pass."""
    block, inputs, settings = _with_arguments(trial, full=True)
    existing = [*block.parameters(), *block.buffers(), *_tensors((inputs, settings))]
    saved = _kept(block, inputs, settings)
    with (
        mock.patch.object(nn.functional, "scaled_dot_product_attention", _flash),
        PeakOfActivations(existing, block.parameters()) as peak,
    ):
        out = block(*inputs, **settings)
        out.backward(torch.empty_like(out))
    trial.model.requires_grad_(False)
    trial.model.zero_grad()
    return {"trained": saved, "trained transient": peak.most - saved}


class PeakOfActivations(Peak):
    """The peak without the gradients of weights, which have a line of their own in the plan.

    Args:
        weights: no activation may have the shape of one of them.
    """

    def __init__(self, known: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        super().__init__(known)
        self._shapes: set[tuple[int, ...]] = set()
        for weight in weights:
            # Products compute some gradients transposed.
            self._shapes |= {tuple(weight.shape), tuple(reversed(weight.shape))}

    def counts(self, tensor: Tensor) -> bool:
        return tuple(tensor.shape) not in self._shapes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _saved_and_read(
    block: nn.Module, inputs: Any, settings: Any, existing: Sequence[Tensor]
) -> tuple[dict[str, str], int]:
    """`Metered.reads`, and the bytes that autograd saves for a block beside existing tensors."""
    input_of_layer: dict[str, Tensor] = {}
    hooks = []
    for name, module in weighted(block):
        hooks.append(module.register_forward_pre_hook(partial(_note_input, input_of_layer, name)))
    with saved_bytes(existing) as meter:
        # The result keeps the saved tensors alive, and with them their addresses.
        out = block(*inputs, **settings)
    for hook in hooks:
        hook.remove()
    reads = _reads(input_of_layer, meter, existing)
    del out
    return reads, meter.bytes


def _note_input(
    input_of_layer: dict[str, Tensor], name: str, module: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    input_of_layer[name] = inputs[0]


def _compile(trial: Trial, block: Any, backend: Any) -> None:
    """Compile a block as training does: its pieces, or the whole block of diffusers."""
    torch._dynamo.reset()
    configure_compiler(ones_are_sizes=False)
    compiler = partial(torch.compile, backend=backend, dynamic=trial.spec.fast_blocks)
    if trial.spec.fast_blocks:
        pieces = trial.adapter.use_fast_blocks(trial.model).pieces
        pieces |= {name: compiler(piece) for name, piece in pieces.items()}
    else:
        wrap = trial.adapter.block_layout(trial.model).compiled
        if wrap is None:
            block.forward = compiler(block.forward)
        else:
            block.forward = wrap(compiler, block.forward)


def _kept(block: nn.Module, inputs: Any, settings: Any, shared: Sequence[Tensor] = ()) -> int:
    """Bytes that autograd saves for a block, beside weights, arguments and shared tensors."""
    arguments = _tensors((inputs, settings))
    with saved_bytes([*block.parameters(), *block.buffers(), *arguments, *shared]) as meter:
        block(*inputs, **settings)
    return meter.bytes


def _kept_again(block: nn.Module, inputs: Any, settings: Any) -> int:
    """The same without tensors that all blocks share, such as position tables.

    They are those that a second call saves again instead of making them anew.
    """
    arguments = _tensors((inputs, settings))
    with saved_bytes([*block.parameters(), *block.buffers(), *arguments]) as first_call:
        block(*inputs, **settings)
    return _kept(block, inputs, settings, first_call.tensors)


def _with_arguments(trial: Trial, *, full: bool = False) -> tuple[nn.Module, Any, Any]:
    """A block without adapters, and the arguments that the model calls it with.

    Gradients flow as in a LoRA run or, with `full`, as in a full fine-tune.
    """
    calls: list[Any] = []
    block = trial.large[-1]
    # To remove the adapters again after the call: they replace layers of the block.
    children_by_name = {name: dict(module._modules) for name, module in block.named_modules()}
    hook = block.register_forward_pre_hook(
        lambda _, *arguments: calls.append(arguments), with_kwargs=True
    )
    if full:
        trial.model.requires_grad_(True)
    else:
        trial.add_lora()
    trial.forward()
    hook.remove()
    for name, children in children_by_name.items():
        block.get_submodule(name)._modules.update(children)
    inputs, settings = tree_map(_leaf, calls[0])
    return block, inputs, settings


def _leaf(value: Any) -> Any:
    """A tensor as the start of a graph; other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _reads(
    input_of_layer: Mapping[str, Tensor], meter: Any, existing: Sequence[Tensor]
) -> dict[str, str]:
    """Layers whose input only an adapter would keep, with the first reader of the same tensor."""
    kept_anyway = {tensor.untyped_storage().data_ptr() for tensor in existing} | meter.addresses
    first_reader: dict[int, str] = {}
    reads = {}
    for name, tensor in input_of_layer.items():
        address = tensor.untyped_storage().data_ptr()
        if address not in kept_anyway:
            reads[name] = first_reader.setdefault(address, name)
    return reads


def _flash(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    return attention(query, key, value)


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """An operation that reads and writes once, as the kernel of a norm does."""
    return torch.add(x, 0)


class Traffic(TorchDispatchMode):
    """Bytes that elementwise operations read and write."""

    # Products, and operations that only make a view.
    NOT_COUNTED = re.compile(
        r"(add)?b?mm|convolution|_?scaled_dot_product.*|empty.*|.*view.*|t|transpose|permute|expand|(un)?squeeze|"
        r"as_strided|slice|select|detach|split.*|unbind|alias|chunk"
    )

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.NOT_COUNTED.fullmatch(func.overloadpacket.__name__):
            for tensor in _tensors((args, kwargs, out)):
                self.bytes += tensor.numel() * tensor.element_size()
        return out


def shapes_of(spec: FamilySpec) -> Iterator[dict[str, Any]]:
    """Parameters of the published checkpoints; those of a repeated block are written once.

    Flavours that differ only in the type of attention share an entry.
    """
    flavours_by_settings: dict[str, list[str]] = {}
    for flavour in spec.flavour_names:
        settings = dict(spec.cost.published(flavour))
        settings.pop("attention_type", None)
        flavours_by_settings.setdefault(json.dumps(settings), []).append(flavour)
    for text, names in flavours_by_settings.items():
        with torch.device("meta"):
            model: Any = getattr(diffusers, spec.cost.transformer_class)(**json.loads(text))
        groups = [
            name for name, child in model.named_children() if isinstance(child, nn.ModuleList)
        ]
        shapes = {}
        for name, parameter in model.named_parameters():
            shapes[numbered(name, groups)] = list(parameter.shape)
        yield {
            "flavours": names,
            "blocks": {name: len(getattr(model, name)) for name in groups},
            "shapes": shapes,
        }


if __name__ == "__main__":
    main()
