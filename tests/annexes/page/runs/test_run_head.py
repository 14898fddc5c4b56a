"""The head of a run's page: one sentence, one filled button, and nothing meant for a terminal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape
from itertools import islice
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.fitting.ready import CONSENT
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.runs.planned import outline
from simpletuner.annexes.page.runs.run_head import answers_of, head
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.payloads import EVENTS_FILE, EventLog, Payloads
from simpletuner.annexes.report.report import facts
from simpletuner.annexes.runs.history import STOPS_LATER
from simpletuner.annexes.runs.log_files import record_in
from simpletuner.annexes.runs.run import Run
from simpletuner.planning.lock import STARTED_FILE
from simpletuner.reporting.events import (
    EVALUATION,
    PREVIEWS,
    Event,
    EventStream,
    Notice,
    PhaseAdvanced,
    PhaseEnded,
    PhaseStarted,
    StateChanged,
)
from simpletuner.reporting.metrics import METRICS_FILE
from tests.annexes.page.run_folder import RunFolder, State, every_run, write_checkpoint
from tests.annexes.page.runs.test_runs import STEPS, own, tell

FILLED = re.compile(r'class="(?:button )?primary"[^>]*>([^<]*)<')
SENTENCE = re.compile(r'<p class="sentence">(.*?)</p>')
TERMINAL = ("simpletuner ", "KeyboardInterrupt", "kill -CONT", "--yes")
ROUND = PhaseStarted("Rendering previews at step 3", 6, "pictures", PREVIEWS, "validation")


@pytest.fixture
def page(tmp_path: Path) -> TestClient:
    return TestClient(create_app(Project(tmp_path.resolve())))


def part(page: TestClient, folder: Path, name: str) -> str:
    return unescape(page.get(f"/runs/{run_id(folder.resolve())}/{name}").text)


def known(folder: Path) -> Path:
    """The folder as of a run that the page started, so that it may go on."""
    started = {"config": "config", "settings": {}, "after": -1}
    (folder / STARTED_FILE).write_text(json.dumps(started))
    return folder


# The button that one most likely wants; of a finished run it is the download.
WANTED = {
    "running": ["Preview now"],
    "interrupted": ["Continue"],
    "cancelled": ["Continue"],
    "stopped": ["Continue"],
    "done": [],
}


@pytest.mark.slow
def test_every_kind_of_run_has_one_filled_button_and_one_sentence(
    page: TestClient, tmp_path: Path
) -> None:
    for run in every_run():
        folder = known(run.write(tmp_path))
        head = part(page, folder, "head")
        rest = "".join(
            part(page, folder, name) for name in ("advice", "planned", "previews", "log")
        )

        assert "cannot be shown" not in head + rest, run.name
        assert FILLED.findall(head) in (WANTED[run.state], ["Add to queue"]), run.name
        assert len(SENTENCE.findall(head)) == 1, run.name
        assert not [words for words in TERMINAL if words in head], run.name


def test_a_run_is_queued_rather_than_started_beside_another(
    page: TestClient, tmp_path: Path
) -> None:
    RunFolder(False, "nothing", False, "running").write(tmp_path)
    folder = known(RunFolder(False, "checkpoint", False, "interrupted").write(tmp_path))

    head = part(page, folder, "head")

    assert FILLED.findall(head) == ["Add to queue"]
    assert "is at work; a run in the queue starts after it." in head


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ((), "Checking the settings and the files"),
        (STEPS[:1], "Preparing the training"),
        ((STEPS[0], PhaseStarted("Loading torch", stage="init_torch")), "Loading PyTorch."),
        (
            (STEPS[0], PhaseStarted("Encoding captions", 27, stage="init_text_embed_cache")),
            "Encoding captions: 0 of 27.",
        ),
        (STEPS[:2], "Training, step 0 of 9."),
        ((*STEPS, StateChanged("stopping", 3, 9)), "Stopping. The last step is being saved."),
        (STEPS, "Training, step 3 of 9, about 12 s left."),
        (
            (*STEPS, ROUND, PhaseAdvanced(ROUND, 4)),
            "Rendering previews at step 3: 4 of 6, a few seconds left. Then training goes on: "
            "step 3 of 9, about 12 s left in all.",
        ),
    ],
)
def test_sentence_says_what_a_run_does_now(
    tmp_path: Path, events: tuple[Event, ...], sentence: str
) -> None:
    tell(tmp_path, *events)
    own(tmp_path, since=time.time())

    shown = Run("run", tmp_path).status()["sentence"]

    assert shown.startswith(sentence)


def test_a_run_on_another_machine_names_it(tmp_path: Path) -> None:
    tell(tmp_path, *STEPS)
    own(tmp_path, host="elsewhere")

    sentence = Run("run", tmp_path).status()["sentence"]

    assert sentence.startswith("On elsewhere: Training, step 3 of 9")


def test_a_round_of_previews_is_expected_to_take_as_long_as_the_last_one(tmp_path: Path) -> None:
    tell(tmp_path, *STEPS, ROUND)
    log = tmp_path / EVENTS_FILE
    # The first round began a minute ago.
    lines = log.read_text().splitlines()
    earlier = datetime.now(UTC) - timedelta(seconds=60)
    lines[-1] = re.sub(r'"timestamp": "[^"]*"', f'"timestamp": "{earlier.isoformat()}"', lines[-1])
    log.write_text("\n".join([*lines, ""]))
    append(tmp_path, PhaseEnded(ROUND, 6, 60.0, True), ROUND)
    own(tmp_path)

    sentence = Run("run", tmp_path).status()["sentence"]

    assert sentence.startswith("Rendering previews at step 3: 0 of 6, about 1 minute left.")


def append(folder: Path, *events: Event) -> None:
    """Add events to the session of a folder."""
    job = json.loads((folder / EVENTS_FILE).read_text().splitlines()[0])["job_id"]
    payloads = Payloads(every=0, job_id=job)
    payloads(ROUND)
    stream = EventStream(EventLog(folder, payloads))
    for event in events:
        stream.publish(event)


def saved_at(step: int) -> Callable[[Path], None]:
    return lambda folder: write_checkpoint(folder / f"checkpoint-{step}", step)


def nothing_saved(folder: Path) -> None:
    """No checkpoint."""


@pytest.mark.parametrize(
    ("save", "label", "sentence"),
    [
        (nothing_saved, "cancelled", "Cancelled at step 3; nothing was saved."),
        (
            saved_at(2),
            "cancelled",
            "Cancelled at step 3. It continues from step 2; 1 step is trained again.",
        ),
        (saved_at(3), "stopped at 3, can continue", "Stopped at step 3; it can continue."),
    ],
)
def test_a_stopped_run_says_what_was_saved(
    tmp_path: Path, save: Callable[[Path], None], label: str, sentence: str
) -> None:
    tell(tmp_path, *STEPS, StateChanged("interrupted", 3, 9, "KeyboardInterrupt"))
    save(tmp_path)

    status = Run("run", tmp_path).status()

    assert (status["label"], status["sentence"]) == (label, sentence)


@pytest.mark.parametrize(
    ("save", "loss"),
    [
        (nothing_saved, "The 3 steps since the start may be lost."),
        (saved_at(2), "The one step since checkpoint-2 may be lost."),
        (saved_at(3), "Nothing is lost: step 3 is saved."),
    ],
)
def test_cancel_asks_what_may_be_lost(
    page: TestClient, tmp_path: Path, save: Callable[[Path], None], loss: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    tell(folder, *STEPS)
    own(folder)
    save(folder)

    assert f'data-cancel data-loss="{loss}"' in part(page, folder, "head")


def test_cancel_before_the_first_step_loses_no_step(page: TestClient, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    tell(folder, StateChanged("starting", 0, 9), StateChanged("running", 0, 9))
    own(folder)

    assert 'data-loss="No step has been trained yet."' in part(page, folder, "head")


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("running", "running"),  # whose status has no message
        ("done", "broken"),  # whose status names the line already
    ],
)
def test_a_damaged_record_is_named_once(
    page: TestClient, tmp_path: Path, state: State, status: str
) -> None:
    folder = RunFolder(False, "result", False, state).write(tmp_path)
    with (folder / METRICS_FILE).open("a") as record:
        record.write("not a row\n")

    shown = head(Run("run", folder))

    assert shown["status"]["status"] == status
    assert shown["reason"].count(METRICS_FILE) == 1


def test_a_warning_is_not_taken_for_the_answer_to_a_request(tmp_path: Path) -> None:
    answer = Notice(f"{STOPS_LATER} this epoch.")
    tell(tmp_path, *STEPS, answer, Notice("The disk is nearly full.", warning=True))

    assert answers_of(Run("run", tmp_path)) == [f"{STOPS_LATER} this epoch."]


DOCUMENT = {
    "problems": [],
    "model": {"family": "sanavideo", "flavour": "2b", "type": "lora", "download": 2 * 10**9},
    "datasets": [{"id": "clips", "files": 12, "used": 10, "trained": True}],
    "length": {"steps": 300},
    "device": {"name": "RTX 4090", "usable": 24e9},
    "memory": [{"device": 8e9}, {"device": 18e9}],
    "seconds": {"total": 3600.0, "previews": 600.0},
}


def test_plan_of_a_run_that_has_not_started_is_in_words() -> None:
    planned = outline(DOCUMENT)

    assert planned["verdict"] == "fits"
    assert planned["lines"] == [
        "LoRA on Sana Video 2b",
        "clips: 10 of 12 files",
        "300 steps, about 60 minutes, of which previews 10 minutes",
        "up to 18.0 GB of 24.0 GB of memory on RTX 4090",
        "2.0 GB to download first",
    ]


def test_plan_that_cannot_start_names_its_problems_in_the_words_of_the_page() -> None:
    problem = {"key": "device", "message": f"no GPU can be used here. {CONSENT}", "fatal": True}

    planned = outline({"problems": [problem], "device": None})

    assert planned["verdict"] == "cannot start: 1 problem"
    assert planned["problems"] == [
        'no GPU can be used here. To train on the CPU all the same, switch on "I Know What I Am '
        'Doing" in Settings.'
    ]


def test_only_a_run_that_has_not_started_shows_a_plan(page: TestClient, tmp_path: Path) -> None:
    folder = known(RunFolder(False, "nothing", False, "interrupted").write(tmp_path))

    assert part(page, folder, "planned") == ""


def test_a_finished_run_shows_its_losses_time_and_files(page: TestClient, tmp_path: Path) -> None:
    folder = RunFolder(True, "result", False, "done").write(tmp_path)

    head = part(page, folder, "head")

    assert re.search(r"Finished: 3 steps in [\d.]+ s\. The file loads in diffusers\.", head)
    assert "<dd>0.5 → 0.5</dd>" in head
    assert "<dd>0.5 at step 3</dd>" in head
    assert "LoRA of 160 B, 1 checkpoint" in head
    assert "Learning rate" not in head


def test_every_round_of_a_stage_is_listed_with_its_time(page: TestClient, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    rounds = [PhaseStarted(f"Evaluating at step {step}", 2, "", EVALUATION) for step in (1, 2)]
    events: list[Event] = []
    for phase in rounds:
        events += [phase, PhaseEnded(phase, 2, 1.0, True)]
    tell(folder, *STEPS, *events)

    log = part(page, folder, "log")

    assert re.findall(r"<b>(Evaluating at step \d)</b>", log) == [
        "Evaluating at step 1",
        "Evaluating at step 2",
    ]


def test_terminal_text_of_a_finished_run_is_folded(page: TestClient, tmp_path: Path) -> None:
    folder = RunFolder(False, "result", False, "done").write(tmp_path)

    log = part(page, folder, "log")

    before, _, folded = log.partition("<summary>What the run reported</summary>")
    assert "simpletuner sample" in folded.partition("</details>")[0]
    assert "simpletuner" not in before


def test_a_run_without_a_config_says_how_it_continues(page: TestClient, tmp_path: Path) -> None:
    folder = RunFolder(False, "checkpoint", False, "interrupted").write(tmp_path / "output")

    head = part(page, folder, "head").replace("<wbr>", "")

    assert f"No config of this project has the output folder output/{folder.name}" in head


def test_folders_of_the_project_are_shown_without_its_path(
    page: TestClient, tmp_path: Path
) -> None:
    folder = RunFolder(False, "result", False, "done").write(tmp_path / "output")

    head = part(page, folder, "head").replace("<wbr>", "")

    assert f"output/{folder.name}" in head
    assert str(tmp_path) not in head


def test_clock_that_is_ahead_adds_no_time(page: TestClient, tmp_path: Path) -> None:
    folder = RunFolder(False, "checkpoint", False, "running").write(tmp_path)
    log = folder / EVENTS_FILE
    ahead = f"{datetime.now().year + 5}-"
    log.write_text(re.sub(r'("timestamp": ")\d{4}-', rf"\g<1>{ahead}", log.read_text()))

    sentence = SENTENCE.search(part(page, folder, "head"))

    assert sentence is not None
    assert "s left" in sentence[1]


def test_the_loss_is_told_in_the_numbers_of_the_report(page: TestClient, tmp_path: Path) -> None:
    folder = RunFolder(False, "result", False, "done").write(tmp_path)
    steps = ({"step": step, "train_loss": 2 / step, "seconds": 1} for step in range(4, 60))
    with (folder / METRICS_FILE).open("a") as record:
        record.writelines(json.dumps(row) + "\n" for row in steps)
    columns = record_in(folder).read()[0]
    of_report = islice(facts({"metrics": columns, "step": 59, "total_steps": 59}), 2)

    head = part(page, folder, "head")

    name = "Loss, first to last tenth"
    assert name in head
    assert dict(of_report)[name] in head


@pytest.mark.parametrize("state", ["running", "interrupted", "stopped", "done"])
def test_head_and_result_have_one_filled_button_together(
    page: TestClient, tmp_path: Path, state: State
) -> None:
    folder = known(RunFolder(False, "checkpoint", False, state).write(tmp_path))

    result = part(page, folder, "results").partition("</section>")[0]

    assert "Use this" in result
    assert len(FILLED.findall(part(page, folder, "head") + result)) == 1
