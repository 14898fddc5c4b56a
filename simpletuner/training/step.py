"""One optimizer step, in reading order.

    batch ─► noise ─► noisy batch ─► predict ─► loss ─► backward ─► clip ─► update ─► report

Events between steps (previews, a restart, another technique) cannot change a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simpletuner.config.rates import learning_rate_at
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import elementwise_loss, per_sample
from simpletuner.diffusion.seeds import step_seed
from simpletuner.reporting.events import StepReport
from simpletuner.training import guard
from simpletuner.training.loader import BatchLoader
from simpletuner.training.losses import Losses, MicroLoss, StepNumbers, loss_divisor
from simpletuner.training.meter import StepMeter, batch_work
from simpletuner.training.settings import StepSettings
from simpletuner.training.state import Assembly
from simpletuner.training.update import RATE_RATIO, SEED


def optimizer_step(assembly: Assembly, loader: BatchLoader, global_step: int) -> StepReport:
    """Train on `accumulation` micro-batches and update the weights once.

    All samples of the step have equal weight.

    Args:
        loader: an endless iterator of batches, on the CPU.
        global_step: number of earlier optimizer steps.

    Raises:
        NonFiniteError: a loss or the gradient is NaN or infinite; the weights are unchanged, unless
            gradients are released.
    """
    settings = assembly.settings
    meter = StepMeter(global_step + 1, assembly.streamer)
    passes_before = assembly.passes
    learning_rate = _prepare_groups(assembly.optimizer, settings, global_step)

    losses = Losses()
    for micro_step in range(settings.accumulation):
        batch = _next_batch(assembly, loader, meter)
        # The backward pass waits for all processes; the watch names this step if one is missing.
        with assembly.world.exchanging(f"Step {global_step + 1}"), assembly.updating():
            run_micro_step(assembly, batch, global_step, micro_step, losses)

    # Clipped separately, so that the gradient of a technique's module does not shrink that of the
    # model.
    parts = [assembly.parameters.values(), assembly.module_parameters.values()]
    numbers = _measure_gradients(assembly, parts, losses)
    sizes = [size for by_name in numbers.sizes for size in by_name.values()]
    # All processes have the same sizes and decide alike: a loss that is not finite makes the sizes
    # NaN (`_backward`). The device updates the weights while the host exchanges records.
    if all(map(math.isfinite, sizes)):
        _update_weights(assembly, parts, numbers)

    with assembly.world.exchanging(f"Step {global_step + 1}"):
        gathered = assembly.data_parallel.gather(numbers.losses)
    global_losses = Losses.merged(gathered)
    guard.stop_if_gradients_not_finite(
        assembly.all_parameters, assembly.scaler, assembly.release, sizes, global_losses.names
    )
    assembly.is_halfway = True  # until the loop counts the step, also without an update
    # After the check, which needs the scale of this step.
    assembly.scaler.update()
    # None instead of zeros frees the memory for previews, and lets optimizers skip modules without
    # a loss.
    assembly.optimizer.zero_grad(set_to_none=True)

    metrics = global_losses.means(assembly.techniques)
    metrics |= numbers.sizes[0]  # of the model's gradient
    metrics |= {"learning_rate": learning_rate, "epoch": loader.epoch}
    return meter.report(
        loader,
        global_losses,
        metrics,
        tiles=numbers.tiles,
        passes=assembly.passes - passes_before,
    )


def _prepare_groups(optimizer: Optimizer, settings: StepSettings, global_step: int) -> float:
    """Set the rate of each parameter group and the seed of stochastic rounding; returns the rate.

    The rate is a function of the step, unlike torch's schedulers, whose state must be saved.
    """
    learning_rate = learning_rate_at(
        global_step, settings.optimizer, settings.learning_rate, settings.total_steps
    )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(RATE_RATIO, 1.0)
        # By step, so that a resumed run rounds like an uninterrupted one.
        if SEED in group:
            group[SEED] = step_seed(settings.seed, global_step, 0, 0, "rounding")
    return learning_rate


def _next_batch(assembly: Assembly, loader: BatchLoader, meter: StepMeter) -> Batch:
    """The next batch, on the device; measures the wait and counts the batch's FLOPs."""
    with meter.waiting_for_data.running():
        batch = next(loader).to(assembly.accelerator.device, non_blocking=True)
    work = batch_work(batch, assembly.adapter.spec, assembly.sample_flops)
    # The processes of a sample share its work.
    meter.count(batch, work.times(1 / assembly.processes_per_sample))
    return batch


def _measure_gradients(
    assembly: Assembly, parts: Sequence[Iterable[nn.Parameter]], losses: Losses
) -> StepNumbers:
    """Finish the gradients, and read their sizes together with the losses.

    This is the step's only synchronisation, unless gradients are released.
    """
    # Clipping and the logged norm need unscaled gradients.
    assembly.scaler.unscale_(assembly.optimizer)
    guard.equalise_samples(chain(*parts), losses.counts)
    sizes = [guard.gradient_size(parameters, assembly.settings.optimizer) for parameters in parts]
    if assembly.release is not None:
        sizes[0] = assembly.release.gradient_size()
    return StepNumbers(losses, sizes, assembly.take_tiles()).to_host()


