"""The workload of a run: the parts of its model, its buckets, samples to encode, and previews.

The sizes of the parts come from local files, else from the published checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from simpletuner.budget import device
from simpletuner.budget.step_memory import StepModel
from simpletuner.config.precision import quantised_bytes, text_encoder_dtype, vae_dtype
from simpletuner.config.schema import RunConfig, ValidationConfig
from simpletuner.config.speed import compile_backend, uses_own_arithmetic
from simpletuner.config.types import Size
from simpletuner.data.sample import Sample
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.adapter_kinds import planned_adapters
from simpletuner.models.cost import (
    BYTES,
    NO_ADAPTERS,
    BatchShape,
    FamilyCost,
    Kernels,
    TransformerCost,
)
from simpletuner.models.lora_layers import Targets, weights_of
from simpletuner.models.source import ModelSource, encoder_weights
from simpletuner.models.spec import FamilySpec
from simpletuner.models.vae_cost import VaeCost, VaeLoad
from simpletuner.planning.entries import (
    Listing,
    evaluated,
    feature_kinds,
    latent_storage,
    prompts_with_sources,
)
from simpletuner.planning.plans import Plan, SamplePlan
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.rounding import ceil_div
from simpletuner.weights.files import Shape
from simpletuner.weights.part import Part

# Decoded pixels that wait for the VAE at a time: about WAITING_BYTES of `encoding.decoding`, which
# would import torch.
QUEUED_BYTES = 1e9


@dataclass(frozen=True)
class Bucket:
    """Training samples of one shape.

    Attributes:
        width, height, frames: size in pixels, and length in frames.
        batch: samples per micro-batch.
        share: share of this bucket in an epoch's micro-batches; of previews, how many of this shape
            a prompt has on average.
        text: text tokens of the longest prompt.
        timed: a first frame is the condition, so timesteps are per token.
        guided: of a preview, whether it is sampled both with and without the prompt.
    """

    width: int
    height: int
    frames: int
    batch: int
    share: float
    text: int
    timed: bool = False
    guided: bool = False

    @property
    def label(self) -> str:
        """Such as "768x512@61, batch 2"."""
        label = Size(self.width, self.height).of_frames(self.frames)
        return f"{label}, batch {self.batch}" if self.batch > 1 else label

    @property
    def clip(self) -> VaeLoad:
        """One sample, for the VAE."""
        return VaeLoad(1, self.frames, self.width, self.height)

    @property
    def pixels(self) -> int:
        return self.batch * self.frames * self.width * self.height


@dataclass(frozen=True)
class Workload:
    """The work of a run, apart from its settings.

    Attributes:
        buckets: training buckets, largest first.
        encoded: samples for the VAE to encode, by shape; empty if all latents are cached. Batch
            size and tiling depend on the settings.
        encodes_text: captions or prompts are missing from the cache.
        previews: sizes and frames of previews; empty without validation.
        waiting: maximum bytes of decoded pixels in the queue of the VAE.
        encoded_in_training: samples encoded during training, one at a time, by shape.
        encodes_features: features of techniques are missing from the cache.
        evaluated: samples of the evaluation loss, one at a time, by shape, largest first.
    """

    buckets: Sequence[Bucket]
    encoded: Sequence[VaeLoad]
    encodes_text: bool
    previews: Sequence[Bucket]
    waiting: float
    encoded_in_training: Sequence[VaeLoad] = ()
    encodes_features: bool = False
    evaluated: Sequence[Bucket] = ()

    def scaled(self, *, spec: FamilySpec, sides: float = 1.0, frames: float = 1.0) -> Workload:
        """The workload with smaller pictures or shorter clips, of sizes that the family supports.

        Previews keep their size unless the run has nothing else.
        """
        grid = max(64, spec.size_multiple)
        stride = spec.frame_stride

        def shrink_side(side: int) -> int:
            return max(grid, round(side * sides / grid) * grid)

        def shrink(bucket: Bucket) -> Bucket:
            return replace(
                bucket,
                width=shrink_side(bucket.width),
                height=shrink_side(bucket.height),
                # 4k + 1 frames, as the VAEs take them
                frames=round((bucket.frames - 1) * frames / stride) * stride + 1,
            )

        evaluated = [shrink(bucket) for bucket in self.evaluated]
        if self.buckets:
            buckets = [shrink(bucket) for bucket in self.buckets]
            return replace(self, buckets=buckets, evaluated=evaluated)
        previews = [shrink(preview) for preview in self.previews]
        return replace(self, previews=previews, evaluated=evaluated)

    def encoded_ahead(self) -> Workload:
        """The workload with all samples encoded before training."""
        encoded = [*self.encoded, *self.encoded_in_training]
        return replace(self, encoded=encoded, encoded_in_training=())

    def with_batch(self, batch: int) -> Workload:
        """The workload with micro-batches of at most `batch` samples."""
        buckets = [replace(bucket, batch=min(bucket.batch, batch)) for bucket in self.buckets]
        return replace(self, buckets=buckets)


def workload_of(plan: SamplePlan, listing: Listing | None) -> Workload:
    """The workload of a plan and its missing cache entries.

    Without a listing, all entries count as missing.
    """
    ahead, later = _to_encode(plan, listing)
    shapes = Counter((sample.geometry.size, sample.frames) for sample in ahead)
    encoded = []
    pixel_bytes = 0.0
    for (size, frames), count in shapes.items():
        encoded.append(VaeLoad(count, frames, *size))
        pixel_bytes += 3.0 * count * math.prod(size) * frames
    has_features = bool(feature_kinds(plan))
    return Workload(
        buckets=buckets_of(plan),
        encoded=encoded,
        encodes_text=listing is None or len(listing.texts.missing) > 0,
        previews=previews_of(plan),
        waiting=min(pixel_bytes, QUEUED_BYTES),
        encoded_in_training=list(
            {VaeLoad(1, sample.frames, *sample.geometry.size) for sample in later}
        ),
        encodes_features=has_features and (listing is None or len(listing.features.missing) > 0),
        evaluated=_evaluated_buckets(plan),
    )


def _evaluated_buckets(plan: SamplePlan) -> list[Bucket]:
    """The shapes of the samples of the evaluation loss, the largest first."""
    buckets = set()
    for dataset in evaluated(plan):
        for sample in dataset.samples:
            buckets.add(_bucket(plan, sample))
    return _largest_first(buckets)


def _to_encode(plan: SamplePlan, listing: Listing | None) -> tuple[list[Sample], list[Sample]]:
    """(samples encoded before training, samples encoded during training)."""
    if listing is not None:
        return (
            [entry.sample for entry in listing.ahead.missing],
            [entry.sample for entry in listing.encoded_in_training],
        )
    ahead: list[Sample] = []
    later: list[Sample] = []
    for dataset in plan.trained:
        samples = ahead if latent_storage(plan, dataset) == "ahead" else later
        samples += dataset.samples
    return ahead, later


def buckets_of(plan: SamplePlan) -> list[Bucket]:
    """Training buckets with their shares, the largest first."""
    counts: Counter[Bucket] = Counter()
    for dataset in plan.trained:
        for samples in dataset.buckets.values():
            # Samples of a bucket have one size and length. The last batch is padded, so it counts
            # in full.
            count = ceil_div(len(samples) * (dataset.repeats + 1), dataset.batch_size)
            counts[_bucket(plan, samples[0], dataset.batch_size)] += count
    return _largest_first(
        replace(bucket, share=count / counts.total()) for bucket, count in counts.items()
    )


def _bucket(plan: SamplePlan, sample: Sample, batch: int = 1) -> Bucket:
    """The bucket of a sample, without its share."""
    # The prompt of i2i includes the source picture.
    picture = sample.partner.geometry.size if sample.partner else None
    width, height = sample.geometry.size
    return Bucket(
        width=width,
        height=height,
        frames=sample.frames,
        batch=batch,
        share=0.0,
        text=prompt_length(plan, picture),
        timed=sample.is_i2v,
    )


def sampled_together(preview: Bucket, validation: ValidationConfig) -> Bucket:
    """A preview with the batch in which it is sampled."""
    if validation.validation_batched_guidance and preview.guided:
        return replace(preview, batch=2)  # with and without the prompt
    return preview


def _largest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    return sorted(buckets, key=lambda bucket: bucket.pixels, reverse=True)


def prompt_length(plan: SamplePlan, picture: tuple[int, int] | None) -> int:
    """Text tokens of the longest allowed prompt, including its source picture, if any."""
    cost = plan.spec.cost
    captions = plan.spec.captions
    if cost.padded_text:
        return cost.padded_text  # padded to a single length
    length = captions.length(plan.config.text)
    if picture and plan.flavour.task in captions.picture_tasks:
        length += cost.picture_tokens(*picture)
    return length


def previews_of(plan: SamplePlan) -> list[Bucket]:
    """Previews as buckets, the largest first."""
    if not plan.prompts:
        return []
    validation = plan.config.validation
    subjects = 0
    shapes: Counter[tuple[Size, bool]] = Counter()  # with and without guidance
    for prompt, sources in prompts_with_sources(plan):
        guidance = prompt.guidance or validation.validation_guidance or 1
        pictures = max(1, len(sources))
        subjects += pictures
        for size in prompt.sizes_among(plan.sizes):
            shapes[size, guidance > 1] += pictures
    frames = 1
    if plan.spec.frame_rate is not None:
        frames = validation.validation_num_video_frames or 1
    guided_together = plan.spec.cost.guided_together
    buckets = []
    for (size, is_guided), count in shapes.items():
        bucket = Bucket(
            width=size.width,
            height=size.height,
            frames=frames,
            # Some pipelines batch the two passes of guidance, others run them in turn.
            batch=2 if guided_together and is_guided else 1,
            share=count / subjects,
            text=prompt_length(plan, size),
            timed=plan.flavour.task == "i2v" and guided_together,
            guided=is_guided,
        )
        buckets.append(bucket)
    return _largest_first(buckets)


# The roles of each counted part of a checkpoint.
ROLES = {
    "transformer": ("transformer",),
    "VAE": ("vae",),
    "text encoders": ("text_encoder", "text_encoder_2"),
}


@dataclass(frozen=True)
class Parts:
    """The transformer, VAE and text encoders of a run.

    Attributes:
        transformer: cost of the transformer.
        targets: selection of the modules that get a LoRA.
        vae: cost of the VAE.
        text_parameters: parameters of all text encoders.
        text_dropped: parameters of the text encoders that are never moved to the device: the
            language head, and the vision tower without pictures in prompts.
        assumed: parts that are not on this machine, for which the published checkpoint's dimensions
            are used.
        techniques: enabled techniques, which may add memory and time to a step.
        trains: whether the run trains; otherwise it only renders previews.
        on_gpu: whether cuDNN is used.
        lora_bytes: bytes of the LoRA files that samples are rendered with at a time.
    """

    spec: FamilySpec
    transformer: TransformerCost
    targets: Targets
    vae: VaeCost
    text_parameters: int
    assumed: tuple[str, ...]
    techniques: tuple[TechniqueSpec, ...] = ()
    trains: bool = True
    lora_bytes: int = 0
    text_dropped: int = 0
    on_gpu: bool = False

    @property
    def cost(self) -> FamilyCost:
        return self.spec.cost

    @cached_property
    def _layers(self) -> dict[str, Shape]:
        """Shapes of the transformer's weights by layer."""
        return weights_of(self.transformer.shapes)

    def download_bytes(self, source: ModelSource) -> int:
        """Bytes to download, as the hub lists them.

        If the hub does not answer, two bytes are assumed for each published parameter.
        """
        parameters = {
            "transformer": self.transformer.parameters,
            "VAE": self.vae.parameters,
            "text encoders": self.text_parameters,
        }
        total = 0
        for name in self.assumed:
            sizes = [source[role].download_size() for role in ROLES[name] if role in source.parts]
            listed = [size for size in sizes if size is not None]
            if len(listed) == len(sizes):
                total += sum(listed)
            else:
                total += 2 * parameters[name]
        return total

    def with_densities(self, measured: Mapping[int, float]) -> Parts:
        """The parts with measured densities of block-sparse attention, by tokens of a sample."""
        assumed = self.transformer.density
        if assumed is None:
            return self

        def density(tokens: int) -> float:
            return measured.get(tokens, assumed(tokens))

        return replace(self, transformer=replace(self.transformer, density=density))

    def load(self, bucket: Bucket) -> BatchShape:
        """The micro-batch of a bucket, in tokens."""
        # pixels -> latent positions -> tokens
        frames, height, width = self.spec.latent_size(bucket.width, bucket.height, bucket.frames)
        patch = self.spec.patch_size
        return BatchShape(
            samples=bucket.batch,
            frames=frames,
            height=height // patch,
            width=width // patch,
            text=bucket.text,
            timed_tokens=bucket.timed,
        )

    def encoder_bytes(self, config: RunConfig) -> tuple[float, float]:
        """(bytes of the VAE's weights, bytes of all text encoders' weights)."""
        vae = self.vae.parameters * BYTES[vae_dtype(config.precision, config.caching)]
        number_bytes = quantised_bytes(config.precision.text_encoder_1_precision)
        number_bytes = number_bytes or BYTES[text_encoder_dtype(config.precision)]
        return float(vae), self.text_parameters * number_bytes

    def model(self, config: RunConfig) -> StepModel:
        """The transformer under some settings."""
        adapters = NO_ADAPTERS
        if config.model.model_type == "lora" and self.trains:
            adapters = planned_adapters(config.lora, self.spec, self.targets, self._layers)
        return StepModel(self.transformer, config, adapters, self.trains, self.techniques)


