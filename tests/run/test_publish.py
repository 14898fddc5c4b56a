"""A result takes its place only when it loads as it was trained."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.annexes.publishing.card import published_result
from simpletuner.config.schema import EmaConfig
from simpletuner.config.sources import parse_arguments
from simpletuner.errors import NonFiniteError
from simpletuner.headers import METADATA, read_header
from simpletuner.planning.checkpoint_folder import PIPELINE_FOLDER
from simpletuner.run.session import publish_result
from simpletuner.training import lora_files
from simpletuner.training.ema import Ema
from simpletuner.training.full_model import FullModel
from simpletuner.training.state import TrainState
from simpletuner.weights.lora_names import LORA_FILE, STEP_NOTE
from tests.tools.assembly import lora_of, make_assembly, make_publication, write_lora
from tests.tools.workspace import Workspace


def change_first_tensor(path: Path) -> None:
    """Add 1 to the first tensor of a file."""
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name] += 1
    save_file(tensors, path, metadata=read_header(path)[METADATA])


def test_a_lora_that_does_not_verify_never_replaces_a_good_one(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = make_assembly(t2i_checkpoint)
    lora = lora_of(assembly)
    publication = make_publication(t2i_checkpoint, assembly.adapter)
    assert f"all {len(lora.state_dict())} tensors load" in lora.publish(tmp_path, publication)
    before = (tmp_path / LORA_FILE).read_bytes()
    write = lora_files.write_weights

    def write_and_change(path: Path, *arguments: Any) -> None:
        write(path, *arguments)
        change_first_tensor(path)

    monkeypatch.setattr(lora_files, "write_weights", write_and_change)

    with pytest.raises(RuntimeError, match="does not load as it was saved"):
        lora.publish(tmp_path, publication)

    assert (tmp_path / LORA_FILE).read_bytes() == before


@pytest.mark.parametrize("is_average", [False, True], ids=["weights", "average"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_that_are_not_finite_are_not_published(
    tmp_path: Path, t2i_checkpoint: Path, kind: str, is_average: bool
) -> None:
    workspace = Workspace.create(tmp_path, t2i_checkpoint, model_type=kind)
    assembly = make_assembly(t2i_checkpoint, model_type=kind)
    ema = Ema(assembly.parameters, EmaConfig(), torch.device("cpu"))
    assembly.trained.ema = ema
    weights = ema.average if is_average else assembly.parameters
    name = next(iter(weights))
    weights[name].data.view(-1)[0] = float("nan")

    with workspace.inside():
        plan = plan_that_fits(parse_arguments([])).plan
        session: Any = SimpleNamespace(plan=plan, assembly=assembly, state=TrainState())
        with pytest.raises(NonFiniteError, match=f"not saved: .*{re.escape(name)}"):
            publish_result(session)

    assert not list(tmp_path.rglob(LORA_FILE))
    assert not list(tmp_path.rglob(PIPELINE_FOLDER))


def test_a_result_of_an_earlier_step_is_not_reported(tmp_path: Path, t2i_checkpoint: Path) -> None:
    workspace = Workspace.create(tmp_path, t2i_checkpoint)
    lora = lora_of(make_assembly(t2i_checkpoint))

    with workspace.inside():
        plan = plan_that_fits(parse_arguments([])).plan
        without_file = published_result(plan, 4)
        write_lora(lora, plan.output_dir, **{STEP_NOTE: "2"})
        with_old_file = published_result(plan, 4)
        write_lora(lora, plan.output_dir, **{STEP_NOTE: "4"})
        with_new_file = published_result(plan, 4)

    assert without_file is None
    assert with_old_file is None
    assert with_new_file is not None
    assert with_new_file["path"] == LORA_FILE


def test_a_pipeline_that_does_not_verify_is_not_published(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = make_assembly(t2i_checkpoint, model_type="full")
    full_model = assembly.trained
    assert isinstance(full_model, FullModel)
    publication = make_publication(t2i_checkpoint, assembly.adapter)
    verify = full_model.verify

    def change_and_verify(folder: Path) -> None:
        change_first_tensor(next(folder.glob("*.safetensors")))
        verify(folder)

    monkeypatch.setattr(full_model, "verify", change_and_verify)

    with pytest.raises(RuntimeError, match="is not what was trained"):
        full_model.publish(tmp_path, publication)

    assert not (tmp_path / PIPELINE_FOLDER).exists()
