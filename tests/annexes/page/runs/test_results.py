"""What comes after a run: jobs that render from it, its previews, files and curves; and the queue
on the page.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.fitting.ready import CONSENT
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import jobs
from simpletuner.annexes.page.runs import runner as running
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.runs.queue import QUEUE_FILE, Queue
from simpletuner.annexes.page.runs.runner import Runner
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.report.html import pages_of
from simpletuner.errors import UserError
from simpletuner.headers import with_metadata
from simpletuner.planning.lock import LOCK_FILE
from simpletuner.reporting.events import StateChanged
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, MediaRecord
from simpletuner.training.lora_files import verify_file
from simpletuner.weights.lora_names import LORA_FILE, STEP_NOTE, LoraForm
from tests.annexes.page.page import opened, serving
from tests.annexes.page.runs.test_run_page import preview
from tests.annexes.page.runs.test_runs import STEPS, own, tell
from tests.tools.assembly import lora_of, make_assembly, write_lora
from tests.tools.families import make_adapter
from tests.tools.processes import PATIENCE
from tests.tools.workspace import Workspace

# In place of simpletuner: says what it was asked for, and goes on until the file `go` is in its
# folder. A plan has the problems in plan.json.
PROGRAM = """
import json, signal, sys, time
from pathlib import Path
if sys.argv[1] == "plan":
    print(json.dumps({"problems": json.loads(Path("plan.json").read_text())}))
    sys.exit()
def interrupt(*_):
    print("Interrupted.", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, interrupt)
folder = Path(sys.argv[2] if sys.argv[1] != "train" else "output")
print("working", flush=True)
while not (folder / "go").exists():
    time.sleep(0.01)
print((folder / "go").read_text() or "Saved everything")
"""


@pytest.fixture
def project(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    made = Workspace.create(tmp_path.resolve() / "project", t2i_checkpoint)
    monkeypatch.chdir(made.folder)
    (tmp_path / "program.py").write_text(PROGRAM)
    made.path("plan.json").write_text("[]")
    monkeypatch.setattr(
        "simpletuner.annexes.page.runs.control.PROGRAM",
        (sys.executable, str(tmp_path / "program.py")),
    )
    monkeypatch.setattr(running, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(running, "POLL_SECONDS", 0.05)
    yield made
    for thread in threading.enumerate():
        if thread.name == "queue":  # of a server that has ended: it may be starting a last job
            thread.join(PATIENCE)
    with suppress(UserError):
        for job in create_app(Project(made.folder)).state.runner.queue.read():
            if job.owner is not None and job.is_alive:
                os.kill(job.owner.pid, signal.SIGKILL)


@pytest.fixture
def page(project: Workspace) -> TestClient:
    return TestClient(create_app(Project(project.folder)))


@pytest.fixture
def finished(project: Workspace) -> Path:
    """A run that has ended, with the LoRA of its last step."""
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS, StateChanged("finished", 3, 9, "done"))
    blob = len(b"{}").to_bytes(8, "little") + b"{}"
    (output / LORA_FILE).write_bytes(with_metadata(blob, {STEP_NOTE: "3"}))
    return output


def run_of(page: TestClient) -> str:
    return str(page.get("/api/training/status").json()["run"])


def post(page: TestClient, path: str, code: int = 202, **body: Any) -> Any:
    answer = page.post(f"/api/training/{path}", json=body)
    assert answer.status_code == code, answer.text
    return answer.json()


def runner_of(page: TestClient) -> Runner:
    runner: Runner = page.app.state.runner  # type: ignore[attr-defined]
    return runner


def queue_of(page: TestClient) -> Queue:
    return runner_of(page).queue


def wait(page: TestClient, wanted: Callable[[str], bool], *, step: bool = True) -> str:
    """The text of the queue, as soon as it is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while True:
        if step:
            runner_of(page).step()
        text = unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page.get("/queue").text)))
        if wanted(text):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def test_a_sample_renders_the_untrained_model_too_and_a_sweep_waits_for_it(
    page: TestClient, finished: Path
) -> None:
    run = run_of(page)
    post(
        page,
        "render",
        run=run,
        command="sample",
        prompts=["a bird", " ", "--checkpoint=1"],
        strength="0, 0.8",
    )
    post(page, "render", run=run, command="sweep", strengths="0.5,1", checkpoints="", prompts=[])
    text = wait(page, lambda text: "working" in text)
    assert text.index("sample of output running") < text.index("sweep of output waiting")
    assert "Waits for sample of output" in text
    said = (finished / "samples" / "job.log").read_text().splitlines()[0]
    assert said.startswith(
        f"$ simpletuner sample {finished} --output={finished / 'samples'} '--prompt=a bird'"
    )
    assert said.endswith("--prompt=--checkpoint=1 '--strength=0, 0.8'"), (
        "no prompt becomes an option"
    )
    (finished / "go").touch()
    text = wait(page, lambda text: "sweep of output finished" in text)
    assert (
        (finished / "sweep" / "job.log")
        .read_text()
        .splitlines()[0]
        .endswith(f"{finished / 'sweep'} --strengths=0.5,1")
    )


