"""How long a run is, what is left of one that continues, and which schedules are refused."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from simpletuner.config.sources import parse_arguments
from simpletuner.planning.build import plan_training
from simpletuner.planning.checkpoint_folder import Manifest, Progress, write_manifest
from simpletuner.planning.length import length_key
from simpletuner.planning.plans import Plan
from simpletuner.planning.resume import identify
from simpletuner.rounding import ceil_div
from tests.tools.refusals import complaint, warnings
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]
TEXTS = DATASETS[1]


def pictures(**keys: Any) -> dict[str, Any]:
    """A dataset of eight pictures, with four batches an epoch."""
    return {**DATASETS[0], "repeats": 0, **keys}


def second(id: str = "second", **keys: Any) -> dict[str, Any]:
    """Another dataset with the same files."""
    return pictures(id=id, **keys)


def planned(workspace: Workspace, *settings: str) -> Plan:
    with workspace.inside():
        return plan_training(parse_arguments(list(settings)))


def save_checkpoint(workspace: Workspace, step: int, epoch: int, progress: Progress | None) -> None:
    """A checkpoint of today's settings and data without weights, which a plan does not read."""
    identity = identify(planned(workspace))
    folder = workspace.path(f"output/checkpoint-{step}")
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step, epoch, identity, {}, progress))


@pytest.mark.parametrize(
    ("windows", "settings", "words"),
    [
        (({"end_step": 3}, {"start_step": 6}), (), "in steps 4 to 5 (epoch 2)"),
        (({"end_step": 3}, {"start_epoch": 3}), (), "from step 4 on (epoch 2)"),
        (({"end_epoch": 1}, {"start_epoch": 3}), (), "from step 5 on (epoch 2)"),
        (({"end_step": 3}, {"end_epoch": 2}), (), "from step 10 on (epoch 3)"),
        (({"end_step": 15}, {"end_step": 19}), (), "from step 20 on (epoch 4)"),
        (
            ({"end_epoch": 2}, {"end_epoch": 2}),
            ("max_train_steps=", "num_train_epochs=3"),
            "num_train_epochs 2",
        ),
    ],
)
def test_schedule_with_a_gap_is_refused_with_the_length_that_avoids_it(
    workspace: Workspace,
    capsys: Capture,
    windows: tuple[dict[str, int], ...],
    settings: tuple[str, ...],
    words: str,
) -> None:
    first, later = windows
    workspace.write_datasets([pictures(**first), second(**later), TEXTS])
    settings = settings or ("max_train_steps=20",)
    problem = complaint(workspace, capsys, "plan", *settings)
    assert problem.startswith("data_backend_config: no dataset takes part")
    assert words in problem
    for key, value in {**first, **later}.items():
        assert f"{key} {value}" in problem
    advised, steps = problem.removesuffix(".").split()[-2:]
    assert workspace.run("plan", *settings, f"{advised}={steps}") == 0, "the advice works"


@pytest.mark.parametrize("epochs", [False, True])
@pytest.mark.parametrize(
    "window", [{"start_step": 21}, {"start_epoch": 6}, {"start_epoch": 4, "end_step": 8}]
)
def test_dataset_that_never_takes_part_is_a_warning(
    workspace: Workspace, capsys: Capture, window: dict[str, int], epochs: bool
) -> None:
    workspace.write_datasets([pictures(), second(**window), TEXTS])
    length = ("max_train_steps=", "num_train_epochs=5") if epochs else ("max_train_steps=20",)
    printed = warnings(workspace, capsys, *length)
    assert "second: never takes part in a run of 20 steps and 5 epochs: its window is " in printed
    workspace.write_datasets([pictures(), second(), TEXTS])
    assert "never takes part" not in warnings(workspace, capsys, *length)


# Changed keys of the dataset, and the batches of an epoch afterwards.
CHANGES: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 4),
    "more repeats": ({"repeats": 2}, 12),
    "fewer pictures": ({"max_num_samples": 4}, 2),
    "another resolution": ({"resolution": 96}, 4),
}
# Step, epoch and position in an epoch of four batches.
PLACES = {"in an epoch": (6, 2, 2), "at its end": (8, 2, 4), "at its beginning": (5, 2, 1)}


CONTINUED = [
    *product(CHANGES, PLACES, (1,)),
    *product(CHANGES, ("in an epoch", "at its end"), (2,)),
]


