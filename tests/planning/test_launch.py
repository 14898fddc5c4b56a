"""Rules of several processes and of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.data.schedule import Origin
from simpletuner.distributed.world import World
from simpletuner.errors import Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.planning.checks import check_config, check_sequence
from simpletuner.planning.environment import as_launched, may_shard
from simpletuner.planning.plans import Model, make_sampler
from tests.tools.reports import found_by

SHARDED = {"num_processes": 4, "fsdp_enable": True}
EXCLUDED: list[tuple[dict[str, Any], str]] = [
    ({"base_model_precision": "int8-quanto"}, "base_model_precision int8-quanto"),
    ({"enable_model_cpu_offload": True}, "enable_model_cpu_offload"),
    ({"lora_type": "lokr"}, "lora_type lokr"),
    *(
        ({"optimizer": name, "model_type": "full"}, f"optimizer '{name}'")
        for name in (
            "prodigy",
            "muon",
            "optimi-stableadamw",
            "ao-adamw8bit",
            "bnb-adamw8bit",
            "bnb-adamw",
        )
    ),
    (
        {"model_type": "full", "mixed_precision": "fp16", "optimizer": "adamw"},
        "mixed_precision fp16",
    ),
    ({"use_dora": True, "lora_format": "comfyui"}, "lora_format comfyui"),
]


def config(**settings: Any) -> Any:
    values = {"model_type": "lora", "model_family": "kandinsky5-video", **settings}
    return resolve([Layer("config.json", list(values.items()))], Problems())


def problems_of(**settings: Any) -> tuple[list[str], list[str]]:
    """Errors and warnings; packages that are not installed do not count."""
    problems = check_config(config(**settings))
    problems = [problem for problem in problems if "not installed" not in problem.message]
    errors = [str(problem) for problem in problems if problem.fatal]
    warnings = [str(problem) for problem in problems if not problem.fatal]
    return errors, warnings


@pytest.mark.parametrize(
    "settings",
    [
        {"num_processes": 4},
        {"num_processes": 4, "num_machines": 2},
        SHARDED,
        {**SHARDED, "model_type": "full", "optimizer": "adamw"},
        {
            **SHARDED,
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": False,
            "fsdp_cpu_ram_efficient_loading": True,
        },
        {**SHARDED, "lora_init_type": "pissa", "mixed_precision": "no"},
        {**SHARDED, "optimizer": "muon", "learning_rate": 3e-4},  # every process has all of a LoRA
        {"num_processes": 4, "enable_group_offload": True, "base_model_precision": "int8-quanto"},
    ],
)
def test_valid_launch_settings_are_accepted(settings: dict[str, Any]) -> None:
    assert problems_of(**settings) == ([], [])


@pytest.mark.parametrize(("restarts", "checkpoint"), [("0", "checkpoint-8"), ("1", "latest")])
def test_processes_restarted_by_torchrun_do_not_start_their_branch_again(
    monkeypatch: pytest.MonkeyPatch, restarts: str, checkpoint: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "TORCHELASTIC_RESTART_COUNT": restarts}.items():
        monkeypatch.setenv(name, value)
    launched = as_launched(config(resume_from_checkpoint="checkpoint-8"), Problems())

    assert launched.run.resume_from_checkpoint == checkpoint


@pytest.mark.parametrize(("processes", "allowed"), [(1, "2"), (5, "4 or 6")])
def test_machines_must_have_equally_many_processes(processes: int, allowed: str) -> None:
    (error,), _ = problems_of(num_processes=processes, num_machines=2)
    assert error.startswith(
        f"num_processes: {processes} processes cannot be shared equally by num_machines 2; "
    )
    assert error.endswith(f"all machines: {allowed}.")


@pytest.mark.parametrize(
    ("settings", "excluded"), EXCLUDED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_settings_that_fsdp_excludes_are_refused(settings: dict[str, Any], excluded: str) -> None:
    (error,), _ = problems_of(**SHARDED, **settings)
    errors_with_ddp, _ = problems_of(num_processes=4, **settings)

    assert error.startswith(f"fsdp_enable: cannot be combined with {excluded}: ")
    assert errors_with_ddp == []
    assert not may_shard(config(num_processes=4, **settings))


ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tread_config": ROUTES}, "cannot be combined with tread_config: "),
        ({"lora_dropout": 0.1}, "cannot be combined with lora_dropout: "),
        ({"speed": "reference"}, "2 needs speed auto: "),
    ],
)
def test_settings_that_sequence_parallelism_excludes_are_refused(
    settings: dict[str, Any], error: str
) -> None:
    (message,), _ = problems_of(num_processes=4, sequence_parallel_size=2, **settings)
    errors_without_it, _ = problems_of(num_processes=4, **settings)

    assert message.startswith(f"sequence_parallel_size: {error}")
    assert errors_without_it == []


@pytest.mark.parametrize(
    ("flavour", "processes", "machines", "size", "error"),
    [
        ("t2v-lite-sft-5s", 8, 1, 4, None),
        ("t2v-pro-sft-10s-hd", 8, 1, 8, None),
        (
            "t2v-lite-sft-5s",
            8,
            1,
            8,
            "8 must divide the 28 heads of the model and the 8 processes of each machine: "
            "use 1, 2, 4.",
        ),
        (
            "t2v-pro-sft-10s-hd",
            8,
            2,
            8,
            "8 must divide the 32 heads of the model and the 4 processes of each machine: "
            "use 1, 2, 4.",
        ),
        (
            "t2v-pro-sft-10s-hd",
            1,
            1,
            2,
            "2 must divide the 32 heads of the model and the 1 process of each machine: use 1.",
        ),
        (
            "2b-480p",
            2,
            1,
            2,
            "2: a block of Sana Video needs all tokens of a sample together; use 1.",
        ),
    ],
)
def test_sequence_parallel_size_must_divide_heads_and_machines(
    flavour: str, processes: int, machines: int, size: int, error: str | None
) -> None:
    family = FAMILIES["sanavideo" if flavour == "2b-480p" else "kandinsky5-video"]
    launch = {"num_processes": processes, "num_machines": machines, "sequence_parallel_size": size}
    settled = config(model_family=family.name, model_flavour=flavour, **launch)
    chosen = family.flavour(flavour)
    source = ModelSource.from_settings(family, chosen, settled.flat)
    model = Model(config=settled, spec=family, flavour=chosen, source=source)

    assert list(map(str, found_by(check_sequence, model))) == (
        [f"sequence_parallel_size: {error}"] if error else []
    )


def test_processes_of_a_sequence_parallel_group_get_the_same_samples() -> None:
    settled = config(num_processes=4, sequence_parallel_size=2)
    samplers = [make_sampler(settled, [], 0, Origin(), World(rank, 4)) for rank in range(4)]

    assert [sampler.world.place for sampler in samplers] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert make_sampler(settled, [], 0, Origin()).world.size == settled.launch.data_processes == 2


def test_fsdp_is_possible_only_where_the_rules_allow_it() -> None:
    assert may_shard(config(num_processes=2))
    assert not may_shard(config())
    assert not may_shard(config(num_processes=2, enable_group_offload=True))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"fsdp_enable": True}, "fsdp_enable: has no effect: one process has nothing to shard."),
        ({**SHARDED, "fsdp_version": 1}, "fsdp_version: '1' is deprecated"),
        (
            {**SHARDED, "fsdp_auto_wrap_policy": "NO_WRAP"},
            "fsdp_auto_wrap_policy: 'NO_WRAP' is treated as",
        ),
    ],
)
def test_harmless_launch_settings_are_only_warnings(settings: dict[str, Any], key: str) -> None:
    errors, (warning,) = problems_of(**settings)
    assert errors == []
    assert warning.startswith(key)
