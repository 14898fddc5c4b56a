"""Webhooks and a real server on this machine: what arrives, and the cost of a bad receiver."""

from __future__ import annotations

import base64
import email.policy
import io
import json
import logging
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpletuner.annexes import webhooks
from simpletuner.annexes.draft import Draft
from simpletuner.annexes.payloads import Payloads
from simpletuner.annexes.webhooks import LONGEST_TEXT, MOST_WAITING, Delivery, Outbox, delivered
from simpletuner.config.webhooks import Hook
from simpletuner.data.clip_writer import write_mp4
from simpletuner.reporting.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    EventStream,
    MediaRendered,
    Notice,
    PreviewGrew,
    StateChanged,
    StepReport,
)
from simpletuner.reporting.metrics import MediaRecord
from tests.tools.processes import PATIENCE, free_port
from tests.tools.runs import PREVIEWED
from tests.tools.workspace import Workspace, read_events

SECRET_PATH = "/a-long-secret-path"
PICTURE = MediaRecord(4, "bird", "@everyone a bird", "validation_images/bird.png", 64, 32)
CLIP = MediaRecord(4, "bird", "a bird", "validation_images/bird.mp4", 64, 32)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers late."""
    monkeypatch.setattr(webhooks, "TIMEOUT", PATIENCE)


@dataclass
class Receiver:
    """A server: what it has received, and how it answers.

    Attributes:
        late: seconds until it answers; None if it waits for `answers`.
        got: path, headers and body of every request.
    """

    url: str = ""
    status: int = 204
    location: str | None = None
    late: float | None = None
    answers: threading.Event = field(default_factory=threading.Event)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.got]

    @property
    def types(self) -> list[str]:
        return [payload["type"] for payload in self.payloads]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [payload for payload in self.payloads if payload["type"] == kind]


@contextmanager
def served(receiver: Receiver) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.got.append(
                (self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            )
            receiver.answers.wait(receiver.late)
            self.send_response(receiver.status)
            if receiver.location is not None:
                self.send_header("Location", receiver.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}{SECRET_PATH}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with served(Receiver()) as receiver:
        receiver.answers.set()
        yield receiver


def hook(url: str, kind: str = "raw", **settings: Any) -> Hook:
    return Hook(kind, webhook_url=url, **settings)


def deliver(target: Hook, folder: Path, *events: Event, images: str = "data_uri") -> Delivery:
    delivery = Delivery(target, Payloads(every=0), folder, images)
    for event in events:
        delivery(event)
    delivery.close(time.monotonic() + PATIENCE)
    delivery.finish(time.monotonic() + PATIENCE)
    return delivery


def step(number: int) -> StepReport:
    return StepReport(number, 1, {"train_loss": 0.5, "learning_rate": 1e-4}, seconds=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "validation_images").mkdir()
    Image.new("RGB", (64, 32), "red").save(tmp_path / PICTURE.path)
    write_mp4(tmp_path / CLIP.path, [Image.new("RGB", (64, 32), "red")] * 5, 8)
    return tmp_path


def test_raw_webhook_receives_messages_in_order_with_the_token(
    receiver: Receiver, tmp_path: Path
) -> None:
    events = [
        StateChanged("running", 0, 2),
        step(1),
        step(2),
        StateChanged("finished", 2, 2, "done"),
    ]

    deliver(hook(receiver.url, auth_token="open sesame"), tmp_path, *events)

    assert receiver.types == ["training.status"] * 4 + ["lifecycle.stage"]
    assert [payload["data"]["status"] for payload in receiver.payloads[:4]] == ["running"] * 3 + [
        "completed"
    ]
    for path, headers, _ in receiver.got:
        assert (path, headers["x-api-key"]) == (SECRET_PATH, "open sesame")
        assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("level", "types"),
    [("error", ["error", "lifecycle.stage", "training.status"]), ("critical", [])],
)
def test_messages_below_log_level_are_not_sent(
    receiver: Receiver, tmp_path: Path, level: str, types: list[str]
) -> None:
    events = [Notice("hot", warning=True), Notice("warm"), StateChanged("failed", 1, 2, "broken")]

    deliver(hook(receiver.url, log_level=level), tmp_path, *events)

    assert sorted(receiver.types) == types


@pytest.mark.parametrize("images", ["data_uri", "base64"])
def test_raw_webhook_embeds_pictures_and_clips(
    receiver: Receiver, folder: Path, images: str
) -> None:
    gone = MediaRecord(4, "bird", "", "validation_images/gone.png", 64, 32)
    events = [
        MediaRendered(PICTURE),
        PreviewGrew(PICTURE, 5, 20, 750.0),
        MediaRendered(CLIP),
        MediaRendered(gone),
    ]
    deliver(hook(receiver.url), folder, *events, images=images)
    picture, growing, clip, lost = receiver.payloads
    head = "data:image/png;base64,"

    data = picture["images"][0]
    assert data.startswith(head) == (images == "data_uri")
    assert base64.b64decode(data.removeprefix(head)) == (folder / PICTURE.path).read_bytes()
    assert growing["images"] == picture["images"]

    video = clip["videos"][0]
    assert video["mime_type"] == "video/mp4"
    assert base64.b64decode(video["src"].partition(",")[2]) == (folder / CLIP.path).read_bytes()
    assert lost["images"] == []


def parts_of(receiver: Receiver) -> list[EmailMessage]:
    """The parts of the only message, by the standard library."""
    ((_, headers, body),) = receiver.got
    head = f"Content-Type: {headers['content-type']}\r\n\r\n".encode()
    whole = BytesParser(EmailMessage, policy=email.policy.HTTP).parsebytes(head + body)
    return list(whole.iter_parts())


def fields_of(receiver: Receiver) -> dict[str, bytes]:
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in parts_of(receiver)
    }


def test_discord_receives_a_form_with_the_preview_file(receiver: Receiver, folder: Path) -> None:
    deliver(
        hook(receiver.url, "discord", message_prefix="birds"),
        folder,
        StateChanged("running", 0, 2),
        step(1),
        MediaRendered(PICTURE),
    )
    fields = fields_of(receiver)
    assert (
        fields["content"]
        .decode()
        .startswith("`(birds)` Validation image for `bird`\nValidation prompt: @everyone")
    )

    settings = json.loads(fields["payload_json"])
    assert settings == {"content": fields["content"].decode(), "allowed_mentions": {"parse": []}}
    assert fields["file0"] == (folder / PICTURE.path).read_bytes()
    assert parts_of(receiver)[-1].get_filename() == "bird.png"


def test_discord_receives_a_still_of_a_large_clip(
    receiver: Receiver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "LARGEST_FILE", 10)
    long = MediaRecord(4, "bird", "x" * 3000, CLIP.path, 64, 32)
    deliver(hook(receiver.url, "discord"), folder, MediaRendered(long))

    fields = fields_of(receiver)

    assert len(fields["content"].decode()) == LONGEST_TEXT
    assert Image.open(io.BytesIO(fields["file0"])).size == (64, 32)


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1", 307), ("127.0.0.1", 303), ("localhost", 302)]
)
def test_redirects_are_reported_and_not_followed(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, status: int
) -> None:
    with served(Receiver()) as target:
        target.answers.set()
        receiver.status = status
        receiver.location = target.url.replace("127.0.0.1", host)
        deliver(hook(receiver.url, auth_token="open sesame"), tmp_path, Notice("hello"))
        assert target.got == []
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    place = receiver.location.removesuffix(SECRET_PATH)
    error = (
        f"The webhook at 127.0.0.1 returned status {status}: it redirects to {place}/, where "
        "nothing is sent."
    )

    # With 303, the message is delivered, and only the response is elsewhere.
    expected = [] if status == 303 else [f"{error} Change webhook_config if that is right."]
    assert messages == expected


def test_final_message_reaches_a_slow_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT", 0.3)
    with served(Receiver(late=0.4)) as slow:
        target = {"webhook_type": "raw", "callback_url": slow.url}
        config = Draft(tmp_path / "config.json", {"webhook_config": target}).config
        events = EventStream()
        with delivered(config.webhooks, "project", tmp_path, events, "job"):
            for number in range(20):
                events.publish(Notice(str(number)))
            events.publish(StateChanged("finished", 50, 50, "done"))
        assert "completed" in [payload.get("data", {}).get("status") for payload in slow.payloads]
        assert len(slow.got) < 20, "the rest gave way"


def test_refusal_is_logged_once_a_minute_without_the_address(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 500
    deliver(hook(receiver.url), tmp_path, *(Notice(str(number)) for number in range(4)))
    assert len(receiver.got) == 4

    messages = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert messages == ["The webhook at 127.0.0.1 returned status 500."]


def test_unreachable_receiver_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Receiver(f"http://127.0.0.1:{free_port()}")
    caplog.set_level(logging.DEBUG, "simpletuner")
    deliver(hook(gone.url), tmp_path, Notice("hello"), Notice("is anybody there?"))

    records = [record for record in caplog.records if record.name.startswith("simpletuner")]

    assert {record.getMessage() for record in records} == {
        "The webhook at 127.0.0.1 could not be reached: ConnectError"
    }
    assert [record.levelname for record in records] == ["WARNING", "DEBUG"], "a warning once"


def test_deliveries_load_the_certificates_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bool] = []
    original = ssl.create_default_context
    monkeypatch.setattr(
        ssl, "create_default_context", lambda *a, **b: loaded.append(True) or original(*a, **b)
    )
    hook = Hook("raw", callback_url=f"http://127.0.0.1:{free_port()}/")
    deliveries = [Delivery(hook, Payloads(), tmp_path) for _ in range(20)]

    for delivery in deliveries:
        delivery(Notice("hello", warning=True))
        delivery.finish(time.monotonic() + PATIENCE)

    assert len(loaded) <= 1


def test_silent_receiver_delays_neither_steps_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(Receiver()) as silent:
        delivery = Delivery(hook(silent.url), Payloads(every=0), tmp_path)
        delivery(StateChanged("running", 0, 900))
        for number in range(1, 501):
            delivery(step(number))
        delivery(CheckpointSaved(Path("checkpoint-500"), 500, 1.0))
        assert len(delivery.outbox) <= MOST_WAITING
        delivery.finish(time.monotonic() + 0.2)
        assert len(silent.got) <= 1, "it has not even answered the first"
    assert "messages were not sent" in caplog.text


def test_full_queue_drops_progress_before_important_messages() -> None:
    outbox = Outbox()
    payloads = Payloads(every=0)

    def put(*events: Event) -> None:
        for event in events:
            for payload in payloads(event):
                outbox.put(payload)

    put(CheckpointSaved(Path("checkpoint-1"), 1, 1.0), Notice("first"))
    put(StateChanged("running", 0, 1000), *(step(number) for number in range(1, 200)))
    put(*(Evaluated(number, {"loss/val/a": 0.5}) for number in range(70)))
    put(StateChanged("failed", 200, 1000, "broken"))
    outbox.close()

    remaining = list(iter(outbox.take, None))

    assert len(remaining) == MOST_WAITING
    assert [message["type"] for message in remaining].count("training.metric") == MOST_WAITING - 3
    assert {"training.checkpoint", "error"} < {message["type"] for message in remaining}
    # The stage of the checkpoint and the notice, all 200 of progress, the oldest metrics, and the
    # stage of the end.
    assert outbox.dropped == 2 + 200 + (70 - (MOST_WAITING - 3)) + 1


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"webhook_type": "raw"}, "webhook_config[0].callback_url: is required for a raw webhook"),
        *(
            (
                {"webhook_type": "raw", "callback_url": "http://h/", "auth_token": token},
                "auth_token: cannot be sent",
            )
            for token in ("schlüssel-schlüssel", "open-sesame\n")
        ),
        (
            [{"webhook_type": "discord", "callback_url": "http://a"}],
            "webhook_config[0].webhook_url: is required",
        ),
        (
            {"webhook_type": "raw", "callback_url": "ftp://a/b"},
            "webhook_config[0].callback_url: must be a URL",
        ),
        ({"webhook_type": "slack"}, "is not one of: discord, raw."),
        (
            {"webhook_type": "raw", "callback_url": "http://a", "log_level": "loud"},
            "is not one of: critical, error",
        ),
        ({"callback_url": "http://a"}, "webhook_type: is required."),
        ("hooks.json", "is not valid JSON"),
    ],
)
def test_plan_refuses_invalid_webhook_settings(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], value: object, complaint: str
) -> None:
    workspace.path("hooks.json").write_text("[{]")
    workspace.write_config(webhook_config=value)

    assert workspace.run("plan") == 2
    assert complaint in capsys.readouterr().err


def test_plan_refuses_an_environment_flag_that_is_not_boolean(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLETUNER_SSL_NO_VERIFY", "maybe")
    workspace.write_config(
        webhook_config={"webhook_type": "raw", "callback_url": "https://example.org/"}
    )

    assert workspace.run("plan") == 2
    assert "SIMPLETUNER_SSL_NO_VERIFY: 'maybe' is not true or false." in capsys.readouterr().err


@pytest.mark.parametrize("in_file", [False, True])
def test_unset_variable_warns_in_plan_and_fails_in_training(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], in_file: bool
) -> None:
    target = {
        "webhook_type": "raw",
        "callback_url": "{env:NO_SUCH_HOOK}",
        "auth_token": "{env:NO_SUCH_HOOK}",
    }
    workspace.path("hooks.json").write_text(json.dumps(target))
    workspace.write_config(
        webhook_config="hooks.json" if in_file else target, model_card_note="{env:NO_SUCH_KEY}"
    )
    reason = "needs the environment variable NO_SUCH_{}, which is not set"

    assert workspace.run("plan") == 0
    output = capsys.readouterr().out
    assert f"webhook_config: {reason.format('HOOK')}; training will need it" in output
    assert f"model_card_note: {reason.format('KEY')}; training will need it" in output

    assert workspace.run("train") == 2
    errors = capsys.readouterr().err
    assert f"error: webhook_config: {reason.format('HOOK')}." in errors
    assert f"error: model_card_note: {reason.format('KEY')}." in errors
    assert not workspace.path("output").exists()


def test_plan_shows_only_the_host_of_a_webhook(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = [
        {
            "webhook_type": "raw",
            "callback_url": f"https://example.org{SECRET_PATH}",
            "ssl_no_verify": True,
        }
    ]
    workspace.path("hooks.json").write_text(json.dumps(hooks))
    workspace.write_config(webhook_config="hooks.json")

    assert workspace.run("plan") == 0
    output = capsys.readouterr().out
    assert "Events are sent to a raw webhook at example.org, info and above" in output
    assert "the certificate of example.org is not checked" in output
    assert SECRET_PATH not in output


def test_webhook_receives_a_run_from_start_to_end(
    receiver: Receiver, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MOST_WAITING", 1000)
    monkeypatch.setenv("SIMPLETUNER_JOB_ID", "job-7")
    target = {"webhook_type": "raw", "callback_url": receiver.url}
    workspace.write_config(webhook_config=target, max_train_steps=2, **PREVIEWED)

    assert workspace.run("train") == 0

    statuses = receiver.of_type("training.status")
    assert [payload["data"]["status"] for payload in statuses] == [
        "starting",
        "running",
        "running",
        "running",
        "completed",
    ]

    stages = {payload["stage"]["key"] for payload in receiver.of_type("lifecycle.stage")}
    assert stages > {
        "init_text_embed_cache",
        "init_vae_cache",
        "init_load_base_model",
        "final_validation",
    }
    assert {payload["job_id"] for payload in receiver.payloads} == {"job-7"}
    assert any(payload["images"] for payload in receiver.of_type("training.validation"))

    logged = [event["type"] for event in read_events(workspace.path("output/events.jsonl"))]
    without_stages = [kind for kind in receiver.types if kind != "lifecycle.stage"]
    assert [kind for kind in logged if kind != "lifecycle.stage"] == without_stages
    assert SECRET_PATH not in workspace.path("output/events.jsonl").read_text()
    assert SECRET_PATH not in workspace.path("debug.log").read_text()
