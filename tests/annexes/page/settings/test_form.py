"""The form: where each option is, what it is called, and when it has no effect; and the routes
behind it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.page.guard import Access, Guard
from simpletuner.annexes.page.project import Project, Refusal
from simpletuner.annexes.page.runs.control import document_in, run_while_wanted
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.page.settings.form import fields
from simpletuner.config.schema import all_options
from simpletuner.config.sections import SECTIONS, TABS
from simpletuner.redaction import redact
from tests.tools.processes import PATIENCE
from tests.tools.web_server import picture, serve
from tests.tools.workspace import Workspace

BOTH_OFFLOADS = {"enable_group_offload": True, "enable_model_cpu_offload": True}
EXCLUDE = (
    "cannot be combined with enable_model_cpu_offload: one streams the blocks, the other moves "
    "them all."
)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = Workspace.create(tmp_path / "project", tmp_path, pictures=2)
    made.write_config(pretrained_model_name_or_path=None)
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def client(workspace: Workspace) -> TestClient:
    return TestClient(
        create_app(Project(workspace.folder.resolve())), base_url="http://localhost:8001"
    )


def ask(client: TestClient, route: str, **body: Any) -> Any:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_option_is_in_one_section() -> None:
    assert sorted(field["name"] for field in fields()) == sorted(all_options())
    assert {field["section"] for field in fields()} == {section.id for section in SECTIONS}


def test_page_shows_every_option_once(client: TestClient) -> None:
    page = client.get("/settings").text.partition('<template id="dataset-card"')[0]
    assert Counter(re.findall(r'data-key="([\w.]+)"', page)) == Counter(
        field["name"] for field in fields()
    )
    assert "in-run" not in client.get("/").text
    tab = client.get("/tabs/training").text
    assert set(re.findall(r'data-key="(\w+)"', tab)) == {
        field["name"] for field in fields() if field["tab"] == "training"
    }


def test_labels_are_distinct_within_a_section() -> None:
    seen = Counter((field["section"], field["group"], field["label"]) for field in fields())
    assert [place for place, count in seen.items() if count > 1] == []


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("crepa_enabled", "CREPA"),
        ("crepa_block_index", "Block Index"),
        ("crepa_lambda", "Weight"),
        ("crepa_adjacent_distance", "Adjacent Distance"),
        ("crepa_adjacent_tau", "Temporal Decay"),
        ("crepa_encoder", "Vision Encoder"),
        ("crepa_encoder_image_size", "Vision Encoder Size"),
        ("crepa_drop_vae_encoder", "Drop VAE Encoder"),
        ("scheduled_sampling_max_step_offset", "Max Step Offset"),
    ],
)
def test_labels_in_guides_exist_on_the_page(key: str, label: str) -> None:
    field = next(field for field in fields() if field["name"] == key)
    assert (field["tab"], field["section"], field["label"]) == (
        "training",
        "training/loss_functions",
        label,
    )
    assert field["common"]


@pytest.mark.parametrize(
    ("family", "block"), [("kandinsky5-image", 8), ("kandinsky5-video", 8), ("sanavideo", 10)]
)
def test_defaults_and_choices_follow_the_family(
    family: str, block: int, client: TestClient
) -> None:
    found = {
        field["name"]: field for field in client.get(f"/api/fields/metadata?family={family}").json()
    }
    assert found["crepa_block_index"]["default"] == block
    flavours = [each["name"] for each in client.get(f"/api/models/{family}/flavours").json()]
    assert found["model_flavour"]["choices"] == flavours
    told = ask(
        client, "/api/training/validate", values={"model_family": family, "model_type": "lora"}
    )
    assert (told["effective"].get("crepa_block_index", 8), [*told["flavours"]]) == (block, flavours)


def test_metadata_describes_types_limits_and_conditions(client: TestClient) -> None:
    found = {field["name"]: field for field in client.get("/api/fields/metadata").json()}
    kinds = {"bool", "int", "float", "text", "choice", "list", "json", "path", "sizes"}
    assert {field["type"] for field in found.values()} == kinds
    wanted = {
        "lora_rank": "int",
        "learning_rate": "float",
        "output_dir": "path",
        "tread_config": "json",
    }
    assert {key: found[key]["type"] for key in wanted} == wanted
    assert found["ema_decay"]["limits"] == {"ge": 0, "le": 0.9999}
    assert found["ema_decay"]["requires"] == ["use_ema"]
    assert found["crepa_lambda"]["requires"] == ["crepa_enabled"]
    assert found["validation_preview"]["requires"] == [], (
        "it requires that validation_disable is off"
    )
    assert found["write_batch_size"]["requires"] == []
    assert found["validation_step_interval"]["aliases"] == ["validation_steps"]
    assert client.get("/api/fields/metadata?family=sdxl").status_code == 404
    assert client.get("/tabs/cloud").status_code == 404


def test_tabs_name_their_sections(client: TestClient) -> None:
    found = {tab["label"]: tab["sections"] for tab in client.get("/api/fields/tabs").json()}
    assert [label.lower() for label in found] == ["start", *TABS, "run"]
    assert {"id": "training/loss_functions", "label": "Loss functions"} in found["Training"]


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({}, "crepa_lambda", "has no effect without crepa_enabled."),
        ({"crepa_enabled": True}, "crepa_lambda", None),
        ({}, "ema_decay", "has no effect without use_ema."),
        ({"use_ema": "yes"}, "ema_decay", None),
        ({"loss_type": "huber"}, "huber_c", None),
        (
            {},
            "group_offload_use_stream",
            "has no effect without enable_group_offload, group_offload_text_encoder or",
        ),
        ({"group_offload_vae": True}, "group_offload_use_stream", None),
        (
            {"model_type": "full"},
            "lora_rank",
            "has no effect: model_type full trains every weight and no LoRA.",
        ),
        ({}, "sana_motion_score", "has no effect: Kandinsky 5 Image is not Sana Video."),
        ({"model_family": "sanavideo"}, "sana_motion_score", None),
        ({"flow_schedule_auto_shift": True}, "flow_schedule_auto_shift", None),
        (
            {"flow_schedule_auto_shift": True, "flow_schedule_shift": 3},
            "flow_schedule_auto_shift",
            "has no effect: flow",
        ),
    ],
)
def test_options_without_effect_have_a_reason(
    settings: dict[str, Any], key: str, reason: str | None
) -> None:
    values = {"model_family": "kandinsky5-image", "model_type": "lora", **settings}
    found = Draft(Path("config/config.json")).judge(values).without_effect.get(key)
    assert found is reason is None or str(found).startswith(str(reason))


def test_invalid_field_is_not_greyed(client: TestClient) -> None:
    values = {"model_family": "kandinsky5-image", "model_type": "full"}
    greyed = ask(client, "/api/training/validate", values=values)["greyed"]
    assert greyed["preservation_weight"].startswith("needs model_type lora")
    told = ask(client, "/api/training/validate", values={**values, "preservation_weight": 0.5})
    assert [each["fatal"] for each in told["problems"] if each["key"] == "preservation_weight"] == [
        True
    ]
    assert "preservation_weight" not in told["greyed"], (
        "greyed fields cannot be changed, and this one must be"
    )


def test_check_reports_the_same_messages_as_the_command_line(client: TestClient) -> None:
    values = {
        "model_family": "kandinsky5-image",
        "model_type": "lora",
        "lora_rnk": 4,
        **BOTH_OFFLOADS,
    }
    entries = [
        {"id": "a", "type": "local", "instance_data_dir": "x", "repeats": -1},
        {"id": "a", "type": "local"},
    ]
    told = ask(client, "/api/configuration/check", values=values, datasets=entries)["problems"]
    assert {"key": "enable_group_offload", "message": EXCLUDE, "fatal": True} in told
    assert {problem["key"] for problem in told} >= {"multidatabackend.json: a.repeats", "a"}
    planned = ask(
        client, "/api/plan", values=values, datasets=entries
    )  # a process of the command line
    assert [problem for problem in told if problem not in planned["problems"]] == []
    assert "simpletuner-plan" not in json.dumps(planned)
    assert {
        each["key"] for each in ask(client, "/api/training/validate", values={})["problems"]
    } >= {
        "model_type",
        "model_family",
    }
    assert client.post("/api/training/validate", json={"values": []}).status_code == 400


@pytest.mark.slow
def test_plan_uses_unsaved_settings(client: TestClient, workspace: Workspace) -> None:
    opened = client.get("/api/configs/config").json()
    before = sorted(workspace.folder.rglob("*"))
    values = {**opened["values"], "max_train_steps": 7}
    entries = [{**opened["datasets"][0], "id": "renamed"}, *opened["datasets"][1:]]
    workspace.path("datasets/pictures/broken.png").write_bytes(b"?")
    told = ask(client, "/api/plan", values=values, datasets=entries, device_memory_gb=48)
    assert (told["length"]["steps"], told["device"]["name"]) == (7, "a GPU with 48 GiB")
    [dataset] = told["datasets"]
    assert (dataset["id"], dataset["left_out"][0]["file"]) == ("renamed", "broken.png")
    workspace.path("datasets/pictures/broken.png").unlink()
    assert sorted(workspace.folder.rglob("*")) == before
    assert (
        ask(client, "/api/plan", values=values, device="RTX 4090")["device"]["name"]
        == "RTX 4090 with 24 GiB"
    )
    short = ask(client, "/api/plan", values=opened["values"], device_memory_gb=1)
    assert not short["ok"]
    assert "memory" in [problem["key"] for problem in short["problems"]]


def csv_entry(workspace: Workspace, address: str) -> dict[str, Any]:
    workspace.path("table.csv").write_text(f"url,text\n{address},words\n")
    return {
        "id": "web",
        "type": "csv",
        "csv_file": "table.csv",
        "csv_cache_dir": "downloads",
        "resolution": 64,
        "csv_caption_column": "text",
        "allow_private_urls": True,
        "repeats": 1,
    }


@pytest.mark.slow(3)
def test_remote_files_are_fetched_only_on_request(client: TestClient, workspace: Workspace) -> None:
    opened = client.get("/api/configs/config").json()
    with serve() as site:
        web = csv_entry(workspace, site.add("/a.png", picture(1)))
        before = sorted(workspace.folder.rglob("*"))
        told = ask(
            client, "/api/plan", values=opened["values"], datasets=[web, opened["datasets"][1]]
        )
        assert [
            each["key"] for each in told["problems"] if "not fetched yet" in each["message"]
        ] == ["web"]
        assert (sorted(workspace.folder.rglob("*")), site.requests) == (before, {})
        told = ask(
            client,
            "/api/plan",
            values=opened["values"],
            datasets=[web, opened["datasets"][1]],
            fetch=True,
        )
        assert ([each["used"] for each in told["datasets"]], site.requests) == ([1], {"/a.png": 1})


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"instance_data_dir": "{outside}"}, {}),
        ({"instance_data_dir": "linked"}, {}),
        ({"cache_dir_vae": "{output_dir}/../../outside"}, {}),
        ({"instance_data_dir": "config/examples/../../../../../../../../../../../..{outside}"}, {}),
        ({"huggingface": {"dataset_name": "{outside}"}, "type": "huggingface"}, {}),
        ({"parquet": {"path": "{outside}/x.parquet"}, "metadata_backend": "parquet"}, {}),
        ({"caption_filter_list": "{outside}/filters.txt"}, {}),
        ({}, {"output_dir": "{outside}"}),
        ({}, {"--cache-dir": "../outside"}),
        ({}, {"user_prompt_library": "{outside}/library.json"}),
        ({}, {"webhook_config": "{outside}/hooks.json"}),
        ({}, {"lycoris_config": "{env:OUTSIDE}/x.json"}),
    ],
)
def test_nothing_outside_the_project_is_touched(
    keys: dict[str, Any],
    values: dict[str, Any],
    client: TestClient,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by drafts nor by what is saved: refused before a process is started that would look
    at it.
    """
    outside = workspace.folder.parent / "outside"
    workspace.path("linked").symlink_to(outside)
    monkeypatch.setenv("OUTSIDE", str(outside))
    keys, values = (
        json.loads(json.dumps(part).replace("{outside}", str(outside))) for part in (keys, values)
    )
    opened = client.get("/api/configs/config").json()
    looked: list[str] = []
    monkeypatch.setattr(
        "simpletuner.annexes.page.runs.control.run_while_wanted", lambda *_: looked.append("plan")
    )
    monkeypatch.setattr(
        "simpletuner.annexes.page.runs.control.Runs.spawn", lambda *_: looked.append("train")
    )
    entries = [{**opened["datasets"][0], **keys}, opened["datasets"][1]]
    asked = {"values": {**opened["values"], **values}, "datasets": entries}
    key = (
        next(iter(keys or values))
        .replace("huggingface", "dataset_name")
        .lstrip("-")
        .replace("-", "_")
    )
    for route in ("/api/plan", "/api/training/validate"):
        told = [
            problem
            for problem in ask(client, route, **asked)["problems"]
            if "outside the project" in problem["message"]
        ]
        assert [problem["key"].split(".")[1 if keys else 0] for problem in told] == [key]
    workspace.write_datasets(entries)
    workspace.write_config(**values)
    for answer in (
        client.get("/dataset"),
        client.post("/api/training/start", json={"config": "config"}),
    ):
        assert answer.status_code == 422
        assert "allow its folder with --root" in answer.text
    assert looked == []