@pytest.mark.parametrize(
    ("said", "state", "told"),
    [
        ("error: strength: is odd.", "failed", "strength: is odd."),
        ("Sweeping: 3/9", "failed", "Ended unexpectedly. Its last line: Sweeping: 3/9"),
        ("", "stopped", "Interrupted."),
    ],
)
def test_new_server_sees_how_a_job_ended(
    page: TestClient, finished: Path, project: Workspace, said: str, state: str, told: str
) -> None:
    post(page, "render", run=run_of(page), command="sweep")
    wait(page, lambda text: "working" in text)
    [job] = queue_of(page).read()
    again = TestClient(create_app(Project(project.folder)))
    wait(again, lambda text: "sweep of output running" in text)
    if said:
        (finished / "go").write_text(said)
    else:
        post(again, "queue/remove", 200, job=job.id)
    text = wait(again, lambda text: f"sweep of output {state}" in text)
    assert told in text
    post(again, "queue/remove", 200, job=job.id)
    assert queue_of(page).read() == []


@pytest.mark.parametrize("command", ["sweep", "train"])
def test_job_without_a_process_does_not_take_an_earlier_success(
    page: TestClient, finished: Path, command: Any
) -> None:
    (finished / "sweep").mkdir()
    (finished / "sweep" / "job.log").write_text("$ simpletuner sweep\nSaved everything\n")
    queue_of(page).add(command, str(finished), state="running")
    assert "interrupted" in wait(page, lambda text: "running" not in text)


def test_queued_runs_wait_for_a_run_started_by_hand(
    page: TestClient, finished: Path, project: Workspace
) -> None:
    project.path("config/second").mkdir()
    values = json.loads(project.path("config/config.json").read_text()) | {"output_dir": "second"}
    project.path("config/second/config.json").write_text(json.dumps(values))
    own(finished)
    job = post(page, "queue", config="second")
    assert "Waits for output" in wait(page, lambda text: "second waiting" in text)
    # Its config is deleted: it stays, with its problem; the next one starts.
    project.path("config/second/config.json").rename(project.path("away.json"))
    wait(page, lambda text: "There is no config 'second'." in text)
    (finished / LOCK_FILE).unlink()
    post(page, "queue", run=run_of(page), settings={"max_train_steps": 9})
    text = wait(page, lambda text: "output running" in text)
    assert "second waiting" in text
    project.path("away.json").rename(project.path("config/second/config.json"))
    (finished / "go").write_text("error: no.")
    text = wait(page, lambda text: "second running" in text)
    assert "--max_train_steps=9" in (finished / "console.log").read_text()
    (project.path("output") / "go").write_text("error: nor this.")
    wait(page, lambda text: "second failed" in text)
    assert job["job"] in [job.id for job in queue_of(page).read()]


def test_invalid_jobs_are_refused_at_once(
    page: TestClient, finished: Path, project: Workspace
) -> None:
    run = run_of(page)
    assert post(page, "queue", 422, config="config", settings={"max_train_stepz": 1})["problems"]
    post(page, "queue", 404, config="absent")
    post(page, "render", 400, run=run, command="train")
    post(page, "render", 400, run=run, command="sample", prompts="a bird")
    post(page, "render", 403, run=run, command="sample", prompts=["a bird"], image="/etc/hostname")
    post(page, "queue/move", 400, job="x", by="y")
    post(page, "queue/move", 404, job="absent", by=1)
    post(page, "queue/remove", 422, job="absent")
    inner = TestClient(create_app(Project(project.folder, run=finished)))
    post(inner, "render", 400, run=run_of(inner), command="sweep")
    assert inner.get("/queue").text == ""
    assert not project.path(QUEUE_FILE).exists()


