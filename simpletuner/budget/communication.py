"""Estimates the communication between the processes of a run.

Ring algorithms of N processes are bandwidth-optimal: each process sends (N - 1) / N of a tensor in
an all-gather or reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan, Journal of
Parallel and Distributed Computing 69(2), 2009).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from simpletuner.budget.device import Device
from simpletuner.budget.step_memory import StepModel
from simpletuner.config.launch import LaunchConfig
from simpletuner.models.cost import BYTES
from simpletuner.planning.techniques.spec import TechniqueCost


@dataclass(frozen=True)
class Sent:
    """Bytes that each process sends in an optimizer step.

    Attributes:
        reduced: all-reduce of gradients (DDP), including adapters and techniques with FSDP2.
        gathered: all-gather of weights (FSDP2).
        scattered: reduce-scatter of gradients (FSDP2, full fine-tunes).
        exchanged: all-to-all of tokens and heads (sequence parallelism), which blocks wait for.
    """

    reduced: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0
    exchanged: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


def sent_bytes(model: StepModel, added: TechniqueCost) -> Sent:
    """Bytes that each process sends in an optimizer step, without the all-to-alls of blocks.

    DDP communicates once per optimizer step, FSDP2 in each micro-step.

    Args:
        added: cost that techniques add to a micro-step.
    """
    if not model.trains:
        return Sent()
    launch = model.config.launch
    # Part of a tensor that a process of a ring sends in an all-gather or a reduce-scatter; an
    # all-reduce is both, hence twice.
    share = (launch.num_processes - 1) / launch.num_processes
    weights = sum(model.unquantised_blocks) + model.rest_bytes
    # Modules of techniques and adapters are whole in every process, whatever shards the model.
    reduced: float = added.parameters * BYTES["fp32"]
    if not model.is_full:
        reduced += model.trained_weights
    elif not model.is_sharded:
        reduced += weights
    if not model.is_sharded:
        return Sent(reduced=2 * share * reduced)

    micro_steps = model.config.schedule.gradient_accumulation_steps
    backward = 1 + added.passes
    # Weights are gathered for each forward pass, and again for the backward pass unless they were
    # kept.
    gathered = backward + added.forwards
    if launch.fsdp_reshard_after_forward:
        gathered += backward
    # FSDP2 reduces the gradients of a full fine-tune in every backward pass.
    scattered = backward if model.is_full else 0.0
    return Sent(
        reduced=2 * share * reduced,
        gathered=share * weights * gathered * micro_steps,
        scattered=share * weights * scattered * micro_steps,
    )


def exchange_seconds(sent: Sent, device: Device, launch: LaunchConfig) -> float:
    """Seconds of communication in an optimizer step, without the all-to-alls of blocks.

    Those count in the time of micro-steps. Processes of a machine communicate over NVLink or the
    host's bus, machines over one network card each.
    """
    slowest = device.rates.link
    if launch.num_machines > 1:
        network = launch.network_gbit / 8 * 1e9  # bytes/s
        slowest = min(slowest, network)
    return (sent.total - sent.exchanged) / slowest
