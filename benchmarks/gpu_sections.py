"""The sections of `first_gpu.py`: measurements of a new machine, on which predictions rely.

A section is a function that yields lines as soon as they are measured, so that one that is cut
short has reported its first results. What a machine cannot do is skipped with a reason.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.models import SHAPES, build_clip_vae, lora_targets, make_config
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
from simpletuner.models.lora_layers import Targets
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.run.train import set_determinism
from simpletuner.speed.attention import activate_attention
from simpletuner.speed.int8_kernels import tuning_int8
from simpletuner.speed.measure import host_to_device_bytes, matmul_flops
from simpletuner.techniques.base import Technique
from simpletuner.techniques.tread import Tread
from simpletuner.timing import fastest

GIGABYTE = 1e9
STEPS = 3  # measured steps of a variant: one of Lite takes up to 3 s on an H100


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
    def is_large(self) -> bool:
        """Whether sizes are chosen that keep a GPU busy."""
        return self.on_gpu and self.size == "real"

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
    """The rates that other results are compared with."""
    device = torch.device(machine.device)
    side, count = (8192, 1 << 30) if machine.is_large else (256, 1 << 22)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = fastest(lambda: target.copy_(source), device, 5)
    yield Line("copy on the device, read and written", 2 * count / copy / GIGABYTE, "GB/s")
    rate = matmul_flops(device, machine.dtype, side)
    yield Line(f"matmul {side}^3 {str(machine.dtype)[6:]}", rate / 1e12, "TFLOP/s")


def pcie(machine: Machine) -> Iterator[Line]:
    """Copies to and from pinned memory, in one direction and in both at once."""
    machine.need_gpu("there is no bus between host and device")
    device = torch.device("cuda")
    count = 2**29 if machine.is_large else 2**22
    host_source = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    host_target = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    device_target = torch.empty(count, dtype=torch.uint8, device=device)
    device_source = torch.empty(count, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream()

    def copy_back() -> None:
        host_target.copy_(device_source, non_blocking=True)

    def copy_both_ways() -> None:
        with torch.cuda.stream(stream):
            device_target.copy_(host_source, non_blocking=True)
        copy_back()

    back = fastest(copy_back, device, 5)
    both = fastest(copy_both_ways, device, 5)
    yield Line("host to device", host_to_device_bytes(device, count) / GIGABYTE, "GB/s")
    yield Line("device to host", count / back / GIGABYTE, "GB/s")
    yield Line("both at once, together", 2 * count / both / GIGABYTE, "GB/s")


# Shares of the pairs of tiles that block-sparse attention visits. The share of a checkpoint depends
# on its weights; a run reports it.
DENSITIES = (0.125, 0.25, 0.5)
DIRECTIONS = ("forward", "backward")
# Operations of attention are 4 n^2 d in the forward pass. The backward pass has five products for
# its two, the recomputation of the scores included.
ATTENTION_PRODUCTS = (1.0, 2.5)


def sparse(machine: Machine) -> Iterator[Line]:
    """Block-sparse attention (NABLA) in random tiles against dense attention, at the shape of Pro.

    It pays off below the density at which it takes as long as dense attention.
    """
    need_keys("speed_keep_attention")
    from simpletuner.models.kandinsky5.options import TILE
    from simpletuner.models.kandinsky5.tile_attention import choose_attend  # older versions lack it

    device = torch.device(machine.device)
    tokens, heads, width = (47_616, 32, 128) if machine.is_large else (1_024, 2, 16)
    shape = (tokens, heads, width)
    flops = [4.0 * tokens**2 * heads * width * products for products in ATTENTION_PRODUCTS]
    dense = _attention_seconds(machine, torch_attention, shape)
    for direction, seconds, work in zip(DIRECTIONS, dense, flops, strict=True):
        name = f"dense {direction}, {tokens} x {heads} x {width}"
        yield Line(name, work / seconds / 1e12, "TFLOP/s")

    attend = choose_attend(device, machine.dtype, width, heads)
    count = tokens // TILE
    draws = torch.rand(1, heads, count, count, device=device)
    diagonal = torch.eye(count, device=device).bool()
    for density in DENSITIES:
        # Every tile visits itself: a row without a tile would have no result.
        attend_in_tiles = partial(_attend_in_tiles, attend, draws.lt(density) | diagonal)
        sparse_seconds = _attention_seconds(machine, attend_in_tiles, shape)
        for direction, seconds, dense_seconds, work in zip(
            DIRECTIONS, sparse_seconds, dense, flops, strict=True
        ):
            name = f"sparse {direction}, density {density}"
            note = f"{seconds / dense_seconds:.3f} of the time of dense"
            yield Line(name, density * work / seconds / 1e12, "TFLOP/s", note)


def _attend_in_tiles(
    attend: Callable[..., Tensor], tiles: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    return attend(query, key, value, tiles)


def attention(machine: Machine) -> Iterator[Line]:
    """Attention of torch (flash), of cuDNN, which training does not use, and of packages."""
    machine.need_gpu("flash and cuDNN attention are its kernels")
    yield from _kernel_rates(machine, "flash", SDPBackend.FLASH_ATTENTION)
    yield from _kernel_rates(machine, "cuDNN", SDPBackend.CUDNN_ATTENTION)
    device = torch.device(machine.device)
    for mechanism, provider in ATTENTION_PACKAGES.items():
        if not provider.torch_name or not is_installed(provider.package.module):
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
        note = ""
        try:
            with sdpa_kernel(backend):
                seconds = _attention_seconds(machine, torch_attention, (tokens, heads, width))
        except RuntimeError as error:
            # This release or device has no such kernel for this shape; the other shape may have.
            seconds = (math.inf, math.inf)
            note = str(error).partition("\n")[0]
        for direction, duration, products in zip(
            DIRECTIONS, seconds, ATTENTION_PRODUCTS, strict=True
        ):
            rate = 4.0 * products * tokens**2 * heads * width / duration
            shape = f"{tokens} x {heads} x {width}"
            yield Line(f"{name} {direction}, {shape}", rate / 1e12, "TFLOP/s", note)


def _attention_seconds(
    machine: Machine, attend: AttentionKernel, shape: tuple[int, int, int]
) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass.

    Args:
        shape: tokens, heads, numbers per head.
    """
    device = torch.device(machine.device)
    inputs = [
        torch.randn(1, *shape, device=device, dtype=machine.dtype).requires_grad_()
        for _ in range(3)
    ]
    return _seconds_of_passes(lambda: attend(*inputs), inputs, device)


