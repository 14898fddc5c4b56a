"""Captions by a server that speaks OpenAI's protocol: what is sent, written, kept and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simpletuner.annexes.captions import address_captioner
from simpletuner.annexes.captions import server as protocol
from simpletuner.annexes.captions.address import read_address
from simpletuner.errors import UserError
from tests.tools.caption_server import (
    PAGE,
    CaptionServer,
    Reply,
    caption,
    error,
    serve_captions,
)
from tests.tools.clips import write_clip
from tests.tools.refusals import complaint
from tests.tools.workspace import DATASETS, Workspace

Capture = pytest.CaptureFixture[str]
PICTURES = "datasets/pictures"


@pytest.fixture
def server() -> Iterator[CaptionServer]:
    with serve_captions("qwen2.5-vl") as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Workspace:
    """Four pictures without a caption, and a checkpoint that nobody has downloaded."""
    workspace = Workspace.create(tmp_path / "run", Path("nobody/model"), pictures=4)
    for path in workspace.path(PICTURES).glob("*.txt"):
        path.unlink()
    return workspace


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for a server are short."""
    monkeypatch.setattr(address_captioner, "SECONDS_TO_DESCRIBE", 0.2)
    monkeypatch.setattr(protocol, "SECONDS_TO_LIST", 0.2)
    monkeypatch.setattr(address_captioner, "SECONDS_BUSY", 0.0)


def captions_of(workspace: Workspace) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(workspace.path(PICTURES).glob("*.txt"))}


def test_a_server_captions_pictures_that_have_no_caption(
    folder: Workspace, server: CaptionServer, capsys: Capture
) -> None:
    folder.path(f"{PICTURES}/p1.txt").write_text("mine\n")
    server.captions = [caption("a cat\n on  a mat"), caption("a dog")]

    assert folder.run("caption", "--address", server.address, "--trigger", "zkt") == 0

    assert captions_of(folder) == {
        "p0.txt": "zkt, a cat on a mat\n",
        "p1.txt": "mine\n",
        "p2.txt": "zkt, a dog\n",
        "p3.txt": "zkt, a dog\n",
    }
    printed = capsys.readouterr().out
    assert "The pictures are sent to 127.0.0.1, to the model qwen2.5-vl." in printed
    assert "Captions written: 3; files left out: 0." in printed


def test_a_request_holds_the_picture_and_the_instruction(
    folder: Workspace, server: CaptionServer
) -> None:
    folder.run("caption", "--address", server.address, "--style", "tags", "--limit", "1")

    (picture,) = server.pictures(0)
    assert (picture.size, picture.format) == ((96, 64), "JPEG")
    assert "short tags in lower case" in server.instruction(0)
    assert server.asked[0]["model"] == "qwen2.5-vl"
    assert server.keys == [None, None]


def test_frames_of_a_clip_are_sent_in_their_order(tmp_path: Path, server: CaptionServer) -> None:
    workspace = Workspace.create(
        tmp_path / "run",
        Path("nobody/model"),
        pictures=0,
        model_family="sanavideo",
        model_flavour=None,
        train_batch_size=1,
    )
    workspace.write_datasets([{**DATASETS[0], "dataset_type": "video"}, DATASETS[1]])
    workspace.path(PICTURES).mkdir(parents=True, exist_ok=True)
    write_clip(workspace.path(f"{PICTURES}/walk.mp4"), seconds=6)

    assert workspace.run("caption", "--address", server.address) == 0

    assert len(server.pictures(0)) == 4
    assert server.instruction(0).startswith("These 4 pictures are frames of one clip of ")
    assert captions_of(workspace) == {"walk.txt": "a cat\n"}


