"""What a run puts on the device, as numbers: the model's parts, the buckets, the previews."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import keeps_bf16_weights, optimizer_name
from simpletuner.config.precision import quantisation, text_encoder_dtype, transformer_dtype, vae_dtype
from simpletuner.config.speed import keeps_attention
from simpletuner.data.sample import Sample
from simpletuner.memory.estimate import Setup, optimizer_state_bytes
from simpletuner.models.cost import BYTES, NO_ADAPTERS, Adapters, FamilyCost, Load, TransformerCost, VaeLoad
from simpletuner.models.lora_targets import Targets, matching_modules
from simpletuner.models.source import Part
from simpletuner.models.spec import FamilySpec
from simpletuner.models.weights import tensor_shapes
from simpletuner.plan.build import Plan


@dataclass(frozen=True)
class Bucket:
    """Training samples of one shape.

    Attributes:
        width, height, frames: in pixels and frames.
        batch: samples of a micro-batch.
        share: of all micro-batches of an epoch.
        text: text tokens of the longest prompt.
        timed: a first frame is given.
    """

    width: int
    height: int
    frames: int
    batch: int
    share: float
    text: int
    timed: bool = False

    @property
    def label(self) -> str:
        frames = f"@{self.frames}" if self.frames > 1 else ""
        return f"{self.width}x{self.height}{frames}" + (f", batch {self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class Parts:
    """The model of a run.

    Attributes:
        transformer: its cost.
        targets: what gets a LoRA.
        vae: the VAE's config, empty for a checkpoint that is not here.
        vae_parameters, text_parameters: how many numbers the encoders have.
        assumed: parts whose dimensions are those of the flavour's published checkpoint.
    """

    spec: FamilySpec
    transformer: TransformerCost
    targets: Targets
    vae: Mapping[str, object]
    vae_parameters: int
    text_parameters: int
    assumed: tuple[str, ...]

    @property
    def cost(self) -> FamilyCost:
        return self.spec.cost

    def load(self, bucket: Bucket) -> Load:
        """A bucket's micro-batch in tokens."""
        step = self.spec.vae_stride * self.spec.patch_size
        frames = (bucket.frames - 1) // self.spec.frame_stride + 1
        return Load(bucket.batch, frames, bucket.height // step, bucket.width // step, bucket.text, bucket.timed)

    def setup(self, config: RunConfig) -> Setup:
        """What of the settings decides about memory."""
        base, name = (
            transformer_dtype(config.precision),
            optimizer_name(config.optimizer, config.precision.mixed_precision),
        )
        compensated = base == "bf16" and keeps_bf16_weights(name)
        trained = "bf16" if compensated else "fp32"
        is_lora, offload, precision = config.model.model_type == "lora", config.offload, config.precision
        checkpointed = precision.gradient_checkpointing
        return Setup(
            dtype=base if is_lora else trained,
            adapters=self._adapters(config.lora.lora_rank) if is_lora else NO_ADAPTERS,
            trained_bytes=BYTES[trained],
            state_bytes=optimizer_state_bytes(name, BYTES[trained], compensated=compensated),
            checkpoint_interval=(precision.gradient_checkpointing_interval or 1) if checkpointed else None,
            keep_attention=checkpointed and keeps_attention(config.speed),
            streamed=offload.enable_group_offload,
            residents=offload.group_offload_resident_blocks,
            group=offload.group_offload_blocks_per_group,
            overlapped=offload.group_offload_use_stream,
            inputs_on_host=offload.offload_block_inputs and checkpointed,
            quantised=quantised_bytes(precision.base_model_precision),
            averaged_on_device=config.ema.use_ema and config.ema.ema_device == "accelerator",
        )

    def _adapters(self, rank: int) -> Adapters:
        modules = [name.removesuffix(".weight") for name, shape in self.transformer.shapes.items() if len(shape) > 1]
        return Adapters(rank, frozenset(matching_modules(modules, self.targets)))


@dataclass(frozen=True)
class Workload:
    """What the model has to do.

    Attributes:
        buckets: of training, the largest first.
        encoded: what the VAE encodes at a time, one entry per shape; empty when every latent is cached.
        encodes_text: captions or prompts are missing from their cache.
        previews: sizes of previews with their frames; empty without validation.
        waiting: bytes of decoded pixels that wait for the VAE at most.
    """

    buckets: Sequence[Bucket]
    encoded: Sequence[VaeLoad]
    encodes_text: bool
    previews: Sequence[Bucket]
    waiting: float

    def scaled(self, sides: float, frames: float) -> Workload:
        """The same with smaller pictures or shorter clips."""

        def shrink(bucket: Bucket) -> Bucket:
            shorter = max(1, round((bucket.frames - 1) * frames / 4) * 4 + 1) if bucket.frames > 1 else 1
            width, height = (max(64, round(side * sides / 64) * 64) for side in (bucket.width, bucket.height))
            return replace(bucket, width=width, height=height, frames=shorter)

        return replace(self, buckets=[shrink(bucket) for bucket in self.buckets])

    def with_batch(self, batch: int) -> Workload:
        """The same with no micro-batch larger than so many samples."""
        return replace(self, buckets=[replace(each, batch=min(each.batch, batch)) for each in self.buckets])


def quantised_bytes(precision: str) -> float:
    """Bytes per weight of a precision that quantises, else 0."""
    stored = quantisation(precision)
    return 0.0 if stored is None else stored.bits / 8


def parts_of(plan: Plan) -> Parts:
    """The model's parts from what is on this machine, else from what is known of the flavour."""
    cost, assumed = plan.spec.cost, []
    settings = plan.source.read_config("transformer")
    if settings is None:
        settings = cost.published(plan.flavour.name)
        assumed.append("transformer")
    vae = plan.source.read_config("vae")
    vae_parameters = count_parameters(plan.source["vae"]) or cost.vae_parameters
    encoders = [plan.source[role] for role in ("text_encoder", "text_encoder_2") if role in plan.source.parts]
    counts = [count_parameters(part) for part in encoders]
    if vae is None:
        assumed.append("VAE")
    if not all(counts):
        assumed.append("text encoders")
    return Parts(
        plan.spec, cost.transformer(settings), plan.lora_targets, vae or {}, vae_parameters,
        sum(counts) if all(counts) else cost.text_parameters, tuple(assumed),
    )  # fmt: skip


def count_parameters(part: Part) -> int:
    """Numbers in the weight files of a part that is on this machine; 0 when they are not, or are not safetensors."""
    folder = part.local_folder()
    if folder is None:
        return 0
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        for shape in tensor_shapes(path).values():
            size = 1
            for length in shape:
                size *= length
            total += size
    return total


def workload_of(plan: Plan, missing_texts: int, missing: Sequence[Sample]) -> Workload:
    """What a plan does, with the captions and samples that are not cached yet."""
    caching = plan.config.caching
    encoded = {
        VaeLoad(
            min(caching.vae_batch_size, count), frames, *size,
            tiled=caching.vae_enable_tiling, sliced=caching.vae_enable_patch_conv,
        )
        for (size, frames), count in Counter((each.geometry.size, each.frames) for each in missing).items()
    }  # fmt: skip
    pixels = sum(3.0 * each.geometry.size[0] * each.geometry.size[1] * each.frames for each in missing)
    return Workload(
        buckets=buckets_of(plan),
        encoded=sorted(encoded, key=lambda load: -load.samples * load.frames * load.width * load.height),
        encodes_text=missing_texts > 0,
        previews=previews_of(plan),
        waiting=min(pixels, 1e9),
    )


def buckets_of(plan: Plan) -> list[Bucket]:
    """Shapes of micro-batches with their shares, the largest first."""
    counts: Counter[Bucket] = Counter()
    for dataset in plan.trained:
        for samples in dataset.buckets().values():
            first = samples[0]
            width, height = first.geometry.size
            text = prompt_length(plan, first.partner.geometry.size if first.partner else None)
            bucket = Bucket(width, height, first.frames, dataset.batch_size, 0.0, text, first.is_i2v)
            counts[bucket] += -(-len(samples) * (dataset.repeats + 1) // dataset.batch_size)
    total = sum(counts.values())
    buckets = [replace(bucket, share=count / total) for bucket, count in counts.items()]
    return sorted(buckets, key=_size, reverse=True)


def _size(bucket: Bucket) -> int:
    return bucket.batch * bucket.frames * bucket.width * bucket.height


def prompt_length(plan: Plan, picture: tuple[int, int] | None) -> int:
    """Text tokens of the longest prompt that is allowed, with a source picture where the prompt holds it."""
    cap, cost = plan.spec.text_length_cap, plan.spec.cost
    held = picture if picture and plan.flavour.task in plan.spec.prompt_holds_picture else None
    longest = min(plan.config.text.tokenizer_max_length or cap, cap)
    return cost.padded_text or longest + (cost.picture_tokens(*held) if held else 0)


def previews_of(plan: Plan) -> list[Bucket]:
    """What validation renders, the largest first."""
    validation = plan.config.validation
    if not plan.prompts:
        return []
    frames = 1 if plan.spec.frame_rate is None else validation.validation_num_video_frames or 1
    batch = 2 if plan.spec.cost.guided_together and (validation.validation_guidance or 1) > 1 else 1
    timed = plan.flavour.task == "i2v" and plan.spec.cost.guided_together
    buckets = [
        Bucket(width, height, frames, batch, 0.0, prompt_length(plan, (width, height)), timed)
        for width, height in plan.sizes
    ]
    return sorted(buckets, key=_size, reverse=True)


def encoder_bytes(parts: Parts, config: RunConfig) -> tuple[float, float]:
    """Bytes of the VAE's and of the text encoders' weights."""
    vae = parts.vae_parameters * BYTES[vae_dtype(config.precision, config.caching)]
    quantised = quantised_bytes(config.precision.text_encoder_1_precision)
    return float(vae), parts.text_parameters * (quantised or BYTES[text_encoder_dtype(config.precision)])


Choice = tuple[RunConfig, Workload]
Apply = Callable[[RunConfig, Workload], Choice]


def set_keys(values: Mapping[str, Any], origin: str) -> Apply:
    """A change of some keys."""
    return lambda config, workload: (config.with_values(values, origin), workload)
