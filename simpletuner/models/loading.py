"""Loads models, and lowers the peak memory of VAEs without changing results.

- full float32 on a GPU for models and layers that need it
- weights as a whole, with errors that name the part
- 3D convolutions in slices of time, and the HunyuanVideo VAE's attention without its mask
- schedulers and stock pipelines, whose transformer may have no weights, to check LoRA files against
- weights module by module, so that memory never holds all of them

TF32, which `disable_tf32` disables everywhere, keeps 10 of 23 mantissa bits. This is enough for a
float32 run and for a LoRA's float32 weights, but would defeat the purpose of a float32 VAE, and of
the layers that diffusers keeps in float32 in a bf16 model; stock pipelines compute these layers in
full float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoCausalConv3d,
    HunyuanVideoMidBlock3D,
)
from diffusers.models.modeling_utils import no_init_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from simpletuner.config.schema import CachingConfig
from simpletuner.errors import UserError, reached_limit, shorten
from simpletuner.models.placement import place
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec
from simpletuner.models.usage import FLOW, SOLVERS
from simpletuner.weights.part import Part


@contextmanager
def full_float32() -> Iterator[None]:
    """A context without TF32. The setting is process-wide, so it affects other threads too."""
    products = torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn
    in_products = products.allow_tf32
    in_convolutions = convolutions.allow_tf32
    try:
        products.allow_tf32 = False
        convolutions.allow_tf32 = False
        yield
    finally:
        products.allow_tf32 = in_products
        convolutions.allow_tf32 = in_convolutions


@torch.library.custom_op(
    "simpletuner::full_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def full_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in full float32; a custom op, since compiled code cannot change torch's settings."""
    with full_float32():
        return nn.functional.linear(x, weight, bias)


@full_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, each None if not needed."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = gradient.flatten(0, -2)
    x_gradient = weight_gradient = bias_gradient = None
    if needs_x:
        x_gradient = full_linear(gradient, weight.t(), None)
    if needs_weight:
        # linear(Gᵀ, Xᵀ) = Gᵀ X.
        weight_gradient = full_linear(rows.t(), x.flatten(0, -2).t(), None)
    if needs_bias:
        bias_gradient = rows.sum(0)
    return x_gradient, weight_gradient, bias_gradient


full_linear.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)


def keep_full_float32(transformer: nn.Module) -> None:
    """Compute the linear layers that a transformer's class keeps in float32 in full float32."""
    model: Any = transformer
    kept = set(model._keep_in_fp32_modules or ())
    for name, layer in transformer.named_modules():
        if isinstance(layer, nn.Linear) and kept & set(name.split(".")):
            layer.forward = MethodType(_full_forward, layer)  # type: ignore[method-assign]


def _full_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """As `nn.Linear`; a weight that is stored in bf16 is cast to the dtype of the input."""
    return full_linear(x, layer.weight.to(x.dtype), layer.bias)


# What the libraries raise for files that they cannot use.
LIBRARY_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    SafetensorError,
)


@contextmanager
def user_errors(part: Part) -> Iterator[None]:
    """Translate library errors about a part's files to an error that names the part.

    Raises:
        UserError: the files cannot be used.
    """
    try:
        yield
    except LIBRARY_ERRORS as error:
        if reached_limit(error):  # not a fault of the files
            raise
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise UserError(f"{part.described} cannot be loaded: {reason}") from error


def load_whole(model_class: Any, part: Part, **settings: Any) -> Any:
    """Load a model, and require every weight in its files.

    The libraries would initialise missing ones at random.

    Args:
        model_class: a model class of diffusers or transformers.
        settings: further arguments of its `from_pretrained`.

    Raises:
        UserError: a weight is missing, or its shape differs from that in the config.
    """
    folder = part.fetch()
    with user_errors(part):
        model, report = model_class.from_pretrained(
            folder, variant=part.variant, output_loading_info=True, **settings
        )
    refuse_missing(part, report["missing_keys"])
    return model


def refuse_missing(part: Part, absent: Collection[str]) -> None:
    """Raise `UserError` if weights are absent from a part's files."""
    if absent:
        raise UserError(
            f"{part.described} is incomplete: {shorten(sorted(absent))} not in its files."
        )


def load_denoiser(model_class: Any, part: Part, dtype: torch.dtype, *, empty: bool) -> Any:
    """Load a transformer onto the CPU in one dtype; its class keeps some layers in float32.

    Args:
        empty: read no weights: parameters are on `meta`, and only buffers have values.
            `DeferredWeights` reads the rest.
    """
    if not empty:
        settings = {"torch_dtype": dtype, "low_cpu_mem_usage": True, **part.overrides}
        return load_whole(model_class, part, **settings)
    folder = part.fetch()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # for buffers, as in `from_pretrained`
    try:
        # Not `torch.device("meta")`, since buffers that are not in the files need values.
        with user_errors(part), init_empty_weights():
            model = model_class.from_config(model_class.load_config(folder), **part.overrides)
    finally:
        torch.set_default_dtype(usual)
    # As `from_pretrained` does.
    model.register_to_config(_name_or_path=folder)
    return model.eval()


