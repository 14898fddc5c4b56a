"""The workload of a run: the buckets it trains on, what is encoded, and the previews."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simpletuner.config.load import RunConfig
from simpletuner.data.sample import Sample
from simpletuner.models.cost import VaeLoad
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.build import Plan


@dataclass(frozen=True)
class Bucket:
    """Training samples of one shape.

    Attributes:
        width, height, frames: size in pixels, and length in frames.
        batch: samples per micro-batch.
        share: share of this bucket in an epoch's micro-batches.
        text: text tokens of the longest prompt.
        timed: a first frame is given, so that tokens have their own timesteps.
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
class Workload:
    """What a run computes.

    Attributes:
        buckets: training buckets, the largest first.
        encoded: samples that the VAE has to encode, by shape; empty if all latents are cached. Batch size and tiling
            depend on the settings.
        encodes_text: captions or prompts are missing from the cache.
        encodes_features: features of techniques are.
        previews: sizes and frames of previews; empty without validation.
        waiting: most bytes of decoded pixels that wait for the VAE.
        encoded_in_training: samples that training encodes, one at a time, by shape.
    """

    buckets: Sequence[Bucket]
    encoded: Sequence[VaeLoad]
    encodes_text: bool
    previews: Sequence[Bucket]
    waiting: float
    encoded_in_training: Sequence[VaeLoad] = ()
    encodes_features: bool = False

    def scaled(self, *, spec: FamilySpec, sides: float = 1.0, frames: float = 1.0) -> Workload:
        """The workload with smaller pictures or shorter clips, of sizes that the family supports.

        Previews keep their size unless they are all there is.
        """
        grid, stride = max(64, spec.size_multiple), spec.frame_stride

        def shrink(bucket: Bucket) -> Bucket:
            width, height = (max(grid, round(side * sides / grid) * grid) for side in (bucket.width, bucket.height))
            shorter = round((bucket.frames - 1) * frames / stride) * stride + 1
            return replace(bucket, width=width, height=height, frames=shorter)

        if not self.buckets:
            return replace(self, previews=[shrink(preview) for preview in self.previews])
        return replace(self, buckets=[shrink(bucket) for bucket in self.buckets])

    def encoded_ahead(self) -> Workload:
        """The workload with all samples encoded before training."""
        return replace(self, encoded=[*self.encoded, *self.encoded_in_training], encoded_in_training=())

    def with_batch(self, batch: int) -> Workload:
        """The workload with micro-batches of at most `batch` samples."""
        return replace(self, buckets=[replace(each, batch=min(each.batch, batch)) for each in self.buckets])


Choice = tuple[RunConfig, Workload]  # settings and their workload


def workload_of(plan: Plan, missing_texts: int, missing: Sequence[Sample], later: Sequence[Sample] = ()) -> Workload:
    """The workload of a plan.

    Args:
        missing_texts, missing: captions and samples that are encoded before training.
        later: samples that training encodes.
    """
    shapes = Counter((each.geometry.size, each.frames) for each in missing)
    encoded = [VaeLoad(count, frames, *size) for (size, frames), count in shapes.items()]
    one_by_one = {VaeLoad(1, each.frames, *each.geometry.size) for each in later}
    pixels = sum(3.0 * each.geometry.size[0] * each.geometry.size[1] * each.frames for each in missing)
    return Workload(
        buckets=buckets_of(plan),
        encoded=encoded,
        encodes_text=missing_texts > 0,
        previews=previews_of(plan),
        waiting=min(pixels, 1e9),
        encoded_in_training=list(one_by_one),
    )


def buckets_of(plan: Plan) -> list[Bucket]:
    """Training buckets with their shares, the largest first."""
    counts: Counter[Bucket] = Counter()
    for dataset in plan.trained:
        for samples in dataset.buckets.values():
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
    """Text tokens of the longest allowed prompt, including a source picture if the prompt holds it."""
    cost = plan.spec.cost
    held = picture if picture and plan.flavour.task in plan.spec.words.hold_picture else None
    longest = plan.spec.words.length(plan.config.text)
    return cost.padded_text or longest + (cost.picture_tokens(*held) if held else 0)


def previews_of(plan: Plan) -> list[Bucket]:
    """Previews as buckets, the largest first."""
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
