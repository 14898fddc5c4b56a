"""The average of an earlier result, left by a run that continued without it, is not used."""

from __future__ import annotations

import shutil

import pytest

from simpletuner.annexes.publishing.uploads import loaded_files
from simpletuner.planning.checkpoint_folder import average_is_stale
from simpletuner.weights.lora_names import LORA_FILE
from tests.tools.refusals import complaint
from tests.tools.workspace import Workspace


def put_average(run: Workspace, step: int) -> None:
    """Write an average of some step beside the result of step 4."""
    output = run.path("output")
    (output / "ema").mkdir()
    shutil.copyfile(output / f"checkpoint-{step}" / LORA_FILE, output / "ema" / LORA_FILE)


@pytest.mark.parametrize(("step", "is_stale"), [(2, True), (4, False)])
def test_an_average_of_an_earlier_result_is_not_uploaded(
    trained: Workspace, step: int, is_stale: bool
) -> None:
    output = trained.path("output")
    assert not average_is_stale(output)

    put_average(trained, step)

    assert average_is_stale(output) == is_stale
    files = loaded_files(output)
    assert LORA_FILE in files
    assert (f"ema/{LORA_FILE}" in files) == (not is_stale)
    assert (output / "ema" / LORA_FILE).exists(), "files are never deleted"


def test_a_stale_average_is_not_rendered(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    put_average(trained, 2)

    message = complaint(trained, capsys, "sample", "output", "--prompt", "a red square", "--ema")

    assert f"ema/{LORA_FILE}' is not of the result beside it" in message
    assert "without use_ema" in message