def build_bare(model_class: Any, settings: Any) -> Any:
    """A diffusers model on the meta device: names and shapes without values or initialisation."""
    with torch.device("meta"), no_init_weights():
        return model_class.from_config(settings)


def check_shapes(part: Part) -> None:
    """Compare a diffusers model's files with its class by names and shapes, without loading.

    Raises:
        UserError: a weight is missing, or its shape differs from that in the config.
    """
    stored = part.weight_shapes()
    settings = part.read_config()
    if not stored or settings is None:
        return  # unknown formats are checked when they are loaded
    with user_errors(part):
        model = build_bare(getattr(diffusers, settings["_class_name"]), settings)
    wrong = []
    for name, tensor in model.state_dict().items():
        if stored.get(name) != tuple(tensor.shape):
            wrong.append(f"{name} {list(tensor.shape)}")
    if wrong:
        raise UserError(
            f"{part.described} does not fit its config.json: its files lack {shorten(wrong)}."
        )


def load_scheduler(part: Part, **overrides: Any) -> Any:
    """Load a scheduler, with the class that its settings name."""
    part.fetch()
    settings = part.read_config() or {}
    with user_errors(part):
        return getattr(diffusers, settings["_class_name"]).from_config(settings, **overrides)


def load_vae(
    spec: FamilySpec,
    source: ModelSource,
    caching: CachingConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Load a frozen VAE onto a device, with slicing and tiling as configured.

    Raises:
        UserError: it cannot be loaded, or holds NaN or infinity, which would turn previews black.
    """
    (kind,) = spec.components["vae"].kinds
    part = source["vae"]
    vae = load_whole(getattr(diffusers, kind), part, torch_dtype=dtype)
    weights = vae.state_dict()
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise UserError(f"{part.described} holds NaN or infinite values in {shorten(broken)}.")
    place(vae.requires_grad_(False).eval(), device)
    if dtype == torch.float32 and device.type == "cuda":
        vae.encode = full_float32()(vae.encode)
        vae.decode = full_float32()(vae.decode)
    if caching.vae_enable_slicing:
        vae.enable_slicing()
    if caching.vae_enable_tiling:
        vae.enable_tiling()
    return vae


def slice_convolutions(vae: nn.Module) -> int:
    """Let the causal convolutions of a HunyuanVideo VAE compute one output frame at a time.

    Each slice is padded separately, so the whole clip is never copied for padding.

    Returns:
        the number of convolutions.
    """
    convolutions = [
        module for module in vae.modules() if isinstance(module, HunyuanVideoCausalConv3d)
    ]
    for module in convolutions:
        module.forward = partial(sliced_forward, module)
    return len(convolutions)


def sliced_forward(module: Any, x: Tensor) -> Tensor:
    """The convolution of `B C T H W`, computed one output frame at a time."""
    conv = module.conv
    # In the order of `pad`: both sides of W, both of H, before and after in T. Causal: none after.
    *sides, before, _ = module.time_causal_padding
    kernel = conv.kernel_size[0]
    stride = conv.stride[0]
    total = (x.shape[2] + before - kernel) // stride + 1
    out = x.new_empty(0)
    for frame in range(total):
        first = frame * stride - before  # input frame; negative while the kernel reaches padding
        frames = x[:, :, max(first, 0) : first + kernel]
        missing = max(-first, 0)
        padded = nn.functional.pad(frames, (*sides, missing, 0), mode=module.pad_mode)
        part = conv(padded)
        if frame == 0:
            out = part.new_empty((*part.shape[:2], total, *part.shape[3:]))
        out[:, :, frame : frame + 1] = part
    return out


def attend_by_frame(vae: nn.Module) -> None:
    """Make the mid blocks of a HunyuanVideo VAE attend frame by frame, without a mask."""
    for block in vae.modules():
        if not isinstance(block, HunyuanVideoMidBlock3D):
            continue
        if all(_is_plain(attn) for attn in block.attentions):  # others keep their mask
            block.forward = partial(_mid_block_forward, block)


def _is_plain(attn: Any) -> bool:
    """Whether an attention has no norms but the group norm, as `frame_causal_attention` assumes."""
    if attn is None:
        return False
    return attn.spatial_norm is None and attn.norm_q is None and attn.norm_k is None


def _mid_block_forward(block: Any, x: Tensor) -> Tensor:
    """Forward of the mid block on `B C F H W`."""
    x = block.resnets[0](x)
    for attn, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = resnet(frame_causal_attention(attn, x))
    return x


def frame_causal_attention(attn: Any, x: Tensor) -> Tensor:
    """diffusers' `Attention` on `B C F H W`: a frame attends to itself and to earlier frames."""
    tokens = x.permute(0, 2, 3, 4, 1).flatten(1, 3)  # B F·H·W C
    normed = attn.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    query, key, value = (
        project(normed).unflatten(2, (attn.heads, -1)).transpose(1, 2)  # B heads F·H·W D
        for project in (attn.to_q, attn.to_k, attn.to_v)
    )
    frames = []
    per_frame = tokens.shape[1] // x.shape[2]
    for end in range(per_frame, tokens.shape[1] + 1, per_frame):
        frame = nn.functional.scaled_dot_product_attention(
            query[:, :, end - per_frame : end], key[:, :, :end], value[:, :, :end]
        )
        frames.append(frame)
    attended = attn.to_out[0](torch.cat(frames, dim=2).transpose(1, 2).flatten(2))
    out = (attended + tokens) / attn.rescale_output_factor
    return out.unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)


