"""Cache entries that are damaged while a run goes on are encoded again, in the thread that loads all other models."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from simpletuner.data.loader import in_loop, read_ahead
from simpletuner.reporting.events import CACHING, EVALUATION, PREVIEWS, EventStream, PhaseStarted, StepReport
from tests.processes import PATIENCE
from tests.run.test_encoding_in_training import ENTRIES
from tests.run.test_resume import RESULT
from tests.validation.test_eval_loss import EVAL
from tests.workspace import Workspace

pytestmark = pytest.mark.slow(6)

SETTINGS: dict[str, Any] = {
    "max_train_steps": 2, "checkpoint_step_interval": 1, "eval_steps_interval": 1, "validation_disable": False,
    "validation_step_interval": 2, "disable_benchmark": True, "eval_timesteps": 2, "lora_type": "lokr",
    "crepa_enabled": True, "irepa_enabled": True, "crepa_block_index": 0, "crepa_encoder_image_size": 70,
}  # fmt: skip
DINO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 70}


@pytest.fixture
def healthy(tmp_path: Path, t2i_checkpoint: Path) -> Workspace:
    """A run that reads captions, latents and features, in training, evaluation, previews and verification."""
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**DINO, patch_size=14)).save_pretrained(tmp_path / "dino")
    encoder = str(tmp_path / "dino")
    run = Workspace.create(tmp_path / "run", t2i_checkpoint, pictures=4, crepa_encoder=encoder, **SETTINGS)
    run.add_pictures(EVAL["instance_data_dir"], 2, seed=9)
    run.write_datasets(ENTRIES)
    return run


def damage(folder: Path) -> None:
    for path in folder.rglob("*.zst"):
        path.write_bytes(path.read_bytes()[:-5])


def test_every_entry_is_damaged_at_every_phase(
    healthy: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = healthy.copy(tmp_path / "broken")
    assert healthy.train() == 0
    publish, moments = EventStream.publish, set[str]()

    def damaging(self: EventStream, event: Any) -> None:
        publish(self, event)
        if isinstance(event, PhaseStarted | StepReport):  # also where entries are being healed
            moments.add(event.kind if isinstance(event, PhaseStarted) else "step")
            damage(broken.path("cache"))

    monkeypatch.setattr(EventStream, "publish", damaging)
    assert broken.train() == 0
    assert moments > {CACHING, EVALUATION, PREVIEWS, "step"}
    assert healthy.metrics() == broken.metrics()
    assert healthy.path(RESULT).read_bytes() == broken.path(RESULT).read_bytes()


def test_what_a_reading_thread_asks_for_is_done_in_the_loops_thread() -> None:
    """Its errors come out of the loop, and a loop that stops leaves nobody waiting."""
    threads = []

    def work() -> str:
        threads.append(threading.current_thread())
        if len(threads) > 2:
            raise ValueError("damaged")
        return "healed"

    planned: Any = range(5)
    made: Any = read_ahead(planned, lambda each: (each, in_loop(work)), 2)
    assert [next(made), next(made)] == [(0, "healed"), (1, "healed")]
    with pytest.raises(ValueError, match="damaged"):
        next(made)
    assert set(threads) == {threading.main_thread()}
    before = threading.enumerate()
    waiting: Any = read_ahead(planned, lambda each: each if not each else in_loop(work), 2)
    next(waiting)
    waiting.close()
    assert not any("batch-reader" in thread.name for thread in threading.enumerate() if thread not in before)
    assert len(threads) == 3


def test_a_second_interrupt_leaves_no_thread_that_waits_for_the_loop() -> None:
    """It comes while the loop waits for an item that is being read, which then has something to ask for."""
    reading, may_ask = threading.Event(), threading.Event()

    def make(number: int) -> int:
        if number:
            reading.set()
            may_ask.wait(PATIENCE)
            in_loop(list)
        return number

    ahead: Any = read_ahead(range(3), make, 1)
    assert next(ahead) == 0
    assert reading.wait(PATIENCE)
    [thread] = [each for each in threading.enumerate() if "batch-reader" in each.name]
    # To this thread, whose wait it has to end.
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ahead.close()
    may_ask.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_interrupt_at_the_end_of_the_loop_leaves_no_item_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were to be read ask for something, since nobody cancelled them."""
    may_ask, asked, shut_down = threading.Event(), list[int](), ThreadPoolExecutor.shutdown

    def make(number: int) -> None:
        if number:
            may_ask.wait(PATIENCE)
            asked.append(number)
            in_loop(list)

    def interrupt(reader: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        may_ask.set()
        if cancel_futures:
            raise KeyboardInterrupt
        shut_down(reader, wait)

    ahead: Any = read_ahead(range(5), make, 2)
    next(ahead)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ahead.close()
    assert asked == [1, 2, 3]
