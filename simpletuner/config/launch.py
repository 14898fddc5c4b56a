"""Keys for launching processes, sharding (FSDP2) and torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator

from simpletuner.config.option import Group, common, option, unless, when
from simpletuner.config.precision import PLAIN_PRECISIONS
from simpletuner.config.types import Flag, Integer, Number, Text, parse_text

# May be written as a number.
FsdpVersion = Annotated[Literal["2", "1"], BeforeValidator(parse_text)]
sharded = partial(option, requires=when("fsdp_enable"))


class LaunchConfig(Group):
    """Launch and compile"""

    num_processes: Integer = option(1, ge=1)
    """Number of processes on all machines, one per device; a multiple of num_machines."""
    num_machines: Integer = option(1, ge=1)
    """Number of machines; ACCELERATE_EXTRA_ARGS sets the rank of this machine and the address of
    the first."""
    network_gbit: Number = option(100, gt=0, le=100_000, requires=unless(num_machines=1))
    """Network between machines in Gbit/s, for the plan's estimate."""
    start_timeout: Integer = option(600, ge=1, requires=unless(num_processes=1))
    """Seconds that the start waits for all processes; then it fails and lists missing ranks."""
    dynamo_backend: Literal["no", "inductor", "aot_eager", "cudagraphs"] | None = common(
        None, default_note="inductor on CUDA with speed auto, else no"
    )
    """torch.compile backend for the repeated blocks; no disables compilation."""
    dynamo_mode: Text | None = common(None)
    """Mode of inductor: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs."""
    dynamo_fullgraph: Flag = option(False)
    """Stop with an error where the compiler would have to split a block."""
    dynamo_dynamic: Flag = option(False)
    """Compile with dynamic shapes for every size, not only for the token count."""
    fsdp_enable: Flag = option(
        False,
        requires=unless(num_processes=1, because="one process has nothing to shard"),
        excludes=(
            unless(
                base_model_precision=PLAIN_PRECISIONS, because="quantised weights cannot be sharded"
            ),
            when(
                "enable_model_cpu_offload",
                because="it moves the whole transformer, and each process has a shard",
            ),
            when(
                lora_type=("lokr", "loha", "lycoris"),
                because=(
                    "one process checks its result with predictions, which need all. Use DDP, "
                    "without fsdp_enable"
                ),
            )
            & when(model_type="lora"),
            when(mixed_precision="fp16", because="processes would overflow apart. Use bf16")
            & when(model_type="full"),
            when(lora_format="comfyui", because="its DoRA takes whole weights. Use diffusers")
            & when("use_dora"),
        ),
    )
    """Shard the model across processes (FSDP2) instead of replicating it (DDP), for runs that do
    not fit otherwise: docs/FSDP2.md."""
    fsdp_version: FsdpVersion = sharded("2", remarks={"1": "is deprecated and treated as 2"})
    """1 is deprecated and treated as 2."""
    fsdp_state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = sharded(
        "SHARDED_STATE_DICT"
    )
    """SHARDED_STATE_DICT: every process saves its shard; FULL_STATE_DICT: rank 0 saves all."""
    fsdp_reshard_after_forward: Flag = sharded(True)
    """Free a block's gathered weights after the forward pass and gather them again for the backward
    pass; false sends less but needs memory for all weights."""
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = (
        sharded(
            "TRANSFORMER_BASED_WRAP",
            remarks=dict.fromkeys(
                ("SIZE_BASED_WRAP", "NO_WRAP"), "is treated as TRANSFORMER_BASED_WRAP: same results"
            ),
        )
    )
    """Weights are gathered block by block; other values are treated as this one."""
    sequence_parallel_size: Integer = option(
        1,
        ge=1,
        excludes=(
            when(
                "tread_config", because="each process would drop different tokens. Use one of them"
            ),
            when(
                "lora_dropout",
                because="all processes of a group would use the same dropout mask. Use 0",
            ),
        ),
    )
    """Processes that share the tokens of a sample (Ulysses), for long clips. It must divide the
    processes of each machine and the model's attention heads."""

    @property
    def data_processes(self) -> int:
        """Number of data-parallel processes or sequence-parallel groups."""
        # `check_sequence` refuses a remainder.
        return max(self.num_processes // self.sequence_parallel_size, 1)

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded, which needs more than one process."""
        return self.fsdp_enable and self.num_processes > 1

    @property
    def sharers(self) -> int:
        """Number of processes that the weights are sharded across."""
        return self.num_processes if self.is_sharded else 1

    @property
    def local_processes(self) -> int:
        """Processes on each machine."""
        # `check_launch` refuses a remainder.
        return self.num_processes // self.num_machines