MISSING = {
    "key": "device",
    "message": f"no GPU was found. {CONSENT}",
    "fatal": False,
    "kind": "consent",
}


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"key": "output_dir", "message": "is odd.", "fatal": True}, "is odd."),
        (MISSING, 'no GPU was found. To train on the CPU all the same, switch on "I Know'),
        ({"key": "cats", "message": "soon", "fatal": True, "kind": "unfetched"}, ""),
        ({"key": "seed", "message": "is odd.", "fatal": False}, ""),
    ],
)
def test_what_its_plan_refuses_is_not_queued(
    page: TestClient,
    project: Workspace,
    problem: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project.path("plan.json").write_text(json.dumps([problem]))
    monkeypatch.setattr(jobs, "sees_gpu_files", lambda: False)

    answer = post(page, "queue", 422 if reason else 202, config="config")

    if reason:
        assert reason in answer["problems"][0]["message"]
        assert not project.path(QUEUE_FILE).exists()


def test_a_run_whose_captions_are_written_first_is_queued(
    page: TestClient, project: Workspace
) -> None:
    problem = {"key": "pictures", "message": "no file has a caption.", "fatal": True}
    project.path("plan.json").write_text(json.dumps([problem]))
    queue_of(page).add("caption", str(project.path("output")))

    post(page, "queue", config="config")

    assert [job.command for job in queue_of(page).read()] == ["caption", "train"]


def test_queue_shows_what_runs_and_waits_before_what_has_ended(
    page: TestClient, project: Workspace
) -> None:
    for name, state in {"a": "completed", "b": "error", "c": "running", "d": "waiting"}.items():
        queue_of(page).add("train", str(project.path(name)), state=state)

    shown = re.findall("<b>(.*?)</b>", page.get("/queue").text)

    assert shown == ["c", "d", "b", "a"]


def test_the_server_starts_jobs(page: TestClient, project: Workspace, finished: Path) -> None:
    (finished / "go").touch()
    with serving(project.folder):
        post(page, "render", run=run_of(page), command="sweep")
        wait(page, lambda text: "sweep of output finished" in text, step=False)
        [thread] = [running for running in threading.enumerate() if running.name == "queue"]
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_damaged_queue_hides_no_other_part(
    page: TestClient, project: Workspace, finished: Path
) -> None:
    project.path(QUEUE_FILE).write_text("[")
    assert "is not a valid queue" in page.get("/queue").text
    post(page, "queue", 422, config="config")
    assert project.path(QUEUE_FILE).read_text() == "["


def shots(count: int, prompts: int, ema: int = False) -> list[MediaRecord]:
    kinds = (False, True) if ema else (False,)
    return [
        MediaRecord(
            step,
            f"p{prompt}",
            f"prompt {prompt}",
            f"shots/p{prompt}-{step}.png",
            64,
            64,
            ema=averaged,
        )
        for step in range(0, 100 * count, 100)
        for prompt in range(prompts)
        for averaged in kinds
    ]


@pytest.mark.parametrize(
    ("count", "prompts", "ema"), [(2000, 1, False), (200, 10, True), (9, 60, False), (0, 0, False)]
)
def test_every_preview_is_on_one_page(count: int, prompts: int, ema: bool) -> None:
    records = shots(count, prompts, ema)
    pages = pages_of(records)
    assert sorted(map(repr, (row for _, page in pages for row in page))) == sorted(
        map(repr, records)
    )
    assert len({name for name, _ in pages}) == len(pages)


def test_all_previews_can_be_reached(page: TestClient, finished: Path, project: Workspace) -> None:
    records = shots(40, 10)
    (finished / "shots").mkdir()
    for record in records:
        (finished / record.path).symlink_to(project.path("datasets/pictures/p1.png"))
    (finished / MEDIA_FILE).write_text(
        "".join(f"{json.dumps(asdict(record))}\n" for record in records)
    )
    first = page.get(f"/runs/{run_of(page)}/previews").text
    _, _, choice = first.partition('data-choice="page"')
    pages = re.findall(r'<option value="(\d+)"', choice.partition("</select>")[0])
    assert "a selection of all 40 steps" in first
    shown = set()
    for number in pages:
        text = page.get(f"/runs/{run_of(page)}/previews?page={number}").text
        shown |= set(re.findall(r'aria-label="Enlarge (p\d+), step (\d+)"', text))
    assert len(shown) == 400
    pair = page.get(f"/runs/{run_of(page)}/previews?only=shots&beside=100&step=3900").text
    assert set(re.findall(r'data-step="(\d+)"', pair)) == {"100", "3900"}
    assert page.get(f"/runs/{run_of(page)}/previews?page=999").text == first


def test_the_lora_is_downloaded_under_the_name_of_its_run(page: TestClient, finished: Path) -> None:
    run = run_of(page)
    answer = page.get(f"/download/{run}")
    assert answer.content == (finished / LORA_FILE).read_bytes()
    assert (
        answer.headers["content-disposition"] == 'attachment; filename="output-step3.safetensors"'
    )
    assert page.get(f"/download/{run}?step=2").status_code == 404
    shown = page.get(f"/runs/{run}/results").text
    assert f'href="/download/{run}"' in shown
    (finished / LORA_FILE).write_bytes(b"torn")
    assert "Use this" not in page.get(f"/runs/{run}/results").text


@pytest.mark.parametrize(("form", "other"), [("diffusers", "comfyui"), ("comfyui", "diffusers")])
def test_a_lora_is_downloaded_as_the_other_form_would_have_written_it(
    page: TestClient,
    finished: Path,
    tmp_path: Path,
    t2i_checkpoint: Path,
    form: LoraForm,
    other: LoraForm,
) -> None:
    note = {STEP_NOTE: "3", "modelspec.architecture": "kandinsky5-image/lite-t2i"}
    lora = lora_of(make_assembly(t2i_checkpoint, lora_rank=4, lora_alpha=6))
    lora.form = other
    expected = write_lora(lora, tmp_path, **note).read_bytes()
    lora.form = form
    write_lora(lora, finished, **note)
    run = run_of(page)
    shown = page.get(f"/runs/{run}/use").text
    assert f'href="/download/{run}?form={other}" download' in shown
    assert "LoraLoaderModelOnly" in shown
    answer = page.get(f"/download/{run}?form={other}")
    assert answer.content == expected
    assert answer.headers["content-length"] == str(len(expected))
    assert (
        answer.headers["content-disposition"]
        == f'attachment; filename="output-step3-{other}.safetensors"'
    )
    if other == "diffusers":
        (tmp_path / LORA_FILE).write_bytes(answer.content)
        lora.form = other
        pipeline = make_adapter(t2i_checkpoint).load_bare_pipeline()
        verify_file(tmp_path / LORA_FILE, lora.file_weights(), other, pipeline)
    own = page.get(f"/download/{run}?form={form}")
    assert own.content == (finished / LORA_FILE).read_bytes()
    assert page.get(f"/download/{run}?form=kohya").status_code == 404


@pytest.mark.parametrize(
    ("family", "use_dora", "why"),
    [
        ("kandinsky5-image", True, "Train with lora_format: comfyui."),
        ("sanavideo", False, "it has no built-in Sana Video."),
    ],
)
def test_lora_without_another_form_shows_the_reason(
    page: TestClient, finished: Path, t2i_checkpoint: Path, family: str, use_dora: bool, why: str
) -> None:
    lora = lora_of(make_assembly(t2i_checkpoint, use_dora=use_dora))
    write_lora(lora, finished, **{STEP_NOTE: "3", "modelspec.architecture": f"{family}/any"})
    run = run_of(page)
    shown = page.get(f"/runs/{run}/use").text
    assert why in shown
    assert "?form=comfyui" not in shown
    assert why in page.get(f"/download/{run}?form=comfyui").text


def test_the_page_shows_the_program_of_the_report(page: TestClient, finished: Path) -> None:
    page_of_report = (
        '<div class="snippet"><button class="copy" type="button">Copy</button><pre>a &lt; '
        "&#34;b&#34;</pre>"
    )
    (finished / "training_report.html").write_text(page_of_report)
    assert (
        '<pre tabindex="0">a &lt; &#34;b&#34;</pre>' in page.get(f"/runs/{run_of(page)}/use").text
    )


def test_samples_stand_beside_the_untrained_model(
    page: TestClient, finished: Path, project: Workspace
) -> None:
    folder = finished / "samples"
    picture = project.path("datasets/pictures/p1.png").read_bytes()
    folder.mkdir()
    made = {"prompt": "a <bird>", "seed": 7, "index": 0, "width": 64, "height": 64, "step": 3}
    for strength in (0, 0.5, 1):
        (folder / f"{strength}.png").write_bytes(picture)
        (folder / f"{strength}.json").write_text(json.dumps({**made, "strength": strength}))
    (folder / "else.png").write_bytes(picture)
    shown = page.get(f"/runs/{run_of(page)}/results").text
    rows = re.findall(r'<article[^>]* data-name="(.*?)".*?</article>', shown, re.DOTALL)
    assert sorted(rows) == ["a &lt;bird&gt;, seed 7", "a &lt;bird&gt;, seed 7, at 0.5"]
    for row in re.findall(r"<article.*?</article>", shown, re.DOTALL):
        assert re.findall(r'data-step="(\d+)"', row) == ["0", "3"]


def test_unfinished_sweep_shows_its_rendered_cells(
    page: TestClient, finished: Path, project: Workspace
) -> None:
    folder = finished / "sweep"
    (folder / "cells").mkdir(parents=True)
    records = [MediaRecord(step, "p at 0.5", "p", f"cells/{step}.png", 64, 64) for step in (2, 3)]
    (folder / "sheet.json").write_text(json.dumps([asdict(record) for record in records]))
    (folder / "cells" / "2.png").write_bytes(project.path("datasets/pictures/p1.png").read_bytes())
    with (finished / METRICS_FILE).open("a") as file:
        file.write(json.dumps({"step": 3, "loss/val/held": 0.5}) + "\n")
    shown = page.get(f"/runs/{run_of(page)}/results").text
    assert "The held-out loss is lowest" in shown
    assert re.findall(r'data-step="(\d+)"', shown) == ["2"]
    source = re.findall(r'<img src="(.*?)"', shown)[0]
    assert page.get(source).headers["content-type"] == "image/png"


def test_two_runs_share_a_chart_over_steps(
    page: TestClient, finished: Path, project: Workspace
) -> None:
    (project.path("other")).mkdir()
    tell(project.path("other"), *STEPS)
    other = next(
        run["run"] for run in page.get("/api/metrics/training/runs").json() if "other" in run["run"]
    )
    run = next(
        run["run"]
        for run in page.get("/api/metrics/training/runs").json()
        if "output" in run["run"]
    )
    data = json.loads(
        re.findall(
            r'id="charts">(.*?)</script>', page.get(f"/runs/{run}/curves?beside={other}").text
        )[0]
    )
    loss = data["charts"][0]
    assert [line["name"] for line in loss["series"]] == ["loss", "other: loss"]
    assert data["hours"] == []
    assert page.get(f"/runs/{run}/curves?beside=absent").status_code == 404


@pytest.mark.slow(5)
def test_a_person_compares_two_steps_and_two_runs(
    browser: Any, project: Workspace, finished: Path
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    preview(finished, *((step, name) for step in (0, 1, 3) for name in ("validation", "bird")))
    project.path("other").mkdir()
    tell(project.path("other"), *STEPS, StateChanged("finished", 3, 3))
    with opened(browser, project.folder, f"?run={run_id(finished)}#run") as page:
        tags = page.locator(".shots.main .step-tag")
        expect(tags).to_have_text(["step 0", "step 3"] * 2)
        page.get_by_label("beside").select_option("1")
        expect(tags).to_have_text(["step 1", "step 3"] * 2)
        page.get_by_label("Compare with").select_option(label="other")
        expect(page.locator(".key-line").first).to_have_text("lossother: loss")
        tell(
            finished,
            *STEPS,
            *preview(finished, (4, "validation"), (4, "bird")),
            StateChanged("finished", 4, 4),
        )
        expect(tags).to_have_text(["step 1", "step 4"] * 2)


@pytest.mark.slow(5)
def test_a_person_samples_and_orders_the_queue(
    browser: Any, project: Workspace, finished: Path
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    with opened(browser, project.folder, f"?run={run_id(finished)}#run") as page:
        page.get_by_text("Sample with your own prompts").click()
        page.get_by_label("Prompts, one a line").filter(visible=True).fill("a bird\nan owl")
        page.get_by_role("button", name="Sample", exact=True).click()
        jobs = page.locator(".queue li")
        expect(jobs).to_contain_text(["running"])
        page.get_by_role("button", name="Sample", exact=True).click()
        expect(jobs).to_have_count(2)
        page.get_by_text("Train longer").click()
        page.locator(".action-form").get_by_role("button", name="Add to queue").click()
        expect(jobs).to_have_count(3)
        page.get_by_role("button", name="Move output up").click()
        expect(jobs.nth(1)).to_contain_text("output waiting")
        page.get_by_role("button", name="Stop sample of output").click()
        expect(page.locator(".queue.ended li")).to_contain_text("stopped")
        said = (finished / "samples" / "job.log").read_text()
    assert "'--prompt=a bird' '--prompt=an owl' '--strength=0, 1'" in said
