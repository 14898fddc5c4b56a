"""Configs and dataset files through the page: nothing that a file says is lost, and no secret
leaves it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import live
from simpletuner.annexes.page.serve import create_app

SET = {"secret": "set"}
WRITTEN = """{
  "--model-family": "kandinsky5-image",
  "somebody_elses_key": [1, 2],
  "learning_rate": 1e-4,
  "webhook_config": [{"webhook_type": "discord", "webhook_url": "https://discord.example/abcdefgh"}],
  "model_type": "lora",
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config" / "second").mkdir(parents=True)
    (tmp_path / "config" / "config.json").write_text(WRITTEN)
    (tmp_path / "config" / "second" / "config.json").write_text(
        '{"_metadata": 1, "config": {"seed": 1}}'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


@pytest.fixture
def page(folder: Path) -> TestClient:
    return TestClient(create_app(Project(folder)))


def saved(folder: Path, file: str = "config/config.json") -> Any:
    return json.loads((folder / file).read_text())


def put(page: TestClient, values: dict[str, Any], path: str = "/api/configs/config") -> Any:
    return page.put(
        path, json={"values": values}, headers={"If-Match": page.get(path).headers["etag"]}
    )


def test_saving_keeps_what_the_page_does_not_name(page: TestClient, folder: Path) -> None:
    shown = page.get("/api/configs/config").json()
    assert shown["values"]["model_family"] == "kandinsky5-image"  # by its main name
    answer = put(page, {"model_family": "sanavideo", "learning_rate": None, "seed": 7})
    assert answer.status_code == 200
    assert answer.headers["etag"] == page.get("/api/configs/config").headers["etag"]
    written = saved(folder)
    assert list(written) == [
        "--model-family",
        "somebody_elses_key",
        "webhook_config",
        "model_type",
        "seed",
    ]
    assert (written["--model-family"], written["seed"]) == ("sanavideo", 7)
    assert written["webhook_config"][0]["webhook_url"] == "https://discord.example/abcdefgh"


def test_draft_with_problems_is_saved_and_they_are_reported(page: TestClient, folder: Path) -> None:
    answer = put(page, {"learning_rate": "fast"})
    assert answer.status_code == 200
    told = {problem["key"]: problem["message"] for problem in answer.json()["problems"]}
    assert told["learning_rate"] == "'fast' is not a number."
    assert saved(folder)["learning_rate"] == "fast"
    seen = {"If-Match": answer.headers["etag"]}
    nan = page.put(
        "/api/configs/config", content='{"values": {"learning_rate": NaN}}', headers=seen
    )
    assert (nan.status_code, nan.json()["values"]["learning_rate"]) == (200, "nan")


def test_saving_refuses_a_file_that_changed_meanwhile(page: TestClient, folder: Path) -> None:
    seen = page.get("/api/configs/config").headers["etag"]
    (folder / "config" / "config.json").write_text('{"seed": 5}')
    answer = page.put(
        "/api/configs/config", json={"values": {"seed": 6}}, headers={"If-Match": seen}
    )
    assert answer.status_code == 412
    assert answer.json()["values"] == {"seed": 5}
    assert "has changed" in answer.json()["problems"][0]["message"]
    assert saved(folder) == {"seed": 5}
    again = {"If-Match": answer.headers["etag"]}
    assert (
        page.put("/api/configs/config", json={"values": {"seed": 6}}, headers=again).status_code
        == 200
    )


def test_new_config_is_created_once(page: TestClient, folder: Path) -> None:
    assert page.get("/api/configs/third").status_code == 404
    for expected in (200, 412):
        assert page.put("/api/configs/third", json={"values": {"seed": 1}}).status_code == expected
    assert saved(folder, "config/third/config.json") == {"seed": 1}
    assert [each["name"] for each in page.get("/api/configs/").json()] == [
        "config",
        "second",
        "third",
    ]


def test_wrapped_settings_stay_wrapped(page: TestClient, folder: Path) -> None:
    assert put(page, {"seed": 2}, "/api/configs/second").status_code == 200
    assert saved(folder, "config/second/config.json") == {"_metadata": 1, "config": {"seed": 2}}


@pytest.mark.parametrize("text", ['{"seed": }', "[1]", '{"seed": 1, "seed": 2}', b"\xff\xfe"])
def test_saving_refuses_a_file_whose_content_would_be_lost(
    text: Any, page: TestClient, folder: Path
) -> None:
    path = folder / "config" / "config.json"
    before = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(before)
    assert page.get("/api/configs/config").status_code == 422
    seen = {"If-Match": f'"{__import__("hashlib").sha256(before).hexdigest()[:32]}"'}
    assert (
        page.put("/api/configs/config", json={"values": {"seed": 3}}, headers=seen).status_code
        == 422
    )
    assert path.read_bytes() == before


SECRETS: dict[str, Any] = {
    "callback_url": "https://example.org/hook/abcdef",
    "webhook_config": {
        "callback_url": "https://example.org/hook",
        "auth_token": "abcdefgh",
        "log_level": "info",
    },
    "stores": [{"secret_access_key": "aaaabbbb", "bucket": "b"}],
    "note": "see https://me:passw0rd@example.org",
    "text": '{"webhook_url": "https://example.org/hook"}',
}


def test_secrets_are_shown_as_set_and_kept(page: TestClient, folder: Path) -> None:
    by_reference = {"hub_token": "{env:HF_TOKEN}"}
    (folder / "config" / "config.json").write_text(json.dumps({**SECRETS, **by_reference}))
    answer = page.get("/api/configs/config")
    shown = answer.json()["values"]
    for secret in ("/hook", "abcdefgh", "aaaabbbb", "passw0rd"):
        assert secret not in answer.text
    assert shown["webhook_config"] == {"callback_url": SET, "auth_token": SET, "log_level": "info"}
    assert shown["stores"] == [{"secret_access_key": SET, "bucket": "b"}]
    assert shown["hub_token"] == "{env:HF_TOKEN}"
    shown["webhook_config"]["log_level"] = "error"
    assert put(page, shown).status_code == 200
    expected = {**SECRETS["webhook_config"], "log_level": "error"}
    assert saved(folder) == {**SECRETS, **by_reference, "webhook_config": expected}
    assert put(page, {"other_token": SET}).status_code == 422
    assert put(page, {"callback_url": "https://example.org/new"}).status_code == 200
    assert saved(folder)["callback_url"] == "https://example.org/new"


def test_datasets_are_saved_with_their_problems(page: TestClient, folder: Path) -> None:
    file = "config/multidatabackend.json"
    nothing = page.get("/api/datasets/plan").json()
    assert (nothing["path"], nothing["entries"]) == (file, [])
    entries = [
        {"id": "a", "type": "local", "access_token": "aaaabbbb"},
        {"id": "b", "instance_data_dir": "x"},
    ]
    made = page.put("/api/datasets/plan", json={"entries": entries})
    assert made.status_code == 200
    assert made.json()["entries"][0]["access_token"] == SET
    turned = [made.json()["entries"][1], {**made.json()["entries"][0], "resolution": "big"}]
    again = page.put(
        "/api/datasets/plan", json={"entries": turned}, headers={"If-Match": made.headers["etag"]}
    )
    assert {
        "key": "multidatabackend.json: a.resolution",
        "message": "'big' is not a number.",
        "fatal": True,
    } in (again.json()["problems"])
    assert saved(folder, file) == [
        entries[1],
        {**entries[0], "resolution": "big"},
    ]  # the secret followed its id
    assert page.put("/api/datasets/plan", json={"entries": []}).status_code == 412
    assert page.get("/api/configs/config").json()["datasets"] == again.json()["entries"]


@pytest.mark.parametrize(
    "body", ["[]", "{", '{"values": 3}', "{}", "nothing", '{"values": {"a": NaN}', b"\xff"]
)
def test_unusable_body_is_refused(body: Any, page: TestClient, folder: Path) -> None:
    assert page.put("/api/configs/config", content=body).status_code == 400
    assert (folder / "config" / "config.json").read_text() == WRITTEN


def test_packaged_examples_can_be_read(page: TestClient) -> None:
    names = [each["name"] for each in page.get("/api/configs/examples").json()]
    assert "examples/demo" in names
    shown = page.get("/api/configs/examples/demo").json()
    assert shown["values"]["model_family"] == "kandinsky5-image"
    assert shown["datasets"][0]["id"] == "glimmers"
    assert page.get("/api/datasets/plan?config=examples/demo").json()["problems"] == []


def test_models_and_folders_are_listed(page: TestClient, folder: Path) -> None:
    families = page.get("/api/models").json()
    assert "sanavideo" in [family["name"] for family in families]
    found = page.get("/api/models/Kandinsky5_Image/flavours").json()
    assert found[0]["name"] == families[0]["flavours"][0]
    assert page.get("/api/models/flux/flavours").status_code == 404
    (folder / "pictures" / "more").mkdir(parents=True)
    for name in ("a.PNG", "a.txt", "b.mp4", "c.psd", ".hidden"):
        (folder / "pictures" / name).touch()
    listed = page.get("/api/datasets/browse?path=pictures").json()
    assert listed["folders"] == ["more"]
    assert listed["files"] == {"images": 1, "captions": 1, "videos": 1, "others": 1}
    assert listed["parent"] == str(folder)
    assert page.get("/api/datasets/browse").json()["parent"] is None


def test_gpus_are_listed_by_their_driver(
    page: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert page.get("/api/hardware/gpus").json() == []
    (tmp_path / "bin").mkdir()
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.write_text(
        '#!/bin/sh\necho "0, NVIDIA H200, 143771, 143000"\necho "1, Odd, [N/A], [N/A]"\n'
    )
    driver.chmod(0o755)
    first, second = page.get("/api/hardware/gpus").json()
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "total": 143771 * 2**20,
        "free": 143000 * 2**20,
    }
    assert second["total"] is None
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert page.get("/api/hardware/gpus").json() == []
    assert page.get("/api/hardware/memory").json()["total"] > 2**20


def test_callback_file_has_a_bounded_size(
    page: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LARGEST_FILE", 200)
    for number in range(10):
        event = {
            "type": "notification",
            "job_id": "x",
            "message": f"{number} https://me:passw0rd@example.org",
        }
        assert page.post("/callback", json=event).status_code == 202
    lines = (folder / live.CALLBACK_FILE).read_text().splitlines()
    assert json.loads(lines[-1])["message"].startswith("9 ")
    assert "passw0rd" not in lines[-1]
    assert sorted(path.name for path in folder.glob("callback*")) == [
        live.CALLBACK_FILE,
        f"{live.CALLBACK_FILE}.1",
    ]
    assert (folder / live.CALLBACK_FILE).stat().st_size < 400
    assert page.post("/callback", json={"message": "no type"}).status_code == 422


def test_full_disk_is_reported_in_one_sentence(page: TestClient, folder: Path) -> None:
    (folder / live.CALLBACK_FILE).symlink_to("/dev/full")
    answer = page.post("/callback", json={"type": "notification"})
    assert answer.status_code == 507
    assert "no space left" in answer.json()["problems"][0]["message"]


def test_damaged_file_is_repaired_as_text_unless_it_may_hold_secrets(
    page: TestClient, folder: Path
) -> None:
    path = "/api/configs/config"
    file = folder / "config" / "config.json"
    for hidden in (
        '{"hub_token": "abc"',
        '{"seed": 1, "x": "hf_0123456789abcdefghijklmnopqrstuvwx"',
    ):
        file.write_text(hidden)
        assert page.get(path).json()["text"] is None
    file.write_text('{"seed": ')
    damaged = page.get(path)
    assert (damaged.status_code, damaged.json()["text"]) == (422, '{"seed": ')
    assert "is not valid JSON" in damaged.json()["problems"][0]["message"]
    etag = {"If-Match": damaged.headers["etag"]}
    assert page.put(path, json={"values": {"seed": 2}}, headers=etag).status_code == 422
    assert file.read_text() == '{"seed": '
    assert (
        page.put(path, json={"values": {"seed": 2}, "whole": True}).status_code == 422
    )  # without its ETag
    assert file.read_text() == '{"seed": '
    assert (
        page.put(path, json={"values": {"seed": 2}, "whole": True}, headers=etag).status_code == 200
    )
    assert saved(folder) == {"seed": 2}


def test_remedy_of_a_dataset_is_not_offered_for_the_config(page: TestClient) -> None:
    entries = [{"id": "a", "type": "local", "seed": 1}]
    body = {
        "values": {"model_family": "sanavideo", "model_type": "lora", "odd": 1},
        "datasets": entries,
    }
    told = page.post("/api/training/validate", json=body).json()["problems"]
    assert [each["remedy"] for each in told if "remedy" in each] == [{"odd": None}]
    assert any("seed" in each["key"] for each in told)
