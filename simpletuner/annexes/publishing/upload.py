"""What is uploaded of a run, and where to: a repository of the Hugging Face hub, buckets of S3. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simpletuner.annexes.publishing.card import CARD_FOLDER, read_notes
from simpletuner.atomic import TEMPORARY_SUFFIX, UNFINISHED_FOLDER_SUFFIX
from simpletuner.config.publishing import BucketConfig, PublishConfig, repository_name
from simpletuner.distributed.requests import FOLDER as REQUESTS
from simpletuner.errors import UserError
from simpletuner.redaction import redact
from simpletuner.reporting.events import EventStream

PIPELINE_FOLDER = "pipeline"
# What users load from a checkpoint or an output folder, besides the LoRA.
LOADED = ("*_weights.safetensors", "lycoris_config.json", "ema/*", "transformer/*", "transformer_ema/*")
# Not part of a copy of the output folder: caches that can be made again, and what is for this machine only.
LEFT_OUT = ("cache", REQUESTS, "run.lock", "unfinished.json")
FORBIDDEN = {
    401: "the hub does not accept the token (log in with `hf auth login`, or set HF_TOKEN), so it cannot write",
    403: "the token of the hub has no permission to write",
}


@dataclass(frozen=True)
class Upload:
    """One state of a run that is uploaded as a whole.

    Attributes:
        name: for people (`step 300`, `checkpoint-100`).
        folder: the output folder or a checkpoint.
        files: local files by their path in the repository.
        message: of the commit; its first line is the title.
    """

    name: str
    step: int
    folder: Path
    files: Mapping[str, Path]
    message: str


def loaded_files(folder: Path) -> dict[str, Path]:
    """What users load from an output folder or a checkpoint, by its path in a repository."""
    pipeline = folder / PIPELINE_FOLDER
    if pipeline.is_dir():
        return _relative(pipeline, pipeline.rglob("*"))
    return _relative(folder, (path for pattern in LOADED for path in folder.glob(pattern)))


def _relative(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    return {path.relative_to(root).as_posix(): path for path in sorted(paths) if path.is_file()}


def make_upload(output_dir: Path, folder: Path, step: int, checkpoints: Iterable[Path] = ()) -> Upload:
    """The upload of the weights in a folder at the root, with the model card, and of checkpoints in their folders."""
    card = output_dir / CARD_FOLDER
    files = loaded_files(folder) | _relative(card, card.rglob("*"))
    for checkpoint in checkpoints:
        files |= {f"{checkpoint.name}/{path}": local for path, local in loaded_files(checkpoint).items()}
    name = f"step {step}" if folder == output_dir else folder.name
    return Upload(name, step, folder, files, read_notes(card).get("summary", f"Trained for {step} steps."))


@dataclass
class Hub:
    """A repository on the Hugging Face hub; `HF_ENDPOINT` may name another server.

    Attributes:
        repository: `owner/name`; the owner is that of the login unless given.
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
        """Check the login and the permission to write, and create the repository; returns a warning, or nothing.

        Raises:
            UserError: nothing can be uploaded there.
        """
        from huggingface_hub.errors import HfHubHTTPError

        try:
            login = self._api.whoami()
            if (login.get("auth", {}).get("accessToken") or {}).get("role") == "read":
                raise UserError("push_to_hub: the token of the hub can only read; log in with one that can write.")
            if "/" not in self.repository:
                self.repository = f"{login['name']}/{self.repository}"
            self._api.create_repo(self.repository, private=self.private, exist_ok=True)
            # Says nothing about an existing repository that only others may write to.
            if self._get("/auth-check/write").status_code in (401, 403):
                raise UserError(f"push_to_hub: {FORBIDDEN[403]} to {self.repository}.")
            found = self._get()
        except UserError:
            raise
        except HfHubHTTPError as error:
            reason = FORBIDDEN.get(error.response.status_code, str(error))
            raise UserError(redact(f"push_to_hub: {reason} to {self.repository}.")) from None
        except Exception as error:  # noqa: BLE001 - of the HTTP library, which depends on the hub's version
            message = f"push_to_hub: {self._api.endpoint} cannot be reached ({type(error).__name__}: {error})."
            raise UserError(redact(message)) from None
        is_public = found.status_code == 200 and found.json().get("private") is False
        there = f"model_card_private has no effect: {self.repository} exists on the hub and is public."
        return there if self.private and is_public else ""

    def _get(self, path: str = "") -> Any:
        from huggingface_hub import get_session, get_token

        headers = {"authorization": f"Bearer {get_token()}"}
        return get_session().get(f"{self._api.endpoint}/api/models/{self.repository}{path}", headers=headers)

    def upload(self, upload: Upload) -> str:
        """Upload in one commit, without large files that were already uploaded. Returns the address."""
        from huggingface_hub import CommitOperationAdd

        added = [CommitOperationAdd(path, local) for path, local in upload.files.items()]
        title, _, description = upload.message.partition("\n")
        self._api.create_commit(self.repository, added, commit_message=title, commit_description=description.strip())
        return f"{self._api.endpoint}/{self.repository}"


