"""The sections of `first_gpu.py`: what a new machine must tell before predictions about it count.

Each is a function of the options that yields lines as soon as they are known, so that a section
that is cut short has told what it found. What a machine cannot do is skipped with a reason.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.models import SHAPES, build_clip_vae, make_config
from benchmarks.tread import MODELS, share_of_arithmetic
from benchmarks.variants import Outcome, Settings, Variant, forget, measure
from simpletuner.config.option import is_installed
from simpletuner.config.precision import QUANTISATIONS
from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.speed import ATTENTION_PACKAGES
from simpletuner.config.techniques.tread import Route
from simpletuner.errors import ConfigError
from simpletuner.memory.quantisation.layers import QuantisedLinear, pack, use_quantised_products
from simpletuner.models.blocks import AttentionKernel, torch_attention
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.train import set_determinism
from simpletuner.speed.attention import activate_attention
from simpletuner.speed.measure import host_to_device_bytes, matmul_flops
from simpletuner.techniques.base import Technique
from simpletuner.techniques.tread import Tread
from simpletuner.timing import fastest

GIGABYTE = 1e9
STEPS = 3  # that count, of each variant: one of Lite takes up to 3 s on an H100


class SkippedError(Exception):
    """This machine or this version cannot run the section; the message says why."""


@dataclass(frozen=True)
class Line:
    """One result."""

    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Machine:
    """Where a section runs, and how large.

    Attributes:
        size: tiny, or real for the sizes that people train.
    """

    device: str
    size: str

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def video(self) -> str:
        """The size of a video model."""
        return "lite" if self.size == "real" else "tiny-video"

    @property
    def image(self) -> str:
        """The size of a picture model."""
        return "image" if self.size == "real" else "tiny"

    def need_gpu(self, why: str) -> None:
        """Skip the section on a CPU."""
        if not self.on_gpu:
            raise SkippedError(f"needs CUDA: {why}")


def peaks(machine: Machine) -> Iterator[Line]:
    """The rates that everything else is measured in."""
    device = torch.device(machine.device)
    side, count = (8192, 1 << 30) if machine.on_gpu else (256, 1 << 22)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = fastest(lambda: target.copy_(source), device, 5)
    yield Line("copy on the device, read and written", 2 * count / copy / GIGABYTE, "GB/s")
    rate = matmul_flops(device, machine.dtype, side)
    yield Line(f"matmul {side}^3 {str(machine.dtype)[6:]}", rate / 1e12, "TFLOP/s")


def pcie(machine: Machine) -> Iterator[Line]:
    """Copies from and to page-locked memory, alone and both at once."""
    machine.need_gpu("there is no bus between host and device")
    device = torch.device("cuda")
    count = 1 << 29
    up, down = (torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    here, there = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))
    side = torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(side):
            here.copy_(up, non_blocking=True)
        down.copy_(there, non_blocking=True)

    back = fastest(lambda: down.copy_(there, non_blocking=True), device, 5)
    together = fastest(both, device, 5)
    yield Line("host to device", host_to_device_bytes(device, count) / GIGABYTE, "GB/s")
    yield Line("device to host", count / back / GIGABYTE, "GB/s")
    yield Line("both at once, together", 2 * count / together / GIGABYTE, "GB/s")


# Of the pairs of tiles that block-sparse attention visits. That of a checkpoint depends on its
# weights: a run tells it.
DENSITIES = (0.125, 0.25, 0.5)


def sparse(machine: Machine) -> Iterator[Line]:
    """Block-sparse attention (NABLA) in tiles drawn at random against dense attention, at the shape
    of Pro. It is worth its while below the density at which its time is that of dense attention."""
    need_keys("speed_keep_attention")
    from simpletuner.models.kandinsky5.options import TILE
    from simpletuner.models.kandinsky5.tile_attention import choose_attend  # older versions lack it

    device = torch.device(machine.device)
    tokens, heads, width = (47_616, 32, 128) if machine.on_gpu else (1_024, 2, 16)
    count = tokens // TILE
    shape = f"{tokens} x {heads} x {width}"
    dense = _attention_seconds(machine, torch_attention, (tokens, heads, width))
    flops = [4.0 * tokens**2 * heads * width * factor for factor in (1.0, 2.5)]
    for direction, seconds, work in zip(DIRECTIONS, dense, flops, strict=True):
        yield Line(f"dense {direction}, {shape}", work / seconds / 1e12, "TFLOP/s")
    attend = choose_attend(device, machine.dtype, width, heads)
    drawn = torch.rand(1, heads, count, count, device=device)
    diagonal = torch.eye(count, device=device).bool()
    for density in DENSITIES:

        def visit(
            query: Tensor, key: Tensor, value: Tensor, tiles: Tensor = drawn.lt(density) | diagonal
        ) -> Tensor:
            return attend(query, key, value, tiles)

        found = _attention_seconds(machine, visit, (tokens, heads, width))
        for direction, seconds, whole, work in zip(DIRECTIONS, found, dense, flops, strict=True):
            name = f"sparse {direction}, density {density}"
            yield Line(
                name,
                density * work / seconds / 1e12,
                "TFLOP/s",
                f"{seconds / whole:.3f} of the time of dense",
            )


def attention(machine: Machine) -> Iterator[Line]:
    """torch's flash attention, cuDNN's (which training does not use) and installed packages,
    forward and backward.
    """
    machine.need_gpu("flash and cuDNN attention are its kernels")
    yield from _kernel_rates(machine, "flash", SDPBackend.FLASH_ATTENTION)
    yield from _kernel_rates(machine, "cuDNN", SDPBackend.CUDNN_ATTENTION)
    device = torch.device(machine.device)
    for mechanism, asked in ATTENTION_PACKAGES.items():
        if not asked.torch_name or not is_installed(asked.package.module):
            continue
        try:
            activate_attention(PrecisionConfig(attention_mechanism=mechanism), device)
        except ConfigError:  # the package is for other GPUs
            continue
        yield from _kernel_rates(machine, mechanism, SDPBackend.FLASH_ATTENTION)
    activate_attention(PrecisionConfig(), device)


def _kernel_rates(machine: Machine, name: str, backend: SDPBackend) -> Iterator[Line]:
    """The rates of a kernel at the shapes of Lite and Image."""
    for tokens, heads, width in ((24_576, 28, 64), (4_096, 20, 128)):
        try:
            with sdpa_kernel(backend):
                seconds = _attention_seconds(machine, torch_attention, (tokens, heads, width))
                note = ""
        except (
            RuntimeError
        ) as error:  # this release or device has no such kernel; the other one still counts
            seconds = (math.inf, math.inf)
            note = str(error).partition("\n")[0]
        # 4 n^2 d operations forward, and 2.5 times as many backward, recomputation included.
        for direction, taken, factor in zip(DIRECTIONS, seconds, (4.0, 10.0), strict=True):
            rate = factor * tokens**2 * heads * width / taken
            shape = f"{tokens} x {heads} x {width}"
            yield Line(f"{name} {direction}, {shape}", rate / 1e12, "TFLOP/s", note)


DIRECTIONS = ("forward", "backward")


def _attention_seconds(
    machine: Machine, attend: AttentionKernel, shape: tuple[int, int, int]
) -> tuple[float, float]:
    """Of a forward and of a backward pass with so many tokens, heads, and numbers per head."""
    device = torch.device(machine.device)
    draws = (torch.randn(1, *shape, device=device, dtype=machine.dtype) for _ in range(3))
    inputs = [each.requires_grad_() for each in draws]
    out = attend(*inputs)
    gradient = torch.randn_like(out)
    forward = fastest(lambda: attend(*inputs), device, 5)
    return forward, fastest(
        lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True), device, 5
    )


def products(machine: Machine) -> Iterator[Line]:
    """Linear layers whose weights are multiplied in int8 and fp8 (`quantized_matmul`) against
    bf16.
    """
    need_keys("quantized_matmul")
    for size in (machine.video, machine.image):
        settings = SHAPES[size].settings
        tokens = SHAPES[size].tokens
        for rows in (settings["model_dim"], settings["ff_dim"]):
            yield from _layer_times(
                machine, f"{size} {tokens} x", tokens, settings["model_dim"], rows
            )


def _layer_times(
    machine: Machine, size: str, tokens: int, columns: int, rows: int
) -> Iterator[Line]:
    """A layer of `rows` by `columns`; compiled ones have the rounding fused, as in compiled
    blocks.
    """
    device = torch.device(machine.device)
    plain = torch.nn.Linear(columns, rows, device=device, dtype=machine.dtype).requires_grad_(False)
    inputs = torch.randn(1, tokens, columns, device=device, dtype=machine.dtype).requires_grad_()
    layers: dict[str, Any] = {"bf16": plain}
    for bits, name in (("int8", "int8-quanto"), ("fp8", "fp8-quanto")):
        layers[bits] = QuantisedLinear(plain, pack(plain.weight, QUANTISATIONS[name]))
        use_quantised_products(torch.nn.Sequential(layers[bits]))
        if machine.on_gpu:
            layers[f"{bits}, compiled"] = torch.compile(layers[bits], dynamic=False)
    found: dict[str, tuple[float, float]] = {}
    for name, layer in layers.items():
        try:
            found[name] = _layer_time(layer, inputs, device)
        except (
            RuntimeError
        ) as error:  # this device does not have the product; the others still count
            yield Line(
                f"{name} forward, {size} {columns} x {rows}",
                0.0,
                "ms",
                str(error).partition("\n")[0],
            )
            continue
        for direction, seconds, unit in zip(
            ("forward", "backward"), found[name], found["bf16"], strict=True
        ):
            yield Line(
                f"{name} {direction}, {size} {columns} x {rows}",
                seconds * 1e3,
                "ms",
                _ratio(seconds, unit),
            )


def _layer_time(
    layer: Callable[[Tensor], Tensor], inputs: Tensor, device: torch.device
) -> tuple[float, float]:
    """Seconds of the product, and of the gradient of its inputs."""
    out = layer(inputs)
    gradient = torch.randn_like(out)
    forward = fastest(lambda: layer(inputs), device, 5)
    return forward, fastest(
        lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True), device, 5
    )


# The parts of `speed`, from the code of diffusers to everything.
BLOCK_VARIANTS: dict[str, Settings] = {
    "stock": {"speed": "reference"},
    "plain": {"dynamo_backend": "no"},
    "compiled": {"dynamo_backend": "inductor"},
}


def block(machine: Machine) -> Iterator[Line]:
    """One visual block, forward and backward, with what it keeps and what it peaks at."""
    need_keys("speed")
    for size in (machine.video, machine.image):
        found: dict[str, float] = {}
        for name, settings in _block_variants(machine).items():
            seconds, kept, peak = _block_cost(machine, size, settings)
            found[name] = seconds
            yield Line(
                f"{size}, {name} block", seconds * 1e3, "ms", _ratio(seconds, found["stock"])
            )
            if machine.on_gpu:
                yield Line(f"{size}, {name} block, kept for backward", kept / GIGABYTE, "GB")
                yield Line(f"{size}, {name} block, peak above its inputs", peak / GIGABYTE, "GB")


def _block_variants(machine: Machine) -> dict[str, Settings]:
    """Without a GPU, inductor would spend the time of a short test on its compiler."""
    return {
        name: BLOCK_VARIANTS[name]
        for name in BLOCK_VARIANTS
        if machine.on_gpu or name != "compiled"
    }


def _block_cost(machine: Machine, size: str, settings: Settings) -> tuple[float, int, int]:
    """Seconds of a forward and a backward pass through the first visual block, bytes kept between,
    bytes at most.
    """
    forget(machine.device)
    inputs: list[Any] = []
    variant = Variant(
        size, machine.device, {**settings, "gradient_checkpointing": False, "lora_rank": 4}
    )
    block: Any = variant.assembly.adapter.block_layout(variant.assembly.transformer).groups[
        "visual_transformer_blocks"
    ][0]
    hook = block.register_forward_pre_hook(lambda module, given: inputs.append(given))
    variant.assembly.transformer.requires_grad_(False)
    with torch.no_grad():
        _predict(variant)
    hook.remove()
    given = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in inputs[0])
    hidden = given[0].requires_grad_()
    kept = 0

    def run() -> None:
        nonlocal kept
        before = _allocated(machine)
        out = block(hidden, *given[1:])
        kept = _allocated(machine) - before
        torch.autograd.grad(out, hidden, torch.ones_like(out))

    run()
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = _allocated(machine)
    run()
    peak = torch.cuda.max_memory_allocated() - before if machine.on_gpu else 0
    return fastest(run, torch.device(machine.device), 5), kept, peak


def _predict(variant: Variant) -> None:
    """One forward pass of the model."""
    assembly = variant.assembly
    batch = next(variant.loader).to(assembly.accelerator.device)
    noisy = assembly.adapter.prepare(assembly.noise.add(batch, 0, 0))
    assembly.adapter.predict(assembly.transformer, noisy)


def _allocated(machine: Machine) -> int:
    return torch.cuda.memory_allocated() if machine.on_gpu else 0


def step(machine: Machine) -> Iterator[Line]:
    """Our step with all that is faster against the code of diffusers, and how much of the device it
    uses.
    """
    need_keys("speed")
    rate = matmul_flops(
        torch.device(machine.device), machine.dtype, 8192 if machine.on_gpu else 256
    )
    for size in (machine.video, machine.image):
        variants: dict[str, Settings] = {
            "reference": {"speed": "reference"},
            "auto": {"speed": "auto"},
        }
        found: dict[str, Outcome] = {}
        yield from _measured(machine, size, variants, found)
        flops = found["auto"].reports[0].flops
        if flops is not None:
            yield Line(f"{size}, MFU", flops / found["auto"].seconds / rate, "of the matmul rate")


def unchecked(machine: Machine) -> Iterator[Line]:
    """Steps that recompute half of the blocks and none of them, against the code of diffusers that
    recomputes none.
    """
    need_keys("gradient_checkpointing_kept_blocks")
    for size in (machine.image, machine.video):
        half = SHAPES[size].settings["num_visual_blocks"] // 2
        none: Settings = {"gradient_checkpointing": False}
        variants: dict[str, Settings] = {
            "every block": {},
            "half of the blocks": {"gradient_checkpointing_kept_blocks": half},
            "no block": none,
            "no block, reference": {"speed": "reference", **none},
        }
        found: dict[str, Outcome] = {}
        for name, settings in variants.items():
            try:
                yield from _measured(machine, size, {f"{name} recomputed": settings}, found)
            except (
                torch.OutOfMemoryError
            ):  # as of a real clip on most cards; the others still count
                yield Line(f"{size}, {name} recomputed, step", 0.0, "s", "out of memory")


def streamer(machine: Machine) -> Iterator[Line]:
    """Streamed weights against resident ones, then with the inputs of blocks in host memory,
    too.
    """
    need_keys("group_offload_resident_blocks")
    streamed = {"enable_group_offload": True, "group_offload_use_stream": machine.on_gpu}
    variants: dict[str, Settings] = {"resident": {}, "streamed": streamed}
    if machine.on_gpu:
        variants["streamed, inputs on the host"] = {**streamed, "offload_block_inputs": True}
    for size in (machine.video, machine.image):
        found: dict[str, Outcome] = {}
        yield from _measured(machine, size, variants, found)
        yield Line(
            f"{size}, streamed, waiting for weights", found["streamed"].weights_share, "of the step"
        )


def full(machine: Machine) -> Iterator[Line]:
    """A full fine-tune: all gradients kept, released, with state on the host, and with state in 8
    bits.
    """
    need_keys("offload_optimizer_state")
    plain: Settings = {"model_type": "full"}
    released = {**plain, "optimizer_release_gradients": True}
    variants = {
        "full": plain,
        "released": released,
        "state on the host": {**released, "offload_optimizer_state": True},
    }
    if machine.on_gpu and importlib.util.find_spec("torchao"):
        variants["state in 8 bits"] = {**released, "optimizer": "ao-adamw8bit"}
    yield from _measured(machine, machine.video, variants, {})


def optimizers(machine: Machine) -> Iterator[Line]:
    """An update of many small weights and of few large ones, by each kernel; `update_kernel`
    chooses between them.
    """
    need_keys("optimizer")
    from simpletuner.training.update import (
        KERNEL_KEYS,
        build_optimizer,
        runs_triton,
    )  # older versions lack these

    sizes = ((1200, 1 << 16), (64, 1 << 23)) if machine.on_gpu else ((20, 1 << 8), (2, 1 << 12))
    device = torch.device(machine.device)
    for name, precision in (("adamw_bf16", "bf16"), ("optimi-adamw", "bf16"), ("adamw", "no")):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for count, numbers in sizes:
            weights = [
                torch.nn.Parameter(torch.zeros(numbers, device=device, dtype=dtype))
                for _ in range(count)
            ]
            config = make_config(optimizer=name).optimizer
            for kernel in ("loop", *KERNEL_KEYS):
                optimizer = build_optimizer(
                    weights, config, "bf16" if name == "adamw_bf16" else "no", 1e-4
                )
                (group,) = optimizer.param_groups
                if (kernel != "loop" and kernel not in group) or (
                    kernel == "triton" and not runs_triton(weights)
                ):
                    continue
                group.update({key: key == kernel for key in KERNEL_KEYS if key in group})
                for weight in weights:
                    weight.grad = torch.full_like(weight, 1e-3)
                seconds = fastest(optimizer.step, device, 5)
                yield Line(f"{name}, {count} x {numbers}, {kernel}", seconds * 1e3, "ms")


def selective(machine: Machine) -> Iterator[Line]:
    """Checkpointing that keeps the attention's result against checkpointing that keeps nothing."""
    need_keys("speed_keep_attention")
    variants: dict[str, Settings] = {
        name: {"speed_keep_attention": keep}
        for name, keep in (("nothing kept", False), ("attention kept", True))
    }
    yield from _measured(machine, machine.video, variants, {})


