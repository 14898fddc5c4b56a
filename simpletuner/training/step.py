"""One optimizer step, readable from top to bottom.

    batch ─► noise ─► noisy batch ─► predict ─► loss ─► backward ─► clip ─► update ─► report

Every random number of a step is derived from (seed, global step, micro-step, sample). Nothing that happens between
steps (previews, a restart, another technique) can change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor, nn

from simpletuner.config.schema import OptimizerConfig
from simpletuner.data.loader import BatchLoader
from simpletuner.diffusion.batch import Batch, NoisyBatch, upload
from simpletuner.diffusion.flow import choose_shift, make_noisy, sample_noise, sample_sigmas, slowed_sigmas
from simpletuner.diffusion.loss import elementwise_loss, per_sample
from simpletuner.diffusion.seeds import Place, seed_device, step_seed
from simpletuner.distributed.sharding import from_all, local, local_parts
from simpletuner.distributed.world import World
from simpletuner.training.finite import stop_if_gradients_not_finite, stop_if_losses_not_finite
from simpletuner.training.meter import StepMeter, tokens_of
from simpletuner.training.optimizers import RATE_RATIO, SEED, learning_rate_at
from simpletuner.training.state import Assembly

Item = TypeVar("Item")


def gradient_size(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> dict[str, Tensor]:
    """The size that `grad_clip_method` limits, on the device: `grad_absmax` (value) or `grad_norm` (norm).

    torch's `clip_grad_norm_` would scale by a tensor on the device even where nothing is clipped; here the size is read
    together with the losses, for clipping, for the log and for the check that it is finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return {}
    parts = local_parts(gradients)
    if config.grad_clip_method == "value":
        return {"grad_absmax": from_all(torch.stack(torch._foreach_norm(parts, float("inf"))), gradients).max()}
    norms = torch.stack([part.float() for part in torch._foreach_norm(parts, 2.0)])
    return {"grad_norm": from_all(norms, gradients).norm(2)}


def clip_gradients(parameters: Iterable[nn.Parameter], config: OptimizerConfig, sizes: Mapping[str, float]) -> None:
    """Clip in place to `max_grad_norm`; 0 clips nothing.

    Args:
        sizes: what `gradient_size` gave for these parameters, as numbers.
    """
    limit = config.max_grad_norm
    if not any(0 < limit < size for size in sizes.values()):
        return
    parts = local_parts([parameter.grad for parameter in parameters if parameter.grad is not None])
    if "grad_norm" in sizes:
        torch._foreach_mul_(parts, limit / sizes["grad_norm"])
    else:
        torch._foreach_clamp_min_(parts, -limit)
        torch._foreach_clamp_max_(parts, limit)


@dataclass(frozen=True)
class StepReport:
    """The outcome of an optimizer step.

    Attributes:
        step: number of this step, counted from 1.
        epoch: epoch of its last sample, counted from 1.
        epochs_done: epochs completed by the end of this step.
        metrics: losses, learning rate and gradient size by their logged names.
        samples: (timestep, loss) of each sample.
        seconds: duration of the step.
        data_seconds: the part of it spent waiting for data.
        weights_seconds: the part of it spent waiting for streamed weights; None if none are streamed.
        flops: model FLOPs of these samples; None if the family's cost is unknown.
        shapes: latent shape of each micro-batch, smallest first.
        passes: forward passes, with those of techniques; steps of equal shapes and passes take comparable time.
    """

    step: int
    epoch: int
    epochs_done: int
    metrics: dict[str, float]
    samples: list[tuple[float, float]]
    seconds: float
    data_seconds: float
    weights_seconds: float | None = None
    flops: float | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    passes: int = 0


@dataclass
class _Losses:
    """Losses of the micro-steps. They stay on the device, so that the host waits for it only once a step."""

    total: list[Tensor] = field(default_factory=list)
    diffusion: list[Tensor] = field(default_factory=list)  # the total without what techniques add to it
    per_sample: list[Tensor] = field(default_factory=list)
    timesteps: list[Tensor] = field(default_factory=list)
    extra: list[dict[str, Tensor]] = field(default_factory=list)  # by names that not all micro-steps have
    names: list[list[str]] = field(default_factory=list)

    def log(self, extra: Mapping[str, Tensor]) -> None:
        """Log scalars of the last micro-step, which may be on the CPU."""
        device = self.per_sample[-1].device
        self.extra[-1].update({name: upload(value.detach(), device) for name, value in extra.items()})

    @property
    def counts(self) -> list[int]:
        """Samples of each micro-batch."""
        return [len(names) for names in self.names]

    def on_host(self, more: Sequence[Tensor] = ()) -> tuple[HostLosses, Iterator[float]]:
        """Copies the losses and extra scalars to the host in one transfer."""
        scalars = [*self.total, *self.diffusion, *(value for extra in self.extra for value in extra.values())]
        flat = [torch.stack(scalars), *self.per_sample, *self.timesteps, *(each[None] for each in more)]
        numbers = iter(torch.cat(flat).tolist())
        total, diffusion = (list(islice(numbers, len(self.total))) for _ in range(2))
        extra = [dict(zip(each, islice(numbers, len(each)), strict=True)) for each in self.extra]
        samples, timesteps = ([list(islice(numbers, count)) for count in self.counts] for _ in range(2))
        return HostLosses(total, diffusion, samples, timesteps, extra, self.names), numbers


