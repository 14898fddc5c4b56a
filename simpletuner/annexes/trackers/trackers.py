"""Mirrors of the run record in wandb and tensorboard, where people compare runs.

A tracker never ends a run: one that fails is logged once and not called again. The local files (`simpletuner` in
`report_to`) are not a tracker; they are always written.

Without a key wandb prompts for one, and an unattended run would wait there for ever. So the login is checked first,
without importing wandb.
"""

from __future__ import annotations

import configparser
import logging
import netrc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from simpletuner.config.schema import TrackingConfig
from simpletuner.errors import Problem, did_you_mean
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting.events import ENDED, Evaluated, Event, MediaRendered, PhaseEnded, StateChanged, StepReport
from simpletuner.reporting.metrics import MediaRecord

DEFAULT_ADDRESS = "https://api.wandb.ai"
MODES_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")


def has_wandb_login() -> bool:
    """Whether a key is stored, or the chosen mode (`WANDB_MODE=offline`, `wandb offline`) needs none."""
    settings = _settings_files()
    if wandb_mode() in MODES_WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.get("api_key"):
        return True
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or DEFAULT_ADDRESS
    return _netrc_knows(urlsplit(address).hostname or "")


def wandb_mode() -> str:
    """`online`, `offline` or `disabled`, from the environment or a settings file."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled"
    return os.environ.get("WANDB_MODE") or _settings_files().get("mode") or "online"


def _settings_files() -> dict[str, str]:
    """The user's settings, overridden by those of the working directory."""
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


logger = logging.getLogger(__name__)

# How to get the package of a tracker, which has the tracker's name.
PACKAGES = {"wandb": "pip install wandb", "tensorboard": "pip install 'simpletuner[tensorboard]'"}
NOT_AVAILABLE_YET = ("comet_ml", "swanlab")
WITHOUT_TRACKER = ("simpletuner", "none")
KNOWN = (*PACKAGES, *NOT_AVAILABLE_YET, *WITHOUT_TRACKER, "all")


class Tracker(Protocol):
    """Receives what the main process measures. `step` is the optimizer step."""

    def start(self, run_config: Mapping[str, Any]) -> None:
        """Open the run; secrets in the settings have been redacted."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of a step; may be called several times for one step."""

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        """The timesteps at which the samples of this step were trained."""

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        """Previews; their files exist."""

    def finish(self, exit_code: int = 0) -> None:
        """Send the rest and close the run."""


def check_trackers(report_to: str) -> list[Problem]:
    """Problems of a value of `report_to`; a missing package or login is only a warning."""
    names = _split(report_to)
    problems = [_unusable(name) for name in names if name in NOT_AVAILABLE_YET or name not in KNOWN]
    if "none" in names and len(set(names)) > 1:
        problems.append(Problem("report_to", f"{report_to!r} asks for none and for {', '.join(names)} at once."))
    if "all" not in names:
        reasons = (_missing(name) for name in PACKAGES if name in names)
        problems += [Problem("report_to", reason, fatal=False) for reason in reasons if reason]
    return problems


def check_names(config: TrackingConfig) -> Iterator[Problem]:
    """Names become folders inside `logging_dir`."""
    for key in ("tracker_project_name", "tracker_run_name"):
        name = str(getattr(config, key))
        if name.startswith("/") or ".." in name.split("/"):
            yield Problem(key, f"{name!r} leads out of logging_dir; it is a name, with no '..' and no '/' in front.")


def build_trackers(
    config: TrackingConfig, output_dir: Path, logging_dir: Path, start_step: int = 0
) -> list[GuardedTracker]:
    """The trackers that `report_to` names and that can work here, not yet started.

    Args:
        config: `report_to` has passed `check_trackers`.
        output_dir: paths of previews are relative to it; the wandb run id is kept there.
        logging_dir: where trackers put their own files.
        start_step: a resumed run continues after this step, under the same wandb run.
    """
    names = _split(config.report_to)
    builders: Mapping[str, Callable[[], Tracker]] = {
        "wandb": lambda: _wandb(config, output_dir, logging_dir, start_step),
        "tensorboard": lambda: _tensorboard(config, output_dir, logging_dir, start_step),
    }
    trackers = []
    for name, build in builders.items():
        if name not in names and "all" not in names:
            continue
        if reason := _missing(name):
            logger.log(logging.INFO if "all" in names else logging.WARNING, "report_to: %s", reason)
        else:
            trackers.append(GuardedTracker(name, build))
    return trackers


class GuardedTracker:
    """Passes events to a tracker, and keeps the tracker's failures away from training.

    Args:
        name: for the log.
        build: makes the tracker; importing its package may fail too.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self._build = build
        self._tracker: Tracker | None = None
        self._round: list[MediaRecord] = []  # previews of one round are sent together

    def start(self, run_config: Mapping[str, Any]) -> None:
        def build_and_start() -> None:
            tracker = self._build()
            tracker.start(redact_settings(run_config))
            self._tracker = tracker

        self._guard(build_and_start)

    def __call__(self, event: Event) -> None:
        if tracker := self._tracker:
            self._guard(lambda: self._tell(tracker, event))

    def _tell(self, tracker: Tracker, event: Event) -> None:
        match event:
            case StepReport():
                tracker.log(event.metrics, event.step)
                tracker.log_timesteps(event.timesteps, event.step)
            case Evaluated():
                tracker.log(event.losses, event.step)
            case MediaRendered():
                self._round.append(event.media)
            case PhaseEnded() if self._round:
                media, self._round = self._round, []
                tracker.log_media(media, media[0].step)
            case StateChanged() if event.state in ENDED:
                tracker.finish(0 if event.state == "finished" else 1)
                self._tracker = None

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        # Broad, because third-party code with a network and files behind it may raise anything.
        except Exception as error:
            self._tracker = None
            logger.warning("%s stopped working; training goes on without it. %s", self.name, redact(_brief(error)))
            logger.debug("%s failed", self.name, exc_info=True)


def _split(report_to: str) -> list[str]:
    return [name.strip().lower() for name in report_to.split(",") if name.strip()] or ["none"]


def _unusable(name: str) -> Problem:
    if name in NOT_AVAILABLE_YET:
        return Problem("report_to", f"{name!r} is not available yet; choose wandb, tensorboard or none.")
    return Problem("report_to", f"{name!r} is not one of: {', '.join(KNOWN)}.{did_you_mean(name, KNOWN)}")


def _missing(name: str) -> str | None:
    """Why a known tracker cannot work here; None if it can."""
    if find_spec(name) is None:
        return f"{name} is not installed ({PACKAGES[name]}); training goes on without it."
    if name == "wandb" and not has_wandb_login():
        return "wandb has no login on this machine (`wandb login`); training goes on without it."
    return None


def _wandb(config: TrackingConfig, output_dir: Path, logging_dir: Path, start_step: int) -> Tracker:
    # Importing a tracker takes a second, which only its users should wait for.
    from simpletuner.annexes.trackers.wandb_tracker import WandbTracker

    project, name = redact(config.tracker_project_name), redact(config.tracker_run_name)
    return WandbTracker(project, name, output_dir, logging_dir, start_step)


def _tensorboard(config: TrackingConfig, output_dir: Path, logging_dir: Path, start_step: int) -> Tracker:
    from simpletuner.annexes.trackers.tensorboard_tracker import TensorboardTracker

    folder = logging_dir / redact(config.tracker_project_name) / redact(config.tracker_run_name)
    return TensorboardTracker(folder, output_dir, start_step)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"({type(error).__name__}: {lines[0]})" if lines else f"({type(error).__name__})"