def deterministic(machine: Machine) -> Iterator[Line]:
    """What an uncompiled step costs with `deterministic`, and whether two runs then agree in every
    bit.
    """
    need_keys("deterministic")
    size = machine.image
    found: list[float] = []
    try:
        for name, is_fixed in (("in a fixed order", True), ("in any order", False)):
            set_determinism(is_fixed)  # first, since cuBLAS reads its setting once
            (seconds, one), (_, other) = (_four_steps(machine, size) for _ in range(2))
            found.append(seconds)
            yield Line(f"{size}, {name}, step", seconds, "s", _ratio(seconds, found[0]))
            alike = [torch.equal(one[key], other[key]) for key in one]
            yield Line(
                f"{size}, {name}, weights of two runs that agree in every bit",
                sum(alike) / len(alike),
                "of 1",
            )
    finally:
        set_determinism(False)


def _four_steps(machine: Machine, size: str) -> tuple[float, dict[str, Tensor]]:
    """Seconds of the fastest step after the first, and the trained weights at the end."""
    forget(machine.device)
    variant = Variant(size, machine.device, {"dynamo_backend": "no"})
    seconds = [variant.step().seconds for _ in range(4)]
    return min(seconds[1:]), {
        name: parameter.detach().cpu() for name, parameter in variant.assembly.parameters.items()
    }


