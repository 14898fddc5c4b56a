"""Whether wandb would work here without asking anything, found out without importing it.

wandb asks for a key at a prompt when it finds none, and a training run on a rented machine must never wait there.
It looks, in this order, at the environment, its settings files and the netrc file.
"""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_ADDRESS = "https://api.wandb.ai"
MODES_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")


def has_wandb_login() -> bool:
    """A key is stored, or the chosen mode (`WANDB_MODE=offline`, `wandb offline`) needs none."""
    settings = _settings_files()
    if wandb_mode() in MODES_WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.get("api_key"):
        return True
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or DEFAULT_ADDRESS
    return _netrc_knows(urlsplit(address).hostname or "")


def wandb_mode() -> str:
    """`online`, `offline` or `disabled`, as the environment or a settings file says."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled"
    return os.environ.get("WANDB_MODE") or _settings_files().get("mode") or "online"


def _settings_files() -> dict[str, str]:
    """The system's settings with those of the working directory laid over them."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    local = Path(os.environ.get("WANDB_DIR") or ".")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([home / "settings", local / "wandb" / "settings", local / ".wandb" / "settings"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _netrc_knows(host: str) -> bool:
    named = os.environ.get("NETRC")
    for path in [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            entry = netrc.netrc(path).hosts.get(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry and entry[2]:
            return True
    return False