def _seconds_of_passes(
    run: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device
) -> tuple[float, float]:
    """Seconds of a function and of the gradients of its inputs."""
    out = run()
    gradient = torch.randn_like(out)

    def differentiate() -> None:
        torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return fastest(run, device, 5), fastest(differentiate, device, 5)


def products(machine: Machine) -> Iterator[Line]:
    """Linear layers with products in int8 and fp8 (`quantized_matmul`) against bf16."""
    need_keys("quantized_matmul")
    for size in (machine.image, machine.video):
        settings = SHAPES[size].settings
        tokens = SHAPES[size].tokens
        columns = settings["model_dim"]
        for rows in (settings["model_dim"], settings["ff_dim"]):
            yield from _layer_times(machine, size, tokens, columns, rows)


def _layer_times(
    machine: Machine, size: str, tokens: int, columns: int, rows: int
) -> Iterator[Line]:
    """A layer of `rows` by `columns`, forward and backward, and its errors."""
    device = torch.device(machine.device)
    plain = torch.nn.Linear(columns, rows, device=device, dtype=machine.dtype).requires_grad_(False)
    inputs = torch.randn(1, tokens, columns, device=device, dtype=machine.dtype).requires_grad_()
    product = f"{size} {tokens} x {columns} x {rows}"
    expected: list[Tensor] = []
    seconds_by_layer: dict[str, tuple[float, float]] = {}
    for name, layer in _layers(machine, plain).items():
        try:
            results = _output_and_gradient(layer, inputs)
            seconds_by_layer[name] = _seconds_of_passes(partial(layer, inputs), [inputs], device)
        except RuntimeError as error:
            # This device does not have the product; it may have the others.
            yield Line(f"{name} forward, {product}", 0.0, "ms", str(error).partition("\n")[0])
            continue
        expected = expected or results
        for direction, seconds, unit, result, exact in zip(
            DIRECTIONS,
            seconds_by_layer[name],
            seconds_by_layer["bf16"],
            results,
            expected,
            strict=True,
        ):
            error = float((result - exact).norm() / exact.norm())
            note = f"{_ratio(seconds, unit)} of the time of bf16, error {error:.1e}"
            yield Line(f"{name} {direction}, {product}", seconds * 1e3, "ms", note)
    levels = torch.zeros(rows, columns, dtype=torch.int8, device=device)
    transposing = fastest(lambda: levels.t().contiguous(), device, 5)
    yield Line(f"transposing the levels, {product}", transposing * 1e3, "ms")