def kernels_on(config: RunConfig, spec: FamilySpec, torch_type: str) -> Kernels:
    """The kernels of the blocks. Compilation counts only where its effect is measured."""
    is_cuda = torch_type == "cuda"
    # A GPU that this machine's torch cannot use is in another machine.
    elsewhere = is_cuda and not device.torch_uses_gpus()
    backend = compile_backend(config.speed, config.launch, torch_type, elsewhere=elsewhere)
    if spec.fast_blocks:
        is_measured = uses_own_arithmetic(config.speed)
    else:
        # Sana Video: on a CPU, the gradients of compiled blocks fail their check.
        is_measured = is_cuda and config.speed.speed == "auto"
    return Kernels(compiled=backend == "inductor" and is_measured, tile_lists=is_cuda)


def parts_of(plan: SamplePlan, torch_type: str) -> Parts:
    """The parts of a plan on a type of device: from local files, else as published.

    Raises:
        ConfigError: nothing says how large the transformer is.
    """
    cost = plan.spec.cost
    source = plan.source
    kernels = kernels_on(plan.config, plan.spec, torch_type)
    assumed = []
    settings = source["transformer"].read_config()
    shapes = source["transformer"].weight_shapes()
    if settings is None or not shapes:
        assumed.append("transformer")
        transformer = _published(plan, kernels)
    else:
        transformer = cost.transformer(settings, shapes, kernels)
        if not source["transformer"].fits_bf16(transformer.fits_bf16):
            transformer = replace(transformer, modulation=frozenset())
    vae = source["vae"].read_config()
    if vae is None:
        assumed.append("VAE")
    encoders = [source[role] for role in ROLES["text encoders"] if role in source.parts]
    counts = [sum(map(math.prod, encoder_weights(part).values())) for part in encoders]
    if not all(counts):
        assumed.append("text encoders")
    return Parts(
        spec=plan.spec,
        transformer=transformer,
        targets=plan.lora_targets if isinstance(plan, Plan) else [],
        vae=replace(
            cost.vae,
            settings=vae or {},
            parameters=count_parameters(source["vae"]) or cost.vae.parameters,
        ),
        # The published number covers all encoders, so a missing encoder replaces the whole sum.
        text_parameters=sum(counts) if all(counts) else cost.text_parameters,
        assumed=tuple(assumed),
        techniques=plan.techniques,
        trains=bool(plan.trained),
        lora_bytes=plan.lora_bytes,
        text_dropped=_dropped_parameters(plan, encoders if all(counts) else ()),
        on_gpu=torch_type == "cuda",
    )


