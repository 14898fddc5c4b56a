"""Datasets of type csv: addresses become files, unless they are refused."""

from __future__ import annotations

import ipaddress
import itertools
import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.remote import store, web
from simpletuner.annexes.remote.collect import collect_cached
from simpletuner.annexes.remote.store import DownloadError
from simpletuner.data.entries import DataContext
from tests.data.test_build import build, fatal
from tests.tools.web_server import Site, picture, serve


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(store, "PAUSES", (0.0, 0.0))
    with serve() as running:
        yield running


def table(folder: Path, rows: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    """An entry of type csv; addresses of this machine are allowed."""
    folder.mkdir(exist_ok=True)
    lines = ["url,text", *(f'"{address}","{caption}"' for address, caption in rows)]
    (folder / "table.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    keys = {
        "csv_file": str(folder / "table.csv"),
        "csv_cache_dir": str(folder / "cache"),
        "csv_caption_column": "text",
    }
    return {"id": "web", "type": "csv", "allow_private_urls": True, **keys, **more}


def test_addresses_are_downloaded_once_and_become_samples(
    context: DataContext, tmp_path: Path, site: Site
) -> None:
    rows = [
        (site.add(f"/{folder}/1.jpg", picture(number)), f"caption {folder}")
        for number, folder in enumerate("ab")
    ]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "local.webp").write_bytes(picture(5, kind="WEBP"))
    rows += [("own/local.webp", "a local one"), (rows[0][0], "the last row wins")]
    entry = table(tmp_path, rows)

    (dataset,), problems = build(context, entry)
    assert not fatal(problems)
    assert [problem.message for problem in problems if "repeat" in problem.message] == [
        "1 rows repeat the address of another row; the last one is used."
    ]

    captions = {
        dataset.folder.listing.origins[sample.name]: sample.captions[0]
        for sample in dataset.samples
    }
    assert captions == {
        rows[0][0]: "the last row wins",
        rows[1][0]: "caption b",
        "own/local.webp": "a local one",
    }
    assert {sample.path.suffix for sample in dataset.samples} == {".png", ".webp"}, (
        "by content, whatever the address"
    )
    assert {entry.note for entry in dataset.ledger()} == set(captions)

    assert build(context, entry)[0][0].samples == dataset.samples
    assert set(site.requests.values()) == {1}


