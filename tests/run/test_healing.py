"""Cache entries damaged during a run are encoded again, in the thread that loads models."""

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

# Training, evaluation and previews, each of which reads captions, latents or features.
EVERY_PHASE: dict[str, Any] = {
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
    "patch_size": 14,
}


@pytest.fixture
def healthy(tmp_path: Path) -> Workspace:
    """A run that reads captions, latents and features in all of its phases."""
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**DINO)).save_pretrained(tmp_path / "dino")
    checkpoint = make_checkpoint(tmp_path / "t2v", "t2v")
    run = make_clip_workspace(tmp_path / "run", checkpoint, "t2v-lite-sft-5s")
    run.write_config(crepa_encoder=str(tmp_path / "dino"), **EVERY_PHASE)
    run.add_pictures(EVAL["instance_data_dir"], 2, seed=9)
    run.write_datasets([CLIPS, EVAL, DATASETS[1]])
    return run


def damage(folder: Path) -> None:
    for path in folder.rglob("*.zst"):
        path.write_bytes(path.read_bytes()[:-5])


def test_cache_entries_damaged_in_any_phase_are_encoded_again(
    healthy: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = healthy.copy(tmp_path / "damaged")
    assert healthy.train() == 0
    publish = EventStream.publish
    moments: set[str] = set()

    def publish_and_damage(self: EventStream, event: Any) -> None:
        """Encoding damaged entries again starts a phase, so they are damaged once more."""
        publish(self, event)
        if isinstance(event, PhaseStarted):
            moments.add(event.kind)
        elif isinstance(event, StepReport):
            moments.add("step")
        else:
            return
        damage(damaged.path("cache"))

    monkeypatch.setattr(EventStream, "publish", publish_and_damage)

    assert damaged.train() == 0

    assert moments > {CACHING, EVALUATION, PREVIEWS, "step"}
    assert damaged.metrics() == healthy.metrics()
    assert damaged.path(LORA).read_bytes() == healthy.path(LORA).read_bytes()


def test_models_are_loaded_in_the_main_thread_while_readers_wait() -> None:
    """Items 1 and 3 need a model, and item 2 takes long to read.

    Loading 1 waits until 2 is read; an error of loading 3 is raised when item 3 is requested.
    """
    loaded: list[int] = []
    reading = threading.Lock()

    def make(number: int) -> int:
        if number in (1, 3):
            return in_loop(lambda: load(number))
        if number == 2:
            with reading:
                time.sleep(0.2)
        return number

    def load(number: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        assert not reading.locked()
        loaded.append(number)
        if number == 3:
            raise ValueError("damaged")
        return number

    items: Any = read_ahead(range(4), make, 3)

    assert [next(items), next(items), next(items)] == [0, 1, 2]
    with pytest.raises(ValueError, match="damaged"):
        next(items)
    assert loaded == [1, 3]
    assert not any("batch-reader" in thread.name for thread in threading.enumerate())