def with_solver(scheduler: Any, name: str | None) -> Any:
    """The scheduler that `validation_noise_scheduler` selects, with the pipeline's shift.

    diffusers' multi-step solvers truncate timesteps to integers, so the model's timestep is too low
    by up to 1 of 1000.
    """
    if name is None or type(scheduler).__name__ == SOLVERS[name]:
        return scheduler
    # Multi-step solvers call it `flow_shift`.
    shift = scheduler.config.get("flow_shift", scheduler.config.get("shift"))
    settings: dict[str, Any] = {"shift": shift}
    if name != "euler":
        settings = {**FLOW, "flow_shift": shift}
    return getattr(diffusers, SOLVERS[name])(**settings)


def stock_pipeline(pipeline_class: Any, source: ModelSource, **parts: Any) -> Any:
    """A diffusers pipeline with these parts of a checkpoint only."""
    absent = dict.fromkeys(source.parts)
    pipeline = pipeline_class(**{**absent, **parts})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def share_zero_weights(model: nn.Module) -> nn.Module:
    """Replace the parameters of a model on the meta device by CPU tensors that expand one zero.

    They have the right shapes and take no memory. On the meta device, loading a LoRA would silently
    copy no values.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stand_in = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
            setattr(module, name, nn.Parameter(stand_in, requires_grad=False))
    return model


class DeferredWeights:
    """The weights that an empty transformer lacks, with the values and dtypes of `from_pretrained`.

    A weight with the dtype of the file becomes a view of the mapped file. Its pages are page cache,
    which the system drops when it needs memory, and they are unmapped with the last view. `place`
    copies those that stay on a CPU, to aligned memory.

    Args:
        transformer: from `load_transformer(dtype, empty=True)`; parameters with values are left
            unchanged.
        part: location of the weights. Formats other than safetensors are loaded as a whole.

    Raises:
        UserError: the files lack a weight.
    """

    def __init__(self, transformer: nn.Module, part: Part, dtype: torch.dtype) -> None:
        self._model: Any = transformer
        self._part = part
        self._dtype = dtype
        self._lacking: list[str] = []
        self._files: dict[str, Path] = {}
        self._loaded: dict[str, Tensor] = {}
        if not any(parameter.is_meta for parameter in transformer.parameters()):
            return
        self._lacking = list(transformer.state_dict())
        self._files = part.weight_files()
        if not self._files:  # other formats do not support reading single weights
            model = load_whole(type(transformer), part, torch_dtype=dtype, low_cpu_mem_usage=True)
            self._loaded = model.state_dict()
        refuse_missing(part, set(self._lacking) - self._files.keys() - self._loaded.keys())

    def fill(self, modules: Sequence[nn.Module]) -> None:
        """Load the missing weights of these modules.

        Raises:
            UserError: a file cannot be read, or a weight has another shape.
        """
        prefixes = []
        for path, module in self._model.named_modules():
            if module in modules:
                prefixes.append(f"{path}." if path else "")  # the model itself has an empty path
        names = [name for name in self._lacking if name.startswith(tuple(prefixes))]
        self._lacking = [name for name in self._lacking if not name.startswith(tuple(prefixes))]
        with user_errors(self._part):
            for name, tensor in self._read(names):
                self._put(name, tensor)

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The weights of these names, one file after the other."""
        if not self._files:
            for name in names:
                yield name, self._loaded.pop(name)
            return
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        # Files are mapped again for each call, since one mapping would last until the last module
        # has been read.
        for path, names_in_file in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in names_in_file:
                    yield name, file.get_tensor(name)

    def _put(self, name: str, tensor: Tensor) -> None:
        """Replace an empty parameter or buffer of the model by a tensor in its final dtype."""
        path, _, key = name.rpartition(".")
        module = self._model.get_submodule(path)
        before: Tensor = getattr(module, key)
        if before.shape != tensor.shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)} in its files and {list(before.shape)} in its "
                "config.json"
            )
        if tensor.is_floating_point():
            kept = set(self._model._keep_in_fp32_modules or ())
            stays_float32 = not kept.isdisjoint(name.split("."))
            tensor = tensor.to(torch.float32 if stays_float32 else self._dtype)
        value = tensor.contiguous()
        if isinstance(before, nn.Parameter):
            value = nn.Parameter(value, requires_grad=before.requires_grad)
        setattr(module, key, value)
