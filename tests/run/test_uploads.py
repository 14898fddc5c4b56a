"""Results reach the hub as they are on disk, and no failure of the hub ends a run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from huggingface_hub import ModelCard

from simpletuner.annexes.payloads import EVENTS_FILE
from simpletuner.annexes.publishing.again import recorded_settings
from simpletuner.annexes.publishing.uploads import Uploads
from simpletuner.config.publishing import PublishConfig
from simpletuner.config.sources import Arguments
from simpletuner.errors import ConfigError
from simpletuner.headers import METADATA, read_header
from simpletuner.planning.checkpoint_folder import (
    Identity,
    Manifest,
    describe_files,
    prune,
    write_manifest,
)
from simpletuner.reporting.events import CheckpointSaved, EventStream, PhaseStarted, Uploaded
from simpletuner.run.companions import Ledger
from simpletuner.training.state import TrainState
from simpletuner.weights.lora_names import LORA_FILE
from tests.tools.hub import GUEST, OWNER, READ, FakeHub, Repository, used_hub
from tests.tools.processes import PATIENCE
from tests.tools.runs import LORA
from tests.tools.workspace import Workspace, read_events

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
IDENTITY = Identity("kandinsky5-image", "t2i-lite-sft", "lora", 1, 0, "", {})
NO_REPORT: Any = None
PUSHED: dict[str, Any] = {"push_to_hub": True, "hub_model_id": "star", "max_train_steps": 1}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("simpletuner.annexes.publishing.uploads.WAITS", (0.0, 0.0))
    with used_hub(monkeypatch) as hub:
        yield hub


def test_a_lora_with_its_checkpoints_is_uploaded(
    hub: FakeHub, workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(
        hub_model_id="https://huggingface.co/me/my-star?x=1",
        push_to_hub=True,
        push_checkpoints_to_hub=True,
        checkpoint_step_interval=2,
        validation_disable=False,
        validation_step_interval=2,
        use_ema=True,
        ema_validation="ema_only",
        model_card_trigger=["a sks star"],
        model_card_note="Mind the *gap*.",
    )

    assert workspace.train() == 0

    repository = hub.repositories["me/my-star"]
    files = repository.files
    assert repository.private
    result = workspace.path(LORA).read_bytes()
    assert files[LORA_FILE] == result
    assert files[f"checkpoint-4/{LORA_FILE}"] == result
    first = workspace.path(f"output/checkpoint-2/{LORA_FILE}").read_bytes()
    assert files[f"checkpoint-2/{LORA_FILE}"] == first
    assert first != result
    assert f"ema/{LORA_FILE}" in files
    assert "simpletuner_config.json" in files
    assert "assets/image_0_0.png" in files
    assert not any("training_state" in path for path in files)
    assert not any(path.endswith("manifest.json") for path in files)
    assert read_header(workspace.path(LORA))[METADATA]["trigger"] == "a sks star, "
    assert [commit["summary"] for commit in repository.commits] == [
        "Trained for 1 epoch and 2 steps.",
        "Trained for 1 epoch and 4 steps.",
    ]
    assert "Training objective: flow matching." in repository.commits[-1]["description"]
    card: Any = ModelCard(repository.text("README.md"))
    assert card.data.base_model_relation == "adapter"
    assert card.data.pipeline_tag == "text-to-image"
    assert card.data.instance_prompt == "a sks star"
    assert 'pipe.load_lora_weights("me/my-star")' in card.text
    assert "Verified by reloading: the weights load through the stock pipeline" in card.text
    assert "Uploaded step 4 to the hub as me/my-star" in capsys.readouterr().out


def test_a_full_fine_tune_is_uploaded_as_a_pipeline(
    hub: FakeHub, tmp_path: Path, t2i_checkpoint: Path
) -> None:
    workspace = Workspace.create(
        tmp_path,
        t2i_checkpoint,
        model_type="full",
        max_train_steps=1,
        push_to_hub=True,
        push_to_hub_background=True,
        tracker_project_name="stars",
    )

    assert workspace.train() == 0

    files = hub.repositories[f"{OWNER}/stars"].files
    pipeline = workspace.path("output/pipeline")
    paths = [path for path in pipeline.rglob("*") if path.is_file()]
    assert pipeline / "model_index.json" in paths
    for path in paths:
        assert files[path.relative_to(pipeline).as_posix()] == path.read_bytes()
    card = ModelCard(files["README.md"].decode()).data.to_dict()
    assert card["base_model_relation"] == "finetune"


def test_a_server_that_recovers_is_asked_again(
    hub: FakeHub, workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(**PUSHED)
    hub.broken_commits = 2

    assert workspace.train() == 0

    assert len(hub.repositories["me/star"].commits) == 1
    assert "simpletuner publish" not in capsys.readouterr().out


def test_publish_uploads_what_failed_without_training(
    hub: FakeHub, workspace: Workspace, capsys: Capture
) -> None:
    workspace.write_config(**PUSHED)
    hub.broken_commits = 3
    assert workspace.train() == 0
    advice = capsys.readouterr().out.splitlines()[-1]
    assert advice.endswith("to try again: simpletuner publish output")
    repository = hub.repositories["me/star"]
    assert repository.commits == []
    assert repository.files == {}
    hub.requests.clear()

    assert workspace.run("publish", "output") == 0

    large_files = [request for request in hub.requests if request.startswith("PUT")]
    assert large_files == [], "they were uploaded before the commit failed"
    assert repository.files[LORA_FILE] == workspace.path(LORA).read_bytes()
    assert len(repository.commits) == 1
    assert workspace.run("publish", "output") == 0
    assert len(repository.commits) == 1, "nothing has changed, so nothing is committed"


def test_publish_writes_a_card_for_the_repository_it_is_given(
    hub: FakeHub, workspace: Workspace
) -> None:
    workspace.write_config(**PUSHED)
    assert workspace.train() == 0

    assert workspace.run("publish", "output", "--hub_model_id=elsewhere") == 0

    card = hub.repositories["me/elsewhere"].text("README.md")
    assert 'pipe.load_lora_weights("me/elsewhere")' in card
    assert "me/star" not in card


def test_publish_reports_folders_settings_and_servers_it_cannot_use(
    hub: FakeHub, workspace: Workspace, capsys: Capture
) -> None:
    """The run was not to be uploaded when it was trained."""
    assert workspace.run("publish", "datasets") == 2
    assert "'datasets' is not the output folder of a run" in capsys.readouterr().err

    assert workspace.train("max_train_steps=1") == 0
    capsys.readouterr()
    assert workspace.run("publish", "output", "lora_rank=4") == 2
    assert "lora_rank: has no effect" in capsys.readouterr().err

    hub.broken_commits = 3
    assert workspace.run("publish", "output", "--hub_model_id=star") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "Not everything was uploaded; the same command tries again."

    assert workspace.run("publish", "output", "--hub_model_id=star") == 0
    card = hub.repositories["me/star"].text("README.md")
    assert 'pipe.load_lora_weights("me/star")' in card


def put_checkpoint(output_dir: Path, config: str) -> None:
    """Write a checkpoint that holds only the settings of its run."""
    folder = output_dir / "checkpoint-1"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    write_manifest(folder, Manifest(1, 1, IDENTITY, describe_files(folder)))


def test_publish_says_where_recorded_settings_are_damaged(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, '{"seed": ')

    with pytest.raises(ConfigError, match=r"checkpoint-1/config\.json: is not valid JSON"):
        recorded_settings(tmp_path, Arguments())


def test_publish_names_recorded_settings_that_were_removed(hub: FakeHub, tmp_path: Path) -> None:
    names = {"tracker_project_name": "stars", "tracker_run_name": "first"}
    put_checkpoint(tmp_path, json.dumps({**names, "publishing_config": [{"bucket": "b"}]}))
    arguments = Arguments()

    settings, recorded = recorded_settings(tmp_path, arguments)

    assert settings.push_to_hub
    assert recorded == names
    [problem] = arguments.problems
    assert problem.message == "publishing_config was removed in 0.2.0 and left out."


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "push_to_hub: not logged in to the hub: run `hf auth login`, or set HF_TOKEN."),
        ("hf_unknownunknownunknown", "push_to_hub: the hub does not accept the token"),
        (READ, "push_to_hub: the hub token is read-only"),
        (GUEST, "push_to_hub: the hub token has no permission to write to me/star."),
    ],
)
def test_a_token_without_write_permission_is_refused_before_training(
    token: str | None,
    message: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    workspace.write_config(**PUSHED)

    with used_hub(monkeypatch, token) as hub:
        assert workspace.train() == 2

    captured = capsys.readouterr()
    assert message in captured.err
    assert "Loading torch" not in captured.out
    assert hub.repositories == {}
    if token is not None:
        assert token not in captured.err + captured.out


def test_an_unreachable_hub_is_refused_before_training(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with used_hub(monkeypatch) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        assert workspace.train("push_to_hub=true") == 2
        assert "push_to_hub: http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err

        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert workspace.train("push_to_hub=true") == 2
        assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err

    assert hub.requests == []


def test_an_existing_public_repository_is_reported(
    hub: FakeHub, workspace: Workspace, capsys: Capture
) -> None:
    hub.repositories["me/star"] = Repository(private=False)
    workspace.write_config(**PUSHED)

    assert workspace.train() == 0

    assert "me/star exists on the hub and is public" in capsys.readouterr().out


def test_secrets_and_local_paths_are_not_uploaded(
    hub: FakeHub, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame-sesame")
    workspace.write_config(
        **PUSHED,
        validation_disable=False,
        model_card_note="{env:MY_API_KEY}",
        output_dir=str(workspace.path("output")),
        modelspec_comment=f"see {Path.home()}/notes/star.txt",
        tracker_run_name="and/or",
    )

    assert workspace.train() == 0

    files = hub.repositories["me/star"].files
    for secret in (b"sesame-sesame", str(workspace.folder).encode(), b"multidatabackend"):
        assert not [path for path, content in files.items() if secret in content]
    settings = json.loads(files["simpletuner_config.json"])["config"]
    assert settings["learning_rate"] == 1e-3
    assert settings["tracker_run_name"] == "and/or", "a slash alone is not a path"
    assert "modelspec_comment" not in settings


def test_scripts_run_after_checkpoints_and_uploads(
    hub: FakeHub, workspace: Workspace, capsys: Capture
) -> None:
    script = workspace.path("note it.py")
    script.write_text(
        "import json, sys\nopen('notes', 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    command = f"{sys.executable} '{script}'"
    checkpoint_arguments = "{global_step} {local_checkpoint_path} {tracker_run_name}"
    workspace.write_config(
        push_to_hub=True,
        hub_model_id="star",
        max_train_steps=2,
        tracker_run_name="a; rm -rf b",
        post_checkpoint_script=f"{command} {checkpoint_arguments}",
        post_upload_script=f"{command} {{remote_checkpoint_path}}",
    )

    assert workspace.train() == 0

    notes = [json.loads(line) for line in workspace.path("notes").read_text().splitlines()]
    assert notes == [
        ["2", str(workspace.path("output/checkpoint-2")), "a; rm -rf b"],
        [f"{hub.address}/me/star"],
    ]
    script.write_text("raise SystemExit('no way')")
    assert workspace.train("max_train_steps=3") == 0
    assert "warning: post_upload_script exited with code 1: no way" in capsys.readouterr().out


def test_prompts_cannot_break_the_yaml_of_a_model_card(hub: FakeHub, workspace: Workspace) -> None:
    prompt = (
        "a \"star\": [x]\n---\nlicense: stolen\n# 'quoted' | {{ 7 * 7 }} ``` </Gallery> "
        "\u2028 \t end"
    )
    workspace.write_config(
        **PUSHED,
        validation_disable=False,
        validation_prompt=prompt,
        validation_disable_unconditional=False,
        disable_benchmark=True,
        tracker_run_name="# a | b\n---",
    )

    assert workspace.train() == 0

    repository = hub.repositories["me/star"]
    text = repository.text("README.md")
    card: Any = ModelCard(text)
    assert yaml.safe_load(text.split("---\n")[1]) == card.data.to_dict()
    assert card.data.license == "mit"
    widgets = {widget["text"]: widget for widget in card.data.widget}
    assert widgets.keys() == {"unconditional (blank prompt)", prompt}
    assert widgets[prompt]["output"]["url"].removeprefix("./") in repository.files
    assert f"````\n{prompt}\n````" in card.text
    assert "# \\# a \\| b ---" in card.text


@dataclass
class SlowDestination:
    """A destination that waits for a gate; the first of its uploads fails.

    Attributes:
        uploads: the message of each upload, and whether all of its files existed by then.
    """

    title: str = "a slow place"
    gate: threading.Event = field(default_factory=threading.Event)
    uploads: list[tuple[str, bool]] = field(default_factory=list)

    def prepare(self) -> str:
        return ""

    def upload(self, files: Mapping[str, Path], message: str) -> str:
        assert self.gate.wait(PATIENCE)
        self.uploads.append((message, all(path.is_file() for path in files.values())))
        if len(self.uploads) == 1:
            raise RuntimeError("the line broke")
        return "slow://there"


def test_background_uploads_do_not_block_training_or_lose_checkpoints(tmp_path: Path) -> None:
    destination = SlowDestination()
    published: list[object] = []
    described_steps: list[int] = []
    events = EventStream(published.append)
    uploads = Uploads(
        PublishConfig(push_to_hub=True, push_checkpoints_to_hub=True, push_to_hub_background=True),
        tmp_path,
        "run",
        cast(Any, destination),
        events,
        lambda plan, step, epoch: described_steps.append(step),
        waits=(0.0,),
    )
    plan: Any = SimpleNamespace()
    assembly: Any = SimpleNamespace(settings=SimpleNamespace(total_steps=9))

    uploads.begin(plan, 0)
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / LORA_FILE).write_bytes(b"weights")
        write_manifest(folder, Manifest(step, 1, IDENTITY, describe_files(folder)))
        events.publish(CheckpointSaved(folder, step, 0.0))
        # A checkpoint is complete one step later, since it is written in the background.
        uploads.on_step_end(assembly, TrainState(step + 1, 1), NO_REPORT)
        deleted = prune(tmp_path, 1, rolling=False, in_use=uploads.in_use)
        assert deleted == [], "both wait for their upload"
    assert destination.uploads == []
    destination.gate.set()
    uploads.finish(Ledger(9, 1, ("card", "uploads", "end")))

    # The upload of step 1 failed, so it was tried again.
    assert destination.uploads == [
        ("Trained for 1 step.", True),
        ("Trained for 1 step.", True),
        ("Trained for 2 steps.", True),
        ("Trained for 9 steps.", True),
    ]
    assert described_steps == [1, 2, 9]
    assert uploads.failed == []
    assert uploads.in_use == []
    assert [event.step for event in published if isinstance(event, Uploaded)] == [1, 2, 9]
    deleted = prune(tmp_path, 1, rolling=False, in_use=uploads.in_use)
    assert deleted == [tmp_path / "checkpoint-1"]


def copy_at_events_after_the_result(
    run: Workspace, folder: Path, patch: pytest.MonkeyPatch
) -> list[Workspace]:
    """Copies of a run at every event at which a kill would cut its last uploads short.

    What a kill leaves is what is on the disk at that moment, without the lock, whose owner has
    ended.
    """
    copies: list[Workspace] = []
    publish = EventStream.publish

    def copy_and_publish(self: EventStream, event: Any) -> None:
        is_moment = isinstance(event, PhaseStarted | Uploaded)
        is_end = getattr(event, "state", "") == "finished"
        if run.path(LORA).exists() and (is_moment or is_end):
            copy = run.copy(folder / f"killed-{len(copies)}")
            copy.path("output/run.lock").unlink()
            copy.path("output/model_card-tmp").mkdir()
            copies.append(copy)
        publish(self, event)

    patch.setattr(EventStream, "publish", copy_and_publish)
    return copies


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_next_start_finishes_uploads_that_a_kill_cut_short(
    hub: FakeHub,
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    workspace.write_config(
        push_to_hub=True, hub_model_id="star", push_checkpoints_to_hub=True, max_train_steps=2
    )
    with monkeypatch.context() as patch:
        copies = copy_at_events_after_the_result(workspace, tmp_path, patch)
        assert workspace.train() == 0
    assert not workspace.path("output/unfinished.json").exists()
    assert len(copies) == 3
    uploaded = hub.repositories.pop("me/star").files.keys()

    for killed in copies:
        capsys.readouterr()
        assert killed.train() == 0
        output = capsys.readouterr().out
        assert "Training is done, to step 2. An earlier session has not finished: " in output
        is_uploaded_already = killed is copies[-1]
        assert ("Uploaded" in output) is not is_uploaded_already
        assert file_names(killed.path("output")) == file_names(workspace.path("output"))
        last_event = read_events(killed.path("output") / EVENTS_FILE)[-1]
        assert "training_complete" in json.dumps(last_event)
        assert "finished" in killed.path("output/training_report.html").read_text()

        assert killed.train() == 0
        finished = (
            "This run is finished: 2 steps are done. Results: output. To train longer, raise max"
        )
        assert finished in capsys.readouterr().out

    assert hub.repositories["me/star"].files.keys() == uploaded


def test_a_run_without_uploads_does_not_mention_them(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Although it writes a model card, which fails here and is written at the next start."""

    def fail(*arguments: object) -> None:
        raise OSError("no card today")

    with monkeypatch.context() as patch:
        patch.setattr("simpletuner.annexes.publishing.uploads.describe_run", fail)
        assert workspace.train("max_train_steps=1") == 0

    output = capsys.readouterr().out
    assert "warning: Writing the model card failed (OSError: no card today)." in output
    assert "upload" not in output.lower()
    assert workspace.train("max_train_steps=1") == 0
    assert "An earlier session has not finished: the model card." in capsys.readouterr().out
    assert workspace.path("output/model_card/README.md").exists()
