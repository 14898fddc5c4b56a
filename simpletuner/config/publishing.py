"""Keys for what leaves the machine: results (hub, model card, scripts), webhook events, and tracker curves.

Without an API key wandb prompts for one, and an unattended run would wait forever. The login is therefore checked
first, without importing wandb. Imports no torch.
"""

from __future__ import annotations

import configparser
import netrc
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field

from simpletuner.config.option import JSON_OR_FILE, Group, common, option, when
from simpletuner.config.values import FALSE_WORDS, TRUE_WORDS, Flag, Integer, Text, TextList, Texts, parse_objects
from simpletuner.errors import Problem, did_you_mean, not_one_of, warning
from simpletuner.redaction import REFERENCE

PLACEHOLDERS = ("local_checkpoint_path", "remote_checkpoint_path", "global_step", "tracker_run_name")
# The hub's rule: at most 96 characters, neither `--` nor `..` inside, neither - nor . at the ends.
REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9](?:[\w.-]{0,94}\w)?", re.ASCII)
WEBHOOK_CONFIG = "webhook_config"
NO_VERIFY = "SIMPLETUNER_SSL_NO_VERIFY"
Level = Literal["critical", "error", "warning", "info", "debug"]

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
    """Text or list of texts written into the safetensors header; `{env:X}`, `{current_step}`, `{current_epoch}` and
    `{timestamp}` expand."""
    post_checkpoint_script: Text | None = option(None)
    """Program to run after each checkpoint, with its arguments; `{local_checkpoint_path}`, `{global_step}` and
    `{tracker_run_name}` expand."""
    post_upload_script: Text | None = on_hub(None)
    """Program to run after each upload; also expands `{remote_checkpoint_path}`, the address of the upload."""

    @property
    def trigger(self) -> str:
        """The trigger words as one text."""
        return ", ".join(self.model_card_trigger or [])


def repository_name(written: str) -> str:
    """`owner/name` or `name` from a name or an address on the hub."""
    # https://huggingface.co/me/my-lora/tree/main is me/my-lora.
    path = urlsplit(written).path if "://" in written else written.partition("?")[0]
    parts = path.strip("/").split("/")
    return "/".join(parts[:2] if "://" in written else parts)


def check_publishing(publish: PublishConfig, project: str) -> Iterator[Problem]:
    """Report faults that are certain to make uploads fail.

    Args:
        project: value of `tracker_project_name`.
    """
    if publish.push_to_hub:
        yield from _check_hub(publish.hub_model_id, project)
    # A checkpoint that is only saved has no remote address.
    saved = [name for name in PLACEHOLDERS if name != "remote_checkpoint_path"]
    yield from _check_script("post_checkpoint_script", publish.post_checkpoint_script, saved)
    yield from _check_script("post_upload_script", publish.post_upload_script, PLACEHOLDERS)


def _check_hub(name: str | None, project: str) -> Iterator[Problem]:
    # Imported late, since most runs do not need it.
    from huggingface_hub import constants, get_token

    # A reference `{env:NAME}` is expanded on upload.
    if not (REPOSITORY.fullmatch(repository_name(name or project)) or REFERENCE.search(name or "")):
        key, rule = "hub_model_id" if name else "tracker_project_name", "letters, digits, '-', '_' and '.'"
        yield Problem(key, f"{name or project!r} is not a name for a repository ({rule}), such as me/my-lora.")
    if constants.HF_HUB_OFFLINE:
        yield Problem("push_to_hub", "HF_HUB_OFFLINE is set, so nothing can be uploaded.")
    elif get_token() is None:
        yield Problem("push_to_hub", "not logged in to the hub: run `hf auth login`, or set HF_TOKEN.")


def _check_script(key: str, script: str | None, known: Sequence[str]) -> Iterator[Problem]:
    for word in re.findall(r"\{(\w+)\}", script or ""):
        if word not in known:
            hint = did_you_mean(word, known) or f" There are: {', '.join(known)}."
            yield warning(key, f"{{{word}}} is not a placeholder here and stays as it is.{hint}")
    try:
        program = shlex.split(script or "")[:1]
    except ValueError as error:
        yield Problem(key, f"{script!r} cannot be split into words: {error}.")
        return
    # Checked now rather than after the first checkpoint, hours later.
    if program and shutil.which(program[0]) is None:
        yield Problem(key, f"{program[0]!r} is not a program that can be run here.")


