"""Keys for results that leave the machine: the hub, the model card, and scripts."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from simpletuner.config.option import Group, common, option, when
from simpletuner.config.types import Flag, Text, TextList, Texts
from simpletuner.errors import Problems, did_you_mean
from simpletuner.redaction import REFERENCE

PLACEHOLDERS = (
    "local_checkpoint_path",
    "remote_checkpoint_path",
    "global_step",
    "tracker_run_name",
)
# The hub's rule: at most 96 characters, neither `--` nor `..` inside, neither - nor . at the ends.
REPOSITORY = re.compile(
    r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9](?:[\w.-]{0,94}\w)?", re.ASCII
)

on_hub = partial(option, requires=when("push_to_hub"))


class PublishConfig(Group):
    """Publishing"""

    push_to_hub: Flag = common(False)
    """Upload the result to the Hugging Face hub at the end."""
    hub_model_id: Text | None = on_hub(None, default_note="tracker_project_name", common=True)
    """Repository on the hub: `owner/name`, its address, or a name below the logged-in account."""
    push_checkpoints_to_hub: Flag = on_hub(False)
    """Also upload every checkpoint; the newest is also copied to the root."""
    push_to_hub_background: Flag = on_hub(False)
    """Upload in the background instead of waiting."""
    model_card_private: Flag = on_hub(True, common=True)
    """Create the repository as private; an existing repository keeps its visibility."""
    model_card_safe_for_work: Flag = option(False)
    """Tag the model card safe-for-work instead of not-for-all-audiences."""
    model_card_note: Text | None = option(None)
    """Note at the top of the model card."""
    model_card_trigger: TextList | None = option(None)
    """Trigger words of the subject, for the model card and the header of weight files."""
    modelspec_comment: Texts | None = option(None)
    """Text or list of texts written into the safetensors header; `{env:X}`, `{current_step}`,
    `{current_epoch}` and `{timestamp}` expand."""
    post_checkpoint_script: Text | None = option(None)
    """Program to run after each checkpoint, with its arguments; `{local_checkpoint_path}`,
    `{global_step}` and `{tracker_run_name}` expand."""
    post_upload_script: Text | None = on_hub(None)
    """Program to run after each upload; `{remote_checkpoint_path}` is the upload's address."""

    @property
    def trigger(self) -> str:
        """The trigger words as one text."""
        return ", ".join(self.model_card_trigger or [])


def repository_name(name_or_address: str) -> str:
    """`owner/name` or `name` from a name or an address on the hub."""
    if "://" not in name_or_address:
        return name_or_address.partition("?")[0].strip("/")
    # https://huggingface.co/me/my-lora/tree/main is me/my-lora.
    parts = urlsplit(name_or_address).path.strip("/").split("/")
    return "/".join(parts[:2])


def check_publishing(publish: PublishConfig, project: str, report: Problems) -> None:
    """Report faults that are certain to make uploads fail.

    Args:
        project: value of `tracker_project_name`.
    """
    if publish.push_to_hub:
        _check_hub(publish.hub_model_id, project, report)
    # A checkpoint that is only saved has no remote address.
    saved = [name for name in PLACEHOLDERS if name != "remote_checkpoint_path"]
    _check_script("post_checkpoint_script", publish.post_checkpoint_script, saved, report)
    _check_script("post_upload_script", publish.post_upload_script, PLACEHOLDERS, report)


def _check_hub(name: str | None, project: str, report: Problems) -> None:
    """Report a name that the hub refuses, and a missing login."""
    # Imported late, since most runs do not need it.
    from huggingface_hub import constants, get_token

    key = "hub_model_id" if name else "tracker_project_name"
    repository = name or project
    is_expanded_later = REFERENCE.search(name or "") is not None  # {env:NAME}, on upload
    if not is_expanded_later and not REPOSITORY.fullmatch(repository_name(repository)):
        rule = "letters, digits, '-', '_' and '.'"
        message = f"{repository!r} is not a name for a repository ({rule}), such as me/my-lora."
        report.error(key, message)
    if constants.HF_HUB_OFFLINE:
        report.error("push_to_hub", "HF_HUB_OFFLINE is set, so nothing can be uploaded.")
    elif get_token() is None:
        report.error(
            "push_to_hub", "not logged in to the hub: run `hf auth login`, or set HF_TOKEN."
        )


def _check_script(key: str, script: str | None, known: Sequence[str], report: Problems) -> None:
    """Report unknown placeholders, and a program that cannot be run."""
    for word in re.findall(r"\{(\w+)\}", script or ""):
        if word not in known:
            hint = did_you_mean(word, known) or f" There are: {', '.join(known)}."
            report.warn(key, f"{{{word}}} is not a placeholder here and stays as it is.{hint}")
    try:
        words = shlex.split(script or "")
    except ValueError as error:
        report.error(key, f"{script!r} cannot be split into words: {error}.")
        return
    # Checked now rather than after the first checkpoint, hours later.
    if words and shutil.which(words[0]) is None:
        report.error(key, f"{words[0]!r} is not a program that can be run here.")
