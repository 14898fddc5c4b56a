"""Keys of trackers, and whether they can work here.

Without an API key wandb prompts for one, and an unattended run would wait forever. The login is
therefore checked first, without importing wandb.
"""

from __future__ import annotations

import configparser
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from simpletuner.config.option import Group, Package, common, is_installed
from simpletuner.config.types import Text, parse_text
from simpletuner.errors import Problems, not_one_of

# The package of every tracker; None: it needs no package. Their classes are in annexes/trackers.py.
PACKAGES: Mapping[str, Package | None] = {
    "wandb": Package("wandb", "wandb>=0.20,<0.32"),
    "tensorboard": Package("tensorboard", "tensorboard>=2.18,<3"),
}
NOT_AVAILABLE_YET = ("comet_ml", "swanlab")
KNOWN = (*PACKAGES, *NOT_AVAILABLE_YET, "simpletuner", "none", "all")
DEFAULT_ADDRESS = "https://api.wandb.ai"
OUTSIDE = re.compile(r"/|(.*/)?\.\.(/|\Z)", re.DOTALL)  # an absolute path, or one with a part ..
MODES_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # dryrun is the former name of offline


def parse_folder_name(value: object) -> object:
    """A name that becomes a folder in `logging_dir`; slashes make subfolders."""
    name = str(parse_text(value))
    if OUTSIDE.match(name):
        raise ValueError(
            "points outside logging_dir; it is a name, with no '..' and no '/' in front"
        )
    return name


FolderName = Annotated[str, BeforeValidator(parse_folder_name)]


class TrackingConfig(Group):
    """Tracking"""

    report_to: Text = common("none")
    """wandb, tensorboard, simpletuner (local files, always written), all, none, or a list."""
    tracker_project_name: FolderName = common("simpletuner")
    """Project under which Weights & Biases and other trackers file the run."""
    tracker_run_name: FolderName = common("simpletuner-testing")
    """What Weights & Biases and other trackers call the run."""


# What wandb refuses in the name of a project.
WANDB_REFUSED = "/\\#?%:"
WANDB_LONGEST = 128  # characters


def tracker_names(report_to: str) -> list[str]:
    """The names in a value of `report_to`."""
    return [name.strip().lower() for name in report_to.split(",") if name.strip()] or ["none"]


def check_trackers(config: TrackingConfig, report: Problems) -> None:
    """Report unknown and unusable names; a missing package or login is only a warning."""
    names = tracker_names(config.report_to)
    for name in names:
        if name in NOT_AVAILABLE_YET:
            report.error(
                "report_to", f"{name!r} is not available yet; choose {', '.join(PACKAGES)} or none."
            )
        elif name not in KNOWN:
            report.error("report_to", not_one_of(name, KNOWN))
    if "none" in names and len(set(names)) > 1:
        report.error(
            "report_to", f"{config.report_to!r} asks for none and for {', '.join(names)} at once."
        )
    if "all" not in names:  # which means all installed trackers
        for name in PACKAGES:
            reason = why_missing(name) if name in names else None
            if reason:
                report.warn("report_to", reason)
    _check_wandb_name(config.tracker_project_name, names, report)


def _check_wandb_name(project: str, names: Sequence[str], report: Problems) -> None:
    """Report a project name that wandb would refuse when the run starts."""
    is_used = "wandb" in names or ("all" in names and why_missing("wandb") is None)
    if not is_used:
        return
    refused = [character for character in WANDB_REFUSED if character in project]
    if refused:
        message = (
            f"{project!r} has {' '.join(refused)}, which wandb does not take in the name of "
            "a project; use '-' instead."
        )
        report.error("tracker_project_name", message)
    elif len(project) > WANDB_LONGEST:
        message = (
            f"has {len(project)} characters; wandb takes at most {WANDB_LONGEST} in the name of a "
            "project."
        )
        report.error("tracker_project_name", message)


def why_missing(name: str) -> str | None:
    """Why a known tracker cannot work here; None if it can."""
    package = PACKAGES[name]
    if package is not None and not is_installed(package.module):
        return f"{name} is not installed ({package.install}); training continues without it."
    if name == "wandb" and not has_wandb_login():
        return "wandb is not logged in (`wandb login`); training continues without it."
    return None


def has_wandb_login() -> bool:
    """Whether an API key is stored, or the mode (`wandb offline`) needs none."""
    if wandb_mode() in MODES_WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _settings_files()
    if settings.get("api_key"):
        return True
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or DEFAULT_ADDRESS
    return _has_password(urlsplit(address).hostname or "")


def _has_password(host: str) -> bool:
    """Whether a netrc file has a password for a host; wandb stores its key as one."""
    chosen = os.environ.get("NETRC")
    paths = [Path.home() / ".netrc", Path.home() / "_netrc"]  # the second on Windows
    if chosen:
        paths = [Path(chosen).expanduser()]
    for path in paths:
        with suppress(OSError, netrc.NetrcParseError):
            login = netrc.netrc(path).hosts.get(host)
            if login and login[2]:  # (login, account, password)
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
    # Later files take precedence; wandb uses the folder .wandb instead of wandb if it exists.
    paths = [home / "settings", local / "wandb" / "settings", local / ".wandb" / "settings"]
    # No interpolation, since keys may contain %.
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(paths, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}