@pytest.mark.parametrize(("change", "place", "accumulation"), CONTINUED)
def test_remaining_epochs_have_the_length_of_todays_data(
    workspace: Workspace, change: str, place: str, accumulation: int
) -> None:
    workspace.write_config(
        max_train_steps=None, num_train_epochs=4, gradient_accumulation_steps=accumulation
    )
    workspace.write_datasets([pictures(), TEXTS])
    micro_batches, epoch, position = PLACES[place]
    step = micro_batches // accumulation
    is_complete = position == 4
    epochs_done = epoch if is_complete else epoch - 1
    progress = Progress(position, epochs_done, total_steps=16 // accumulation)
    save_checkpoint(workspace, step, epoch, progress)
    keys, batches_per_epoch = CHANGES[change]
    workspace.write_datasets([pictures(**keys), TEXTS])

    plan = planned(workspace)

    remaining = (4 - epochs_done) * batches_per_epoch
    if change == "nothing" and not is_complete:
        remaining -= position  # the epoch continues; otherwise it starts over
    assert plan.length.total_steps == step + ceil_div(remaining, accumulation)
    assert plan.same_data == (change == "nothing")


def test_max_train_steps_stays_after_the_data_have_changed(workspace: Workspace) -> None:
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, Progress(2, 1, 20))
    workspace.write_datasets([pictures(repeats=2), TEXTS])
    length = planned(workspace, "max_train_steps=20").length

    assert (length.total_steps, length.batches_per_epoch, length.epochs) == (20, 12, 3)


def test_plan_shows_the_remaining_steps(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(max_train_steps=None, num_train_epochs=3)
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, Progress(2, 1, 12))
    workspace.write_datasets([pictures(repeats=1), TEXTS])
    assert workspace.run("plan") == 0
    shown = capsys.readouterr().out
    assert (
        "continues from step 6 (checkpoint-6); 16 steps are left: epochs 2 to 3 of today's data"
        in shown
    )
    assert "the datasets are not those of checkpoint-6; epoch 2 starts over." in shown


@pytest.mark.parametrize(
    ("gone", "new", "words"),
    [
        (1, 0, "1 file is gone or changed."),
        (0, 2, "2 files are new or changed."),
        (2, 1, "2 files are gone or changed, 1 file is new or changed."),
    ],
)
def test_files_added_and_removed_since_the_checkpoint_are_counted(
    workspace: Workspace, capsys: Capture, gone: int, new: int, words: str
) -> None:
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, Progress(2, 1, 12))
    for path in sorted(workspace.path("datasets/pictures").glob("*.png"))[:gone]:
        path.unlink()
    if new:
        workspace.add_pictures("datasets/pictures/more", new, seed=5)

    assert workspace.run("plan", "max_train_steps=12") == 0

    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "pictures.resolution: " in line]
    assert "checkpoint-6 was trained with 4 of 64x64, 4 of 80x48, and now there are " in line
    assert line.endswith(f"; epoch 2 starts over. {words}")
    assert (
        "with other captions, or with captions of other files; the new value applies from here on"
        in shown
    )
    assert "digest" not in shown


def test_checkpoint_of_an_earlier_version_continues_its_epoch(workspace: Workspace) -> None:
    workspace.write_config(max_train_steps=None, num_train_epochs=3)
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, None)
    manifest = workspace.path("output/checkpoint-6/manifest.json")
    written = json.loads(manifest.read_text())
    del written["progress"]
    manifest.write_text(json.dumps(written))

    assert planned(workspace).length.total_steps == 12


@pytest.mark.parametrize(
    ("settings", "progress", "words"),
    [
        (
            ("max_train_steps=5",),
            Progress(2, 1, 12),
            "max_train_steps: 5 is below step 6 of checkpoint-6",
        ),
        (
            ("max_train_steps=", "num_train_epochs=1"),
            Progress(2, 1, 12),
            "1 is below epoch 2 of checkpoint-6",
        ),
    ],
)
def test_session_without_a_step_is_refused(
    workspace: Workspace, capsys: Capture, settings: tuple[str, ...], progress: Progress, words: str
) -> None:
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, progress)
    assert words in complaint(workspace, capsys, "plan", *settings)


@pytest.mark.parametrize(
    "command", [("verify",), ("gc",), ("explain", "pictures/p0.png"), ("fill",)]
)
def test_caches_can_be_inspected_with_any_number_of_steps(
    workspace: Workspace, command: tuple[str, ...]
) -> None:
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, Progress(2, 1, 12))

    assert workspace.run("cache", *command, "max_train_steps=5") == 0