@dataclass(frozen=True)
class HostLosses:
    """What `_Losses` holds, as numbers: one item per micro-step."""

    total: list[float]
    diffusion: list[float]
    per_sample: list[list[float]]
    timesteps: list[list[float]]
    extra: list[dict[str, float]]
    names: list[list[str]]

    @classmethod
    def merged(cls, parts: Sequence[HostLosses]) -> HostLosses:
        """The losses of all processes as those of one, with samples in the order of the global batch.

        Raises:
            NonFiniteError: naming the files of the micro-batches of one process.
        """
        files = [names for part in parts for names in part.names]
        stop_if_losses_not_finite([loss for part in parts for loss in part.total], files)
        return cls(
            total=_averaged(part.total for part in parts),
            diffusion=_averaged(part.diffusion for part in parts),
            per_sample=[_joined(micro) for micro in zip(*(part.per_sample for part in parts), strict=True)],
            timesteps=[_joined(micro) for micro in zip(*(part.timesteps for part in parts), strict=True)],
            extra=[
                {name: fmean(values) for name, values in _by_name(micro).items()}
                for micro in zip(*(part.extra for part in parts), strict=True)
            ],
            names=[_joined(micro) for micro in zip(*(part.names for part in parts), strict=True)],
        )


def _joined(lists: Iterable[list[Item]]) -> list[Item]:
    return [item for each in lists for item in each]


def _averaged(columns: Iterable[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*columns, strict=True)]


