"""The functions for programs do what the commands do, and print nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import simpletuner
import simpletuner.planning.build
from simpletuner.errors import ConfigError
from simpletuner.reporting.events import CheckpointSaved, Event, StepReport
from tests.tools.workspace import CONFIG, DATASETS, Workspace

Capture = pytest.CaptureFixture[str]


def settings(workspace: Workspace, **changes: Any) -> dict[str, Any]:
    return json.loads(workspace.path("config/config.json").read_text()) | changes


def problems(error: pytest.ExceptionInfo[ConfigError]) -> set[str]:
    return {problem.where for problem in error.value.problems if problem.fatal}


def test_import_is_lazy_and_planning_needs_no_torch() -> None:
    code = (
        "import simpletuner, sys\nprint(sorted({'torch', 'pydantic', 'typer', 'numpy', "
        "'simpletuner.plan'} & set(sys.modules)))\nprint(simpletuner.plan({'example': "
        "'demo'})['ok'], 'torch' in sys.modules)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert (process.stdout, process.stderr) == ("[]\nTrue False\n", "")


def test_train_writes_the_same_lora_as_the_command(
    workspace: Workspace, finished: Workspace, capfd: Capture
) -> None:
    events: list[Event] = []
    with workspace.inside():
        result = simpletuner.train(settings(workspace), on_event=events.append)
    assert capfd.readouterr() == ("", "")

    by_command = finished.path("output/pytorch_lora_weights.safetensors")
    assert workspace.path(str(result.file)).read_bytes() == by_command.read_bytes()

    rows = workspace.metrics()
    assert (result.step, result.losses["train_loss"]) == (4, rows[-1]["train_loss"])
    assert [event.step for event in events if isinstance(event, StepReport)] == [1, 2, 3, 4]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2, 4]


def test_train_returns_a_finished_run_without_a_step(trained: Workspace) -> None:
    events: list[Event] = []
    with trained.inside():
        result = simpletuner.train(settings(trained), on_event=events.append)

    assert result.losses["train_loss"] == trained.metrics()[-1]["train_loss"]
    assert not [event for event in events if isinstance(event, StepReport)]


def test_train_and_plan_report_all_mistakes_at_once(workspace: Workspace, capfd: Capture) -> None:
    wrong = settings(workspace, learning_rte=1, max_train_steps="many", model_flavour="t2i-light")

    for function in (simpletuner.train, simpletuner.plan):
        with (
            workspace.inside(),
            pytest.raises(ConfigError, match="Did you mean 'learning_rate'") as error,
        ):
            function(wrong)
        assert problems(error) == {"learning_rte", "max_train_steps", "model_flavour"}
        assert all(
            "(config)" in problem.message
            for problem in error.value.problems
            if problem.where != "model_flavour"
        )
    assert capfd.readouterr() == ("", "")
    assert not workspace.path("output").exists()


def test_wrong_types_of_arguments_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"write \{'config': 'config/config.json'\}"):
        simpletuner.train("config/config.json")
    with pytest.raises(ConfigError, match=r"prompts: is a list: \['a cat'\]"):
        simpletuner.sample("output", "a cat")

    no_text: Any = 3
    with pytest.raises(ConfigError, match="prompts: is a list of texts; 3 is not a text"):
        simpletuner.sample("output", ["a cat", no_text])


def test_train_refuses_several_processes(workspace: Workspace) -> None:
    with (
        workspace.inside(),
        pytest.raises(ConfigError, match="use the command `simpletuner train`") as error,
    ):
        simpletuner.train(settings(workspace, num_processes=2))
    assert problems(error) == {"num_processes"}
    assert not workspace.path("output").exists()


def test_plan_returns_the_document_of_the_command(workspace: Workspace, capsys: Capture) -> None:
    assert workspace.run("plan", "--json") == 0

    by_command = json.loads(capsys.readouterr().out)
    with workspace.inside():
        document = simpletuner.plan(settings(workspace))
        by_name = simpletuner.plan({"config": "config/config.json", "max_train_steps": 8})
    for plan in (by_command, document):
        for setting in plan["settings"].values():
            del setting["origin"]  # a file, or the dict
        del plan["device"], plan["seconds"], plan["buckets"]  # as busy as the machine is
    assert document == by_command
    assert (document["length"]["steps"], by_name["length"]["steps"]) == (4, 8)


def test_train_takes_a_list_of_datasets_in_another_thread(workspace: Workspace) -> None:
    """As a program with windows trains: Python lets only the main thread handle signals."""
    workspace.path("config/multidatabackend.json").unlink()
    config = settings(
        workspace, data_backend_config=DATASETS, output_dir=Path("threaded"), max_train_steps=1
    )
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(simpletuner.train(config)))

    with workspace.inside():
        thread.start()
        thread.join()

    assert [result.step for result in results] == [1]
    assert json.loads(workspace.path("threaded/data_backend_config.json").read_text()) == DATASETS


def test_sample_returns_the_files(trained: Workspace, capfd: Capture) -> None:
    with trained.inside():
        paths = simpletuner.sample(
            Path("output"), ["a cat", "a dog"], checkpoint=2, steps=1, resolution="128x128"
        )
        with pytest.raises(ConfigError) as error:
            simpletuner.sample(
                "output", ["a cat"], images=["no.png"], stesp=3, guidance="much", strength="x"
            )

    assert [path.name for path in paths] == ["a_cat_7_128x128.png", "a_dog_7_128x128.png"]
    assert all(trained.path(str(path)).is_file() for path in paths)
    assert problems(error) == {"stesp", "guidance", "images", "strength"}
    assert "stesp: is not a known key. Did you mean 'steps'? (settings)" in str(error.value)
    assert str(error.value).count("(settings)") == 2
    assert "command line" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_an_exception_of_on_event_ends_the_run(workspace: Workspace) -> None:
    def refuse(event: Event) -> None:
        if isinstance(event, StepReport):
            raise LookupError("enough")

    with workspace.inside(), pytest.raises(LookupError, match="enough"):
        simpletuner.train({**CONFIG, **settings(workspace)}, on_event=refuse)
    assert not workspace.path("output/pytorch_lora_weights.safetensors").exists()


def test_unknown_names_raise_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="trian"):
        simpletuner.trian  # noqa: B018
