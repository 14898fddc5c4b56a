"""Uploads checkpoints and results to the hub, and runs the user's scripts.

Both are done in order, in a thread; a failure never ends the run.
"""

from __future__ import annotations

import queue
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.annexes.publishing.card import (
    CARD_FOLDER,
    NOBODY,
    describe_run,
    move_card,
    read_notes,
)
from simpletuner.atomic import sweep_folders
from simpletuner.config.publishing import PLACEHOLDERS, PublishConfig, repository_name
from simpletuner.errors import Interrupted, UserError, counted
from simpletuner.planning.checkpoint_folder import (
    AVERAGE_FOLDER,
    PIPELINE_FOLDER,
    Checkpoint,
    average_is_stale,
    find_checkpoints,
    result_step,
)
from simpletuner.reporting.events import UPLOADING, CheckpointSaved, Event, EventStream, Uploaded
from simpletuner.run.companions import Companion, Ledger, Task, mark_done
from simpletuner.weights.published_lora import OFFICIAL_SETTINGS

if TYPE_CHECKING:
    from simpletuner.planning.plans import Plan
    from simpletuner.reporting.events import StepReport
    from simpletuner.training.state import Assembly, TrainState


# Seconds before the second and the third attempt, which is the last.
WAITS = (5.0, 20.0)
SCRIPT_SECONDS = 600.0  # timeout of a user's script


class UploadError(Exception):
    """All attempts to upload failed; the reason has been reported."""


def repeat_command(output_dir: Path) -> str:
    """The command that repeats the uploads of a run."""
    return f"simpletuner publish {shlex.quote(str(output_dir))}"


