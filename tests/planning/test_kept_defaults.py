"""A default that a newer version has changed is no change by the user of a run that continues.

The record of a run of version 0.1.0 is edited, as if that version had had other defaults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.sampling import SampleRequest, plan_samples
from simpletuner.config.load import Layer
from simpletuner.config.optimizers import optimizer_settings
from simpletuner.config.schema import FAMILY_DEFAULT, KEPT
from simpletuner.config.sources import parse_arguments
from simpletuner.errors import Problems
from simpletuner.models.kandinsky5.options import KandinskyOptions
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.build import plan_training, resolve_layers
from simpletuner.planning.kept_defaults import changed_defaults
from simpletuner.planning.plans import Plan
from tests.tools.earlier_runs import PLAIN_FAILURE, unpack_earlier_runs
from tests.tools.workspace import Workspace

CONFIG = f"{PLAIN_FAILURE}/config.json"
CHECKPOINT = "runs/plain/checkpoint-4"


@dataclass
class Record:
    """A run that ended at step 4, and what its checkpoint says of its settings."""

    run: Workspace

    def write(self, key: str, value: Any, origin: str = "default") -> None:
        """Record the value of a key, and where it came from."""
        settings = self.run.path(f"{CHECKPOINT}/config.json")
        content = json.loads(settings.read_text())
        settings.write_text(json.dumps({**content, key: value}))
        manifest = self._manifest()
        manifest["files"]["config.json"][0] = settings.stat().st_size
        manifest["identity"]["origins"][key] = origin
        self._replace(manifest)

    def write_effective(self, key: str, value: Any) -> None:
        """Record the value that a key or a setting of the optimizer had in training."""
        manifest = self._manifest()
        manifest["identity"]["settings"][key] = value
        self._replace(manifest)

    def plan(self, *settings: str) -> Plan:
        """The plan of the run that continues."""
        with self.run.inside():
            return plan_training(parse_arguments(["--config", CONFIG, *settings]))

    def _manifest(self) -> Any:
        return json.loads(self.run.path(f"{CHECKPOINT}/manifest.json").read_text())

    def _replace(self, manifest: Any) -> None:
        self.run.path(f"{CHECKPOINT}/manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(unpack_earlier_runs(tmp_path))


def changes(plan: Plan) -> str:
    """What the plan says has changed since the checkpoint."""
    lines = [str(problem) for problem in plan.warnings]
    return "\n".join(line for line in lines if "was trained with" in line)


def of_optimizer(plan: Plan) -> dict[str, Any]:
    return optimizer_settings(plan.config.optimizer, plan.config.precision.mixed_precision)


@pytest.mark.parametrize(
    ("key", "value", "origin"),
    [
        ("huber_c", 0.3, "default"),
        ("max_grad_norm", 1.0, "default"),
        ("flow_schedule_shift", 3.0, FAMILY_DEFAULT),
        ("text_template", "diffusers", "default"),
        ("crepa_adjacent_tau", 2.0, "default"),
        ("ema_decay", 0.9, KEPT),
    ],
)
def test_a_key_that_was_never_set_keeps_its_default_silently(
    record: Record, key: str, value: Any, origin: str
) -> None:
    record.write(key, value, origin)
    record.write_effective(key, value)

    plan = record.plan()

    assert plan.config.flat[key] == value
    assert plan.config.origins[key] == KEPT
    assert not plan.config.is_explicit(key)
    assert changes(plan) == ""


def test_a_kept_default_acts_on_the_model_too(record: Record) -> None:
    record.write("attention_type", "dense")

    plan = record.plan()

    assert plan.config.family.of(KandinskyOptions).attention_type == "dense"
    assert plan.source["transformer"].overrides == {"attention_type": "regular"}


def test_the_pixel_grid_is_that_of_the_model(record: Record) -> None:
    record.write("aspect_bucket_alignment", "128", FAMILY_DEFAULT)

    plan = record.plan()

    assert plan.config.datasets.aspect_bucket_alignment == "16"
    assert plan.config.origins["aspect_bucket_alignment"] == FAMILY_DEFAULT


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        pytest.param("eps", 1e-6, id="with a key of its own"),
        pytest.param("amsgrad", True, id="in optimizer_config only"),
    ],
)
def test_an_optimizer_keeps_its_defaults_silently(record: Record, setting: str, value: Any) -> None:
    record.write_effective(f"optimizer_config.{setting}", value)

    plan = record.plan()

    assert of_optimizer(plan)[setting] == value
    assert changes(plan) == ""


@pytest.mark.parametrize("chosen", ["adam_epsilon=1e-7", "optimizer_config=eps=1e-7"])
def test_a_setting_that_the_user_sets_counts_and_is_reported(record: Record, chosen: str) -> None:
    record.write_effective("optimizer_config.eps", 1e-6)

    plan = record.plan(chosen)

    assert of_optimizer(plan)["eps"] == 1e-7
    assert "optimizer_config.eps: runs/plain/checkpoint-4 was trained with 1e-06, not 1e-07" in (
        changes(plan)
    )


def test_a_default_that_the_user_sets_again_is_reported(record: Record) -> None:
    record.write("huber_c", 0.3)
    record.write_effective("huber_c", 0.3)

    plan = record.plan("huber_c=0.1")

    assert plan.config.loss.huber_c == 0.1
    assert "with 0.3, not 0.1" in changes(plan)


@pytest.mark.parametrize(
    ("key", "value", "effective", "change"),
    [
        ("huber_c", 0.3, "huber_c", "with 0.3, not 0.1"),
        ("adam_epsilon", 1e-6, "optimizer_config.eps", "with 1e-06, not 1e-08"),
        ("optimizer_config", "eps=1e-6", "optimizer_config.eps", "with 1e-06, not 1e-08"),
    ],
)
def test_removing_a_key_that_was_set_is_reported(
    record: Record, key: str, value: Any, effective: str, change: str
) -> None:
    record.write(key, value, origin="config.json")
    record.write_effective(effective, 1e-6 if "eps" in effective else value)

    plan = record.plan()

    assert change in changes(plan)


def test_a_setting_of_the_optimizer_that_this_version_refuses_is_not_kept(record: Record) -> None:
    record.write("adam_beta1", 1.5, origin="config.json")

    assert of_optimizer(record.plan())["beta1"] == 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_of_this_version_differs_from_no_default(family: str) -> None:
    layer = Layer("config.json", [("model_type", "lora"), ("model_family", family)])
    config, _ = resolve_layers([layer], Problems())
    written = json.loads(json.dumps(config.flat, default=str))
    unset = {key: written[key] for key in written.keys() - {"model_type", "model_family"}}

    assert changed_defaults(unset, config) == {}


def test_what_offload_auto_had_chosen_is_not_kept(record: Record) -> None:
    record.write("offload_block_inputs", True, origin="chosen by offload auto")

    assert record.plan().config.offload.offload_block_inputs is False


def test_a_default_that_this_version_lacks_is_not_kept(record: Record) -> None:
    record.write("loss_type", "cubic")

    assert record.plan().config.loss.loss_type == "l2"


@pytest.mark.parametrize(
    ("flavour", "template"),
    [
        ([], "diffusers"),
        (["--model_flavour", "t2i-lite-pretrain"], "official"),
    ],
)
def test_samples_have_the_defaults_of_the_run_unless_they_are_of_another_model(
    record: Record, flavour: list[str], template: str
) -> None:
    record.write("text_template", "diffusers")
    request = SampleRequest("runs/plain", "samples", parse_arguments(flavour), ["a big glimmer"])

    with record.run.inside():
        plan, _ = plan_samples(request)

    assert plan.config.family.of(KandinskyOptions).text_template == template


def test_a_plan_shows_kept_defaults_only_in_full(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write_effective("optimizer_config.eps", 1e-6)
    shown = {}

    for detail in ([], ["--verbose"]):
        assert record.run.run("plan", "--config", CONFIG, *detail) == 0
        shown[bool(detail)] = capsys.readouterr().out

    assert "epsilon" not in shown[False]
    assert f"Settings ({KEPT})\n" in shown[True]
    assert "adam_epsilon" in shown[True]
