"""The payloads of a run's events, and the log that mirrors them."""

from __future__ import annotations

import errno
import json
import math
import re
import resource
from datetime import datetime
from pathlib import Path

import pytest

import simpletuner
from simpletuner import atomic
from simpletuner.annexes import payloads
from simpletuner.annexes.page.runs.live import events_after
from simpletuner.annexes.payloads import (
    EVENTS_FILE,
    EventLog,
    Payload,
    Payloads,
    append_whole,
    last_id,
)
from simpletuner.annexes.runs.history import RunHistory
from simpletuner.annexes.runs.log_files import Tail
from simpletuner.encoding.download import download
from simpletuner.encoding.encoders import FeatureJob, LatentJob, TextJob
from simpletuner.errors import DiskFullError
from simpletuner.redaction import HIDDEN
from simpletuner.reporting.events import (
    EVALUATION,
    UPLOADING,
    CheckpointSaved,
    Evaluated,
    Event,
    EventStream,
    MediaRendered,
    Notice,
    PhaseStarted,
    PreviewGrew,
    StateChanged,
    StepReport,
    Uploaded,
)
from simpletuner.reporting.metrics import MediaRecord
from tests.tools.workspace import read_events

PICTURE = MediaRecord(4, "bird", "a bird", "validation_images/step_4_bird_0_64x32.png", 64, 32)
CLIP = MediaRecord(4, "bird", "a bird", "validation_images/step_4_bird_0_64x32@5.mp4", 64, 32)
RUNNING = StateChanged("running", 0, 4)
DOCS = Path(simpletuner.__file__).parent / "docs"
# In the order of docs/WEBHOOKS.md; tests of whole runs promise more of them.
STATUSES = [
    "starting",
    "running",
    "stopping",
    "completed",
    "failed",
    "cancelled",
    "uploading_model",
    "model_available",
]
STAGES = [
    "init_torch",
    "init_download_model",
    "init_text_embed_cache",
    "init_vae_cache",
    "init_feature_cache",
    "init_load_base_model",
    "init_prepare_models",
    "benchmark_base_model",
    "evaluation",
    "validation",
    "final_validation",
    "checkpoint_save",
    "save_result",
    "uploading",
    "training_complete",
    "training_abort",
]


def step(number: int, loss: float = 0.5) -> StepReport:
    return StepReport(number, 1, {"train_loss": loss, "learning_rate": 1e-4}, seconds=2.0)


