"""Several devices: memory of a device and of the host, and the choices of `offload: auto`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from simpletuner.annexes.fitting.fit import check_fit, check_sharded_lora, choose, smallest_change
from simpletuner.annexes.fitting.ready import check_devices
from simpletuner.budget.budget import Budget
from simpletuner.budget.communication import sent_bytes
from simpletuner.budget.device import HOST_BASE
from simpletuner.budget.workload import Bucket
from simpletuner.planning.techniques.spec import TechniqueCost
from tests.annexes.test_fit import LEANEST, budget, gpu
from tests.budget.test_device import LISTED, fake_smi
from tests.tools.reports import found_by
from tests.tools.workspace import Workspace

STREAMED = {"enable_group_offload": True, "group_offload_use_stream": True}
FULL = {"model_type": "full"}


def peak(chosen: Budget, name: str) -> Any:
    return next(phase for phase in chosen.phases if phase.name.startswith(name))


def test_ddp_needs_the_memory_of_one_process_per_device() -> None:
    single = budget(gpu(80))

    group = budget(gpu(80), num_processes=8)

    assert peak(group, "loading").device == peak(single, "loading").device
    # DDP keeps the gradients in buckets, from the first block of the backward pass to the last.
    more = peak(group, "training").device - peak(single, "training").device
    assert 0 < more < group.model.bucket_bytes
    assert (peak(single, "training").host, peak(group, "training").host) == (
        HOST_BASE,
        8 * HOST_BASE,
    )
    assert peak(group, "loading").passing == 8 * peak(single, "loading").passing
    assert group.step_seconds == single.step_seconds, "gradients of a LoRA are sent meanwhile"


@pytest.mark.parametrize(("machines", "local"), [(1, 8), (2, 4)])
def test_processes_of_a_machine_share_streamed_weights(machines: int, local: int) -> None:
    single = budget(gpu(80), **STREAMED)
    group = budget(gpu(80), **STREAMED, num_processes=8, num_machines=machines)

    streamed = peak(single, "training").host - HOST_BASE

    assert streamed > 4e9
    assert peak(group, "training").host == pytest.approx(local * HOST_BASE + streamed)
    assert peak(group, "saving").host - peak(group, "training").host == pytest.approx(
        peak(single, "saving").host - peak(single, "training").host
    ), "one process saves"


def test_shards_shrink_with_the_number_of_processes() -> None:
    budgets = [
        budget(gpu(80), **FULL, fsdp_enable=True, num_processes=count) for count in (1, 2, 4)
    ]
    peaks = [peak(sharded, "training").device for sharded in budgets]

    _, halves, quarters = (sharded.steps[0].memory for sharded in budgets)

    assert peaks[0] == peak(budget(gpu(80), **FULL), "training").device, (
        "one process has nothing to shard"
    )
    assert halves.trained == 2 * quarters.trained
    assert halves.gradients == 2 * quarters.gradients
    assert peaks[1] - peaks[2] == pytest.approx(quarters.trained + quarters.gradients)


def test_weights_are_in_host_memory_once() -> None:
    """Blocks until FSDP2 splits them, text encoders while they are loaded; otherwise a few blocks
    of each process.
    """
    single = peak(budget(gpu(80)), "loading")
    assert single.passing < single.device / 5

    sharded = peak(budget(gpu(80), **FULL, fsdp_enable=True, num_processes=8), "loading")
    blocks = sum(budget(gpu(80), **FULL).parts.transformer.block_bytes("bf16", quantised=0.0))
    assert sharded.host == 8 * HOST_BASE + blocks
    assert sharded.passing == 8 * single.passing

    texts = [
        peak(budget(gpu(80), encodes_text=True, num_processes=count), "encoding")
        for count in (1, 8)
    ]
    assert texts[0].passing == texts[1].passing


def test_slow_link_between_machines_limits_the_step() -> None:
    far = budget(gpu(80), **FULL, fsdp_enable=True, num_processes=8, num_machines=8)

    assert far.step_seconds == max(far.steps[0].cost.seconds, far.sent.total / 12.5e9)
    assert far.sent == sent_bytes(far.model, TechniqueCost())


def test_sequence_parallel_processes_hold_and_compute_a_share() -> None:
    separate = budget(gpu(80), num_processes=4, sequence_parallel_size=1)
    parallel = budget(gpu(80), num_processes=4, sequence_parallel_size=4)
    separate_step = separate.steps[0]
    parallel_step = parallel.steps[0]

    held = (
        2 * parallel_step.load.samples * parallel_step.load.tokens * parallel_step.model.cost.hidden
    )
    assert [
        activation.held for activation in parallel_step.model.activations(parallel_step.load)[:2]
    ] == [
        held,
        held / 4,
    ]
    assert parallel_step.cost.model == pytest.approx(separate_step.cost.model / 4)
    assert separate_step.exchanged == 0

    # A block exchanges q, k, v and its output: four tensors in the forward pass, in the backward
    # pass, and in the recomputation of checkpointed blocks. Of a process's quarter, it keeps a
    # quarter and sends three.
    passes = 2 + sum(parallel_step.model.checkpointed) / parallel_step.model.cost.large
    share = held / 4
    sent_bytes_of_share = share * 3 / 4
    assert parallel.sent.exchanged == pytest.approx(
        parallel_step.model.cost.large * 4 * passes * sent_bytes_of_share
    )
    assert parallel_step.cost.seconds == pytest.approx(
        separate_step.cost.seconds / 4 + parallel_step.exchanged / separate.device.rates.link,
        rel=0.01,
    )


def test_sequence_parallelism_is_suggested_for_long_clips() -> None:
    clip = Bucket(1280, 768, 241, 1, 1.0, 256)

    pro = partial(budget, gpu(24), clip, "t2v-pro-sft-10s-hd", speed="auto", **LEANEST)

    assert [str(change) for change in smallest_change(pro(num_processes=8))][-1] == (
        "sequence_parallel_size 8, with fewer samples a step"
    )
    assert pro(num_processes=8, sequence_parallel_size=8, speed_keep_attention=False).fits
    for settings in ({}, {"num_processes": 8, "lora_dropout": 0.1}):
        assert "sequence_parallel_size" not in str(smallest_change(pro(**settings))), (
            "nobody to share with, or refused"
        )


def test_auto_trains_a_lora_with_ddp_while_it_fits() -> None:
    """Rank 16 on q, k and v of 34 self- and 32 cross-attentions, 1792 wide: 22.7 MB of bf16, 1.5
    times of which go.
    """
    chosen = choose(budget(gpu(80), num_processes=4))
    assert not chosen.config.launch.fsdp_enable
    assert chosen.decisions[0].startswith(
        "DDP: it fits every process, which sends 34.1 MB a step, while FSDP2"
    )

    streamed = choose(budget(gpu(8), num_processes=4))
    assert streamed.config.offload.enable_group_offload
    assert "DDP: " in streamed.decisions[0]

    lean = choose(budget(gpu(3.5), num_processes=4))
    assert lean.config.precision.base_model_precision == "int8-quanto", (
        "where FSDP2 does not fit either"
    )
    assert not lean.config.launch.fsdp_enable


@pytest.mark.parametrize(("size", "settings"), [(20, FULL), (8, {"enable_group_offload": False})])
def test_auto_shards_what_fits_no_other_way(size: float, settings: dict[str, Any]) -> None:
    chosen = choose(budget(gpu(size), num_processes=8, **settings))

    assert chosen.config.launch.is_sharded
    assert chosen.fits
    assert chosen.decisions[0].startswith(
        "fsdp_enable true: each process keeps a share of the weights, to fit"
    )
    assert not choose(
        budget(gpu(size), num_processes=8, fsdp_enable=False, **settings)
    ).config.launch.fsdp_enable
    assert not choose(budget(gpu(size), **settings)).config.launch.fsdp_enable


def test_a_full_fine_tune_that_fits_is_not_sharded() -> None:
    chosen = choose(budget(gpu(80), num_processes=8, **FULL))

    assert not chosen.config.launch.fsdp_enable
    assert (
        chosen.decisions[0]
        == f"DDP: it fits every process, which sends {chosen.sent.total / 1e9:.1f} GB a step"
    )


def test_sharding_is_suggested_for_a_full_fine_tune() -> None:
    (problem,) = found_by(check_fit, budget(gpu(24), num_processes=8, **FULL))

    assert "This would fit: fsdp_enable true." in problem.message
    assert "fsdp_enable" not in found_by(check_fit, budget(gpu(8), num_processes=8))[0].message, (
        "a LoRA streams"
    )


def test_sharding_a_lora_needlessly_is_warned_about() -> None:
    (warning,) = found_by(check_sharded_lora, budget(gpu(80), num_processes=4, fsdp_enable=True))
    assert not warning.fatal
    assert "DDP fits too, and each process sends 34.1 MB a step instead of " in warning.message

    (warning,) = found_by(check_sharded_lora, budget(gpu(8), num_processes=4, fsdp_enable=True))
    assert warning.message.startswith("DDP, streamed fits too, ")
    assert warning.remedy == {"fsdp_enable": False, **STREAMED}
    assert (
        found_by(check_sharded_lora, budget(gpu(80), num_processes=4, fsdp_enable=True, **FULL))
        == []
    )
    assert found_by(check_sharded_lora, budget(gpu(80), num_processes=4)) == []


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-bb"])
def test_each_process_needs_a_device(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    assert found_by(check_devices, 64) == [], "processes on the CPU are no matter of devices"

    fake_smi(tmp_path, monkeypatch, f"echo '{LISTED}'")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    count, words = (1, "1 GPU") if visible == "GPU-bb" else (2, "2 GPUs")
    assert found_by(check_devices, count) == []

    (problem,) = found_by(check_devices, 3)
    assert str(problem).startswith(
        f"num_processes: 3 processes need as many GPUs, but this machine has {words}."
    )

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert found_by(check_devices, 3) == [], "a launcher may have shown each process its own"


def test_plan_for_several_devices_shows_steps_previews_and_traffic(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    command = (
        "plan",
        "--devices=4",
        "--machines=2",
        "--device-memory=80",
        "num_train_epochs=1",
        "max_train_steps=0",
    )
    workspace.write_config(pretrained_model_name_or_path=None, lr_scale=True, learning_rate=1e-4)

    assert workspace.run(*command) == 0
    output = capsys.readouterr().out
    for line in (
        "  length    2 steps of 8 samples",
        "  rate      0.0008, which is 0.0001 scaled to the samples of a step",
        "  4 processes on 2 machines, one per device, DDP",
    ):
        assert line in output.splitlines(), output

    seconds = {}
    previews = ("validation_disable=false", "validation_disable_unconditional=false")
    for devices in (1, 2, 4):
        assert (
            workspace.run(*command, "--machines=1", f"--devices={devices}", "--json", *previews)
            == 0
        )
        seconds[devices] = json.loads(capsys.readouterr().out)["seconds"]["previews"]
    assert [seconds[1] / duration for duration in seconds.values()] == pytest.approx([1, 2, 2]), (
        "of two prompts each"
    )

    assert workspace.run(*command, "--json") == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    assert (processes["count"], processes["machines"], processes["way"]) == (4, 2, "DDP")
    assert processes["sent"]["reduced"] > 0 == processes["sent"]["gathered"]
