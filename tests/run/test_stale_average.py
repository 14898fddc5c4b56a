"""A run that was continued without `use_ema` leaves the moving average of an earlier result beside
the new one.
"""

from __future__ import annotations

import shutil

import pytest

from simpletuner.annexes.publishing.uploads import loaded_files
from simpletuner.planning.checkpoint_folder import average_is_stale
from tests.tools.refusals import complaint
from tests.tools.workspace import Workspace

LORA = "pytorch_lora_weights.safetensors"


def put_average(run: Workspace, step: int) -> None:
    run.path("output/ema").mkdir()
    shutil.copyfile(run.path(f"output/checkpoint-{step}/{LORA}"), run.path(f"output/ema/{LORA}"))


@pytest.mark.parametrize(("step", "is_stale"), [(2, True), (4, False)])
def test_an_average_of_an_earlier_result_is_not_uploaded(
    trained: Workspace, step: int, is_stale: bool
) -> None:
    assert not average_is_stale(trained.path("output"))
    put_average(trained, step)
    assert average_is_stale(trained.path("output")) == is_stale
    files = loaded_files(trained.path("output"))
    assert LORA in files
    assert (f"ema/{LORA}" in files) == (not is_stale)
    assert trained.path(f"output/ema/{LORA}").exists(), "files are never deleted"


def test_a_stale_average_is_not_rendered(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    put_average(trained, 2)
    told = complaint(trained, capsys, "sample", "output", "--prompt", "a red square", "--ema")
    assert "ema/pytorch_lora_weights.safetensors' is not of the result beside it" in told
    assert "without use_ema" in told