def tread(machine: Machine) -> Iterator[Line]:
    """Half of the tokens pass by all blocks but the outermost ones."""
    for size in (machine.video, machine.image):
        found: dict[str, Outcome] = {}
        for name, techniques in (
            ("all tokens", []),
            ("half the tokens", [Tread(TreadSpec([routes_of(size)]))]),
        ):
            yield from _measured(machine, size, {name: {}}, found, techniques)
        if size in MODELS:
            allowed = share_of_arithmetic(size, [routes_of(size)])
            reached = allowed * found["all tokens"].seconds / found["half the tokens"].seconds
            yield Line(
                f"{size}, speed-up / FLOP limit", reached, "of 1", f"limit {1 / allowed:.2f}"
            )


def routes_of(size: str) -> Route:
    """Half of the tokens pass by layers 2 to -2; by all layers of a model that has no more than
    three.
    """
    edge = 2 if SHAPES[size].settings["num_visual_blocks"] > 3 else 0
    return Route(0.5, edge, -edge or -1)


def vae(machine: Machine) -> Iterator[Line]:
    """The encoder of HunyuanVideo's VAE with its convolutions in either memory layout."""
    device = torch.device(machine.device)
    real = machine.size == "real"
    model = build_clip_vae(machine.video, machine.device)
    frames, height, width = (17, 512, 768) if real else (5, 32, 48)
    pixels = torch.rand(1, 3, frames, height, width, device=device, dtype=machine.dtype)
    found: dict[str, float] = {}
    for name, layout in (
        ("contiguous", torch.contiguous_format),
        ("channels_last_3d", torch.channels_last_3d),
    ):
        model.to(memory_format=layout)
        given = pixels.contiguous(memory_format=layout)
        with torch.no_grad():
            found[name] = fastest(lambda given=given: model.encode(given), device, 3)
        yield Line(
            name, found[name] * 1e3, "ms for one clip", _ratio(found[name], found["contiguous"])
        )


