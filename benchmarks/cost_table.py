"""Measures what the transformer of each family costs and writes it beside the family, as
`cost.json`.

    python -m benchmarks.cost_table [--only FAMILY]

The plan reads the tables without torch (`models/cost_table.py`). Shapes come from the classes at
the published dimensions, on the meta device. Everything else comes from small transformers of the
same classes on the CPU: which weights meet tokens, text or samples, which of them need the gradient
of their input, FLOPs of attention, and bytes of activations. Those grow linearly with a few widths,
so a handful of small models gives factors that hold at any size.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# What the quantities are fitted to: products of these numbers of a micro-batch and of the model.
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
# What the traffic of compiled blocks is fitted to: modulations and text, which the cases have
# little of, are left out.
TRAFFIC_OF = ("token width", "token inner")
# Largest error of a sum, relative; of traffic, because of what is left out.
LARGEST_ERROR = 0.002
TRAFFIC_ERROR = 0.02
WHOLE = 0.05  # a factor that is so near to a whole number is one
LORA_RANK = 4
# Compiled by this, a block saves what inductor chooses; no code is generated.
GRAPHS_OF_INDUCTOR = "aot_eager_decomp_partition"


@dataclass(frozen=True)
class Case:
    """A small model and one micro-batch of it: heads, their width, the ratio of the feed-forward;
    tokens by axis.
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
    Case(1, 128, 5, 5, 16, 8, 10),
)


# With many tokens, so that what grows with them is all that counts.
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
    """Families by the folder that their table lies in; those of one folder share a transformer
    class.
    """
    found: dict[str, list[FamilySpec]] = {}
    for spec in FAMILIES.values():
        found.setdefault(spec.cost.package, []).append(spec)
    return found


def table_of(specs: Sequence[FamilySpec], *, compiled: bool = True) -> dict[str, Any]:
    """Everything that is measured of one class; compiling takes most of the time."""
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
        given: bool = False,
        rows: Mapping[str, str] | None = None,
    ) -> None:
        size = small_size(family, case.heads, case.head, case.ratio)
        self.spec = FAMILIES[family]
        # A picture has the tokens of all frames in one.
        frames, rows_of_one = (case.frames, 1) if self.spec.media == "video" else (1, case.frames)
        patch = self.spec.patch_size
        latents = (frames, patch * rows_of_one * case.height, patch * case.width)
        text = self.spec.cost.padded_text or case.text
        with mock.patch.dict(SHAPES, {"trial": replace(size, latents=latents, caption=text)}):
            self.adapter = RandomAdapter(make_config("trial"), "trial", "cpu")
            self.model: Any = self.adapter.load_transformer(dtype).train().requires_grad_(False)
            batch = make_batch("trial", case.samples)
        if given:
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
        name = groups[-1]
        layers = ((f"{name}.0.{layer}", module) for layer, module in weighted(self.large[-1]))
        return [
            module for layer, module in layers if self.rows.get(numbered(layer, groups)) == "token"
        ]

    @property
    def large(self) -> nn.ModuleList:
        """The blocks that tokens pass through: the last group."""
        return list(self.groups.values())[-1]

    def add_lora(self) -> None:
        self.model.add_adapter(LoraConfig(r=LORA_RANK, target_modules=list(self.spec.lora_targets)))

    def part(self, index: int) -> NoisyBatch:
        """One sample of the micro-batch."""
        one = slice(index, index + 1)
        batch = self.noisy.batch
        noisy = self.noisy
        alone = replace(
            batch, latents=batch.latents[one], embeds=batch.embeds[one], names=batch.names[one]
        )
        return self.adapter.prepare(make_noisy(alone, noisy.sigmas[one], noisy.noise[one]))

    def forward(self) -> Tensor:
        return self.adapter.predict(self.model, self.noisy)