@dataclass(frozen=True)
class Hook:
    """One receiver of events."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    webhook_type: Literal["discord", "raw"]
    webhook_url: Text | None = None
    callback_url: Text | None = None
    message_prefix: Text | None = None
    log_level: Level = "info"
    auth_token: Text | None = None
    ssl_no_verify: Flag = False

    @property
    def address(self) -> str:
        """The address, which is a secret; empty if unset."""
        # A raw webhook may have its address in either key.
        return (self.callback_url if self.webhook_type == "raw" else None) or self.webhook_url or ""

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        return _host(self.address) or "?"

    @property
    def verifies(self) -> bool:
        """Whether the receiver's certificate is checked."""
        return not (self.ssl_no_verify or _no_verify() in TRUE_WORDS)

    def __str__(self) -> str:
        return f"{self.webhook_type} webhook at {self.host}, {self.log_level} and above"


parse_hooks = partial(parse_objects, WEBHOOK_CONFIG)
Hooks = Annotated[list[Annotated[Hook, Field(title="webhook")]], BeforeValidator(parse_hooks)]


class WebhookConfig(Group):
    """Webhooks"""

    requires = when(WEBHOOK_CONFIG)

    webhook_config: Hooks | None = common(None, form=JSON_OR_FILE)
    """Receivers of a run's events: an object with `webhook_type` (discord or raw) and `webhook_url` or `callback_url`,
    a list of objects, or a file with either."""
    webhook_reporting_interval: Integer = option(5, ge=1)
    """Minimum seconds between messages about training steps; the first and last step are always sent."""
    webhook_images: Literal["data_uri", "base64"] = option("data_uri")
    """Encoding of pictures in raw webhooks: data URIs, or plain base64. Clips are always data URIs."""

    @property
    def hooks(self) -> list[Hook]:
        return self.webhook_config or []


def check_webhooks(config: WebhookConfig) -> Iterator[Problem]:
    """Report missing and invalid addresses; messages never show an address."""
    if _no_verify() not in {"", *TRUE_WORDS, *FALSE_WORDS}:
        yield Problem(NO_VERIFY, f"{_no_verify()!r} is not true or false.")
    for index, hook in enumerate(config.hooks):
        where = f"{WEBHOOK_CONFIG}[{index}]"
        key = "webhook_url" if hook.webhook_type == "discord" else "callback_url"
        if not hook.address:
            yield Problem(f"{where}.{key}", f"is required for a {hook.webhook_type} webhook: its address.")
        elif not (_host(hook.address) or REFERENCE.search(hook.address)):
            yield Problem(f"{where}.{key}", "is no address of the form https://host/path or http://host/path.")
        elif hook.auth_token and not (hook.auth_token.isascii() and hook.auth_token.isprintable()):
            yield Problem(f"{where}.auth_token", "cannot be sent: a header is one line of ASCII letters.")
        elif not hook.verifies:
            yield warning(where, f"the certificate of {hook.host} is not checked, so messages could be intercepted.")


def _no_verify() -> str:
    return os.environ.get(NO_VERIFY, "").strip().lower()


def _host(address: str) -> str:
    """The host of an HTTP address; empty if the address is invalid."""
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError:
        return ""
    is_usable = parts.scheme in ("http", "https") and address.isprintable() and " " not in address
    return (parts.hostname or "") if is_usable else ""


# Install commands by tracker; the package is named after the tracker.
PACKAGES = {"wandb": "pip install wandb", "tensorboard": "pip install 'tensorboard>=2.18,<3'"}
NOT_AVAILABLE_YET = ("comet_ml", "swanlab")
KNOWN = (*PACKAGES, *NOT_AVAILABLE_YET, "simpletuner", "none", "all")
DEFAULT_ADDRESS = "https://api.wandb.ai"
OUTSIDE = re.compile(r"/|(.*/)?\.\.(/|\Z)", re.DOTALL)  # an absolute path, or one with a part ..
MODES_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # dryrun is the former name of offline