@pytest.mark.parametrize(
    "line", ["CACHE_DIR=/elsewhere", "TRAINER_EXTRA_ARGS='--seed=1 --cache-dir /elsewhere'"]
)
def test_config_env_cannot_name_paths_outside_the_project(
    line: str, client: TestClient, workspace: Workspace
) -> None:
    workspace.path("config/config.env").write_text(f"{line}\n")
    answer = client.post("/api/training/start", json={"config": "config"})
    assert (answer.status_code, [each["key"] for each in answer.json()["problems"]]) == (
        422,
        ["cache_dir"],
    )


def test_every_file_is_shown_as_it_is_trained(client: TestClient, workspace: Workspace) -> None:
    shown = client.get("/dataset?config=config")
    assert "p0.png" in shown.text
    assert "sandbox allow-scripts" in shown.headers["content-security-policy"], (
        "it must not act for the page"
    )
    assert not workspace.path("dataset.html").exists()
    workspace.path("config/multidatabackend.json").unlink()
    refused = client.get("/dataset?config=config")
    assert (
        refused.status_code,
        "multidatabackend.json" in refused.json()["problems"][0]["message"],
    ) == (422, True)


def test_plan_ends_when_the_client_leaves(tmp_path: Path) -> None:
    class Left:
        async def is_disconnected(self) -> bool:
            return True

    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    plan = run_while_wanted(cast(Request, Left()), command, tmp_path)
    with pytest.raises(Refusal, match="has disconnected"):
        asyncio.run(asyncio.wait_for(plan, PATIENCE))


