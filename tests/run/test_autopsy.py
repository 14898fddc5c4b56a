"""What a failed run leaves behind, and the repetition of its step from that."""

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

SETTINGS: dict[str, Any] = {
    "max_train_steps": 8,
    "checkpoint_step_interval": 2,
    "gradient_accumulation_steps": 2,
    "lora_dropout": 0.1,
    "caption_dropout_probability": 0.3,
}
TOKEN = "hf_abcdefghijklmnopqrstuvwx"
Loss = Callable[[torch.Tensor, Any, Any], torch.Tensor]


@pytest.fixture
def failing(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Any, torch.Tensor], None]], None]:
    """Lets a function see each noisy batch and its loss, to fail as it likes."""
    original: Loss = step.elementwise_loss

    def install(look: Callable[[Any, torch.Tensor], None]) -> None:
        def loss(prediction: torch.Tensor, noisy: Any, config: Any) -> torch.Tensor:
            value = original(prediction, noisy, config)
            look(noisy, value)
            return value

        monkeypatch.setattr(step, "elementwise_loss", loss)

    return install


def only_failure(workspace: Workspace) -> tuple[Path, dict[str, Any]]:
    (folder,) = workspace.path("output/failures").iterdir()
    return folder, json.loads((folder / "failure.json").read_text())


def files_of(workspace: Workspace) -> dict[str, bytes]:
    output = workspace.path("output")
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file()
    }


def poison(workspace: Workspace, name: str) -> Path:
    """Write numbers that overflow into the cached latents of a picture; returns the folder of the
    cache.
    """
    assert workspace.run("cache", "fill") == 0
    with workspace.inside():
        listing = weigh_plan(parse_arguments([])).listing
        assert listing is not None
        (entry,) = [latent for latent in listing.latents if latent.sample.name == name]
        latents = CacheStore(entry.folder).read(entry.key.digest())["latents"]
        write_entry(entry, {"latents": torch.full_like(latents, 3e38)})
        return entry.folder.absolute()