class TrackingConfig(Group):
    """Tracking"""

    report_to: Text = common("none")
    """wandb, tensorboard, simpletuner (local files, always written), all, none, or a list of names."""
    tracker_project_name: Text = common("simpletuner")
    """Project name for trackers."""
    tracker_run_name: Text = common("simpletuner-testing")
    """Run name for trackers."""


# What wandb refuses in the name of a project.
WANDB_REFUSED = "/\\#?%:"
WANDB_LONGEST = 128  # characters


def tracker_names(report_to: str) -> list[str]:
    """The names in a value of `report_to`."""
    return [name.strip().lower() for name in report_to.split(",") if name.strip()] or ["none"]


def check_trackers(config: TrackingConfig) -> Iterator[Problem]:
    """Report unknown and unusable names; a missing package or login is only a warning."""
    names = tracker_names(config.report_to)
    for name in names:
        if name in NOT_AVAILABLE_YET:
            yield Problem("report_to", f"{name!r} is not available yet; choose wandb, tensorboard or none.")
        elif name not in KNOWN:
            yield Problem("report_to", not_one_of(name, KNOWN))
    if "none" in names and len(set(names)) > 1:
        yield Problem("report_to", f"{config.report_to!r} asks for none and for {', '.join(names)} at once.")
    # `all` means all installed trackers.
    for name in PACKAGES if "all" not in names else ():
        if name in names and (reason := why_missing(name)):
            yield warning("report_to", reason)
    yield from _check_wandb_name(config.tracker_project_name, names)
    # Names become folders in `logging_dir`.
    for key, name in config.model_dump(exclude={"report_to"}).items():
        if OUTSIDE.match(name):
            yield Problem(key, f"{name!r} points outside logging_dir; it is a name, with no '..' and no '/' in front.")


def _check_wandb_name(project: str, names: Sequence[str]) -> Iterator[Problem]:
    """Report a project name that wandb would refuse when the run starts."""
    is_used = "wandb" in names or ("all" in names and why_missing("wandb") is None)
    refused = [sign for sign in WANDB_REFUSED if sign in project]
    if is_used and refused:
        message = f"{project!r} has {' '.join(refused)}, which wandb does not take in the name of a project"
        yield Problem("tracker_project_name", f"{message}; use '-' instead.")
    elif is_used and len(project) > WANDB_LONGEST:
        message = f"has {len(project)} characters; wandb takes at most {WANDB_LONGEST} in the name of a project."
        yield Problem("tracker_project_name", message)


def why_missing(name: str) -> str | None:
    """Why a known tracker cannot work here; None if it can."""
    if find_spec(name) is None:
        return f"{name} is not installed ({PACKAGES[name]}); training continues without it."
    if name == "wandb" and not has_wandb_login():
        return "wandb is not logged in (`wandb login`); training continues without it."
    return None


def has_wandb_login() -> bool:
    """Whether an API key is stored, or the mode (`WANDB_MODE=offline`, `wandb offline`) needs none."""
    settings = _settings_files()
    if wandb_mode() in MODES_WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.get("api_key"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or DEFAULT_ADDRESS).hostname or ""
    named = os.environ.get("NETRC")
    # _netrc is the name on Windows; NETRC replaces both.
    for path in [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            login = netrc.netrc(path).hosts.get(host)
            if login and login[2]:  # (login, account, password), where the password is the key
                return True
    return False


def wandb_mode() -> str:
    """`online`, `offline` or `disabled`, from the environment or a settings file."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled"
    return os.environ.get("WANDB_MODE") or _settings_files().get("mode") or "online"


def _settings_files() -> dict[str, str]:
    """The user's settings, overridden by those of the working directory."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    local = Path(os.environ.get("WANDB_DIR") or ".")
    # No interpolation, since keys may contain %.
    parser = configparser.ConfigParser(interpolation=None)
    try:
        # Later files take precedence; wandb uses the folder .wandb instead of wandb if it exists.
        parser.read([home / "settings", local / "wandb" / "settings", local / ".wandb" / "settings"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}