@dataclass
class Uploads(Companion):
    """Companion that uploads checkpoints and the result, and runs the user's scripts.

    Attributes:
        run_name: value of `tracker_run_name`.
        hub: the repository; None uploads nothing.
        describe: writes the model card for a step and an epoch; None keeps the existing card.
        waits: seconds between attempts.
        in_use: checkpoints that an upload or a script needs, and that must not be deleted yet.
        failed: messages of failed uploads.
    """

    publish: PublishConfig
    output_dir: Path
    run_name: str
    hub: Hub | None
    events: EventStream
    describe: Callable[[Plan, int, int], None] | None = None
    waits: Sequence[float] = field(default_factory=lambda: WAITS)
    in_use: list[Path] = field(default_factory=list, init=False)
    failed: list[str] = field(default_factory=list, init=False)
    _plan: Plan | None = field(default=None, init=False)
    _saved: CheckpointSaved | None = field(default=None, init=False)
    _due: CheckpointSaved | None = field(default=None, init=False)  # saved but not uploaded yet
    _jobs: queue.Queue[tuple[Callable[[], None], Path | None]] = field(
        default_factory=queue.Queue, init=False
    )
    _worker: threading.Thread | None = field(default=None, init=False)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return ("card", "uploads") if self.hub else ("card",)

    def begin(self, plan: Plan, step: int) -> None:
        self._plan = plan
        sweep_folders(self.output_dir, re.compile(CARD_FOLDER))
        self.events.subscribe("The upload of checkpoints", self)

    def __call__(self, event: Event) -> None:
        """Queue a saved checkpoint for upload, and run the user's script for it."""
        if isinstance(event, CheckpointSaved):
            self._saved = event
            self._due = event
            script = self.publish.post_checkpoint_script
            if script:
                key = "post_checkpoint_script"
                job = partial(self._run_script, key, script, event.path, event.step)
                self._add(job, event.path)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """Upload the latest checkpoint; that of the last step is uploaded with the result."""
        # Not in `__call__`, because companions are called after the previews that the card shows.
        due = self._due
        self._due = None
        if due is None or not self._is_pushed(due) or due.step >= assembly.settings.total_steps:
            return
        send = partial(self._send, due.path, due.step, state.epoch, [due.path], self.hub)
        self._add(send, due.path)
        if not self.publish.push_to_hub_background:
            self.join()

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """Wait for uploads and scripts if the run stops early."""
        # Otherwise `finish` follows, with the verified result.
        if state.global_step < assembly.settings.total_steps:
            self.join()

    def finish(self, ledger: Ledger) -> str:
        """Write the model card and upload the result; returns when this is done or has failed.

        Raises:
            KeyboardInterrupt: Ctrl-C; the next start uploads the rest.
        """
        if "card" not in ledger.tasks:
            return ""
        saved = self._saved
        folders: list[Path] = []
        if saved is None:
            # This session saved nothing: it finishes a run that was killed after its last step.
            folders = self._pushed(self._regular())
        elif saved.step == ledger.step and self._is_pushed(saved):
            folders = [saved.path]
        hub = self.hub if "uploads" in ledger.tasks else None
        self._add(lambda: self._send(self.output_dir, ledger.step, ledger.epoch, folders, hub))
        self.join()
        if not self.failed:
            mark_done(self.output_dir, "card", "uploads")
        return ""

    @property
    def unfinished(self) -> str:
        if not (self.failed and self.hub):
            return ""
        return f"Not everything was uploaded; to try again: {repeat_command(self.output_dir)}"

    @property
    def repository(self) -> str | None:
        """`owner/name` on the hub, if the run is uploaded."""
        return self.hub.repository if self.hub else None

    def repeat(self) -> None:
        """Upload the result of a run that has ended, or else its last checkpoint.

        Raises:
            UserError: the run has neither.
        """
        regular = self._regular()
        folder = self.output_dir
        step = result_step(folder, "lora") or result_step(folder, "full")
        if not step:
            if not regular:
                raise UserError(
                    f"{str(self.output_dir)!r} contains no result and no checkpoint to upload."
                )
            folder = regular[-1].path
            step = regular[-1].step
        if self.repository:
            move_card(self.output_dir, self.repository)
        self._add(partial(self._send, folder, step, 0, self._pushed(regular), self.hub))
        self.join()

    def join(self) -> None:
        """Wait for all uploads and scripts."""
        try:
            while self._jobs.unfinished_tasks:  # `Queue.join` would not let Ctrl-C through
                time.sleep(0.002)
        except KeyboardInterrupt:
            if self.hub:
                self.events.notify(
                    "An upload was interrupted; to upload the rest: "
                    f"{repeat_command(self.output_dir)}"
                )
            raise

    def _regular(self) -> list[Checkpoint]:
        """The checkpoints of the run, without rolling ones."""
        checkpoints, _incomplete = find_checkpoints(self.output_dir)
        return [checkpoint for checkpoint in checkpoints if not checkpoint.rolling]

    def _pushed(self, checkpoints: Sequence[Checkpoint]) -> list[Path]:
        """The folders of the checkpoints, if checkpoints are uploaded."""
        if not self.publish.push_checkpoints_to_hub:
            return []
        return [checkpoint.path for checkpoint in checkpoints]

    def _is_pushed(self, saved: CheckpointSaved) -> bool:
        """Whether to upload a checkpoint; rolling ones serve only to resume."""
        if not (self.publish.push_to_hub and self.publish.push_checkpoints_to_hub):
            return False
        return not saved.path.name.endswith("-rolling")

    def _add(self, job: Callable[[], None], folder: Path | None = None) -> None:
        """Queue a job; `folder` must not be deleted until it is done."""
        if self._worker is None:
            # A daemon, so that a hanging connection does not keep an interrupted run alive.
            self._worker = threading.Thread(target=self._work, daemon=True)
            self._worker.start()
        if folder:
            self.in_use.append(folder)
        self._jobs.put((job, folder))

    def _work(self) -> None:
        """Do the queued jobs, in the worker's thread."""
        while True:
            job, folder = self._jobs.get()
            try:
                job()
            except Interrupted:
                self.failed.append("A stop was requested before the upload.")
            except Exception as error:  # noqa: BLE001 - whatever a library raises, the run goes on
                what = "Publishing" if self.hub else "Writing the model card"
                self._fail(f"{what} failed ({type(error).__name__}: {error}).")
            finally:
                if folder is not None:
                    self.in_use.remove(folder)
                self._jobs.task_done()

    def _send(
        self, folder: Path, step: int, epoch: int, checkpoints: Sequence[Path], hub: Hub | None
    ) -> None:
        """Write the model card and upload a result or a checkpoint.

        Args:
            folder: the folder of the weights for the root of the repository.
            checkpoints: folders that are uploaded beside them.
            hub: None writes only the card.
        """
        # In the worker, since an earlier upload still needs the card of its step.
        if self.describe and self._plan:
            self.describe(self._plan, step, epoch)
        if hub is None:
            return
        files, message = contents(self.output_dir, folder, step, checkpoints)
        what = f"step {step}" if folder == self.output_dir else folder.name
        name = f"{what} to {hub.title}"
        with suppress(UploadError), self.events.phase(f"Uploading {name}", kind=UPLOADING):
            url = self._attempt(name, partial(hub.upload, files, message))
            self.events.publish(Uploaded(name, url, step))
            script = self.publish.post_upload_script
            if script:
                self._run_script("post_upload_script", script, folder, step, url)

    def _attempt(self, name: str, upload: Callable[[], str]) -> str:
        """Upload, in several attempts; returns the URL.

        Raises:
            UploadError: all attempts failed.
        """
        for wait in (*self.waits, None):  # None marks the last attempt
            try:
                return upload()
            except Exception as error:  # noqa: BLE001 - whatever a library raises, the run goes on
                reason = f"Uploading {name} failed ({type(error).__name__}: {error})"
            if wait is not None:
                self.events.notify(f"{reason}; next attempt in {wait:g} s.", warning=True)
                time.sleep(wait)
        self._fail(f"{reason}.")
        raise UploadError(reason)

    def _fail(self, reason: str) -> None:
        self.failed.append(reason)
        self.events.notify(reason, warning=True)

    def _run_script(self, key: str, script: str, folder: Path, step: int, url: str = "") -> None:
        """Run a program without a shell; a failure is a warning."""
        texts = (str(folder.resolve()), url, str(step), self.run_name)
        values = dict(zip(PLACEHOLDERS, texts, strict=True))
        placeholder = re.compile("|".join(rf"\{{{name}\}}" for name in values))

        def fill(argument: str) -> str:
            return placeholder.sub(lambda match: values[match[0][1:-1]], argument)

        # Filled in after splitting, so that every value stays a single argument.
        command = [fill(argument) for argument in shlex.split(script)]
        try:
            subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SCRIPT_SECONDS,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            output = (error.stderr or error.stdout).strip()[-500:]
            end = f": {output}" if output else ", and printed nothing."
            self.events.notify(f"{key} exited with code {error.returncode}{end}", warning=True)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.events.notify(f"{key} failed: {error}", warning=True)


