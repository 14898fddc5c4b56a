"""The sentence on what to do next: right on records of many kinds, silent where nothing decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from simpletuner.annexes.advice.curve import LossCurve, Trend
from simpletuner.annexes.advice.facts import difference, preview_changes, read_files
from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.annexes.fitting.show import start_lines
from simpletuner.annexes.runs.next_step import next_step_of
from simpletuner.annexes.runs.run import Run
from simpletuner.cli.next_step import print_next_step
from simpletuner.config.sources import parse_arguments
from simpletuner.planning.lock import LOCK_FILE
from simpletuner.reporting.metrics import MediaRecord
from tests.annexes.page.runs.test_runs import own
from tests.tools.records import MadeRecord, write_grey
from tests.tools.workspace import Workspace

FALLING = {50: 1.64, 100: 1.52, 150: 1.44, 200: 1.37, 250: 1.31, 300: 1.26, 350: 1.22, 400: 1.18}
RISING = {50: 1.64, 100: 1.42, 150: 1.31, 200: 1.25, 250: 1.27, 300: 1.31, 350: 1.36, 400: 1.42}
LEVEL = {50: 1.64, 100: 1.42, 150: 1.31, 200: 1.27, 250: 1.262, 300: 1.26, 350: 1.259, 400: 1.26}
NOISY = {50: 1.30, 100: 1.24, 150: 1.31, 200: 1.22, 250: 1.29, 300: 1.23, 350: 1.32, 400: 1.27}
NOTHING_CAPTIONED = (
    "cats: 9 files are left out: 2 damaged (a.jpg, b.jpg); 7 no caption (c.jpg, d.jpg, ...). "
    "The plan lists each with its reason."
)
ENLARGED = (
    "cats.resolution: 9 of 26 files enlarged, a.jpg the most, from 96x96 to 512x512: the model "
    "learns their blur."
)
TWINS = (
    "cats: files that differ only in their extension: IMG_1.heic and IMG_1.jpg. If they show the "
    "same, it is trained twice as often: list one of each in exclude.json."
)


def falling_loss(step: int) -> float:
    return 0.8 / (1 + step / 100) + 0.01 * (step % 5)


def scattered_loss(step: int) -> float:
    """A loss that falls by a tenth in the last quarter, far less than it scatters."""
    return 1.0 + 0.9 * (-1) ** step - 0.1 * (step > 300)


def loss_with_an_outlier(step: int) -> float:
    return 5.0 if step == 95 else 0.1


def growing_loss(step: int) -> float:
    return 0.5 + 0.01 * (step % 5) + max(0, step - 300) * 0.02


def sentence_of(record: MadeRecord, folder: Path) -> str:
    """The sentence about a record; empty if there is none."""
    step = next_step_of(Run("run", record.write(folder)))
    return "" if step is None else step.sentence


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        pytest.param(
            MadeRecord(held_out=RISING),
            "Take checkpoint 200: the loss on held-out files has risen since, from 1.25 to 1.42.",
            id="overfit",
        ),
        pytest.param(
            MadeRecord(held_out=RISING, checkpoints=(300, 400)),
            "Take checkpoint 300, of those that are kept the nearest to step 200: the loss on "
            "held-out files was lowest there (1.25) and has risen to 1.42.",
            id="overfit, and the best checkpoint was pruned",
        ),
        pytest.param(
            MadeRecord(held_out=RISING, checkpoints=()),
            "Train again for 200 steps: the loss on held-out files was lowest at step "
            "200 (1.25) and has risen to 1.42, and no checkpoint is kept.",
            id="overfit, and no checkpoint is kept",
        ),
        pytest.param(
            MadeRecord(held_out=RISING, steps=400, total=800, end="interrupted"),
            "Take checkpoint 200: the loss on held-out files has risen since, from 1.25 to 1.42.",
            id="overfit and stopped",
        ),
        pytest.param(
            MadeRecord(held_out=FALLING),
            "Continue to step 600: the loss on held-out files was still falling at the end, from "
            "1.31 at step 250 to 1.18 at step 400.",
            id="underfit",
        ),
        pytest.param(
            MadeRecord(held_out=LEVEL),
            "Use the result: the loss on held-out files is level since step 200 (1.26), and no "
            "checkpoint has a clearly lower one.",
            id="done",
        ),
        pytest.param(
            MadeRecord(held_out=LEVEL, loss=falling_loss),
            "Take checkpoint 200: since step 200 the loss on held-out files is level (1.26), and "
            "only that on trained files falls, from 0.25 to 0.198.",
            id="done, and the rest was learned by heart",
        ),
        pytest.param(
            MadeRecord(held_out=LEVEL, loss=scattered_loss),
            "Use the result: the loss on held-out files is level since step 200 (1.26), and no "
            "checkpoint has a clearly lower one.",
            id="done, and the training loss scatters more than it falls",
        ),
        pytest.param(
            MadeRecord(changes=(0, 0), rate=1e-5),
            "Raise the learning rate from 1e-05 to 0.0001 and train again: the last previews "
            "cannot be told from those of the untrained model.",
            id="nothing learned, at a low rate",
        ),
        pytest.param(
            MadeRecord(changes=(0, 0), pictures=5),
            "Raise the learning rate from 0.0001 to 0.0002 and train again: the last previews "
            "cannot be told from those of the untrained model.",
            id="nothing learned, at the usual rate and length",
        ),
        pytest.param(
            MadeRecord(changes=(0, 0), pictures=20),
            "Continue to step 800: the last previews cannot be told from those of the untrained "
            "model.",
            id="nothing learned, in few steps",
        ),
        pytest.param(
            MadeRecord(changes=(0, 0), pictures=5, rate=1.0),
            "Continue to step 800: the last previews cannot be told from those of the untrained "
            "model.",
            id="nothing learned, and the optimizer chooses the rate",
        ),
        pytest.param(
            MadeRecord(changes=(0,), rate=0.0),
            "Set a learning rate above 0 and train again: the last previews cannot be told from "
            "those of the untrained model.",
            id="nothing learned, at no rate",
        ),
        pytest.param(
            MadeRecord(loss=growing_loss, rate=3e-4),
            "Lower the learning rate from 0.0003 to 0.0001 and continue from checkpoint 200: "
            "the training loss rose from 0.52 to 2.13.",
            id="diverged",
        ),
        pytest.param(
            MadeRecord(
                steps=230,
                checkpoints=(100, 200),
                rate=3e-4,
                end="failed",
                message="The loss is nan. The weights were not updated. Trained on: a.jpg.",
            ),
            "Lower the learning rate from 0.0003 to 0.0001 and continue from checkpoint 200: "
            "the loss or the weights became NaN or infinite after step 230.",
            id="NaN",
        ),
        pytest.param(
            MadeRecord(steps=230, checkpoints=(100, 200), end=None),
            "Continue from step 200: the run ended at step 230 of 400, and the 30 steps in between "
            "are trained again.",
            id="killed",
        ),
        pytest.param(
            MadeRecord(steps=201, checkpoints=(100, 200), end=None),
            "Continue from step 200: the run ended at step 201 of 400, one step later.",
            id="killed one step after a checkpoint",
        ),
        pytest.param(
            MadeRecord(steps=230, checkpoints=(100, 230), end="interrupted"),
            "Continue from step 230: 170 of 400 steps are left.",
            id="stopped",
        ),
        pytest.param(
            MadeRecord(steps=57, checkpoints=(), end=None),
            "Start again and save more often: the run ended at step 57, before its first "
            "checkpoint.",
            id="killed before a checkpoint",
        ),
        pytest.param(
            MadeRecord(warnings=(NOTHING_CAPTIONED,), held_out=RISING),
            "Write the missing captions and train again: 7 of 27 files have no caption and are not "
            "trained.",
            id="captions are missing",
        ),
        pytest.param(
            MadeRecord(warnings=(ENLARGED,), held_out=LEVEL),
            "Leave out small files or lower the resolution: 9 of 26 files are enlarged, and the "
            "model learns their blur.",
            id="files are enlarged",
        ),
        pytest.param(
            MadeRecord(warnings=(TWINS,)),
            "Leave out one of IMG_1.heic and IMG_1.jpg: they seem to be the same, which is then "
            "trained twice as often.",
            id="files occur twice",
        ),
        pytest.param(
            MadeRecord(pictures=3),
            "Add pictures and train again: only 3 pictures were trained, which the model learns by "
            "heart.",
            id="very few files",
        ),
    ],
)
def test_the_sentence_says_what_to_do_and_why(
    tmp_path: Path, record: MadeRecord, sentence: str
) -> None:
    assert sentence_of(record, tmp_path) == sentence


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(MadeRecord(), id="no evaluation"),
        pytest.param(MadeRecord(held_out=NOISY), id="a noisy, flat loss"),
        pytest.param(MadeRecord(held_out={200: 1.3, 400: 1.2}), id="two measurements"),
        pytest.param(
            MadeRecord(held_out={**LEVEL, 400: 1.35}), id="one higher measurement at the end"
        ),
        pytest.param(
            MadeRecord(steps=100, total=100, checkpoints=(100,), loss=loss_with_an_outlier),
            id="one large training loss",
        ),
        pytest.param(MadeRecord(changes=()), id="no previews"),
        pytest.param(MadeRecord(changes=(0, 9)), id="one prompt of two looks as before"),
        pytest.param(MadeRecord(end="failed", message="out of memory"), id="another failure"),
        pytest.param(
            MadeRecord(warnings=(NOTHING_CAPTIONED,), pictures=60), id="few captions are missing"
        ),
        pytest.param(MadeRecord(steps=0, changes=(), checkpoints=(), end=None), id="not begun"),
    ],
)
def test_there_is_no_sentence_where_the_facts_do_not_decide(
    tmp_path: Path, record: MadeRecord
) -> None:
    assert sentence_of(record, tmp_path) == ""


def test_a_running_run_hears_only_what_cannot_wait(tmp_path: Path) -> None:
    def while_running(name: str, record: MadeRecord) -> str:
        folder = record.write(tmp_path / name)
        own(folder)
        step = next_step_of(Run(name, folder))
        return "" if step is None else step.sentence

    early = MadeRecord(steps=100, end=None, held_out={50: 1.64, 100: 1.42}, changes=(0, 0))
    falling = MadeRecord(total=800, end=None, held_out=FALLING)
    rising = MadeRecord(total=800, end=None, held_out=RISING)
    growing = MadeRecord(total=800, end=None, loss=growing_loss, checkpoints=(200,))

    assert while_running("early", early) == ""
    assert while_running("falling", falling) == ""
    assert while_running("rising", rising) == (
        "Stop and take checkpoint 200: the loss on held-out files has risen since, from 1.25 to "
        "1.42."
    )
    assert while_running("growing", growing).startswith("Stop, lower the learning rate from 0.0001")


@pytest.mark.parametrize(
    ("record", "how"),
    [
        (MadeRecord(held_out=RISING), "output/cats/checkpoint-200"),
        (MadeRecord(held_out=FALLING), "max_train_steps=600"),
        (
            MadeRecord(loss=growing_loss, rate=3e-4),
            "learning_rate=0.0001, resume_from_checkpoint=200",
        ),
        (MadeRecord(warnings=(NOTHING_CAPTIONED,)), "simpletuner caption"),
        (MadeRecord(warnings=(TWINS,)), "exclude_files in the dataset file"),
    ],
)
def test_the_terminal_adds_what_to_type(tmp_path: Path, record: MadeRecord, how: str) -> None:
    step = next_step_of(Run("run", record.write(tmp_path)))

    assert step is not None
    assert step.in_terminal(Path("output/cats")) == f"Next: {step.sentence} ({how})"


def test_the_end_of_a_command_is_silent_without_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decided = MadeRecord(held_out=FALLING).write(tmp_path / "decided")
    undecided = MadeRecord().write(tmp_path / "undecided")
    damaged = MadeRecord(held_out=FALLING).write(tmp_path / "damaged")
    (damaged / LOCK_FILE).write_text("[")

    print_next_step(decided)
    print_next_step(undecided)
    print_next_step(damaged)
    print_next_step(tmp_path / "no folder")

    assert capsys.readouterr().out == (
        "Next: Continue to step 600: the loss on held-out files was still falling at the end, from "
        "1.31 at step 250 to 1.18 at step 400. (max_train_steps=600)\n"
    )


@pytest.mark.parametrize(
    ("losses", "passes", "trend"),
    [
        ([1.0, 1.0, 1.0], 24, "unclear"),
        ([1.64, 1.5, 1.4, 1.32, 1.27, 1.22], 24, "falling"),
        ([1.92, 1.83, 1.69, 1.68, 1.65], 24, "falling"),
        ([1.64, 1.4, 1.3, 1.25, 1.25, 1.26, 1.28, 1.30], 112, "rising"),
        # The same rise is within what two measurements can show.
        ([1.64, 1.4, 1.3, 1.25, 1.25, 1.26, 1.28, 1.30], 2, "unclear"),
        # It rises within its own noise.
        ([1.64, 1.3, 1.0, 1.10, 1.05, 1.16, 1.11, 1.20], 112, "unclear"),
        # It has jumped once, and falls again.
        ([1.64, 1.3, 1.0, 1.9, 1.8, 1.7, 1.6], 112, "unclear"),
        ([1.3, 1.3, 1.3, 1.3, 1.3, 1.3], 24, "level"),
        ([1.30, 1.24, 1.31, 1.22, 1.29, 1.23, 1.32, 1.27], 24, "unclear"),
    ],
)
def test_a_trend_is_clear_only_beyond_its_noise(
    losses: list[float], passes: int, trend: Trend
) -> None:
    points = [(50 * number, loss) for number, loss in enumerate(losses, start=1)]

    assert LossCurve(points, passes).trend == trend


def test_only_previews_of_the_same_seed_prompt_and_weights_are_compared(tmp_path: Path) -> None:
    def record(step: int, name: str, level: int, file: str = "", **changes: object) -> MediaRecord:
        path = f"{file or name}-{step}.png"
        write_grey(tmp_path / path, level)
        values = {"prompt": "a cat", "seed": 1, **changes}
        return MediaRecord(step, name, path=path, width=16, height=16, **values)

    records = [
        record(0, "same", 100),
        record(10, "same", 120),
        record(20, "same", 107),
        record(20, "same", 150, "same-ema", ema=True),
        record(0, "seed", 100),
        record(20, "seed", 120, seed=2),
        record(0, "prompt", 100),
        record(20, "prompt", 120, prompt="a dog"),
        record(0, "gone", 100),
        record(20, "gone", 120),
    ]
    (tmp_path / "gone-20.png").write_text("not a picture")

    assert preview_changes(tmp_path, records) == [7.0]


def test_a_replaced_preview_is_compared_again(tmp_path: Path) -> None:
    before = tmp_path / "before.png"
    after = tmp_path / "after.png"
    write_grey(before, 100)
    write_grey(after, 107)
    first = difference(before, after)
    write_grey(after, 120)
    os.utime(after, (1, 1))

    second = difference(before, after)

    assert (first, second) == (7.0, 20.0)


def test_what_a_plan_says_of_its_files_is_understood(workspace: Workspace) -> None:
    pictures = workspace.path("datasets/pictures")
    for number in (0, 1):
        (pictures / f"p{number}.txt").unlink()
    Image.open(pictures / "p2.png").save(pictures / "p2.webp", lossless=True)
    Image.open(pictures / "p3.png").resize((20, 20)).save(pictures / "p3.png")

    with workspace.inside():
        budget = plan_that_fits(parse_arguments([]))
    warnings = [str(warning) for warning in budget.plan.warnings]
    files = read_files("\n".join(start_lines(budget)), warnings)

    assert files.trained == 7
    assert files.noun == "pictures"
    assert files.uncaptioned == 2
    assert (files.enlarged, files.measured) == (1, 7)
    assert files.twins == "p2.png and p2.webp"