def test_the_key_is_sent_and_written_nowhere(
    folder: Workspace,
    server: CaptionServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    key = "local-9f3b77aa21"
    monkeypatch.setenv("CAPTION_API_KEY", key)
    server.captions = [error(400, f"the key {key} may not do this")]

    folder.run("caption", "--address", server.address)

    assert set(server.keys) == {f"Bearer {key}"}
    printed = capsys.readouterr()
    assert key not in printed.out + printed.err
    files = [path.read_bytes() for path in folder.folder.rglob("*") if path.is_file()]
    assert not any(key.encode() in content for content in files)


@pytest.mark.parametrize(
    "address",
    [
        "http://192.168.1.7:1234/v1",
        "https://api.example.com/v1",
        "http://localhost.example.com/v1",
        "http://nas/v1",
    ],
)
def test_pictures_leave_this_machine_only_with_consent(
    address: str, folder: Workspace, capsys: Capture
) -> None:
    refused = complaint(folder, capsys, "caption", "--address", address)

    host = read_address(address).host
    assert f"The pictures would be sent to {host}, which is not this machine." in refused
    assert "--send-to-network" in refused


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:1234",
        "http://127.0.0.1:1234/v1/",
        "http://[::1]:1234/v1/chat/completions",
        "http://0.0.0.0:1234/v1",
    ],
)
def test_addresses_of_this_machine_need_no_consent(address: str) -> None:
    read = read_address(address)

    read.check_consent(may_send=False, remedy="")

    assert read.url.endswith(":1234/v1")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("localhost:1234", "is not an address of a captioning server"),
        ("ftp://localhost/v1", "is not an address of a captioning server"),
        ("http://[::1/v1", "is not an address of a captioning server"),
        ("http://localhost:port/v1", "is not an address of a captioning server"),
        ("http://localhost/v1?key=abcdefgh", "is not an address of a captioning server"),
        ("http://me:hunter2222@localhost/v1", "set the key as CAPTION_API_KEY"),
    ],
)
def test_what_is_not_an_address_is_refused(address: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refusal:
        read_address(address)

    assert "hunter2222" not in str(refusal.value)


def test_a_proxy_of_the_environment_gets_no_pictures_for_this_machine(
    folder: Workspace, server: CaptionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert folder.run("caption", "--address", server.address, "--limit", "1") == 0

    assert captions_of(folder) == {"p0.txt": "a cat\n"}


UNUSABLE = {
    "web page": (PAGE, "answers with a web page (HTTP 200), not as a captioning server does"),
    "page of an error": (
        Reply("<html>Bad gateway</html>", 502, "text/html"),
        "answers with a web page (HTTP 502)",
    ),
    "no JSON": (Reply("hello", kind="text/plain"), "answers with something else"),
    "other JSON": (Reply({"hello": 1}), "not as a captioning server does"),
    "redirect": (
        Reply("", 302, headers={"Location": "http://10.0.0.1/v1"}),
        "redirects to 'http://10.0.0.1/v1'",
    ),
    "key": (error(401, "no key"), "does not accept the key (HTTP 401: no key)"),
    "hangs": (Reply({}, seconds=1.0), "does not answer within 0 s"),
}


@pytest.mark.parametrize(("reply", "message"), UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.usefixtures("impatient")
def test_a_server_that_cannot_caption_is_named_in_one_sentence(
    reply: Reply, message: str, folder: Workspace, server: CaptionServer, capsys: Capture
) -> None:
    server.models = reply

    refused = complaint(folder, capsys, "caption", "--address", server.address)

    assert server.address in refused
    assert message in refused
    assert not server.asked, "no picture was sent"


def test_a_server_that_does_not_run_is_named(folder: Workspace, capsys: Capture) -> None:
    refused = complaint(folder, capsys, "caption", "--address", "http://127.0.0.1:9")

    assert "http://127.0.0.1:9/v1 cannot be reached" in refused
    assert "Does the server run?" in refused


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        (["a", "b"], (), "--model: choose a model of"),
        (["qwen2.5-vl", "llava"], ("--model", "qwen2.5vl"), "Did you mean 'qwen2.5-vl'?"),
        ([], ("--model", "llava"), "offers no model; load one there."),
    ],
)
def test_models_that_the_server_offers_are_listed(
    names: list[str], asked: tuple[str, ...], message: str, folder: Workspace, capsys: Capture
) -> None:
    with serve_captions(*names) as server:
        refused = complaint(folder, capsys, "caption", "--address", server.address, *asked)

    assert message in refused
    assert ", ".join(names) in refused


def test_a_model_may_be_named_without_its_latest_tag(folder: Workspace) -> None:
    with serve_captions("llava:latest", "other") as server:
        folder.run("caption", "--address", server.address, "--model", "llava", "--limit", "1")

    assert server.asked[0]["model"] == "llava:latest"


LEFT_OUT = {
    "empty": (caption(" "), "the model returned an empty caption"),
    "nothing": (caption(None), "the model returned an empty caption"),
    "refusal in words": (caption("I'm sorry, I can't help with that."), "refuses to describe it"),
    "refusal as a field": (caption(None, refusal="no"), "the model refuses to describe it"),
    "filter": (caption("a", finish="content_filter"), "the model refuses to describe it"),
    "only thoughts": (caption("<think>hm, a cat", finish="length"), "does not reason first"),
    "control token": (caption("a cat<|im_end|>"), "a control token of the tokenizer"),
    "too large": (error(413, "picture too large"), "HTTP 413: picture too large"),
}


@pytest.mark.parametrize(("reply", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_file_that_is_not_described_is_left_out_and_the_rest_goes_on(
    reply: Reply, reason: str, folder: Workspace, server: CaptionServer, capsys: Capture
) -> None:
    server.captions = [reply, caption("a cat")]

    assert folder.run("caption", "--address", server.address) == 0

    assert captions_of(folder).keys() == {"p1.txt", "p2.txt", "p3.txt"}
    printed = capsys.readouterr()
    assert "p0.png is left out" in printed.err
    assert reason in printed.err
    assert "Captions written: 3; files left out: 1." in printed.out


@pytest.mark.parametrize(
    "last",
    [error(500, "out of memory"), Reply({}, seconds=0.5), caption("")],
    ids=["error", "hangs", "empty"],
)
@pytest.mark.usefixtures("impatient")
def test_three_failures_in_a_row_end_it_and_written_captions_are_kept(
    last: Reply, folder: Workspace, server: CaptionServer, capsys: Capture
) -> None:
    server.captions = [caption("a cat"), last]

    refused = complaint(folder, capsys, "caption", "--address", server.address)

    assert "3 files in a row were not captioned" in refused
    assert "1 captions are written; the same command writes the rest." in refused
    assert captions_of(folder) == {"p0.txt": "a cat\n"}


@pytest.mark.usefixtures("impatient")
def test_a_server_that_breaks_keeps_what_is_written_and_goes_on_later(
    folder: Workspace, server: CaptionServer, capsys: Capture
) -> None:
    server.captions = [caption("a cat"), PAGE]
    complaint(folder, capsys, "caption", "--address", server.address)
    server.captions = [caption("a dog")]

    assert folder.run("caption", "--address", server.address) == 0

    assert list(captions_of(folder).values()) == ["a cat\n", "a dog\n", "a dog\n", "a dog\n"]


@pytest.mark.usefixtures("impatient")
def test_a_busy_server_is_asked_again(folder: Workspace, server: CaptionServer) -> None:
    server.captions = [error(429, "slow down"), error(503, "loading"), caption("a cat")]

    folder.run("caption", "--address", server.address, "--limit", "1")

    assert captions_of(folder) == {"p0.txt": "a cat\n"}


def test_parameters_that_a_server_refuses_are_left_out(
    folder: Workspace, server: CaptionServer
) -> None:
    server.captions = [error(400, "Unsupported parameter: 'max_tokens'"), caption("a cat")]

    folder.run("caption", "--address", server.address, "--limit", "1")

    assert captions_of(folder) == {"p0.txt": "a cat\n"}
    assert "max_tokens" not in server.asked[1]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (caption("A cat. It sleeps on a", finish="length"), "A cat.\n"),
        (caption("<think>a dog?</think> A cat."), "A cat.\n"),
        (caption([{"type": "text", "text": "A cat."}]), "A cat.\n"),
    ],
)
def test_only_the_finished_caption_is_written(
    reply: Reply, text: str, folder: Workspace, server: CaptionServer
) -> None:
    server.captions = [reply]

    folder.run("caption", "--address", server.address, "--limit", "1")

    assert captions_of(folder) == {"p0.txt": text}


def test_an_overlong_caption_ends_with_a_whole_sentence(
    folder: Workspace, server: CaptionServer
) -> None:
    server.captions = [caption("It is a cat. " * 500)]

    folder.run("caption", "--address", server.address, "--style", "short", "--limit", "1")

    (text,) = captions_of(folder).values()
    assert 300 < len(text) <= 360
    assert text.endswith("a cat.\n")


def test_interrupting_keeps_what_is_written(
    folder: Workspace, server: CaptionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = address_captioner.AddressCaptioner._answer

    def answer_once(self: address_captioner.AddressCaptioner, request: object) -> object:
        if server.asked:
            raise KeyboardInterrupt
        return answer(self, request)

    monkeypatch.setattr(address_captioner.AddressCaptioner, "_answer", answer_once)

    assert folder.run("caption", "--address", server.address) == 130

    assert captions_of(folder) == {"p0.txt": "a cat\n"}


def test_options_of_a_server_without_an_address_are_refused(
    folder: Workspace, capsys: Capture
) -> None:
    refused = complaint(folder, capsys, "caption", "--model", "llava")

    assert refused == "--model belongs to --address, which is not given."
