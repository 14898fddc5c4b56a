"""The evaluation loss: its value, when it is measured, and that training is unaffected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.config.schema import EmaConfig, EvaluationConfig
from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.chance import order_key
from simpletuner.data.sample import Sample
from simpletuner.diffusion.batch import Batch
from simpletuner.reporting.events import EventStream
from simpletuner.training.ema import Ema
from simpletuner.validation.eval_loss import EvaluationLoss, even_sigmas
from tests.tools.assembly import make_assembly, make_batch
from tests.tools.clips import write_clip
from tests.tools.refusals import complaints, warnings
from tests.tools.runs import CLIPS, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, EVAL, Workspace

LORA = "output/pytorch_lora_weights.safetensors"


def sample(name: str) -> Sample:
    geometry = Geometry("1.0", Size(32, 32), Size(32, 32), (0, 0))
    return Sample("d", name, Path(), "a" * 64, (32, 32), geometry, ("a star",))


def evaluation(batch: Batch, **settings: Any) -> EvaluationLoss:
    """An evaluation of two samples, which are read as the rows of the batch."""

    def read(sample: Sample) -> Batch:
        index = int(sample.name)
        row = slice(index, index + 1)
        return replace(
            batch,
            latents=batch.latents[row],
            embeds=batch.embeds[row],
            names=[sample.full_name],
        )

    config = EvaluationConfig(**{"eval_steps_interval": 1, "eval_timesteps": 3, **settings})
    return EvaluationLoss(
        config=config,
        datasets={"d": [sample("0"), sample("1")]},
        read=read,
        steps_per_epoch=4.0,
        ema_validation="comparison",
        events=EventStream(),
    )


@pytest.fixture(scope="module")
def batch(t2i_checkpoint: Path) -> Batch:
    return make_batch(t2i_checkpoint, ["a star", "two stars"])


def test_the_evaluation_loss_is_the_mean_squared_error_at_even_noise_levels(
    t2i_checkpoint: Path, batch: Batch
) -> None:
    assembly = make_assembly(t2i_checkpoint)
    inputs: list[Any] = []
    predict = assembly.adapter.predict
    errors = []

    def noted(transformer: Any, noisy: Any) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not transformer.training
        inputs.append(noisy)
        prediction = predict(transformer, noisy)
        errors.append((prediction - (noisy.noise - noisy.batch.latents)).square().mean().item())
        return prediction

    assembly.adapter.predict = noted

    losses = evaluation(batch).evaluate(assembly, 1)

    assert list(losses) == ["loss/val/d"]
    assert losses["loss/val/d"] == pytest.approx(sum(errors) / 6, rel=1e-5)
    sigmas = [round(noisy.sigmas.item(), 4) for noisy in inputs]
    assert sigmas == [0.1667, 0.5, 0.8333] * 2  # 1/6, 3/6 and 5/6, of two samples
    first, *rest = [noisy.noise for noisy in inputs]
    assert not any(torch.equal(first, noise) for noise in rest)
    assert assembly.transformer.training


def test_the_noise_of_evaluation_is_the_same_at_every_step(
    t2i_checkpoint: Path, batch: Batch
) -> None:
    assembly = make_assembly(t2i_checkpoint)

    losses = evaluation(batch).evaluate(assembly, 1)

    assert evaluation(batch).evaluate(assembly, 9) == losses


def test_the_moving_average_has_its_own_evaluation_loss(t2i_checkpoint: Path, batch: Batch) -> None:
    assembly = make_assembly(t2i_checkpoint, use_ema=True)
    plain = evaluation(batch).evaluate(assembly, 1)["loss/val/d"]
    ema = Ema(assembly.parameters, EmaConfig(use_ema=True), torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in assembly.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.3)
    trained = evaluation(batch).evaluate(assembly, 1)["loss/val/d"]
    assert trained != pytest.approx(plain, rel=1e-4), "ten times the tolerance below"

    assembly.trained.ema = ema
    both = evaluation(batch, eval_dataset_pooling=True).evaluate(assembly, 1)
    assert both["loss/val/d/ema"] == pytest.approx(plain, rel=1e-5)
    assert both["loss/val/d"] == pytest.approx(trained, rel=1e-5)
    assert both["loss/val/pooled"] == both["loss/val/d"]
    alone = replace(evaluation(batch), ema_validation="ema_only").evaluate(assembly, 1)
    assert alone == {"loss/val/d": both["loss/val/d/ema"]}


def test_evaluation_is_due_at_its_intervals_and_at_the_end(batch: Batch) -> None:
    def due(total: int = 100, **settings: Any) -> list[int]:
        callback = evaluation(batch, **{"eval_steps_interval": None, **settings})
        return [step for step in range(1, 13) if callback.is_due(step, total)]

    assert due(eval_steps_interval=5) == [5, 10]
    assert due(total=12, eval_steps_interval=5) == [5, 10, 12], "the last step always"
    assert due(eval_epoch_interval=1) == [4, 8, 12]
    assert due(eval_epoch_interval=0.5) == [2, 4, 6, 8, 10, 12]
    assert due(eval_epoch_interval=1.5) == [6, 12]
    assert due(eval_epoch_interval=0.1) == list(range(1, 13)), "not more than once a step"
    assert due(eval_steps_interval=6, eval_epoch_interval=2) == [6, 8, 12]
    assert even_sigmas(4) == [0.125, 0.375, 0.625, 0.875]


def test_evaluation_is_recorded_and_does_not_change_training(
    tmp_path: Path, t2i_checkpoint: Path, finished: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Workspace.create(tmp_path / "watched", t2i_checkpoint)
    watched.add_pictures("datasets/held out", 3, seed=9)
    watched.add_pictures("datasets/more", 1, seed=8)
    watched.path("datasets/more/p0.txt").write_text("a caption that is not trained")
    more = {**EVAL, "id": "more", "instance_data_dir": "datasets/more"}
    watched.write_datasets([*DATASETS, EVAL, more])
    watched.write_config(
        eval_steps_interval=2, eval_timesteps=2, eval_dataset_pooling=True, num_eval_images=2
    )
    assert watched.train() == 0
    assert "made anew" not in capsys.readouterr().err, "everything is encoded before the first step"
    records = watched.metrics()
    training_records = [
        {key: value for key, value in record.items() if not key.startswith("loss/val/")}
        for record in records
    ]
    assert training_records == finished.metrics()
    assert finished.path(LORA).read_bytes() == watched.path(LORA).read_bytes()
    is_evaluated = ["loss/val/held-out" in record for record in records]
    assert is_evaluated == [False, True, False, True]
    last = records[-1]
    mean = (last["loss/val/held-out"] + last["loss/val/more"]) / 2
    assert last["loss/val/pooled"] == pytest.approx(mean)
    assert last["loss/val/held-out"] != records[1]["loss/val/held-out"]
    report = watched.path("output/training_report.html").read_text()
    assert "held-out loss (held-out)" in report
    latents = watched.path("output/cache/vae/kandinsky5-image/held-out")

    assert len(list(latents.rglob("*.zst"))) == 2, "num_eval_images of them, and no more"


@pytest.mark.slow(1)
def test_held_out_files_are_evaluated_like_a_separate_folder(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    settings = {"eval_steps_interval": 2, "eval_timesteps": 2, "max_train_steps": 2}
    held_out = Workspace.create(tmp_path / "held out", t2i_checkpoint, **settings)
    held_out.write_datasets([{**DATASETS[0], "hold_out": 2}, DATASETS[1]])
    separate = Workspace.create(tmp_path / "separate", t2i_checkpoint, **settings)
    pictures = separate.path("datasets/pictures")
    folder = separate.path("datasets/held out")
    folder.mkdir()
    ordered = sorted(
        pictures.glob("*.png"), key=lambda path: order_key("pictures", "held out", path.name)
    )
    for picture in ordered[:2]:
        for path in pictures.glob(f"{picture.stem}.*"):  # and its caption
            path.rename(folder / path.name)
    separate.write_datasets([*DATASETS, {**EVAL, "id": "pictures-held-out"}])

    assert held_out.train() == 0
    assert separate.train() == 0

    assert held_out.metrics() == separate.metrics()
    assert "loss/val/pictures-held-out" in held_out.metrics()[1]
    assert held_out.path(LORA).read_bytes() == separate.path(LORA).read_bytes()


@pytest.mark.slow
def test_a_resumed_run_has_the_same_evaluation_losses(tmp_path: Path, t2i_checkpoint: Path) -> None:
    uninterrupted = Workspace.create(tmp_path / "uninterrupted", t2i_checkpoint)
    uninterrupted.add_pictures("datasets/held out", 1, seed=9)
    uninterrupted.write_datasets([*DATASETS, EVAL])
    uninterrupted.write_config(eval_epoch_interval=0.25, eval_timesteps=2)
    assert uninterrupted.train() == 0
    resumed = uninterrupted.stopped(tmp_path / "resumed", 2)

    assert resumed.train() == 0

    assert resumed.metrics() == uninterrupted.metrics()
    assert "loss/val/held-out" in uninterrupted.metrics()[1]


def test_clips_are_evaluated_as_clips(tmp_path: Path) -> None:
    """For i2v, their first frames are the condition."""
    checkpoint = make_checkpoint(tmp_path / "i2v", "i2v")
    workspace = make_clip_workspace(tmp_path / "run", checkpoint, "i2v-lite-5s")
    path = workspace.path("datasets/held out/other.mp4")
    path.parent.mkdir(parents=True)
    write_clip(path, seconds=1.5)
    path.with_suffix(".txt").write_text("another clip")
    workspace.write_datasets([CLIPS, DATASETS[1], {**EVAL, "video": CLIPS["video"]}])
    assert workspace.train("eval_steps_interval=1", "eval_timesteps=2", "max_train_steps=1") == 0
    (line,) = workspace.metrics()
    assert line["loss/val/held-out"] > 0
    held_out = list(workspace.path("output/cache/vae/kandinsky5-video/held-out").rglob("*.zst"))

    assert len(held_out) == 2, "the clip, and its first frame"


def test_the_plan_lists_the_evaluation(
    workspace: Workspace, i2i_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no dataset has dataset_type eval" in warnings(
        workspace, capsys, "eval_steps_interval=5"
    )
    workspace.add_pictures("datasets/held out", 1)
    workspace.write_datasets([*DATASETS, EVAL])
    assert "held-out: is not used: set eval_steps_interval" in warnings(workspace, capsys)
    assert "held-out: is not used" in warnings(
        workspace, capsys, "eval_steps_interval=5", "--eval_loss_disable"
    )
    both = warnings(workspace, capsys, "eval_steps_interval=5", "eval_epoch_interval=0.5")
    assert len(both.splitlines()) == 1
    assert "both are used" in both
    assert workspace.run("plan", "eval_epoch_interval=1") == 0
    assert "Evaluation loss at 28 timesteps: held-out (1 sample)" in capsys.readouterr().out
    workspace.write_config(
        pretrained_model_name_or_path=str(i2i_checkpoint), model_flavour="i2i-lite-sft"
    )
    errors = complaints(workspace, capsys, "plan", "eval_epoch_interval=1")
    assert any(error.startswith("held-out.conditioning_data: is required") for error in errors)
