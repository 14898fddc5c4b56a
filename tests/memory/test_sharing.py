"""The processes of a machine share one copy of frozen weights."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from simpletuner.annexes.processes.joining import connect
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.memory.offload import image
from tests.tools.processes import run_together


def share(place: World, folder: Path) -> None:
    """Share one buffer in every way, in a separate process."""
    with connect(place, f"file://{folder / 'meeting'}", start_limit=60) as world:
        buffer = torch.full((3 * image.PAGE,), 1 + place.rank, dtype=torch.uint8)
        assert mapped(buffer, world, None).startswith("/memfd:simpletuner-offload")
        assert mapped(buffer, world, folder / "disk").startswith(f"{folder}/disk/")
        # As in containers of their own: the first process is not where the others look, or another
        # one is there.
        image.PROCESSES = folder / f"proc{place.rank}"
        image.SHARED_MEMORY = folder / "shm"
        wrong = folder / "proc0" / str(os.getpid()) / "fd"
        if world.is_leader:
            wrong.mkdir(parents=True)
            for number in range(64):
                (wrong / str(number)).write_bytes(b"what another program has open")
        for where in ("shm", "disk"):
            assert mapped(buffer, world, None if where == "shm" else folder / where).startswith(
                f"{folder}/{where}/"
            )
            assert sorted(path.name for path in (folder / where).iterdir()) == [
                "mine",
                "simpletuner-offload-young",
            ]
        assert all(path.read_bytes().startswith(b"what") for path in wrong.glob("*"))
        # Nor do they have a folder in common: all learn it.
        if not world.is_leader:
            image._opened = lambda path, mark: None
        with pytest.raises(
            UserError, match=r"The 2 processes .* \(docker run --pid=host\), or /.*--ipc=host"
        ):
            image.shared_by_machine(buffer, world, None)
        with pytest.raises(UserError, match=r"--pid=host\), or group_offload_to_disk_path '/"):
            image.shared_by_machine(buffer, world, folder / "disk")
        world.barrier()
        assert sorted(path.name for path in (folder / "disk").iterdir()) == [
            "mine",
            "simpletuner-offload-young",
        ]


def mapped(buffer: torch.Tensor, world: World, folder: Path | None) -> str:
    """The file behind a shared buffer, which is the first process's, and in which all see what one
    writes.
    """
    flat = image.shared_by_machine(buffer, world, folder)
    assert set(flat.tolist()) == {1}
    world.barrier()
    if world.is_main:
        flat[7] = 9
    world.barrier()
    assert flat[7] == 9
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(
        line.split(maxsplit=5)[5]
        for line in lines
        if line.startswith(f"{flat.data_ptr():x}-".zfill(13))
    )


@pytest.mark.slow
def test_processes_share_memory_even_in_separate_containers(tmp_path: Path) -> None:
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir()
    for name in ("shm", "disk"):
        for stray in ("old", "young"):
            (tmp_path / name / f"simpletuner-offload-{stray}").touch()
        (tmp_path / name / "mine").touch()
        past = time.time() - 2 * image.STRAY_SECONDS
        for file in ("simpletuner-offload-old", "mine"):
            os.utime(tmp_path / name / file, (past, past))
    run_together(2, share, tmp_path)