def test_failed_downloads_are_listed_with_their_reasons(
    context: DataContext, tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletuner.annexes.remote.web_table.WEB_PICTURE", 5000)
    site.add("/page.png", b"<html>" * 20, "text/html")
    site.add("/text.png", b"plain words" * 20)
    site.add("/large.png", bytes(6000))
    site.add("/short.png", picture(3))
    site.announced["/short.png"] = 4000
    site.moved["/file.png"] = "file:///etc/hostname"
    reasons = {
        f"{site.address}/gone.png": "returned HTTP 404 Not Found",
        f"{site.address}/page.png": "is text/html, not a picture or clip",
        f"{site.address}/text.png": "is neither a picture nor a clip",
        f"{site.address}/large.png": "has more than 0 MB",
        f"{site.address}/short.png": "ended after",
        f"{site.address}/file.png": "does not lead to http or https",
        "ftp://host/x.png": "uses ftp",
        "a\0.png": "its name contains a null character",
    }
    rows = [(address, "caption") for address in reasons]
    good = site.add("/good.png", picture(1))

    (dataset,), problems = build(context, table(tmp_path, [(good, "good"), *rows]))

    assert not fatal(problems)
    assert [sample.captions[0] for sample in dataset.samples] == ["good"]
    details = {file.name: file.detail for file in dataset.rejected}
    assert details.keys() == reasons.keys()
    for address, reason in reasons.items():
        assert reason in details[address]
        assert "--retry-failed" in details[address]
    lines = (tmp_path / "cache" / "failed.jsonl").read_text().splitlines()
    assert {json.loads(line)["key"] for line in lines} == reasons.keys()


def test_download_is_tried_three_times_and_follows_redirects(
    context: DataContext, tmp_path: Path, site: Site
) -> None:
    busy = site.add("/busy.png", picture(2))
    site.status["/busy.png"] = [503, 429]  # then it is sent
    site.add("/good.png", picture(1))
    site.moved["/moved.png"] = "/good.png"
    short = site.add("/short.png", picture(3))
    site.announced["/short.png"] = 4000
    rows = [(busy, "busy"), (f"{site.address}/moved.png", "moved"), (short, "short")]

    (dataset,), problems = build(context, table(tmp_path, rows))

    assert not fatal(problems)
    assert {sample.captions[0] for sample in dataset.samples} == {"busy", "moved"}
    assert site.requests["/busy.png"] == 3
    assert site.requests["/short.png"] == 3


def test_failed_downloads_are_retried_only_on_request(
    context: DataContext, tmp_path: Path, site: Site
) -> None:
    good = site.add("/good.png", picture(1))
    entry = table(tmp_path, [(good, "good"), (f"{site.address}/gone.png", "gone")])

    def count_samples(**settings: bool) -> int:
        (dataset,), _ = build(context, entry, **settings)
        return len(dataset.samples)

    assert count_samples() == 1
    requests = dict(site.requests)

    site.add("/gone.png", picture(9))
    assert count_samples() == 1
    assert site.requests == requests

    assert count_samples(retry_failed=True) == 2
    assert count_samples() == 2
    assert site.requests["/good.png"] == 1


def test_cached_plan_uses_only_downloaded_files(
    context: DataContext, tmp_path: Path, site: Site
) -> None:
    rows = [(site.add(f"/{number}.png", picture(number)), "x") for number in range(2)]
    entry = table(tmp_path, rows)
    cached = replace(context, collect=collect_cached)
    before = sorted(tmp_path.rglob("*"))

    _, problems = build(cached, entry)
    assert [problem.message for problem in fatal(problems)] == [
        "2 of 2 files are not fetched yet; `simpletuner plan` fetches them."
    ]
    assert (sorted(tmp_path.rglob("*")), site.requests) == (before, {})

    build(context, entry)
    requests = dict(site.requests)
    entry = table(tmp_path, [*rows, (site.add("/2.png", picture(2)), "x")])
    (dataset,), problems = build(cached, entry)
    assert (len(dataset.samples), site.requests) == (2, requests)
    assert not fatal(problems)

    [unfetched] = (problem for problem in problems if problem.kind == "unfetched")
    assert "1 of 3 files are not fetched yet" in unfetched.message


def test_private_address_is_retried_once_it_is_allowed(
    context: DataContext, tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(site.add("/1.png", picture(1)), "x"), (f"{site.address}/gone.png", "x")]
    _, problems = build(context, table(tmp_path, rows, allow_private_urls=False))
    assert fatal(problems)

    (dataset,), _ = build(context, table(tmp_path, rows))
    assert len(dataset.samples) == 1

    build(context, table(tmp_path, rows))
    assert site.requests == {"/1.png": 1, "/gone.png": 1}, "other failures are still left alone"


def test_a_shared_table_names_only_files_beside_it(context: DataContext, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    elsewhere = tmp_path / "elsewhere"
    seeds = itertools.count()  # no two pictures are the same
    for place in (folder / "own", elsewhere):
        place.mkdir(parents=True)
        for name in ("a.png", "b.png", "c.png"):
            (place / name).write_bytes(picture(next(seeds)))
    (folder / "link").symlink_to(elsewhere)
    inside = ["own/a.png", str(folder / "own/b.png"), "own/../own/c.png", "link/a.png"]
    outside = ["../elsewhere/b.png", str(elsewhere / "c.png")]
    entry = table(folder, [(path, "x") for path in (*inside, *outside)], allow_private_urls=False)

    (dataset,), problems = build(context, entry)
    assert not fatal(problems)
    assert sorted(
        dataset.folder.listing.origins[sample.name] for sample in dataset.samples
    ) == sorted(inside)
    assert {
        line.name: line.detail.partition("; --")[0] for line in dataset.rejected
    } == dict.fromkeys(
        outside,
        "is outside of the folder of its table; set allow_private_urls to accept such files",
    )

    (dataset,), _ = build(context, entry | {"allow_private_urls": True})
    assert sorted(
        dataset.folder.listing.origins[sample.name] for sample in dataset.samples
    ) == sorted(inside + outside)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "255.255.255.255",
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not web.is_public(ipaddress.ip_address(address))
    assert web.is_public(ipaddress.ip_address("93.184.216.34"))
    assert web.is_public(ipaddress.ip_address("2606:2800:220:1:248:1893:25c8:1946"))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f000001", "2130706433", "[::ffff:127.0.0.1]"]
)
def test_shared_table_cannot_reach_the_local_network(
    context: DataContext, tmp_path: Path, site: Site, host: str
) -> None:
    address = site.add("/secret.png", picture()).replace("127.0.0.1", host)
    _, problems = build(context, table(tmp_path, [(address, "x")], allow_private_urls=False))

    (problem,) = fatal(problems)

    assert "which is not a public address; set allow_private_urls to accept it" in problem.message
    assert not site.requests


def test_redirects_and_proxies_cannot_reach_the_local_network(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", site.address)
    real = web.is_public
    monkeypatch.setattr(
        web, "is_public", lambda address: str(address) == "127.0.0.1" or real(address)
    )
    monkeypatch.setattr(web.socket, "getaddrinfo", _answers(web.socket.getaddrinfo, site))
    site.moved["/start.png"] = "http://inner.example/secret.png"
    port = site.address.removeprefix("http://127.0.0.1")

    with pytest.raises(DownloadError, match=r"leads to 10\.0\.0\.7"):
        list(web.read_url(f"http://outer.example{port}/start.png", 5000))
    assert site.requests == {"/start.png": 1}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_certificate_is_verified_for_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -addext"
    )
    names = "subjectAltName=DNS:outer.example"
    subprocess.run(
        [*command.split(), names, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(web, "_certificates", lambda: trusting)
    monkeypatch.setattr(web, "is_public", lambda address: True)
    real = web.socket.getaddrinfo
    monkeypatch.setattr(
        web.socket, "getaddrinfo", lambda host, *more, **named: real("127.0.0.1", *more, **named)
    )
    with serve(secure) as site:
        site.moved["/start.png"] = "/end.png"
        site.add("/end.png", b"content")
        port = site.address.rpartition(":")[2]
        assert list(web.read_url(f"https://outer.example:{port}/start.png", 100)) == [b"content"]
        with pytest.raises(DownloadError, match=r"not valid for 'other\.example'"):
            list(web.read_url(f"https://other.example:{port}/end.png", 100))


def _answers(real: Any, site: Site) -> Any:
    """Resolve outer.example to this server, and inner.example to a private address."""

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        names = {"outer.example": "127.0.0.1", "inner.example": "10.0.0.7"}
        return real(names.get(host, host), port, *args, **kwargs)

    return resolve


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        (
            {"csv_url_column": "link"},
            "web.csv_url_column",
            "there is no column 'link'; the table has: url, text.",
        ),
        ({"csv_caption_column": "txt"}, "web.csv_caption_column", "Did you mean 'text'?"),
        ({"csv_file": "nowhere.csv"}, "web.csv_file", "'nowhere.csv' cannot be read: No such file"),
        ({"csv_cache_dir": None}, "web.csv_cache_dir", "is required with type csv"),
        (
            {"caption_strategy": "textfile"},
            "web.type",
            "caption_strategy csv, or instanceprompt with instance_prompt",
        ),
        (
            {"dataset_name": "b"},
            "web.dataset_name",
            "is for type huggingface, which needs dataset_name, too; the type is csv. "
            "Leave it out.",
        ),
        ({"instance_data_dir": "x"}, "web.instance_data_dir", "is for type local"),
        ({"dataset_type": "text_embeds"}, "web.type", "caches are local"),
    ],
)
def test_invalid_csv_entry_is_reported_once(
    context: DataContext, tmp_path: Path, change: dict[str, Any], where: str, words: str
) -> None:
    _, problems = build(
        context,
        {"instance_data_dir": str(tmp_path), "id": "b"},
        table(tmp_path, [("a.png", "x")], **change),
    )

    (problem,) = [problem for problem in fatal(problems) if problem.where == where]
    assert words in problem.message


def test_problems_of_ids_with_a_common_prefix_are_all_reported(
    context: DataContext, tmp_path: Path
) -> None:
    bad_table = table(tmp_path / "a", [("a.png", "x")], csv_caption_column="txt")
    refused = table(tmp_path / "b", [("a.png", "x")], caption_strategy="textfile", id="web-2")

    _, problems = build(context, bad_table, refused)

    assert {problem.where for problem in fatal(problems)} == {
        "web.csv_caption_column",
        "web-2.type",
    }