def _update_weights(
    assembly: Assembly, parts: Sequence[Iterable[nn.Parameter]], numbers: StepNumbers
) -> None:
    """Clip the gradients and update the weights."""
    for parameters, limited in zip(parts, numbers.sizes, strict=True):
        guard.clip_gradients(parameters, assembly.settings.optimizer, limited)
    assembly.is_halfway = True  # until the loop counts the step
    if assembly.release is None:
        assembly.scaler.step(assembly.optimizer)
    else:  # the backward pass has already updated the model
        assembly.release.finish()


def run_micro_step(
    assembly: Assembly, batch: Batch, global_step: int, micro_step: int, losses: Losses
) -> None:
    """Forward and backward pass of one micro-batch, then the extra passes of techniques.

    Each backward pass frees its graph before the next forward pass, and all of them accumulate
    into the same gradients.
    """
    # Processes exchange the summed gradients once, in the last backward pass of the step. For the
    # transformer, that may be an extra pass.
    is_last = micro_step == assembly.settings.accumulation - 1
    with ExitStack() as acting:
        for technique in assembly.techniques:
            acting.enter_context(technique.acting(batch))
        noisy = noisy_batch(assembly, batch, global_step, micro_step)
        extra_passes = [
            extra_pass
            for technique in assembly.techniques
            for extra_pass in technique.extra_passes(noisy)
        ]
        assert not (extra_passes and assembly.release), "a released gradient must be the whole one"
        with assembly.exchange_only(transformer=is_last and not extra_passes, modules=is_last):
            loss = micro_loss(assembly, noisy, losses)
            if assembly.release is not None:  # the backward pass will update the weights
                guard.stop_if_losses_not_finite([loss.item()], losses.names)
            _backward(assembly, loss, losses)

    for index, extra_pass in enumerate(extra_passes):
        is_last_pass = is_last and index == len(extra_passes) - 1
        with assembly.exchange_only(transformer=is_last_pass, modules=False):
            extra_losses = extra_pass(partial(predict, assembly))
            loss = torch.stack([*extra_losses.values()]).sum()
            losses[-1].log(extra_losses)
            # Added to the total, which `_backward` checks.
            losses[-1].total = losses[-1].total + loss.detach()
            _backward(assembly, loss, losses)


def _backward(assembly: Assembly, loss: Tensor, losses: Losses) -> None:
    """Accumulate the gradients of a loss.

    If the micro-step's total is not finite, all gradients become NaN, so that every process sees it
    in the synchronised gradients.
    """
    # 1 if the total is finite: 0 * inf and 0 * NaN are NaN. An `if` would synchronise.
    one_or_nan = 1 + 0 * losses[-1].total
    share = one_or_nan * loss / loss_divisor(losses.counts, assembly.settings.accumulation)
    assembly.accelerator.backward(assembly.scaler.scale(share))


def noisy_batch(assembly: Assembly, batch: Batch, global_step: int, micro_step: int) -> NoisyBatch:
    """The noisy batch to train on at this position in the run."""
    # The adapter first: techniques must see the clean first frame of i2v, and its weight of 0 in
    # the loss.
    noisy = assembly.adapter.prepare(assembly.noise.add(batch, global_step, micro_step))
    for technique in assembly.techniques:
        noisy = technique.before_forward(noisy, partial(predict_now, assembly))
    return noisy


def micro_loss(assembly: Assembly, noisy: NoisyBatch, losses: Losses) -> Tensor:
    """The scalar loss of one micro-batch, ready for backward; its parts are added to `losses`."""
    with assembly.hidden.open():  # extra losses may read the hidden states of this forward pass
        prediction = predict(assembly, noisy)
        extra_losses = [
            technique.extra_losses(noisy, prediction) for technique in assembly.techniques
        ]

    loss = elementwise_loss(prediction, noisy, assembly.settings.loss)  # B C F H W
    micro = MicroLoss(noisy.batch.names, noisy.timesteps, per_sample(loss.detach()))
    for technique in assembly.techniques:
        loss = technique.weigh(noisy, prediction, loss)
    total = per_sample(loss).mean()
    micro.diffusion = total.detach()

    for by_name in extra_losses:
        micro.log(by_name)
        for value in by_name.values():
            total = total + value
    for technique in assembly.techniques:
        micro.log(technique.metrics())
    micro.total = total.detach()
    losses.append(micro)
    return total


def predict(assembly: Assembly, noisy: NoisyBatch) -> Tensor:
    """A forward pass, counted in `assembly.passes`."""
    assembly.passes += 1
    return assembly.adapter.predict(assembly.transformer, noisy)


def predict_now(assembly: Assembly, noisy: NoisyBatch) -> Tensor:
    """The model's current prediction without gradients and dropout, for techniques."""
    # Dropout would draw from the generator that `NoiseSource.add` seeded for the training pass.
    assembly.transformer.eval()
    with torch.no_grad():
        prediction = predict(assembly, noisy)
    assembly.transformer.train()
    return prediction