def test_a_damaged_latent_is_named_and_its_step_fails_until_it_is_encoded_again(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(max_train_steps=8, checkpoint_step_interval=2)
    cache = poison(workspace, "p7.png")
    assert workspace.train("hub_model_id=someone/else", "learning_rate=2e-3") == 1
    folder, failure = only_failure(workspace)
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.endswith(str(folder.relative_to(workspace.folder)))
    assert "The first module whose output is not finite is " in message
    assert "pictures/p7.png" in failure["cause"]
    samples = [sample for batch in failure["batches"] for sample in batch["samples"]]
    assert "pictures/p7.png" in [sample["name"] for sample in samples]
    assert folder.name == f"step-{failure['step']}"
    assert [row["step"] for row in failure["metrics"]] == list(range(1, failure["step"]))
    assert "NonFiniteError" in (folder / "traceback.txt").read_text()
    assert json.loads((folder / "config.json").read_text())["learning_rate"] == 2e-3

    before = files_of(workspace)
    assert workspace.train("--replay", str(folder)) == 1
    shown = capsys.readouterr().out
    assert "fails again, with the same cause" in shown
    assert "was" not in shown, "nothing has changed"
    assert files_of(workspace) == before

    for path in cache.rglob("*.safetensors*"):
        path.unlink()
    assert workspace.train("--replay", str(folder), "lora_dropout=0.2") == 0
    shown = "".join(capsys.readouterr())
    assert shown.index(f"Repeating step {failure['step']} from") < shown.index(
        "does not fail this time."
    )
    assert "lora_dropout was 0.0 and is 0.2 now." in shown


def test_a_replay_repeats_the_failed_step_bit_exactly(
    workspace: Workspace, failing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(noisy: Any, loss: torch.Tensor) -> None:
        if (noisy.place.global_step, noisy.place.micro_step) == (3, 1):
            raise RuntimeError(f"The loss of {noisy.batch.names} is {loss.tolist()!r} with {TOKEN}")

    failing(crash)
    workspace.write_config(**SETTINGS)
    workspace.write_datasets(
        [DATASETS[0], {key: value for key, value in DATASETS[1].items() if key != "cache_dir"}]
    )
    assert workspace.train() == 1
    folder, failure = only_failure(workspace)
    before = files_of(workspace)
    assert (failure["step"], Path(failure["checkpoint"]).name) == (4, "checkpoint-3-rolling")
    capsys.readouterr()
    assert workspace.train("--replay", str(folder)) == 1
    shown = capsys.readouterr().out
    assert "Repeating step 4 from checkpoint-3-rolling" in shown
    assert "Step 4 fails again, with the same cause: RuntimeError: The loss of" in shown
    assert "Encoding" not in shown
    assert not any(TOKEN.encode() in path.read_bytes() for path in folder.iterdir())
    assert files_of(workspace) == before

    shutil.rmtree(workspace.path("output/checkpoint-3-rolling"))
    failing(lambda noisy, loss: loss.detach().fill_(float("nan")))
    assert workspace.train("--replay", str(folder)) == 1
    assert "Step 3 fails already" in capsys.readouterr().out


def test_a_failure_is_recorded_even_when_every_gpu_call_fails(
    workspace: Workspace,
    failing: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise torch.AcceleratorError(
            "CUDA error: an illegal memory access was encountered\nSearch for it"
        )

    def break_the_device(noisy: Any, loss: torch.Tensor) -> None:
        if noisy.place.global_step < 2:
            return
        for name in ("item", "tolist", "cpu", "numpy", "to", "__bool__", "__repr__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        for name in set(torch.cuda.__all__) - {"AcceleratorError", "OutOfMemoryError"}:
            if callable(function := getattr(torch.cuda, name)) and not isinstance(function, type):
                monkeypatch.setattr(torch.cuda, name, refuse)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        refuse()

    failing(break_the_device)
    assert workspace.train("hub_model_id=someone/else", "max_train_steps=8") == 1
    folder, failure = only_failure(workspace)
    assert (
        failure["cause"] == "AcceleratorError: CUDA error: an illegal memory access was encountered"
    )
    (batch,) = failure["batches"]
    assert all(sample["name"].startswith("pictures/") for sample in batch["samples"])
    assert [row["step"] for row in failure["metrics"]] == [1, 2]
    assert failure["facts"]["max_train_steps"] == 8
    assert failure["facts"]["device"] == "unknown"
    assert json.loads((folder / "config.json").read_text())["max_train_steps"] == 8
    assert "break_the_device" in (folder / "traceback.txt").read_text()
    shown = capsys.readouterr().err
    assert "AcceleratorError: CUDA error: an illegal memory access was encountered" in shown


def test_a_replay_runs_out_of_memory_like_the_failed_step(
    workspace: Workspace, failing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def exceed(noisy: Any, loss: torch.Tensor) -> None:
        if noisy.place.global_step == 1:
            raise torch.OutOfMemoryError("Tried to allocate 12.34 GiB")

    failing(exceed)
    assert workspace.train() == 1
    folder, failure = only_failure(workspace)
    assert failure["cause"] == "Out of memory in step 2."
    assert "train_batch_size" in capsys.readouterr().err.splitlines()[-1]
    assert workspace.train("--replay", str(folder)) == 1
    assert "with the same cause: Out of memory" in capsys.readouterr().out


def test_a_damaged_picture_and_a_broken_module_are_both_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(workspace.path("output/cache"))
    original = Session.open

    def damage(*given: Any) -> Any:
        for path in workspace.path("datasets/pictures").glob("*.png"):
            path.write_bytes(path.read_bytes()[:100])
        return original(*given)

    monkeypatch.setattr(Session, "open", damage)
    whole = {path: path.read_bytes() for path in workspace.path("datasets/pictures").iterdir()}
    assert workspace.train("vae_cache_ondemand=true") == 2
    folder, failure = only_failure(workspace)
    assert "datasets/pictures/p" in failure["cause"]
    assert str(folder.relative_to(workspace.folder)) in capsys.readouterr().err
    for path, content in whole.items():
        path.write_bytes(content)

    def break_a_module(*given: Any) -> Any:
        parts = original(*given)
        layer = parts.assembly.transformer.get_submodule("visual_transformer_blocks.1.feed_forward")
        layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        return parts

    monkeypatch.setattr(Session, "open", break_a_module)
    assert workspace.train() == 1
    assert workspace.path("output/failures/step-1-2").is_dir(), "beside the other"
    assert (
        "whose output is not finite is visual_transformer_blocks.1.feed_forward."
        in capsys.readouterr().err
    )


def test_one_process_replays_a_failed_step_of_two(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(max_train_steps=8, train_batch_size=1)
    poison(workspace, "p7.png")
    assert processes.train(workspace, 2) == [1, 1]
    folder, _ = only_failure(workspace)
    assert processes.printed(workspace).strip().endswith(str(folder.relative_to(workspace.folder)))
    capsys.readouterr()
    assert workspace.train("--replay", str(folder)) == 2
    advice = "num_processes=1 train_batch_size=2"
    assert advice in capsys.readouterr().err
    assert workspace.train("--replay", str(folder), *advice.split()) == 1
    shown = capsys.readouterr().out
    assert "fails again" in shown
    assert "pictures/p7.png" in shown


def fail_in_the_second(rank: int, port: int) -> None:
    """`simpletuner train` as one of two processes, of which the second fails in step 2."""
    compute = step.elementwise_loss

    def fail(prediction: torch.Tensor, noisy: Any, config: Any) -> torch.Tensor:
        if rank == 1 and noisy.place.global_step == 1:
            raise ValueError("only here")
        return compute(prediction, noisy, config)

    with patch.object(step, "elementwise_loss", fail):
        processes.run_as(rank, 2, port, ["train"])


def test_a_failure_of_the_second_process_is_recorded(workspace: Workspace) -> None:
    port = processes.free_port()
    codes = processes.finish([workspace.fork(fail_in_the_second, rank, port) for rank in range(2)])
    assert 0 not in codes
    folder, failure = only_failure(workspace)
    assert folder.name == "step-2-process-1"
    assert failure["cause"] == "ValueError: only here"
    (batch,) = failure["batches"]
    assert [sample["slot"] for sample in batch["samples"]] == [2, 3], "its own part"
    assert "only here" in processes.printed(workspace)


def test_an_error_while_recording_a_failure_does_not_hide_it(
    workspace: Workspace,
    failing: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def act(noisy: Any, loss: torch.Tensor) -> None:
        raise errors.pop()

    errors: list[BaseException] = [ValueError("the first"), KeyboardInterrupt()]
    failing(act)
    assert workspace.train("learning_rte=1") == 2
    assert workspace.train() == 130
    monkeypatch.setattr(autopsy, "describe_environment", lambda: 1 / 0)
    assert workspace.train() == 1
    assert "ValueError: the first" in capsys.readouterr().err
    assert not workspace.path("output/failures").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "cannot be read"), ("{}", "is damaged"), ('{"step": 1', "is damaged")],
)
def test_a_folder_without_a_failure_is_refused_with_a_hint(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], content: str | None, expected: str
) -> None:
    folder = workspace.path("elsewhere")
    folder.mkdir()
    if content is not None:
        (folder / "failure.json").write_text(content)
    assert workspace.train("--replay", str(folder)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert expected in line
    assert "failed runs write it to <output_dir>/failures." in line
    failed = workspace.path("output/failures/step-4")
    failed.mkdir(parents=True)
    (failed / "failure.json").write_text("{}")
    for near in (workspace.path("output"), failed.parent, failed.with_name("step-3")):
        assert workspace.train("--replay", str(near)) == 2
        assert f"{failed}?" in capsys.readouterr().err


def test_a_wrong_replay_folder_is_reported_before_torch_is_imported() -> None:
    code = "import sys; from simpletuner.cli.app import main; print(main(), 'torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code, "train", "--replay", "no"], capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr.count("no/failure.json")) == ("2 False\n", 1)