def test_secrets_stay_on_the_server(client: TestClient, workspace: Workspace) -> None:
    workspace.write_config(
        webhook_config=[{"webhook_type": "raw", "callback_url": "https://example.org/s3cr3t-name"}]
    )
    opened = client.get("/api/configs/config").json()
    assert opened["values"]["webhook_config"][0]["callback_url"] == {"secret": "set"}
    answer = client.post("/api/training/validate", json={"values": opened["values"]})
    assert answer.status_code == 200
    assert "s3cr3t" not in answer.text
    assert "s3cr3t" not in client.post("/api/plan", json={"values": opened["values"]}).text


def test_redaction_of_one_request_does_not_affect_another(
    client: TestClient, workspace: Workspace
) -> None:
    guarded = TestClient(Guard(client.app, Access()), base_url="http://localhost:8001")
    typed = ["https://", "training", "learning_rate", "0123456789abcdef"]
    for secret in typed:
        ask(
            guarded,
            "/api/training/validate",
            values={"hub_token": secret, "seed": secret},
            datasets=[{"token": secret}],
        )
    assert redact(" ".join(typed)) == " ".join(typed)
    workspace.write_config(hub_token="t0p-b0x-opensesame")
    values = guarded.get("/api/configs/config").json()["values"]
    answer = ask(
        guarded,
        "/api/training/validate",
        values=values | {"seed": "t0p-b0x-opensesame is no learning_rate"},
    )
    assert "'[hidden] is no learning_rate' is not a whole number." in [
        each["message"] for each in answer["problems"]
    ]


def test_the_plan_on_the_page_names_no_flag_of_the_terminal() -> None:
    advice = "To train on the CPU, run train --yes or set i_know_what_i_am_doing."
    message = f"no GPU was found. {advice}"
    problem = {"key": "device", "kind": "consent", "message": message, "fatal": False}

    document = document_in(json.dumps({"problems": [problem]}), "", "plan")

    (shown,) = document["problems"]
    assert "--yes" not in shown["message"]
    assert shown["remedy"] == {"i_know_what_i_am_doing": True}