class Clock:
    """Time that only tests move."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def payloads_of(*events: Event) -> list[Payload]:
    payloads = Payloads(every=0)
    return [payload for event in events for payload in payloads(event)]


@pytest.mark.parametrize(
    ("event", "kinds"),
    [
        (StateChanged("starting", 0, 4), ["training.status"]),
        (StateChanged("finished", 4, 4, "done"), ["training.status", "lifecycle.stage"]),
        (StateChanged("failed", 2, 4, "broken"), ["training.status", "lifecycle.stage", "error"]),
        (Evaluated(2, {"loss/val/a": 0.5}), ["training.metric"]),
        (MediaRendered(PICTURE), ["training.validation"]),
        (PreviewGrew(PICTURE, 5, 20, 750.0), ["validation.image"]),
        (
            CheckpointSaved(Path("x/checkpoint-4"), 4, 1.0),
            ["training.checkpoint", "lifecycle.stage"],
        ),
        (PhaseStarted("Uploading", kind=UPLOADING), ["training.status", "lifecycle.stage"]),
        (Uploaded("step 4 to the hub", "https://hub/me/star", 4), ["training.status"]),
        (Notice("hot", warning=True), ["notification"]),
    ],
)
def test_every_payload_has_the_common_fields(event: Event, kinds: list[str]) -> None:
    payloads = payloads_of(event)
    assert [payload["type"] for payload in payloads] == kinds

    for payload in payloads:
        assert payload["severity"] in {"info", "warning", "error", "success"}
        assert payload["job_id"]
        assert datetime.fromisoformat(payload["timestamp"]).tzinfo is not None
        json.dumps(payload, allow_nan=False)


def test_progress_payload_has_the_fields_of_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLETUNER_JOB_ID", "job-7")
    *_, payload = payloads_of(RUNNING, step(1))
    assert payload["job_id"] == "job-7"
    assert payload["data"] == {"status": "running", "step": 1}

    progress = payload["progress"]
    assert (progress["current"], progress["total"], progress["percent"]) == (1, 4, 25.0)
    assert progress["eta_seconds"] == pytest.approx(6.0)
    assert progress["metrics"]["loss"] == 0.5
    assert progress["metrics"]["learning_rate"] == 1e-4


def test_previews_name_their_files() -> None:
    picture, clip, growing = payloads_of(
        MediaRendered(PICTURE), MediaRendered(CLIP), PreviewGrew(PICTURE, 5, 20, math.nan)
    )

    assert (picture["images"], picture["videos"]) == ([PICTURE.path], [])
    assert (clip["images"], clip["videos"]) == ([], [{"src": CLIP.path, "mime_type": "video/mp4"}])
    assert growing["data"]["step_label"] == "5/20"
    assert growing["data"]["resolution"] == [64, 32]
    assert growing["data"]["timestep"] is None


def test_progress_is_thinned_but_keeps_first_and_last_step() -> None:
    clock = Clock()
    payloads = Payloads(every=5, now=clock)
    payloads(StateChanged("running", 0, 10))
    sent = []

    for number in range(1, 11):
        clock.seconds = float(number)
        sent += [payload["data"]["step"] for payload in payloads(step(number))]

    assert sent == [1, 6, 10]


def test_phases_become_stages() -> None:
    payloads = Payloads(every=5, now=Clock())
    seen: list[Payload] = []
    events = EventStream(lambda event: seen.extend(payloads(event)))

    def encode() -> None:
        with events.phase(
            "Encoding captions", 3, "captions", stage="init_text_embed_cache"
        ) as phase:
            for _ in range(2):
                phase.advance(1, "bird.txt")
            raise OSError

    with pytest.raises(OSError):
        encode()

    stages = [payload["stage"] for payload in seen]
    assert [stage["status"] for stage in stages] == ["running", "running", "failed"]
    assert {stage["key"] for stage in stages} == {"init_text_embed_cache"}
    assert [stage["progress"]["current"] for stage in stages] == [0, 1, 2]


def test_secrets_are_hidden_in_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "geheimgeheim")
    assert (
        payloads_of(Notice("the token is geheimgeheim"))[0]["message"] == f"the token is {HIDDEN}"
    )


def test_event_log_continues_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    first = EventLog(tmp_path, Payloads(every=0))
    for event in (RUNNING, step(1), step(2)):
        first(event)

    with path.open("ab") as file:
        file.write(b'{"id": 4, "type": "tor')
    assert [event["id"] for event in read_events(path)] == [1, 2, 3]

    second = EventLog(tmp_path, Payloads(every=0))
    second(Notice("again"))
    assert [(event["id"], event["type"]) for event in read_events(path)[2:]] == [
        (3, "training.status"),
        (4, "notification"),
    ]


def test_new_events_are_read_from_any_position_of_a_long_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path, Payloads(every=0))
    ids = list(range(1, 301))

    for number in ids:
        log(Notice("ä" * (10 + 7 * number)))
    assert last_id(log.path) == 300

    for after in (0, 1, 150, 299, 300):
        tail = Tail(log.path, "id")
        ids_after: list[int] = []
        while lines := tail.lines():
            ids_after += [event["id"] for event in events_after(lines, after)]
        assert ids_after == ids[after:]


def test_full_disk_ends_the_run_for_every_subscriber(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, the file may grow by a few bytes only: a write would be cut off."""
    monkeypatch.setattr(atomic, "DISK_FULL_CODES", atomic.DISK_FULL_CODES | {errno.EFBIG})
    received: list[Event] = []
    path = tmp_path / EVENTS_FILE
    stream = EventStream(EventLog(tmp_path, Payloads(every=0)), received.append)
    stream.publish(RUNNING)
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))

    try:
        with pytest.raises(DiskFullError):
            stream.publish(Notice("n" * 1000))
        stream.publish(StateChanged("failed", 0, 99, "no space left on the disk"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert isinstance(received[-1], StateChanged), "other subscribers receive the end, too"
    assert path.read_bytes() == whole, "nothing is written in part"


def test_final_event_is_written_into_reserved_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk counts as full for as long as the reserve is open."""

    def reserve_is_open() -> bool:
        """Whether this process has an open file in the folder that is deleted already."""
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.is_symlink():
                file = descriptor.readlink()
                if file.parent == tmp_path and file.name.endswith("(deleted)"):
                    return True
        return False

    def append(path: Path, content: bytes) -> None:
        if reserve_is_open():
            raise OSError(errno.ENOSPC, "No space left on device")
        append_whole(path, content)

    stream = EventStream(EventLog(tmp_path, Payloads(every=0)))
    history = RunHistory()

    stream.publish(RUNNING)
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS_FILE]

    monkeypatch.setattr(payloads, "append_whole", append)
    with pytest.raises(DiskFullError):
        stream.publish(Notice("n"))

    stream.publish(StateChanged("failed", 0, 99, "no space left on the disk"))
    history.follow(Tail(tmp_path / EVENTS_FILE, "id", renew=history.begin))
    assert (history.status, history.message) == ("failed", "no space left on the disk")


@pytest.mark.parametrize(
    ("event", "key"),
    [
        (PhaseStarted("Encoding captions", 3, stage=TextJob.stage), "init_text_embed_cache"),
        (PhaseStarted("Encoding pictures", 3, stage=LatentJob.stage), "init_vae_cache"),
        (PhaseStarted("Encoding features", 3, stage=FeatureJob.stage), "init_feature_cache"),
        (PhaseStarted("Evaluating at step 2", kind=EVALUATION), "evaluation"),
        (CheckpointSaved(Path("x/checkpoint-4"), 4, 1.0), "checkpoint_save"),
        (StateChanged("finished", 4, 4, "done"), "training_complete"),
        (StateChanged("failed", 2, 4, "broken"), "training_abort"),
        (StateChanged("interrupted", 2, 4, "stopped"), "training_abort"),
    ],
)
def test_stages_have_the_names_that_programs_know(event: Event, key: str) -> None:
    stages = [payload["stage"] for payload in payloads_of(event) if "stage" in payload]

    assert [stage["key"] for stage in stages] == [key]


@pytest.mark.parametrize(
    ("event", "status", "severity"),
    [
        (StateChanged("starting", 0, 4), "starting", "info"),
        (StateChanged("running", 0, 4), "running", "info"),
        (StateChanged("stopping", 2, 4), "stopping", "info"),
        (StateChanged("finished", 4, 4, "done"), "completed", "success"),
        (StateChanged("interrupted", 2, 4, "stopped"), "cancelled", "warning"),
        (StateChanged("failed", 2, 4, "broken"), "failed", "error"),
        (PhaseStarted("Uploading", kind=UPLOADING), "uploading_model", "info"),
        (Uploaded("step 4 to the hub", "https://hub/me/star", 4), "model_available", "info"),
    ],
)
def test_the_status_of_a_run_has_the_name_that_programs_know(
    event: Event, status: str, severity: str
) -> None:
    (payload,) = [each for each in payloads_of(event) if each["type"] == "training.status"]

    assert payload["data"]["status"] == status
    assert payload["severity"] == severity


def test_the_page_of_webhooks_lists_every_name() -> None:
    page = (DOCS / "WEBHOOKS.md").read_text(encoding="utf-8")
    statuses = page.partition("`data.status`: ")[2].partition(";")[0]
    stages = page.partition("Keys of stages:")[2].partition(".\n")[0]

    assert re.findall(r"`(\w+)`", statuses) == STATUSES
    assert re.findall(r"`(\w+)`", stages) == STAGES


def test_downloading_and_uploading_have_stages_of_their_own() -> None:
    seen: list[Payload] = []
    payloads = Payloads(every=0)
    events = EventStream(lambda event: seen.extend(payloads(event)))

    download([], events)
    with events.phase("Uploading the result", kind=UPLOADING):
        pass

    keys = [payload["stage"]["key"] for payload in seen if "stage" in payload]
    assert keys == ["init_download_model", "init_download_model", "uploading", "uploading"]