def decoding(machine: Machine) -> Iterator[Line]:
    """A clip decoded in each way, and on a GPU what it takes at most, against the plan."""
    need_keys("validation_decoding")
    from simpletuner.models.decoding import decode_in
    from simpletuner.models.vae_cost import TILE, VaeLoad  # older versions lack these

    device = torch.device(machine.device)
    spec = FAMILIES["kandinsky5-video"]
    width, height, frames = (768, 512, 61) if machine.size == "real" else (48, 32, 5)
    z = torch.randn(
        1, 16, *spec.latent_size(width, height, frames), device=device, dtype=machine.dtype
    )
    found: dict[str, float] = {}
    for how in ("whole", "strips", "tiles"):
        model = build_clip_vae(machine.video, machine.device)
        decode_in(how, model, spec.vae_stride)
        if machine.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = _allocated(machine)
        with torch.no_grad():
            found[how] = fastest(partial(model.decode, z), device, 2)
        yield Line(how, found[how] * 1e3, "ms for one clip", _ratio(found[how], found["whole"]))
        if machine.on_gpu:
            load = VaeLoad(
                1, frames, width, height, tiled=how == "tiles", strips=how != "whole", tile=TILE
            )
            planned = 2 * spec.cost.vae.decode(load)
            taken = torch.cuda.max_memory_allocated() - before
            yield Line(f"{how}, peak", taken / 2**30, "GiB", f"{taken / planned:.3f} of the plan's")