def _published(plan: SamplePlan, kernels: Kernels) -> TransformerCost:
    """The cost of the published transformer.

    Raises:
        ConfigError: the family is not measured yet, and only the weights of the checkpoint would
            say how large it is.
    """
    spec = plan.spec
    part = plan.source["transformer"]
    if not spec.cost.published_shapes(plan.flavour.name):
        message = (
            f"{part.location!r} is not on this machine, and {spec.title} is not measured yet, so "
            f"its size is unknown. Download it with `hf download {part.location}`, or measure the "
            f"family with `python -m benchmarks.cost_table --only {spec.name}`."
        )
        raise ConfigError([Problem(part.key, message)])
    return spec.cost.of_flavour(plan.flavour.name, kernels, **part.overrides)


def _dropped_parameters(plan: SamplePlan, encoders: Sequence[Part]) -> int:
    """Parameters of the text encoders that are dropped after loading.

    Without local encoders, the published numbers.
    """
    needs_vision = plan.flavour.task in plan.spec.captions.picture_tasks
    cost = plan.spec.cost
    if not encoders:
        return cost.head_parameters + (0 if needs_vision else cost.vision_parameters)
    dropped = ("lm_head.",) if needs_vision else ("lm_head.", "visual.")
    count = 0
    for part in encoders:
        for name, shape in part.weight_shapes().items():
            if name.removeprefix("model.").startswith(dropped):
                count += math.prod(shape)
    return count


def count_parameters(part: Part) -> int:
    """Number of parameters in the local files of a part; 0 without files, or if unknown."""
    return sum(math.prod(shape) for shape in part.weight_shapes().values())
