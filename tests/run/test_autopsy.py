"""What a failed run leaves behind, and the replay of its step from that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from simpletuner.annexes.fitting.ready import weigh_plan
from simpletuner.annexes.replay import autopsy
from simpletuner.config.sources import parse_arguments
from simpletuner.encoding.fill import write_entry
from simpletuner.encoding.read import CacheStore
from simpletuner.run.session import Session
from simpletuner.training import step
from tests.tools import processes
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
# Called with each noisy batch and its loss; it may raise, or change the loss in place.
LossHook = Callable[[Any, torch.Tensor], object]
# A run whose steps depend on random draws and on more than one micro-step.
RANDOM_RUN: dict[str, Any] = {
    "max_train_steps": 8,
    "checkpoint_step_interval": 2,
    "gradient_accumulation_steps": 2,
    "lora_dropout": 0.1,
    "caption_dropout_probability": 0.3,
}
TOKEN = "hf_abcdefghijklmnopqrstuvwx"
GPU_ERROR = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def hook_loss(monkeypatch: pytest.MonkeyPatch) -> Callable[[LossHook], None]:
    """Installs a hook that is called with every noisy batch and its loss."""
    compute = step.elementwise_loss

    def install(hook: LossHook) -> None:
        def compute_and_call(prediction: torch.Tensor, noisy: Any, config: Any) -> torch.Tensor:
            loss = compute(prediction, noisy, config)
            hook(noisy, loss)
            return loss

        monkeypatch.setattr(step, "elementwise_loss", compute_and_call)

    return install


def read_failure(workspace: Workspace) -> tuple[Path, dict[str, Any]]:
    """The folder of the only failure and its record."""
    (folder,) = workspace.path("output/failures").iterdir()
    return folder, json.loads((folder / "failure.json").read_text())


def read_output(workspace: Workspace) -> dict[Path, bytes]:
    paths = workspace.path("output").rglob("*")
    return {path: path.read_bytes() for path in paths if path.is_file()}


def overflow_latents(workspace: Workspace, name: str) -> Path:
    """Fill the cached latents of a picture with numbers that overflow; returns the cache folder."""
    assert workspace.run("cache", "fill") == 0
    with workspace.inside():
        listing = weigh_plan(parse_arguments([])).listing
        assert listing is not None
        (entry,) = [latent for latent in listing.latents if latent.sample.name == name]
        latents = CacheStore(entry.folder).read(entry.key.digest())["latents"]
        write_entry(entry, {"latents": torch.full_like(latents, 3e38)})
        return entry.folder.absolute()


def test_a_damaged_latent_is_named_and_its_step_fails_until_it_is_encoded_again(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(max_train_steps=8, checkpoint_step_interval=2)
    cache = overflow_latents(workspace, "p7.png")

    assert workspace.train("hub_model_id=someone/else", "learning_rate=2e-3") == 1

    folder, failure = read_failure(workspace)
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.endswith(str(folder.relative_to(workspace.folder)))
    assert "The first module whose output is not finite is " in message
    assert "pictures/p7.png" in failure["cause"]
    samples = [sample["name"] for batch in failure["batches"] for sample in batch["samples"]]
    assert "pictures/p7.png" in samples
    assert folder.name == f"step-{failure['step']}"
    assert [row["step"] for row in failure["metrics"]] == list(range(1, failure["step"]))
    assert "NonFiniteError" in (folder / "traceback.txt").read_text()
    assert json.loads((folder / "config.json").read_text())["learning_rate"] == 2e-3

    before = read_output(workspace)
    assert workspace.train("--replay", str(folder)) == 1
    output = capsys.readouterr().out
    assert "fails again, with the same cause" in output
    assert "was" not in output, "no setting has changed"
    assert read_output(workspace) == before

    for path in cache.rglob("*.safetensors*"):
        path.unlink()
    assert workspace.train("--replay", str(folder), "lora_dropout=0.2") == 0
    captured = capsys.readouterr()
    output = captured.out + captured.err
    start = output.index(f"Repeating step {failure['step']} from")
    assert start < output.index("does not fail this time.")
    assert "lora_dropout was 0.0 and is 0.2 now." in output


def test_a_replay_repeats_the_failed_step_bit_exactly(
    workspace: Workspace, hook_loss: Callable[[LossHook], None], capsys: Capture
) -> None:
    """The cause contains the loss to its last digit, so another loss would be another cause."""

    def fail(noisy: Any, loss: torch.Tensor) -> None:
        if noisy.place.global_step == 3 and noisy.place.micro_step == 1:
            raise RuntimeError(f"The loss of {noisy.batch.names} is {loss.tolist()!r} with {TOKEN}")

    hook_loss(fail)
    workspace.write_config(**RANDOM_RUN)
    text_without_cache = {key: value for key, value in DATASETS[1].items() if key != "cache_dir"}
    workspace.write_datasets([DATASETS[0], text_without_cache])
    assert workspace.train() == 1
    folder, failure = read_failure(workspace)
    before = read_output(workspace)
    capsys.readouterr()

    assert workspace.train("--replay", str(folder)) == 1

    assert failure["step"] == 4
    assert Path(failure["checkpoint"]).name == "checkpoint-3-rolling"
    output = capsys.readouterr().out
    assert "Repeating step 4 from checkpoint-3-rolling" in output
    assert "Step 4 fails again, with the same cause: RuntimeError: The loss of" in output
    assert "Encoding" not in output
    assert not any(TOKEN.encode() in path.read_bytes() for path in folder.iterdir())
    assert read_output(workspace) == before

    # Without that checkpoint, step 3 is repeated first, from the checkpoint of step 2.
    shutil.rmtree(workspace.path("output/checkpoint-3-rolling"))
    hook_loss(lambda noisy, loss: loss.detach().fill_(float("nan")))
    assert workspace.train("--replay", str(folder)) == 1
    assert "Step 3 fails already" in capsys.readouterr().out


def refuse_gpu_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal memory access, whatever reads a tensor or asks for the device fails."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise torch.AcceleratorError(f"{GPU_ERROR}\nSearch for it")

    for name in ("item", "tolist", "cpu", "numpy", "to", "__bool__", "__repr__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for name in set(torch.cuda.__all__) - {"AcceleratorError", "OutOfMemoryError"}:
        function = getattr(torch.cuda, name)
        if callable(function) and not isinstance(function, type):
            monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse()


def test_a_failure_is_recorded_even_when_every_gpu_call_fails(
    workspace: Workspace,
    hook_loss: Callable[[LossHook], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    def fail_in_step_3(noisy: Any, loss: torch.Tensor) -> None:
        if noisy.place.global_step >= 2:
            refuse_gpu_calls(monkeypatch)

    hook_loss(fail_in_step_3)

    assert workspace.train("hub_model_id=someone/else", "max_train_steps=8") == 1

    folder, failure = read_failure(workspace)
    assert failure["cause"] == f"AcceleratorError: {GPU_ERROR}"
    (batch,) = failure["batches"]
    assert all(sample["name"].startswith("pictures/") for sample in batch["samples"])
    assert [row["step"] for row in failure["metrics"]] == [1, 2]
    assert failure["facts"]["max_train_steps"] == 8
    assert failure["facts"]["device"] == "unknown"
    assert json.loads((folder / "config.json").read_text())["max_train_steps"] == 8
    assert "refuse_gpu_calls" in (folder / "traceback.txt").read_text()
    assert f"AcceleratorError: {GPU_ERROR}" in capsys.readouterr().err


def test_a_replay_runs_out_of_memory_like_the_failed_step(
    workspace: Workspace, hook_loss: Callable[[LossHook], None], capsys: Capture
) -> None:
    def fail_in_step_2(noisy: Any, loss: torch.Tensor) -> None:
        if noisy.place.global_step == 1:
            raise torch.OutOfMemoryError("Tried to allocate 12.34 GiB")

    hook_loss(fail_in_step_2)
    assert workspace.train() == 1
    folder, failure = read_failure(workspace)
    assert failure["cause"] == "Out of memory in step 2."
    assert "train_batch_size" in capsys.readouterr().err.splitlines()[-1]

    assert workspace.train("--replay", str(folder)) == 1

    assert "with the same cause: Out of memory" in capsys.readouterr().out


def test_a_picture_damaged_after_the_plan_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shutil.rmtree(workspace.path("output/cache"))
    open_session = Session.open

    def damage_and_open(*arguments: Any) -> Any:
        for path in workspace.path("datasets/pictures").glob("*.png"):
            path.write_bytes(path.read_bytes()[:100])
        return open_session(*arguments)

    monkeypatch.setattr(Session, "open", damage_and_open)

    assert workspace.train("vae_cache_ondemand=true") == 2

    folder, failure = read_failure(workspace)
    assert "datasets/pictures/p" in failure["cause"]
    assert str(folder.relative_to(workspace.folder)) in capsys.readouterr().err


def test_a_module_whose_output_is_not_finite_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    workspace.path("output/failures/step-1").mkdir(parents=True)
    open_session = Session.open

    def open_and_break(*arguments: Any) -> Any:
        session = open_session(*arguments)
        transformer = session.assembly.transformer
        layer = transformer.get_submodule("visual_transformer_blocks.1.feed_forward")
        layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        return session

    monkeypatch.setattr(Session, "open", open_and_break)

    assert workspace.train() == 1

    error = capsys.readouterr().err
    assert "output is not finite is visual_transformer_blocks.1.feed_forward." in error
    assert workspace.path("output/failures/step-1-2").is_dir(), "beside the earlier failure"


def test_one_process_replays_a_failed_step_of_two(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(max_train_steps=8, train_batch_size=1)
    overflow_latents(workspace, "p7.png")
    assert processes.train(workspace, 2) == [1, 1]
    folder, _ = read_failure(workspace)
    printed = processes.printed(workspace).strip()
    assert printed.endswith(str(folder.relative_to(workspace.folder)))
    capsys.readouterr()

    assert workspace.train("--replay", str(folder)) == 2
    assert "num_processes=1 train_batch_size=2" in capsys.readouterr().err

    advice = ("num_processes=1", "train_batch_size=2")
    assert workspace.train("--replay", str(folder), *advice) == 1
    output = capsys.readouterr().out
    assert "fails again" in output
    assert "pictures/p7.png" in output


def fail_in_second_process(rank: int, port: int) -> None:
    """`simpletuner train` as one of two processes, of which the second fails in step 2."""
    compute = step.elementwise_loss

    def compute_or_fail(prediction: torch.Tensor, noisy: Any, config: Any) -> torch.Tensor:
        if rank == 1 and noisy.place.global_step == 1:
            raise ValueError("only here")
        return compute(prediction, noisy, config)

    with patch.object(step, "elementwise_loss", compute_or_fail):
        processes.run_as(rank, 2, port, ["train"])


def test_a_failure_of_the_second_process_is_recorded(workspace: Workspace) -> None:
    port = processes.free_port()
    started = [workspace.fork(fail_in_second_process, rank, port) for rank in range(2)]

    codes = processes.finish(started)

    assert 0 not in codes
    folder, failure = read_failure(workspace)
    assert folder.name == "step-2-process-1"
    assert failure["cause"] == "ValueError: only here"
    (batch,) = failure["batches"]
    assert [sample["slot"] for sample in batch["samples"]] == [2, 3], "its half of four samples"
    assert "only here" in processes.printed(workspace)


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("learning_rte=1", 2),
        ("learning_rate=1e-3", 130),
    ],
)
def test_a_refused_or_interrupted_run_is_not_recorded_as_a_failure(
    workspace: Workspace, hook_loss: Callable[[LossHook], None], setting: str, code: int
) -> None:
    def interrupt(noisy: Any, loss: torch.Tensor) -> None:
        raise KeyboardInterrupt

    hook_loss(interrupt)

    assert workspace.train(setting) == code

    assert not workspace.path("output/failures").exists()


def test_an_error_while_recording_a_failure_does_not_hide_it(
    workspace: Workspace,
    hook_loss: Callable[[LossHook], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    def fail(noisy: Any, loss: torch.Tensor) -> None:
        raise ValueError("the first")

    hook_loss(fail)
    monkeypatch.setattr(autopsy, "describe_environment", lambda: 1 / 0)

    assert workspace.train() == 1

    assert "ValueError: the first" in capsys.readouterr().err
    assert not workspace.path("output/failures").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("{}", "is damaged"),
        ('{"step": 1', "is damaged"),
    ],
)
def test_a_folder_without_a_failure_is_refused(
    workspace: Workspace, capsys: Capture, content: str | None, expected: str
) -> None:
    folder = workspace.path("elsewhere")
    folder.mkdir()
    if content is not None:
        (folder / "failure.json").write_text(content)

    assert workspace.train("--replay", str(folder)) == 2

    (error,) = capsys.readouterr().err.strip().splitlines()
    assert expected in error
    assert "failed runs write it to <output_dir>/failures." in error


@pytest.mark.parametrize("mistake", ["output", "output/failures", "output/failures/step-3"])
def test_a_replay_of_a_nearby_folder_proposes_the_failure(
    workspace: Workspace, capsys: Capture, mistake: str
) -> None:
    failure = workspace.path("output/failures/step-4")
    failure.mkdir(parents=True)
    (failure / "failure.json").write_text("{}")

    assert workspace.train("--replay", str(workspace.path(mistake))) == 2

    assert f"{failure}?" in capsys.readouterr().err


def test_a_wrong_replay_folder_is_reported_before_torch_is_imported() -> None:
    code = "import sys; from simpletuner.cli.app import main; print(main(), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "train", "--replay", "no"]

    process = subprocess.run(command, capture_output=True, text=True)

    assert process.stdout == "2 False\n"
    assert process.stderr.count("no/failure.json") == 1