# Files that users load from a checkpoint or an output folder.
LOADED = (
    "*_weights.safetensors",
    "lycoris_config.json",
    OFFICIAL_SETTINGS,
    "ema/*",
    "transformer/*",
    "transformer_ema/*",
)
FORBIDDEN = {
    401: (
        "the hub does not accept the token (log in with `hf auth login`, or set HF_TOKEN), so it "
        "cannot write"
    ),
    403: "the hub token has no permission to write",
}


def loaded_files(folder: Path) -> dict[str, Path]:
    """The files of a run or checkpoint that users load, by their path in a repository."""
    pipeline = folder / PIPELINE_FOLDER
    if pipeline.is_dir():
        return _relative(pipeline, pipeline.rglob("*"))
    files = _relative(folder, chain.from_iterable(map(folder.glob, LOADED)))
    if not average_is_stale(folder):
        return files
    prefix = f"{AVERAGE_FOLDER}/"
    return {path: local for path, local in files.items() if not path.startswith(prefix)}


def _relative(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """The files among these paths, by their path below a folder."""
    return {path.relative_to(root).as_posix(): path for path in sorted(paths) if path.is_file()}


def contents(
    output_dir: Path, folder: Path, step: int, checkpoints: Iterable[Path]
) -> tuple[dict[str, Path], str]:
    """The files of a commit by their path in the repository, and its message.

    The weights of `folder` go to the root, beside the model card, and checkpoints into folders
    named after them.
    """
    card = output_dir / CARD_FOLDER
    files = loaded_files(folder) | _relative(card, card.rglob("*"))
    for checkpoint in checkpoints:
        for path, local in loaded_files(checkpoint).items():
            files[f"{checkpoint.name}/{path}"] = local
    message = read_notes(card).get("summary", f"Trained for {counted(step, 'step')}.")
    return files, message


@dataclass
class Hub:
    """A repository on the Hugging Face hub; `HF_ENDPOINT` may name another server.

    Attributes:
        repository: `owner/name`; without an owner, `prepare` adds the logged-in user.
    """

    repository: str
    private: bool

    @property
    def title(self) -> str:
        return f"the hub as {self.repository}"

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi()

    def prepare(self) -> str:
        """Check the login and the permission to write, and create the repository.

        Returns:
            A warning, or an empty text.

        Raises:
            UserError: the hub cannot be reached or refuses uploads.
        """
        from huggingface_hub import get_session, get_token
        from huggingface_hub.errors import HfHubHTTPError

        try:
            login = self._api.whoami()
            # Fine-grained tokens have a different role; the request below tests their permissions.
            if (login.get("auth", {}).get("accessToken") or {}).get("role") == "read":
                raise UserError(
                    "push_to_hub: the hub token is read-only; log in with a write token."
                )
            if "/" not in self.repository:
                self.repository = f"{login['name']}/{self.repository}"
            self._api.create_repo(self.repository, private=self.private, exist_ok=True)
            # `create_repo` succeeds even if an existing repository is read-only for this login.
            address = f"{self._api.endpoint}/api/models/{self.repository}/auth-check/write"
            answer = get_session().get(address, headers={"authorization": f"Bearer {get_token()}"})
            if answer.status_code in (401, 403):
                raise UserError(f"push_to_hub: {FORBIDDEN[403]} to {self.repository}.")
            is_public = self._api.model_info(self.repository).private is False
        except UserError:
            raise
        except HfHubHTTPError as error:
            reason = FORBIDDEN.get(error.response.status_code, str(error))
            raise UserError(f"push_to_hub: {reason} to {self.repository}.") from None
        except Exception as error:  # noqa: BLE001 - of the HTTP library, which depends on the hub's version
            raise UserError(
                f"push_to_hub: {self._api.endpoint} cannot be reached ({type(error).__name__}: "
                f"{error})."
            ) from None
        if self.private and is_public:
            return (
                f"model_card_private has no effect: {self.repository} exists on the hub and is "
                "public."
            )
        return ""

    def upload(self, files: Mapping[str, Path], message: str) -> str:
        """Upload in one commit; returns the URL of the repository.

        Large files that are already on the hub are skipped.
        """
        from huggingface_hub import CommitOperationAdd

        added = [CommitOperationAdd(path, local) for path, local in files.items()]
        title, _, description = message.partition("\n")
        self._api.create_commit(
            self.repository, added, commit_message=title, commit_description=description.strip()
        )
        return f"{self._api.endpoint}/{self.repository}"


def open_hub(publish: PublishConfig, project: str, events: EventStream) -> Hub | None:
    """The repository of a run, after checking that it is writable; None if nothing is uploaded.

    Args:
        project: value of `tracker_project_name`.

    Raises:
        UserError: the repository is not writable.
    """
    if not publish.push_to_hub:
        return None
    hub = Hub(repository_name(publish.hub_model_id or project), publish.model_card_private)
    warning = hub.prepare()
    if warning:
        events.notify(warning, warning=True)
    return hub


def open_uploads(plan: Plan, hub: Hub | None, events: EventStream) -> Uploads:
    """The companion that uploads a run with its model card.

    Args:
        hub: the result of `open_hub`.
    """
    publish = plan.config.publish
    tracking = plan.config.tracking
    if hub is not None:
        repository = hub.repository
    else:
        repository = repository_name(publish.hub_model_id or tracking.tracker_project_name)
        if "/" not in repository:
            repository = f"{NOBODY}/{repository}"
    describe = partial(describe_run, repository)
    return Uploads(publish, plan.output_dir, tracking.tracker_run_name, hub, events, describe)
