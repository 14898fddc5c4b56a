"""What a webhook costs a step when its receiver accepts the connection and never answers.

Every step is told, which is more than a run does. The first ratio is the time to publish; the second compares whole
steps, so that it also holds what the sending thread computes, and their noise.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.models import SIZES, clock_of, make_batch
from benchmarks.models import make_config as config_of
from benchmarks.step import ours
from benchmarks.timing import Ratio, arguments, compare, interleave, show
from simpletuner.config.webhooks import Hook
from simpletuner.reporting.events import EventStream, StateChanged, StepDone
from simpletuner.reporting.payloads import Payloads
from simpletuner.reporting.webhooks import Delivery

BAR = 0.01
METRICS = {"train_loss": 0.5, "optimization_loss": 0.5, "learning_rate": 1e-4, "epoch": 1.0, "grad_absmax": 0.1}


def main() -> None:
    parser = arguments(__doc__, tuple(SIZES), rounds=15)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = ours(options.size, options.device, config_of(options.size), make_batch(options.size, 1))
    with socket.create_server(("127.0.0.1", 0)) as silent, tempfile.TemporaryDirectory() as folder:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        delivery = Delivery(Hook("raw", callback_url=address), Payloads(every=0), Path(folder))
        published: list[float] = []
        variants = {
            "webhook": _steps(step, EventStream(delivery), options.steps, published),
            "plain": _steps(step, EventStream(), options.steps, []),
        }
        seconds = interleave(variants, options.rounds, clock_of(options.device))
        delivery.finish(time.monotonic())
    shares = [spent / whole for spent, whole in zip(published[-options.rounds :], seconds["webhook"], strict=True)]
    ratios = [
        Ratio("publishing / step", shares, BAR),
        compare("step with a webhook / step", seconds, "webhook", "plain"),
    ]
    show(f"A webhook that never answers, {options.size} model on {options.device}", ratios, options)


def _steps(step: Callable[[], None], events: EventStream, count: int, published: list[float]) -> Callable[[], None]:
    """Some steps, each published; the time that publishing took is added to a list."""
    events.publish(StateChanged("running", 0, 1_000_000))

    def run() -> None:
        spent = 0.0
        for _ in range(count):
            step()
            started = time.perf_counter()
            events.publish(StepDone(events.step + 1, 1, METRICS, seconds=1.0))
            spent += time.perf_counter() - started
        published.append(spent)

    return run


if __name__ == "__main__":
    main()