def _layers(machine: Machine, plain: torch.nn.Linear) -> dict[str, Callable[[Tensor], Tensor]]:
    """A layer in bf16, then quantised; compiled ones fuse the rounding, as in compiled blocks.

    Tuned ones may also scale int8 sums where they are added up.
    """
    layers: dict[str, Any] = {"bf16": plain}
    for bits, name in (("int8", "int8-quanto"), ("fp8", "fp8-quanto")):
        layer = QuantisedLinear(plain, pack(plain.weight, QUANTISATIONS[name]))
        use_quantised_products(torch.nn.Sequential(layer))
        layers[bits] = layer
        if machine.on_gpu:
            compiler = partial(torch.compile, dynamic=False)
            layers[f"{bits}, compiled"] = compiler(layer)
            if bits == "int8":
                layers["int8, compiled and tuned"] = tuning_int8(compiler)(layer)
    return layers


def _output_and_gradient(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> list[Tensor]:
    """The output, and the gradient of the inputs for the output itself, in float32."""
    output = layer(inputs)
    (gradient,) = torch.autograd.grad(output, inputs, output.detach())
    return [output.detach().float(), gradient.float()]


# From the code of diffusers to all that makes a block faster.
BLOCK_VARIANTS: dict[str, Settings] = {
    "stock": {"speed": "reference"},
    "plain": {"dynamo_backend": "no"},
    "compiled": {"dynamo_backend": "inductor"},
}


def block(machine: Machine) -> Iterator[Line]:
    """One visual block, forward and backward, with the memory that it keeps and its peak."""
    need_keys("speed")
    for size in (machine.video, machine.image):
        seconds_by_variant: dict[str, float] = {}
        for name, settings in _block_variants(machine).items():
            seconds, kept, peak = _block_cost(machine, size, settings)
            seconds_by_variant[name] = seconds
            note = _ratio(seconds, seconds_by_variant["stock"])
            yield Line(f"{size}, {name} block", seconds * 1e3, "ms", note)
            if machine.on_gpu:
                yield Line(f"{size}, {name} block, kept for backward", kept / GIGABYTE, "GB")
                yield Line(f"{size}, {name} block, peak above its inputs", peak / GIGABYTE, "GB")


def _block_variants(machine: Machine) -> dict[str, Settings]:
    """All variants on a GPU; on a CPU without the compiled one, which takes long to compile."""
    if machine.on_gpu:
        return BLOCK_VARIANTS
    return {name: settings for name, settings in BLOCK_VARIANTS.items() if name != "compiled"}


def _block_cost(machine: Machine, size: str, settings: Settings) -> tuple[float, int, int]:
    """The cost of the first visual block.

    Returns seconds of a forward and a backward pass, bytes kept between them, and bytes at most.
    """
    forget(machine.device)
    calls: list[Any] = []
    variant = Variant(
        size, machine.device, {**settings, "gradient_checkpointing": False, "lora_rank": 4}
    )
    layout = variant.assembly.adapter.block_layout(variant.assembly.transformer)
    block: Any = layout.groups["visual_transformer_blocks"][0]
    hook = block.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    variant.assembly.transformer.requires_grad_(False)
    with torch.no_grad():
        _predict(variant)
    hook.remove()
    hidden, *conditions = [
        value.detach() if isinstance(value, torch.Tensor) else value for value in calls[0]
    ]
    hidden.requires_grad_()
    kept = 0

    def run() -> None:
        nonlocal kept
        before = _allocated(machine)
        out = block(hidden, *conditions)
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
    """A fast step against one with the code of diffusers, and its use of the device (MFU).

    And a LoRA on the second half of the blocks, below which nothing is kept or computed backwards.
    """
    need_keys("speed")
    side = 8192 if machine.is_large else 256
    rate = matmul_flops(torch.device(machine.device), machine.dtype, side)
    variants: dict[str, Settings] = {
        "reference": {"speed": "reference"},
        "auto": {"speed": "auto"},
    }
    for size in (machine.video, machine.image):
        outcomes: dict[str, Outcome] = {}
        yield from _measured(machine, size, variants, outcomes)
        fast = outcomes["auto"]
        flops = fast.reports[0].flops
        if flops is not None:
            yield Line(f"{size}, MFU", flops / fast.seconds / rate, "of the matmul rate")
    late = {"late half": variants["auto"]}
    yield from _measured(machine, size, late, outcomes, targets=second_half(size))


def second_half(size: str) -> str:
    """A regular expression of the family's targets in the second half of the visual blocks."""
    count = SHAPES[size].settings["num_visual_blocks"]
    numbers = "|".join(map(str, range(count // 2, count)))
    names = "|".join(map(re.escape, lora_targets(size)))
    return rf"visual_transformer_blocks\.({numbers})\..*({names})"


def unchecked(machine: Machine) -> Iterator[Line]:
    """Steps that recompute every block, half of them and none, and one of diffusers' code."""
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
        outcomes: dict[str, Outcome] = {}
        for name, settings in variants.items():
            try:
                yield from _measured(machine, size, {f"{name} recomputed": settings}, outcomes)
            except torch.OutOfMemoryError:
                # A real clip without recomputation fits few cards; other variants still do.
                yield Line(f"{size}, {name} recomputed, step", 0.0, "s", "out of memory")


def streamer(machine: Machine) -> Iterator[Line]:
    """Streamed weights against resident ones, with and without blocks' inputs in host memory."""
    need_keys("group_offload_resident_blocks")
    streamed = {"enable_group_offload": True, "group_offload_use_stream": machine.on_gpu}
    variants: dict[str, Settings] = {"resident": {}, "streamed": streamed}
    if machine.on_gpu:
        variants["streamed, inputs on the host"] = {**streamed, "offload_block_inputs": True}
    for size in (machine.video, machine.image):
        outcomes: dict[str, Outcome] = {}
        yield from _measured(machine, size, variants, outcomes)
        waited = outcomes["streamed"].weights_share
        yield Line(f"{size}, streamed, waiting for weights", waited, "of the step")


def full(machine: Machine) -> Iterator[Line]:
    """Full fine-tunes: gradients kept, gradients released, state on the host, state in 8 bits."""
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
    """Updates of many small weights and of few large ones by all kernels of `update_kernel`."""
    need_keys("optimizer")
    # Older versions lack these.
    from simpletuner.training.update import KERNEL_KEYS, build_optimizer, runs_triton

    sizes = ((1200, 1 << 16), (64, 1 << 23)) if machine.is_large else ((20, 1 << 8), (2, 1 << 12))
    device = torch.device(machine.device)
    for name, precision in (("adamw_bf16", "bf16"), ("optimi-adamw", "bf16"), ("adamw", "no")):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for count, numbers in sizes:
            weights = [
                torch.nn.Parameter(torch.zeros(numbers, device=device, dtype=dtype))
                for _ in range(count)
            ]
            config = make_config(optimizer=name).optimizer
            mixed_precision = "bf16" if name == "adamw_bf16" else "no"
            for kernel in ("loop", *KERNEL_KEYS):
                optimizer = build_optimizer(weights, config, mixed_precision, 1e-4)
                (group,) = optimizer.param_groups
                if kernel != "loop" and kernel not in group:
                    continue
                if kernel == "triton" and not runs_triton(weights):
                    continue
                for key in KERNEL_KEYS:
                    if key in group:
                        group[key] = key == kernel
                for weight in weights:
                    weight.grad = torch.full_like(weight, 1e-3)
                seconds = fastest(optimizer.step, device, 5)
                yield Line(f"{name}, {count} x {numbers}, {kernel}", seconds * 1e3, "ms")


def selective(machine: Machine) -> Iterator[Line]:
    """Checkpointing that keeps the result of attention against checkpointing that keeps nothing."""
    need_keys("speed_keep_attention")
    variants: dict[str, Settings] = {
        "nothing kept": {"speed_keep_attention": False},
        "attention kept": {"speed_keep_attention": True},
    }
    yield from _measured(machine, machine.video, variants, {})


def deterministic(machine: Machine) -> Iterator[Line]:
    """The cost of `deterministic` without compiling, and whether two runs agree in every bit."""
    need_keys("deterministic")
    size = machine.image
    seconds_of_variants: list[float] = []
    try:
        # The fixed order comes first: cuBLAS reads its setting once.
        for name, is_fixed in (("in a fixed order", True), ("in any order", False)):
            set_determinism(is_fixed)
            seconds, first_weights = _four_steps(machine, size)
            _, second_weights = _four_steps(machine, size)
            seconds_of_variants.append(seconds)
            note = _ratio(seconds, seconds_of_variants[0])
            yield Line(f"{size}, {name}, step", seconds, "s", note)

            equal = [torch.equal(first_weights[key], second_weights[key]) for key in first_weights]
            title = f"{size}, {name}, weights of two runs that agree in every bit"
            yield Line(title, sum(equal) / len(equal), "of 1")
    finally:
        set_determinism(False)


def _four_steps(machine: Machine, size: str) -> tuple[float, dict[str, Tensor]]:
    """Seconds of the fastest step after the first, and the trained weights at the end."""
    forget(machine.device)
    variant = Variant(size, machine.device, {"dynamo_backend": "no"})
    seconds = [variant.step().seconds for _ in range(4)]
    weights = {
        name: parameter.detach().cpu() for name, parameter in variant.assembly.parameters.items()
    }
    return min(seconds[1:]), weights


def tread(machine: Machine) -> Iterator[Line]:
    """TREAD: half of the tokens skip all but the outermost blocks."""
    for size in (machine.video, machine.image):
        route = route_of(size)
        outcomes: dict[str, Outcome] = {}
        yield from _measured(machine, size, {"all tokens": {}}, outcomes)
        techniques = [Tread(TreadSpec([route]))]
        yield from _measured(machine, size, {"half the tokens": {}}, outcomes, techniques)
        if size in MODELS:
            limit = 1 / share_of_arithmetic(size, [route])
            speed_up = outcomes["all tokens"].seconds / outcomes["half the tokens"].seconds
            title = f"{size}, speed-up / FLOP limit"
            yield Line(title, speed_up / limit, "of 1", f"limit {limit:.2f}")


def route_of(size: str) -> Route:
    """Half of the tokens skip layers 2 to -2, or all layers of a model with at most three."""
    if SHAPES[size].settings["num_visual_blocks"] > 3:
        return Route(0.5, 2, -2)
    return Route(0.5, 0, -1)


def vae(machine: Machine) -> Iterator[Line]:
    """The encoder of HunyuanVideo's VAE with its convolutions in either memory layout."""
    device = torch.device(machine.device)
    real = machine.size == "real"
    model = build_clip_vae(machine.video, machine.device)
    frames, height, width = (17, 512, 768) if real else (5, 32, 48)
    pixels = torch.rand(1, 3, frames, height, width, device=device, dtype=machine.dtype)
    layouts = {
        "contiguous": torch.contiguous_format,
        "channels_last_3d": torch.channels_last_3d,
    }
    seconds_by_layout: dict[str, float] = {}
    for name, layout in layouts.items():
        model.to(memory_format=layout)
        clip = pixels.contiguous(memory_format=layout)
        with torch.no_grad():
            seconds = fastest(partial(model.encode, clip), device, 3)
        seconds_by_layout[name] = seconds
        note = _ratio(seconds, seconds_by_layout["contiguous"])
        yield Line(name, seconds * 1e3, "ms for one clip", note)


def decoding(machine: Machine) -> Iterator[Line]:
    """A clip decoded in every way, and on a GPU its peak memory against the plan."""
    need_keys("validation_decoding")
    from simpletuner.models.decoding import decode_in
    from simpletuner.models.vae_cost import TILE, VaeLoad  # older versions lack these

    device = torch.device(machine.device)
    spec = FAMILIES["kandinsky5-video"]
    width, height, frames = (768, 512, 61) if machine.size == "real" else (48, 32, 5)
    size = spec.latent_size(width, height, frames)
    latents = torch.randn(1, 16, *size, device=device, dtype=machine.dtype)
    seconds_by_way: dict[str, float] = {}
    for way in ("whole", "strips", "tiles"):
        model = build_clip_vae(machine.video, machine.device)
        decode_in(way, model, spec.vae_stride)
        if machine.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = _allocated(machine)
        with torch.no_grad():
            seconds = fastest(partial(model.decode, latents), device, 2)
        seconds_by_way[way] = seconds
        yield Line(way, seconds * 1e3, "ms for one clip", _ratio(seconds, seconds_by_way["whole"]))
        if machine.on_gpu:
            is_tiled = way == "tiles"
            load = VaeLoad(
                1, frames, width, height, tiled=is_tiled, strips=way != "whole", tile=TILE
            )
            planned = 2 * spec.cost.vae.decode(load)  # two bytes a number, in bf16
            peak = torch.cuda.max_memory_allocated() - before
            yield Line(f"{way}, peak", peak / 2**30, "GiB", f"{peak / planned:.3f} of the plan's")


def need_keys(*keys: str) -> None:
    """Skip the section if this version lacks an option."""
    known = make_config().flat
    missing = [key for key in keys if key not in known]
    if missing:
        raise SkippedError(f"this version has no option {', '.join(missing)}")


def _measured(
    machine: Machine,
    size: str,
    variants: Mapping[str, Settings],
    outcomes: dict[str, Outcome],
    techniques: Sequence[Technique] = (),
    targets: Targets = "",
) -> Iterator[Line]:
    """Seconds and peak memory of variants; fills in `outcomes`, whose first one is the unit."""
    for name, settings in variants.items():
        outcome = measure(size, machine.device, settings, techniques, targets=targets, steps=STEPS)
        outcomes[name] = outcome
        unit = next(iter(outcomes.values())).seconds
        yield Line(f"{size}, {name}, step", outcome.seconds, "s", _ratio(outcome.seconds, unit))
        if outcome.peak_bytes is not None:
            yield Line(f"{size}, {name}, peak", outcome.peak_bytes / 2**30, "GiB")


def _ratio(value: float, unit: float) -> str:
    return f"{value / unit:.3f}"


Section = Callable[[Machine], Iterator[Line]]
# The probable cause of a failing section, and a setting that avoids it.
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
# In the order of their importance, with time limits in seconds: about twice what an H100 is
# expected to take. All of them fit into two runs of `first_gpu.MINUTES`.
SECTIONS: dict[str, tuple[Section, float]] = {
    "products": (products, 150),
    "step": (step, 140),
    "full": (full, 110),
    "sparse": (sparse, 60),
    "peaks": (peaks, 20),
    "attention": (attention, 30),
    "streamer": (streamer, 110),
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
