"""Cache entries that are damaged while a run goes on are encoded again, in the thread that loads
all other models.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from simpletuner.reporting.events import (
    CACHING,
    EVALUATION,
    PREVIEWS,
    EventStream,
    PhaseStarted,
    StepReport,
)
from simpletuner.training.loader import in_loop, read_ahead
from tests.tools.runs import CLIPS, LORA, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, EVAL, Workspace

pytestmark = pytest.mark.slow(6)

SETTINGS: dict[str, Any] = {
    "max_train_steps": 2,
    "checkpoint_step_interval": 1,
    "eval_steps_interval": 1,
    "validation_disable": False,
    "validation_step_interval": 2,
    "disable_benchmark": True,
    "eval_timesteps": 2,
    "lora_type": "lokr",
    "validation_num_video_frames": 5,
    "crepa_enabled": True,
    "crepa_block_index": 0,
    "crepa_encoder_image_size": 70,
}
DINO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_ratio": 2,
    "image_size": 70,
}


@pytest.fixture
def healthy(tmp_path: Path) -> Workspace:
    """A run that reads captions, latents and features, in training, evaluation, previews and
    verification.
    """
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**DINO, patch_size=14)).save_pretrained(tmp_path / "dino")
    run = make_clip_workspace(
        tmp_path / "run", make_checkpoint(tmp_path / "t2v", "t2v"), "t2v-lite-sft-5s"
    )
    run.write_config(crepa_encoder=str(tmp_path / "dino"), **SETTINGS)
    run.add_pictures(EVAL["instance_data_dir"], 2, seed=9)
    run.write_datasets([CLIPS, EVAL, DATASETS[1]])
    return run


def damage(folder: Path) -> None:
    for path in folder.rglob("*.zst"):
        path.write_bytes(path.read_bytes()[:-5])


def test_cache_entries_damaged_in_any_phase_are_encoded_again(
    healthy: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = healthy.copy(tmp_path / "broken")
    assert healthy.train() == 0
    publish = EventStream.publish
    moments: set[str] = set()

    def damaging(self: EventStream, event: Any) -> None:
        publish(self, event)
        if isinstance(event, PhaseStarted | StepReport):  # also where entries are being healed
            moments.add(event.kind if isinstance(event, PhaseStarted) else "step")
            damage(broken.path("cache"))

    monkeypatch.setattr(EventStream, "publish", damaging)
    assert broken.train() == 0
    assert moments > {CACHING, EVALUATION, PREVIEWS, "step"}
    assert healthy.metrics() == broken.metrics()
    assert healthy.path(LORA).read_bytes() == broken.path(LORA).read_bytes()


def test_models_are_loaded_in_the_main_thread_while_readers_wait() -> None:
    """An item that needs one is made by the loop. What else was to be read is read first, and
    errors come out of it.
    """
    loading: list[int] = []
    reading = threading.Lock()

    def make(number: int) -> int:
        if number == 0:
            return number
        if number == 2:
            with reading:
                time.sleep(0.2)
            return number
        return in_loop(lambda: load(number))

    def load(number: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        assert not reading.locked()
        loading.append(number)
        if number == 3:
            raise ValueError("damaged")
        return number

    made: Any = read_ahead(range(4), make, 3)
    assert [next(made), next(made), next(made)] == [0, 1, 2]
    with pytest.raises(ValueError, match="damaged"):
        next(made)
    assert loading == [1, 3]
    assert not any("batch-reader" in thread.name for thread in threading.enumerate())