def _by_name(extras: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values under each name, which need not be in all of these."""
    found: dict[str, list[float]] = {}
    for name, value in (pair for extra in extras for pair in extra.items()):
        found.setdefault(name, []).append(value)
    return found


def optimizer_step(assembly: Assembly, loader: BatchLoader, global_step: int) -> StepReport:
    """Train on `accumulation` micro-batches and update the weights once. All their samples have the same weight.

    Args:
        loader: an endless supply of batches, on the CPU.
        global_step: optimizer steps done before this one.

    Raises:
        NonFiniteError: a loss or the gradient is NaN or infinite; the weights are unchanged, unless gradients are
            released.
    """
    settings, accelerator = assembly.settings, assembly.accelerator
    meter, passes = StepMeter(assembly), assembly.passes
    learning_rate = _prepare_groups(assembly, global_step)
    losses = _Losses()
    for micro_step in range(settings.accumulation):
        with meter.waiting_for_data():
            batch = next(loader).to(accelerator.device, non_blocking=True)
        meter.count(batch)
        with assembly.world.exchanging(f"Step {global_step + 1}"), assembly.updating():
            run_micro_step(assembly, batch, global_step, micro_step, losses)

    assembly.scaler.unscale_(assembly.optimizer)
    every = assembly.parameters | assembly.module_parameters
    equalise_samples(every.values(), losses.counts)
    # Clipped apart: the gradient of a technique's module must not shrink that of the model.
    sizes = [
        gradient_size(each.values(), settings.optimizer) for each in (assembly.parameters, assembly.module_parameters)
    ]
    measured = [size for each in sizes for size in each.values()]
    read, numbers = losses.on_host(measured)  # without released gradients, the step's only wait for the device
    gradient, own = ({name: next(numbers) for name in each} for each in sizes)
    if assembly.release is not None:
        gradient = assembly.release.read_size(losses.names)
    found = (*gradient.values(), *own.values())
    # All processes have the same sizes, which a loss that is not finite makes NaN (`_backward`): they decide alike, and
    # the device updates the weights while the host exchanges records.
    if all(map(math.isfinite, found)):
        _update(assembly, gradient, own)
    with assembly.world.exchanging(f"Step {global_step + 1}"):
        gathered = assembly.world.gather(read)
    everyone = HostLosses.merged(gathered)
    is_halfway = assembly.release is not None
    stop_if_gradients_not_finite(found, every, assembly.scaler, everyone.names, is_halfway=is_halfway)
    assembly.scaler.update()
    assembly.optimizer.zero_grad(set_to_none=True)
    return StepReport(
        step=global_step + 1,
        epoch=loader.epoch,
        epochs_done=loader.epochs_done,
        metrics={**_means(assembly, everyone), **gradient, "learning_rate": learning_rate, "epoch": loader.epoch},
        samples=list(zip(_joined(everyone.timesteps), _joined(everyone.per_sample), strict=True)),
        seconds=meter.seconds,  # last: reading the losses has waited for the device
        data_seconds=meter.data_seconds,
        weights_seconds=meter.read_weights_seconds(),
        flops=meter.flops,
        shapes=meter.shapes,
        passes=assembly.passes - passes,
    )


def _update(assembly: Assembly, gradient: Mapping[str, float], own: Mapping[str, float]) -> None:
    """Clip the gradients and update the weights.

    Args:
        gradient, own: sizes of the model's gradient and of those of techniques' modules, as numbers.
    """
    config = assembly.settings.optimizer
    clip_gradients(assembly.module_parameters.values(), config, own)
    if assembly.release is not None:
        assembly.release.finish()
        return
    clip_gradients(assembly.parameters.values(), config, gradient)
    assembly.scaler.step(assembly.optimizer)


def _prepare_groups(assembly: Assembly, global_step: int) -> float:
    """Set the rate of every parameter group, and the seed of those that round at random; returns the step's rate."""
    settings = assembly.settings
    learning_rate = learning_rate_at(global_step, settings.optimizer, settings.base_learning_rate, settings.total_steps)
    for group in assembly.optimizer.param_groups:
        group["lr"] = learning_rate * group.get(RATE_RATIO, 1.0)
        if SEED in group:
            group[SEED] = step_seed(settings.seed, global_step, 0, 0, "rounding")
    return learning_rate


def loss_divisor(counts: Sequence[int], accumulation: int) -> float:
    """The divisor for the loss of the last micro-batch; `accumulation` if it has as many samples as the first one.

    The number of samples in the window is unknown before its last batch, so this assumes batches like the first;
    `equalise_samples` corrects the sum afterwards.
    """
    return accumulation * counts[0] / counts[-1]


def equalise_samples(parameters: Iterable[nn.Parameter], counts: Sequence[int]) -> None:
    """Rescale gradients summed with `loss_divisor` to those of the mean over all samples."""
    factor = len(counts) * counts[0] / sum(counts)
    if factor != 1:
        torch._foreach_mul_([local(each.grad) for each in parameters if each.grad is not None], factor)


def rehearse_micro_step(assembly: Assembly, batch: Batch, global_step: int = 0, micro_step: int = 0) -> HostLosses:
    """Forward and backward of one micro-batch as at a place in the run; the caller clears the gradients."""
    losses = _Losses()
    assembly.transformer.train()
    run_micro_step(assembly, batch.to(assembly.accelerator.device), global_step, micro_step, losses)
    return losses.on_host()[0]


def run_micro_step(assembly: Assembly, batch: Batch, global_step: int, micro_step: int, losses: _Losses) -> None:
    """Forward and backward of one micro-batch, then of the passes that techniques add, one graph at a time."""
    last = micro_step == assembly.settings.accumulation - 1  # only then do processes exchange their gradients
    with ExitStack() as acting:
        for technique in assembly.techniques:
            acting.enter_context(technique.acting(batch))
        noisy = noisy_batch(assembly, batch, global_step, micro_step)
        extras = [run for technique in assembly.techniques for run in technique.extra_passes(noisy)]
        assert not (extras and assembly.release), "a released gradient must be the whole one"
        with exchange_only(assembly, transformer=last and not extras, modules=last):
            loss = micro_loss(assembly, noisy, losses)
            if assembly.release is not None:  # the backward pass will update the weights
                stop_if_losses_not_finite([loss.item()], losses.names)
            _backward(assembly, loss, losses)
    for index, run in enumerate(extras):
        with exchange_only(assembly, transformer=last and index == len(extras) - 1, modules=False):
            added = run(partial(predict, assembly))
            losses.log(added)
            for loss in added.values():
                losses.total[-1] = losses.total[-1] + loss.detach()
            _backward(assembly, torch.stack(list(added.values())).sum(), losses)


@contextmanager
def exchange_only(assembly: Assembly, *, transformer: bool, modules: bool) -> Iterator[None]:
    """Let processes exchange the accumulated gradients in the backward pass of this context, or only accumulate."""
    with ExitStack() as stack:
        for module in [assembly.transformer] * (not transformer) + assembly.wrapped_modules * (not modules):
            stack.enter_context(assembly.accelerator.no_sync(module))
        yield


def _backward(assembly: Assembly, loss: Tensor, losses: _Losses) -> None:
    """Add the gradients of a loss; NaN if the total is not finite, which every process then sees in its gradients."""
    one = 1 + 0 * losses.total[-1]
    share = one * loss / loss_divisor(losses.counts, assembly.settings.accumulation)
    assembly.accelerator.backward(assembly.scaler.scale(share))


def noisy_batch(assembly: Assembly, batch: Batch, global_step: int, micro_step: int) -> NoisyBatch:
    """What the model is trained on at this place in the run."""
    noisy = assembly.adapter.prepare(add_noise(assembly, batch, global_step, micro_step))
    for technique in assembly.techniques:
        noisy = technique.before_forward(noisy, partial(predict_now, assembly))
    return noisy


def micro_loss(assembly: Assembly, noisy: NoisyBatch, losses: _Losses) -> Tensor:
    """The scalar loss of one micro-batch, ready for backward."""
    with assembly.hidden.open():  # extra losses may read the hidden states of this forward pass
        prediction = predict(assembly, noisy)
        extras = [technique.extra_losses(noisy, prediction) for technique in assembly.techniques]

    loss = elementwise_loss(prediction, noisy, assembly.settings.loss)  # B C F H W
    losses.per_sample.append(per_sample(loss.detach()))  # logged as train_loss: before techniques weigh it
    losses.timesteps.append(noisy.timesteps)
    losses.names.append(noisy.batch.names)
    losses.extra.append({})
    for technique in assembly.techniques:
        loss = technique.weigh(noisy, prediction, loss)
    total = per_sample(loss).mean()
    losses.diffusion.append(total.detach())
    for extra in extras:
        losses.log(extra)
        for value in extra.values():
            total = total + value
    for technique in assembly.techniques:
        losses.log(technique.metrics())
    losses.total.append(total.detach())
    return total


def predict(assembly: Assembly, noisy: NoisyBatch) -> Tensor:
    """A forward pass, which is counted."""
    assembly.passes += 1
    return assembly.adapter.predict(assembly.transformer, noisy)


def predict_now(assembly: Assembly, noisy: NoisyBatch) -> Tensor:
    """The model's current prediction without gradients and dropout, for techniques."""
    assembly.transformer.eval()
    with torch.no_grad():
        prediction = predict(assembly, noisy)
    assembly.transformer.train()
    return prediction


def add_noise(assembly: Assembly, batch: Batch, global_step: int, micro_step: int) -> NoisyBatch:
    """Draw sigmas and noise for this place in the run, and seed the device's generator for dropout."""
    settings = assembly.settings
    place = place_of(assembly, len(batch.names), global_step, micro_step)
    seed_device(batch.latents.device, place.forward_seed)
    shift = choose_shift(
        settings.flow, tokens_of(assembly, batch), assembly.adapter.spec.auto_shift,
        shift_is_explicit=settings.shift_is_explicit,
    )  # fmt: skip
    sigmas = sample_sigmas(place, settings.flow, shift, settings.timestep_offsets.get(batch.dataset_id, 0.0))
    noise = batch.noise if batch.noise is not None and batch.place == place else _noise(batch, place)
    noisy = make_noisy(
        batch,
        sigmas,
        noise,
        input_perturbation=settings.loss.input_perturbation_at(global_step),
        noise_offset=settings.loss.noise_offset,
        noise_offset_probability=settings.loss.noise_offset_probability,
        levels=slowed_sigmas(place, sigmas, settings.flow.mixflow_gamma) if settings.flow.mixflow_enabled else None,
        place=place,
    )
    return replace(noisy, host_sigmas=tuple(sigmas.tolist()))


def with_noise(assembly: Assembly, batch: Batch, number: int) -> Batch:
    """The batch with its noise as `add_noise` would draw it, which takes long: to be done ahead, in the background.

    Args:
        number: micro-batches of the run before this one.
    """
    place = place_of(assembly, len(batch.names), *divmod(number, assembly.settings.accumulation))
    return replace(batch, noise=_noise(batch, place), place=place)


def _noise(batch: Batch, place: Place) -> Tensor:
    return sample_noise(batch.latents, place.generators("noise"))


def place_of(assembly: Assembly, count: int, global_step: int, micro_step: int) -> Place:
    """Where in the run a micro-batch of `count` samples is."""
    # With shared noise every process draws what it would draw alone.
    world = World() if assembly.settings.shared_noise else assembly.world
    return Place(assembly.settings.seed, global_step, micro_step, world.slots(count), world.size * count)


def _means(assembly: Assembly, losses: HostLosses) -> dict[str, float]:
    counts = torch.tensor([len(names) for names in losses.names], dtype=torch.float32)
    shares = counts / counts.mean()  # all 1 if the batches are of one size
    means = {
        "train_loss": torch.tensor(_joined(losses.per_sample)).mean().item(),
        "optimization_loss": (torch.tensor(losses.total) * shares).mean().item(),
    }
    if any(losses.extra):
        means["diffusion_loss"] = (torch.tensor(losses.diffusion) * shares).mean().item()
    means |= {name: torch.tensor(values).mean().item() for name, values in _by_name(losses.extra).items()}
    for technique in assembly.techniques:
        means |= technique.summary(means)
    return means
