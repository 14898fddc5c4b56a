"""Clients for S3, against a server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from simpletuner.s3 import S3Login


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def test_a_store_by_its_address(endpoint: str) -> None:
    client = S3Login(endpoint, "us-east-1", access_key="me", secret_key="secret", headers={"X-Project": "stars"}).client()
    sent: list[dict[str, str]] = []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(dict(request.headers)))
    client.create_bucket(Bucket="pictures")
    client.put_object(Bucket="pictures", Key="a b/ä.txt", Body=b"star")
    assert client.get_object(Bucket="pictures", Key="a b/ä.txt")["Body"].read() == b"star"
    assert all(headers["X-Project"] in ("stars", b"stars") for headers in sent)