def test_finished_run_with_changed_data_is_refused(trained: Workspace, capsys: Capture) -> None:
    trained.write_datasets([pictures(), TEXTS])
    error = complaint(trained, capsys, "train")

    assert (
        error
        == "max_train_steps: 4 steps are done, and the datasets have changed since: raise it to "
        "train on them."
    )
    assert trained.run("plan", "max_train_steps=8") == 0, "the advice works"


@pytest.mark.parametrize(
    ("lora_step", "steps", "left"), [(100, 8, None), (8, 8, None), (4, 8, 4), (0, 8, 8)]
)
def test_steps_of_init_lora_count_as_done(
    trained: Workspace, capsys: Capture, lora_step: int, steps: int, left: int | None
) -> None:
    lora = str(trained.path("output/pytorch_lora_weights.safetensors"))
    trained.write_config(init_lora=lora, init_lora_step=lora_step, output_dir="another")
    if left is None:
        error = complaint(trained, capsys, "plan", f"max_train_steps={steps}")
        assert f"is not above init_lora_step {lora_step}" in error
        assert f"max_train_steps {lora_step + steps} trains {steps} steps" in error
        assert trained.run("plan", f"max_train_steps={lora_step + steps}") == 0, "the advice works"
    else:
        plan = planned(trained, f"max_train_steps={steps}")
        assert plan.length.total_steps - plan.steps_done == left
    plan = planned(trained, "max_train_steps=", "num_train_epochs=2")

    assert plan.length.total_steps == lora_step + 16


def test_longer_run_warns_about_a_jump_of_the_learning_rate(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(lr_scheduler="cosine")
    workspace.write_datasets([pictures(), TEXTS])
    save_checkpoint(workspace, 6, 2, Progress(2, 1, 6))
    printed = warnings(workspace, capsys, "max_train_steps=12")

    assert "lr_scheduler: cosine was computed for 6 steps and now is for 12" in printed
    assert "from 4e-07 in step 6 to 0.000429 in step 7" in printed
    assert "lr_scheduler" not in warnings(
        workspace, capsys, "max_train_steps=12", "lr_scheduler=constant"
    )


def test_dataset_of_earlier_sessions_counts_as_used(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(max_train_steps=None, num_train_epochs=2)
    workspace.write_datasets(
        [pictures(), second(end_epoch=1), second(id="late", start_epoch=3), TEXTS]
    )
    save_checkpoint(workspace, 12, 2, Progress(4, 2, 12))
    printed = warnings(workspace, capsys)

    assert "late: never takes part" in printed
    assert printed.count("never takes part") == 1


@pytest.mark.parametrize(
    "change", [{"probability": 2.0}, {"end_step": 300}, {"start_epoch": 1, "end_epoch": 90}]
)
def test_changed_sample_order_is_a_warning(
    workspace: Workspace, capsys: Capture, change: dict[str, Any]
) -> None:
    """Otherwise a run would continue in the middle of an epoch of another order."""
    workspace.write_datasets([pictures(), second(), TEXTS])
    save_checkpoint(workspace, 6, 1, Progress(6, 0, 20))
    assert planned(workspace, "max_train_steps=20").same_data
    workspace.write_datasets([pictures(), second(**change), TEXTS])
    printed = warnings(workspace, capsys, "max_train_steps=20")
    assert "second.probability" in printed or "second.window" in printed
    assert "epoch 1 starts over" in printed
    assert not planned(workspace, "max_train_steps=20").same_data


@pytest.mark.parametrize(("window", "starts_over"), [({}, False), ({"end_step": 300}, True)])
def test_window_in_steps_depends_on_the_accumulation(
    workspace: Workspace, capsys: Capture, window: dict[str, int], starts_over: bool
) -> None:
    workspace.write_datasets([pictures(), second(**window), TEXTS])
    save_checkpoint(workspace, 4, 1, Progress(4, 0, 20))

    printed = warnings(workspace, capsys, "max_train_steps=20", "gradient_accumulation_steps=2")

    assert ("starts over" in printed) == starts_over


@pytest.mark.parametrize(
    ("settings", "key"),
    [((), "max_train_steps"), (("max_train_steps=", "num_train_epochs=2"), "num_train_epochs")],
)
def test_advice_to_train_longer_names_the_key_of_the_length(
    workspace: Workspace, settings: tuple[str, ...], key: str
) -> None:
    assert length_key(planned(workspace, *settings)) == key
