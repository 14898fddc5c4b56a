"""Trackers that a run can report to, and whether they can work here. Free of torch.

Without a key wandb prompts for one, and an unattended run would wait there for ever. So the login is checked first,
without importing wandb.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from simpletuner.config.schema import TrackingConfig
from simpletuner.errors import Problem, did_you_mean

# How to get the package of a tracker, which has the tracker's name.
PACKAGES = {"wandb": "pip install wandb", "tensorboard": "pip install 'tensorboard>=2.18,<3'"}
NOT_AVAILABLE_YET = ("comet_ml", "swanlab")
KNOWN = (*PACKAGES, *NOT_AVAILABLE_YET, "simpletuner", "none", "all")
DEFAULT_ADDRESS = "https://api.wandb.ai"
MODES_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # dryrun is the old name of offline


def tracker_names(report_to: str) -> list[str]:
    """The names in a value of `report_to`."""
    return [name.strip().lower() for name in report_to.split(",") if name.strip()] or ["none"]


def check_trackers(config: TrackingConfig) -> Iterator[Problem]:
    """Problems of names; a missing package or login is only a warning."""
    names = tracker_names(config.report_to)
    for name in names:
        if name in NOT_AVAILABLE_YET:
            yield Problem("report_to", f"{name!r} is not available yet; choose wandb, tensorboard or none.")
        elif name not in KNOWN:
            message = f"{name!r} is not one of: {', '.join(KNOWN)}.{did_you_mean(name, KNOWN)}"
            yield Problem("report_to", message)
    if "none" in names and len(set(names)) > 1:
        yield Problem("report_to", f"{config.report_to!r} asks for none and for {', '.join(names)} at once.")
    # `all` means those that are installed.
    for name in PACKAGES if "all" not in names else ():
        if name in names and (reason := why_missing(name)):
            yield Problem("report_to", reason, fatal=False)
    yield from check_names(config)


def check_names(config: TrackingConfig) -> Iterator[Problem]:
    """Names become folders inside `logging_dir`."""
    folders = {"tracker_project_name": config.tracker_project_name, "tracker_run_name": config.tracker_run_name}
    for key, name in folders.items():
        if name.startswith("/") or ".." in name.split("/"):
            yield Problem(key, f"{name!r} leads out of logging_dir; it is a name, with no '..' and no '/' in front.")


def why_missing(name: str) -> str | None:
    """Why a known tracker cannot work here; None if it can."""
    if find_spec(name) is None:
        return f"{name} is not installed ({PACKAGES[name]}); training goes on without it."
    if name == "wandb" and not has_wandb_login():
        return "wandb has no login on this machine (`wandb login`); training goes on without it."
    return None


def has_wandb_login() -> bool:
    """Whether a key is stored, or the chosen mode (`WANDB_MODE=offline`, `wandb offline`) needs none."""
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
            if login and login[2]:  # (login, account, password), of which the last is the key
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
    # A % in a key is no reference.
    parser = configparser.ConfigParser(interpolation=None)
    try:
        # Later files win; wandb uses .wandb instead of wandb where that folder exists.
        parser.read([home / "settings", local / "wandb" / "settings", local / ".wandb" / "settings"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}
