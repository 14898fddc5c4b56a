"""Requests to a running session, by a file in `output_dir/requests/`. Free of torch.

touch output/requests/stop                 end after the current step, as Ctrl-C does
touch output/requests/stop_at_epoch_end    end after the last step of the epoch
touch output/requests/save                 a checkpoint now
touch output/requests/preview              previews now
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

FOLDER = "requests"
Request = Literal["stop", "stop_at_epoch_end", "save", "preview"]
REQUESTS: tuple[Request, ...] = get_args(Request)


def make_request(output_dir: Path, request: Request) -> None:
    """Ask the session that runs in an output folder for something.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = output_dir / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / request).touch()


def expect_requests(output_dir: Path) -> None:
    """Make the folder that requests are made in, and discard those made to an earlier session."""
    (output_dir / FOLDER).mkdir(exist_ok=True)
    take_requests(output_dir)


def take_requests(output_dir: Path) -> list[Request]:
    """The requests since the last call; their files are removed. Other files stay."""
    return [request for request in REQUESTS if take_request(output_dir, request)]


def take_request(output_dir: Path, request: Request) -> bool:
    """Whether something was requested since the last call; its file is removed."""
    try:
        (output_dir / FOLDER / request).unlink()
    except OSError:  # usually there is none
        return False
    return True