@dataclass
class BucketCopy:
    """A bucket of S3 or of a store that speaks its protocol; it gets a copy of the output folder."""

    store: BucketConfig
    output_dir: Path

    @property
    def title(self) -> str:
        return f"s3://{self.store.bucket}/{self.prefix}"

    @property
    def prefix(self) -> str:
        """What the keys begin with, without a slash at the end."""
        return "/".join(filter(None, (self.store.base_path.strip("/"), self.output_dir.resolve().name)))

    @cached_property
    def _client(self) -> Any:
        return self.store.client()

    def prepare(self) -> str:
        """Check that the bucket can be written to.

        Raises:
            UserError: it cannot.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            # Only writing shows that writing is allowed.
            self._client.put_object(Bucket=self.store.bucket, Key=f"{self.prefix}/.simpletuner", Body=b"")
        except (BotoCoreError, ClientError, ValueError) as error:
            raise UserError(redact(f"publishing_config: {self.title} cannot be written: {error}")) from None
        return ""

    def upload(self, upload: Upload) -> str:
        """Upload what is not there yet in the same size since it was written; returns the address."""
        from boto3.s3.transfer import TransferConfig

        whole = {"multipart_threshold": 5 * 2**30} if self.store.force_single_part else {}
        there = self._objects()
        for path, local in copied_files(self.output_dir).items():
            key, facts = f"{self.prefix}/{path}", local.stat()
            if there.get(key, (-1, 0.0))[0] != facts.st_size or there[key][1] < facts.st_mtime:
                self._client.upload_file(str(local), self.store.bucket, key, Config=TransferConfig(**whole))
        public = self.store.public_base_url
        return f"{public.rstrip('/')}/{self.prefix}" if public else self.title

    def _objects(self) -> dict[str, tuple[int, float]]:
        """Size and time of what is there, by key."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.store.bucket, Prefix=f"{self.prefix}/"
        )
        found = (each for page in pages for each in page.get("Contents", ()))
        return {each["Key"]: (each["Size"], each["LastModified"].timestamp()) for each in found}


def copied_files(folder: Path) -> dict[str, Path]:
    """The files of an output folder without caches and unfinished ones."""
    found = _relative(folder, folder.rglob("*"))
    return {path: local for path, local in found.items() if not any(map(_is_left_out, path.split("/")))}


def _is_left_out(name: str) -> bool:
    return name in LEFT_OUT or name.endswith((TEMPORARY_SUFFIX, UNFINISHED_FOLDER_SUFFIX))


Destination = Hub | BucketCopy


def prepared_destinations(
    publish: PublishConfig, project: str, output_dir: Path, events: EventStream
) -> list[Destination]:
    """Where a run is uploaded to, the hub first; each is known to be writable.

    Args:
        project: value of `tracker_project_name`.

    Raises:
        UserError: nothing can be uploaded to one of them.
    """
    name = repository_name(publish.hub_model_id or project)
    hubs = [Hub(name, publish.model_card_private)] if publish.push_to_hub else []
    places: list[Destination] = [*hubs, *(BucketCopy(store, output_dir) for store in publish.stores)]
    for warning in filter(None, [place.prepare() for place in places]):
        events.say(warning, warning=True)
    return places