def need_keys(*keys: str) -> None:
    """Skip the section where this version has no such option."""
    known = make_config().flat
    missing = [key for key in keys if key not in known]
    if missing:
        raise SkippedError(f"this version has no option {', '.join(missing)}")


def _measured(
    machine: Machine,
    size: str,
    variants: Mapping[str, Settings],
    found: dict[str, Outcome],
    techniques: Sequence[Technique] = (),
) -> Iterator[Line]:
    """Seconds of each variant, in units of the first one in `found`, and its peak memory."""
    for name, settings in variants.items():
        found[name] = outcome = measure(size, machine.device, settings, techniques, steps=STEPS)
        unit = next(iter(found.values())).seconds
        yield Line(f"{size}, {name}, step", outcome.seconds, "s", _ratio(outcome.seconds, unit))
        if outcome.peak_bytes is not None:
            yield Line(f"{size}, {name}, peak", outcome.peak_bytes / 2**30, "GiB")


def _ratio(value: float, unit: float) -> str:
    return f"{value / unit:.3f}"


Section = Callable[[Machine], Iterator[Line]]
# What to look at, and what to set until it is mended, if a section fails.
SUSPECTS = {
    "sparse": "the implementations of block-sparse attention in `models/kandinsky5/flex.py`",
    "attention": (
        "kernels of scaled_dot_product_attention; `deterministic: true` keeps to flash and math"
    ),
    "step": "compiled blocks (`dynamo_backend: no`) or our own (`speed: reference`)",
    "unchecked": "blocks that recompute themselves (`speed: reference`)",
    "streamer": "the order of copies (`group_offload_use_stream: false`), or page-locked memory",
    "selective": "the kept result of attention (`speed_keep_attention: false`)",
    "block": "compiled blocks (`dynamo_backend: no`)",
    "deterministic": "a kernel without a fixed order of sums, which torch names",
    "tread": "routed tokens in compiled blocks (`dynamo_backend: no`)",
    "full": (
        "gradients that are released (`optimizer_release_gradients: false`), or state on the host"
    ),
    "optimizers": "the kernels of `update_kernel` in `config/optimizers.py`",
    "products": "`quantized_matmul: false`, or int8-torchao in place of int8dq-torchao",
    "decoding": "`validation_decoding: tiles`",
}
# In order of what is missed most, with the seconds that each may take: about twice what is expected
# of an H100. All of them fit into two runs of `first_gpu.MINUTES`.
SECTIONS: dict[str, tuple[Section, float]] = {
    "sparse": (sparse, 60),
    "peaks": (peaks, 20),
    "step": (step, 110),
    "attention": (attention, 30),
    "streamer": (streamer, 110),
    "full": (full, 110),
    "products": (products, 60),
    "unchecked": (unchecked, 110),
    "decoding": (decoding, 60),
    "tread": (tread, 70),
    "block": (block, 50),
    "selective": (selective, 50),
    "pcie": (pcie, 20),
    "deterministic": (deterministic, 40),
    "vae": (vae, 20),
    "optimizers": (optimizers, 20),
}
