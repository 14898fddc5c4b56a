"""The sentence that says what a run does now, or how it ended, from a history made by hand."""

from __future__ import annotations

import pytest

from simpletuner.annexes.runs.history import RunHistory, StageTurn
from simpletuner.annexes.runs.sentence import finished, training

CLOCK = 1000.0  # the present Unix time
PROGRESS = {"current": 3, "total": 9, "eta_seconds": 12.0}


def history_with(turn: StageTurn, eta: float | None, *earlier: StageTurn) -> RunHistory:
    """The history of a run in which a stage is under way."""
    counts = {"current": turn.done, "total": turn.total, "eta_seconds": eta}
    stage = {"key": turn.key, "label": turn.label, "status": "running", "progress": counts}
    return RunHistory(
        at=CLOCK, step_at=CLOCK, status="running", stages={turn.key: stage}, turns=[*earlier, turn]
    )


def test_a_run_lasts_no_less_than_the_stage_that_it_is_in() -> None:
    turn = StageTurn("validation", "Rendering", CLOCK, "running", done=1, total=6)

    now = training(history_with(turn, 300.0), PROGRESS, CLOCK)

    assert now.sentence.endswith("step 3 of 9, about 5 minutes left in all.")


@pytest.mark.parametrize(
    ("earlier", "sentence"),
    [
        ("benchmark_base_model", "Rendering: 0 of 6, about 1 minute left."),
        ("final_validation", "Rendering: 0 of 6, about 1 minute left."),
        ("init_vae_cache", "Rendering: 0 of 6."),
    ],
)
def test_a_round_of_previews_takes_as_long_as_any_round_before_it(
    earlier: str, sentence: str
) -> None:
    before = StageTurn(earlier, "Earlier", CLOCK - 100, "completed", CLOCK - 40)
    turn = StageTurn("validation", "Rendering", CLOCK, "running", total=6)

    now = training(history_with(turn, None, before), PROGRESS, CLOCK)

    assert now.sentence.startswith(f"{sentence} Then training goes on")


def test_after_the_last_step_the_result_is_saved_and_checked() -> None:
    history = RunHistory(at=CLOCK, step_at=CLOCK, status="running")

    now = training(history, {**PROGRESS, "current": 9}, CLOCK)

    assert now.sentence == "Saving and checking the result."
    assert (now.done, now.total) == (9, 9)


@pytest.mark.parametrize(
    ("start_step", "sentence"),
    [
        (0, "Finished: 9 steps in 2:00."),
        (3, "Finished: 9 steps."),  # the time of the sessions before is not known
    ],
)
def test_only_a_run_of_one_session_tells_its_time(start_step: int, sentence: str) -> None:
    history = RunHistory(began=CLOCK - 120, at=CLOCK, start_step=start_step)

    assert finished(9, history, "") == sentence
