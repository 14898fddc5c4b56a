"""GPUs that are not NVIDIA's: what their drivers say is what the plan is made for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from simpletuner.annexes.fitting.ready import check_vendor
from simpletuner.budget import device as devices
from simpletuner.budget import drivers
from simpletuner.budget.device import DeviceRates, find_device, write_rates
from simpletuner.budget.drivers import (
    TITLES,
    Backend,
    Gpu,
    ask_torch,
    count_gpus,
    query_gpu,
    torch_backend,
)
from simpletuner.budget.phases import PhasePeak
from simpletuner.budget.workload import kernels_on
from simpletuner.config.load import Layer, resolve
from simpletuner.diffusion.seeds import seeded
from simpletuner.errors import Problems
from simpletuner.models.cost import Kernels
from simpletuner.models.kandinsky5.tile_attention import attend_masked, choose_attend
from simpletuner.models.registry import FAMILIES
from simpletuner.training.state import random_states, restore_random_states
from tests.tools.reports import found_by

GIGABYTE = 2**30
RADEON = {
    "card0": {
        "Card Series": "AMD Radeon RX 7900 XTX",
        "VRAM Total Memory (B)": str(24 * GIGABYTE),
        "VRAM Total Used Memory (B)": str(3 * GIGABYTE),
    },
    "card1": {
        "Card Series": "AMD Radeon PRO W7900",
        "VRAM Total Memory (B)": str(48 * GIGABYTE),
        "VRAM Total Used Memory (B)": "26000000",
    },
}


@pytest.fixture(autouse=True)
def _bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Linux machine without drivers, and with a torch of which nothing is known."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in drivers.VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(drivers, "DEVICE_FILES", dict.fromkeys(TITLES, ()))
    monkeypatch.setattr(drivers, "torch_backend", lambda: None)
    monkeypatch.setattr(devices, "query_gpu", query_gpu)
    ask_torch.cache_clear()
    yield
    ask_torch.cache_clear()


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def be_amd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(folder, "rocm-smi", f"echo '{json.dumps(RADEON)}'")
    monkeypatch.setattr(drivers, "torch_backend", lambda: "rocm")


def be_apple(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        folder,
        "sysctl",
        f"case $2 in hw.memsize) echo {64 * GIGABYTE};; *) echo 'Apple M3 Max';; esac",
    )
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(drivers, "torch_backend", torch_backend)


def be_intel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = program(folder, "python", f"""echo '["Intel Arc B580", {12 * GIGABYTE}]'""")
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(drivers, "torch_backend", lambda: "xpu")
    monkeypatch.setitem(drivers.DEVICE_FILES, "xpu", (str(folder),))


MACHINES = {
    "rocm": (be_amd, Gpu("AMD Radeon RX 7900 XTX", 24 * GIGABYTE, 3 * GIGABYTE, "rocm"), "cuda"),
    "mps": (be_apple, Gpu("Apple M3 Max", 48 * GIGABYTE, 0.0, "mps"), "mps"),
    "xpu": (be_intel, Gpu("Intel Arc B580", 12 * GIGABYTE, 0.0, "xpu"), "xpu"),
}


@pytest.mark.parametrize("backend", MACHINES)
def test_plan_is_for_the_gpu_that_torch_uses(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become, gpu, torch_type = MACHINES[backend]
    become(tmp_path, monkeypatch)
    assert query_gpu() == gpu

    device = find_device(output_dir=tmp_path)
    (sentence,) = found_by(check_vendor, device)

    assert (device.name, device.memory, device.is_gpu) == (gpu.name, gpu.memory, True)
    assert (device.torch_type, device.taken) == (torch_type, gpu.taken)
    assert sentence.message.startswith(f"{gpu.name} ({TITLES[backend]}): ")
    assert not sentence.fatal


def test_cuda_build_of_torch_is_not_imported_for_a_render_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_intel(tmp_path, monkeypatch)
    monkeypatch.setattr(drivers, "torch_backend", lambda: "cuda")

    assert query_gpu() is None


@pytest.mark.parametrize("backend", MACHINES)
def test_measured_rates_are_used(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become, _, _ = MACHINES[backend]
    become(tmp_path, monkeypatch)
    write_rates(tmp_path, DeviceRates(TITLES[backend], 33e12, dtype="bfloat16"))
    device = find_device(output_dir=tmp_path)

    assert device.rates.matmul == pytest.approx(33e12)
    assert "measured" in device.note


@pytest.mark.parametrize("backend", MACHINES)
def test_compilation_and_flex_attention_are_planned_on_cuda_only(backend: Backend) -> None:
    _, _, torch_type = MACHINES[backend]
    spec = FAMILIES["kandinsky5-video"]
    config = resolve(
        [Layer("test", [("model_type", "lora"), ("model_family", spec.name)])], Problems()
    )
    kernels = kernels_on(config, spec, torch_type)
    assert kernels.tile_lists is (torch_type == "cuda")
    if torch_type != "cuda":
        assert kernels == Kernels()
        assert choose_attend(torch.device(torch_type), torch.float32, 64) is attend_masked


def test_apple_chip_shares_its_memory_with_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_apple(tmp_path, monkeypatch)
    device = find_device()

    assert not device.has_own_memory
    assert device.usable == 48 * GIGABYTE
    assert PhasePeak("training", 40e9, 11e9).shortage(device) is None
    assert "of the machine's memory" in (PhasePeak("training", 40e9, 12e9).shortage(device) or "")


@pytest.mark.parametrize("variable", drivers.VISIBLE)
def test_visible_amd_gpu_is_used(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_amd(tmp_path, monkeypatch)
    assert count_gpus() == 2
    monkeypatch.setenv(variable, "1")
    assert query_gpu() == Gpu("AMD Radeon PRO W7900", 48 * GIGABYTE, 0.0, "rocm")
    assert count_gpus() == 1
    monkeypatch.setenv(variable, "")
    assert query_gpu() is None


@pytest.mark.parametrize(
    "answer", ["", "no JSON", "[]", "{}", '{"card0": {}}', '{"system": {"Driver": "6"}}']
)
def test_driver_with_an_invalid_answer_counts_as_missing(answer: str, tmp_path: Path) -> None:
    program(tmp_path, "rocm-smi", f"echo '{answer}'")
    assert query_gpu() is None


def test_gpu_for_another_build_of_torch_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_amd(tmp_path, monkeypatch)
    monkeypatch.setattr(drivers, "torch_backend", lambda: "cuda")
    device = find_device()

    assert (device.name, device.idle, device.is_gpu) == ("CPU", "AMD Radeon RX 7900 XTX", False)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\nxpu: Optional[str] = None\n",
            "rocm",
        ),
        (
            "cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = "
            "'20250301'\n",
            "xpu",
        ),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", ""),
    ],
)
def test_build_of_torch_is_read_from_its_version_file(
    lines: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(lines)
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")),
    )
    assert torch_backend() == expected


class FakeMps:
    """The generator of an Apple GPU."""

    def __init__(self) -> None:
        self.state = torch.tensor([7])

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps()
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda check_available=False: torch.device("mps")
    )
    monkeypatch.setattr("torch.get_device_module", lambda device=None: fake)
    monkeypatch.setattr("torch.mps.get_rng_state", fake.get_rng_state)
    monkeypatch.setattr("torch.mps.set_rng_state", fake.set_rng_state)
    return fake


def test_random_state_of_an_apple_gpu_is_saved_and_restored(mps: FakeMps) -> None:
    states = random_states()
    mps.state = torch.tensor([8])
    restore_random_states(states)

    assert mps.state.item() == 7


def test_previews_keep_the_random_state_of_an_apple_gpu(mps: FakeMps) -> None:
    with seeded(3, [torch.device("mps")]):
        mps.state = torch.tensor([9])
    assert mps.state.item() == 7