def weighted(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules that multiply with a weight of their own."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def structure_of(family: str) -> dict[str, Any]:
    """What holds at any size: names of the blocks, what each weight is applied to, where no
    gradient flows.
    """
    case = Case(2, 64, 3, 2, 4, 8, 24, samples=3)
    trial = Trial(family, case)
    groups = list(trial.groups)
    rows: dict[str, str] = {}
    untrained: dict[str, set[str]] = {}
    for kind in ("lora", "full"):
        trial = Trial(family, case)
        seen = {name: _watch(module) for name, module in weighted(trial.model)}
        if kind == "lora":
            trial.add_lora()
        else:
            trial.model.requires_grad_(True)
        trial.forward()
        untrained[kind] = {name for name, (_, flows) in seen.items() if not flows[0]}
        counts = {trial.numbers[axis]: axis for axis in ("sample", "text", "token")}
        rows = {numbered(name, groups): counts[found[0]] for name, (found, _) in seen.items()}
    return {
        "groups": groups,
        "float32": sorted(trial.model._keep_in_fp32_modules or ()),
        "rows": rows,
        "no_gradient": {kind: _first_or_all(names, groups) for kind, names in untrained.items()},
        "keeps_attention": trial.spec.fast_blocks,
    }


def _watch(module: Any) -> tuple[list[int], list[bool]]:
    """Fills in, at each call, to how many positions a module is applied and whether its input needs
    a gradient.
    """
    positions: list[int] = []
    flows: list[bool] = []

    def look(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        positions.append(output.numel() // module.weight.shape[0])
        flows.append(inputs[0].requires_grad)

    module.register_forward_hook(look)
    return positions, flows


def _first_or_all(names: set[str], groups: Sequence[str]) -> list[str]:
    """Names with `#` for the block's number where they hold in every block, else with the number
    0.
    """
    second = {name for name in names if re.match(rf"({'|'.join(groups)})\.1\.", name)}
    all_blocks = {numbered(name, groups) for name in second}
    first = {name for name in names - second if numbered(name, groups) not in all_blocks}
    return sorted(all_blocks | first)


def flops_of(family: str, table: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """FLOPs of a block that are no products with weights, as factors; `small` blocks are those of
    the other groups.

    Raises:
        ValueError: as of `fit`.
    """
    names = [f"{size} {term}" for size in FLOPS_OF for term in FLOPS_OF[size]]
    rows = []
    found = []
    for case in CASES:
        trial = Trial(family, case)
        large = len(trial.large)
        every = sum(map(len, trial.groups.values()))
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
        counts = {"large": large, "small": every - large}
        rows.append(
            [
                counts[size] * product_of(term, trial.numbers)
                for size in FLOPS_OF
                for term in FLOPS_OF[size]
            ]
        )
        found.append(counter.get_total_flops() - products)
    factors = fit(Quantity(f"{family}: FLOPs of attention", "FLOPS_OF", names), rows, found)
    by_name = dict(zip(names, factors, strict=True))
    return {
        size: {term: by_name[f"{size} {term}"] for term in terms if by_name[f"{size} {term}"]}
        for size, terms in FLOPS_OF.items()
    }


def bytes_of(family: str, rows: Mapping[str, str], *, compiled: bool) -> dict[str, dict[str, Any]]:
    """Bytes of a large block as factors, by the name of the dtype; ` given` where a first frame has
    its own time.

    Raises:
        ValueError: as of `fit`.
    """
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = "bf16" if dtype == torch.bfloat16 else "fp32"
        found[name] = bytes_in(
            f"{family} in {name}", partial(Trial, family, dtype=dtype, rows=rows), compiled=compiled
        )
        if FAMILIES[family].cost.guided_together:
            make_trial = partial(Trial, family, dtype=dtype, rows=rows, given=True)
            found[f"{name} given"] = bytes_in(
                f"{family} in {name} given", make_trial, compiled=compiled
            )
    return found


def bytes_in(what: str, make_trial: Callable[[Case], Trial], *, compiled: bool) -> dict[str, Any]:
    """The same in one dtype; `what` is for the error."""
    trials = [make_trial(case) for case in CASES]
    metered = [
        metered_block(trial, backend=GRAPHS_OF_INDUCTOR if compiled else None) for trial in trials
    ]
    products = [[product_of(term, trial.numbers) for term in BYTES_OF] for trial in trials]
    table: dict[str, Any] = {"reads": metered[0].reads}
    for quantity in metered[0].bytes:
        found = [block.bytes[quantity] for block in metered]
        table[quantity] = named(
            fit(Quantity(f"{what}: {quantity}", "BYTES_OF", BYTES_OF), products, found)
        )
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
    moved = [compiled_traffic(trial) for trial in trials]
    products = [[product_of(term, trial.numbers) for term in TRAFFIC_OF] for trial in trials]
    table = {}
    for way in ("forward", "backward"):
        found = [bytes_moved[way] for bytes_moved in moved]
        quantity = Quantity(
            f"{what}: compiled {way}", "TRAFFIC_OF", TRAFFIC_OF, TRAFFIC_CASES, TRAFFIC_ERROR
        )
        factors = fit(quantity, products, found)
        table[f"compiled {way}"] = dict(zip(TRAFFIC_OF, factors, strict=True))
    return table


def compiled_traffic(trial: Trial) -> dict[str, int]:
    """Bytes that inductor's kernels read and write in a block without adapters: `forward` and
    `backward`.

    Its own count for the kernels that it fuses, without generating their code; products and
    attention are not among them.
    """
    block, inputs, settings = _with_arguments(trial)
    moved: Counter[str] = Counter()
    _compile(trial, block, counting(moved))
    block(*inputs, **settings)
    return moved


def counting(moved: Counter[str]) -> Any:
    """A backend that adds up what `compiled_traffic` returns; the graphs are inductor's, and run
    uncompiled.
    """
    return aot_autograd(
        fw_compiler=partial(_count_kernels, moved, "forward"),
        bw_compiler=partial(_count_kernels, moved, "backward"),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )


def _count_kernels(moved: Counter[str], way: str, graph: Any, inputs: Sequence[Any]) -> Any:
    """A compiler that counts what the kernels of a graph would move, and runs the graph
    uncompiled.
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
            kernels = [
                node
                for node in lowering.scheduler.nodes
                if not (node.is_extern() or isinstance(node, Nothing))
            ]
            moved[way] += sum(node.get_read_write_buffers_sizes() for node in kernels)
    return graph.forward


@dataclass(frozen=True)
class Quantity:
    """A quantity of the table, which is a sum of products.

    Attributes:
        name: with family and dtype.
        constant: the list of products in this file.
        terms: these products.
        cases: what it is measured in.
        largest_error: of the sum, relative.
    """

    name: str
    constant: str
    terms: Sequence[str]
    cases: Sequence[Case] = CASES
    largest_error: float = LARGEST_ERROR

    def misfit(
        self, factors: Sequence[float], found: Sequence[float], errors: Sequence[float]
    ) -> str:
        """What is wrong with the sum, in the worst case, and what can be done."""
        worst = max(range(len(errors)), key=lambda index: abs(errors[index]))
        measured = found[worst]
        fitted = measured * (1 - errors[worst])
        nearest = " + ".join(
            f"{factor:g} {term}" for factor, term in zip(factors, self.terms, strict=True) if factor
        )
        return (
            f"{self.name} is no sum of the products in {self.constant}; the nearest is {nearest}. "
            f"For {self.cases[worst]} that is {fitted:.6g} instead of {measured:.6g}, "
            f"{abs(errors[worst]):.1%} off ({self.largest_error:.1%} is allowed). Add the missing "
            f"product to {self.constant} in benchmarks/cost_table.py."
        )


def fit(quantity: Quantity, rows: Sequence[Sequence[float]], found: Sequence[float]) -> list[float]:
    """Factors of a sum of products.

    Args:
        rows: the products of each case.
        found: what was measured in each case.

    Raises:
        ValueError: what was found is no such sum.
    """
    factors, errors = solve(rows, found)
    if max(map(abs, errors)) > quantity.largest_error:
        raise ValueError(quantity.misfit(factors, found, errors))
    return factors


def fit_peak(
    quantity: Quantity, rows: Sequence[Sequence[float]], moments: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Factors of each phase of a peak: of one if the peak is a sum, otherwise of every moment at
    which a case has it.

    What is alive at a moment is always a sum, since it is whole tensors; the largest of several
    need not be one.

    Args:
        moments: of each case, bytes after every operation.

    Raises:
        ValueError: as of `fit`.
    """
    peaks = [max(case) for case in moments]
    _, errors = solve(rows, peaks)
    is_sum = max(map(abs, errors)) <= quantity.largest_error
    operations = {len(case) for case in moments}
    if is_sum or len(operations) > 1:
        return [fit(quantity, rows, peaks)]
    phases = []
    for at in sorted({case.index(peak) for case, peak in zip(moments, peaks, strict=True)}):
        phase = replace(quantity, name=f"{quantity.name} after operation {at} of {len(moments[0])}")
        phases.append(fit(phase, rows, [case[at] for case in moments]))
    return phases


def solve(
    rows: Sequence[Sequence[float]], found: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Factors of a sum of products by least squares on relative errors, and these errors.

    Most factors are whole numbers: bytes and operations of whole tensors. The largest shares are
    taken first and rounded, and what they leave is fitted again.
    """
    matrix = np.array(rows) / np.array(found)[:, None]
    factors = np.zeros(matrix.shape[1])
    rest = np.ones(len(found))
    open_ones = list(np.flatnonzero(matrix.any(0)))
    while open_ones:
        solved = np.linalg.lstsq(matrix[:, open_ones], rest, rcond=None)[0]
        shares = np.abs(matrix[:, open_ones] * solved).mean(0)
        at = int(shares.argmax())
        column = open_ones.pop(at)
        factors[column] = (
            round(solved[at])
            if abs(solved[at] - round(solved[at])) < WHOLE
            else round(solved[at], 4)
        )
        rest = rest - matrix[:, column] * factors[column]
    return [float(factor) for factor in factors], [float(error) for error in rest]


@dataclass(frozen=True)
class Metered:
    """A block, metered.

    Attributes:
        bytes: by what they are.
        moments: bytes after every operation of a forward pass without gradients.
        reads: which layers read a tensor that only an adapter would keep.
    """

    bytes: Mapping[str, float]
    moments: Sequence[int]
    reads: Mapping[str, str]


def metered_block(trial: Trial, *, backend: Any = GRAPHS_OF_INDUCTOR) -> Metered:
    """The last block with the arguments that it has in a LoRA run, without adapters of its own, and
    what autograd saves for it in a full fine-tune.

    Args:
        backend: meter it compiled by this one, too, which takes most of the time; or None.
    """
    block, inputs, settings = _with_arguments(trial)
    hidden, *others = [leaf for leaf in tree_leaves((inputs, settings)) if isinstance(leaf, Tensor)]
    there = [*block.parameters(), *block.buffers(), hidden, *others]
    read: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, arguments, name=name: read.update({name: arguments[0]})
        )
        for name, module in weighted(block)
    ]
    with saved_bytes(there) as meter:
        out = block(*inputs, **settings)
    for hook in hooks:
        hook.remove()
    reads = _reads(read, meter, there)
    saved = meter.bytes
    read.clear()
    del out, meter
    more = {"trained": _kept(*_with_arguments(trial, full=True))}
    trial.model.requires_grad_(False)
    with mock.patch.object(nn.functional, "scaled_dot_product_attention", _flash):
        with Peak(there) as peak:
            out = block(*inputs, **settings)
            out.backward(torch.empty_like(out))
        del out
        with torch.no_grad(), Peak(there) as sampling:
            block(*inputs, **settings)
    with torch.no_grad(), mock.patch.object(nn.functional, "rms_norm", _norm), Traffic() as traffic:
        block(*inputs, **settings)
    if backend is not None:
        _compile(trial, block, backend)
        more["compiled"] = _kept_again(block, inputs, settings)
    outside = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in others}
    return Metered(
        {
            "saved": saved,
            **more,
            "transient": peak.most - saved,
            "outside": sum(outside.values()),
            "traffic": traffic.bytes,
        },
        sampling.moments,
        reads,
    )


def _compile(trial: Trial, block: Any, backend: Any) -> None:
    torch._dynamo.reset()
    configure_compiler(ones_are_sizes=False)
    compiler = partial(torch.compile, backend=backend, dynamic=trial.spec.fast_blocks)
    if trial.spec.fast_blocks:
        pieces = trial.adapter.use_fast_blocks(trial.model).pieces
        pieces |= {name: compiler(piece) for name, piece in pieces.items()}
    else:
        around = trial.adapter.block_layout(trial.model).compiled
        block.forward = (
            compiler(block.forward) if around is None else around(compiler, block.forward)
        )


def _kept(block: nn.Module, inputs: Any, settings: Any, others: Sequence[Tensor] = ()) -> int:
    """Bytes that autograd saves for a block, beside weights, arguments and other tensors."""
    given = [leaf for leaf in tree_leaves((inputs, settings)) if isinstance(leaf, Tensor)]
    with saved_bytes([*block.parameters(), *block.buffers(), *given, *others]) as meter:
        block(*inputs, **settings)
    return meter.bytes


def _kept_again(block: nn.Module, inputs: Any, settings: Any) -> int:
    """The same without what every call saves, such as position tables, which is no block's own."""
    given = [leaf for leaf in tree_leaves((inputs, settings)) if isinstance(leaf, Tensor)]
    with saved_bytes([*block.parameters(), *block.buffers(), *given]) as once:
        block(*inputs, **settings)
    return _kept(block, inputs, settings, once.tensors)


def _with_arguments(trial: Trial, *, full: bool = False) -> tuple[nn.Module, Any, Any]:
    """A block without adapters, and what the model hands to it; gradients flow where they do beside
    a LoRA, or in a full fine-tune."""
    seen: list[Any] = []
    block = trial.large[-1]
    layers = {name: dict(module._modules) for name, module in block.named_modules()}
    hook = block.register_forward_pre_hook(
        lambda _, *arguments: seen.append(arguments), with_kwargs=True
    )
    if full:
        trial.model.requires_grad_(True)
    else:
        trial.add_lora()
    trial.forward()
    hook.remove()
    for name, children in layers.items():
        block.get_submodule(name)._modules.update(children)
    inputs, settings = tree_map(_leaf, seen[0])
    return block, inputs, settings


def _leaf(value: Any) -> Any:
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )


def _reads(read: Mapping[str, Tensor], meter: Any, there: Sequence[Tensor]) -> dict[str, str]:
    """Layers whose input is kept for an adapter alone, with the first layer that reads the same
    tensor.
    """
    known = {each.untyped_storage().data_ptr() for each in there} | meter.addresses
    first: dict[int, str] = {}
    found = {}
    for name, tensor in read.items():
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            found[name] = first.setdefault(address, name)
    return found


def _flash(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    return attention(query, key, value)


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """A norm that reads and writes once, as its kernel does; `add` stands for it."""
    return torch.add(x, 0)


class Traffic(TorchDispatchMode):
    """Bytes that elementwise operations read and write."""

    # Products, and what only makes another view of a tensor.
    OTHERS = re.compile(
        r"(add)?b?mm|convolution|_?scaled_dot_product.*|empty.*|.*view.*|t|transpose|permute|expand|(un)?squeeze|"
        r"as_strided|slice|select|detach|split.*|unbind|alias|chunk"
    )

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.OTHERS.fullmatch(func.overloadpacket.__name__):
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)
            ]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def shapes_of(spec: FamilySpec) -> Iterator[dict[str, Any]]:
    """Parameters of the published checkpoints; those of a repeated block are written once."""
    flavours: dict[str, list[str]] = {}
    for flavour in spec.flavour_names:
        settings = {
            key: value
            for key, value in spec.cost.published(flavour).items()
            if key != "attention_type"
        }
        flavours.setdefault(json.dumps(settings), []).append(flavour)
    for text, names in flavours.items():
        with torch.device("meta"):
            model: Any = getattr(diffusers, spec.cost.transformer_class)(**json.loads(text))
        groups = [
            name for name, child in model.named_children() if isinstance(child, nn.ModuleList)
        ]
        shapes = {
            numbered(name, groups): list(each.shape) for name, each in model.named_parameters()
        }
        yield {
            "flavours": names,
            "blocks": {name: len(getattr(model, name)) for name in groups},
            "shapes": shapes,
        }


if __name__ == "__main__":
    main()
