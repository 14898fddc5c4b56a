"""type aws: the objects of a bucket, by the same names below the folder of downloads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from simpletuner.annexes.remote.store import CHUNK, DownloadError, Item, Offer, Store, UnfetchedError
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.option import check_installed
from simpletuner.config.publishing import BOTO3
from simpletuner.data.discovery import classify, name_problem
from simpletuner.errors import Problem, Reading
from simpletuner.s3 import S3Login

LONGEST_NAME = 255  # bytes of a file's name


def list_bucket(config: DatasetConfig, store: Store) -> Reading[Offer]:
    """The pictures or clips below a prefix, and their caption files.

    Raises:
        UnfetchedError: nothing of it is here, and the server may not be asked.
    """
    if missing := list(check_installed(BOTO3, f"{config.id}.type", "aws")):
        yield from missing
        return Offer([])
    if not store.fetches:
        items = store.here(f"s3://{config.aws_bucket_name}/{_prefix(config)}")
        if not items:
            raise UnfetchedError("its files are")
        return Offer(items)
    # An extra, known to be installed only now.
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = _login(config).client()
        objects = dict(_objects(client, config))
    # botocore raises ValueError for an endpoint that is not a URL.
    except (BotoCoreError, ClientError, ValueError) as error:
        why = " ".join(str(error).split())
        yield Problem(f"{config.id}.aws_bucket_name", f"{_place(config)} cannot be listed: {why}")
        return Offer([])
    if not objects:
        yield Problem(f"{config.id}.aws_data_prefix", f"{_place(config)} holds no objects.")
    listing = classify([(name, _problem(name)) for name in objects], store.wanted)
    names, ignored = {*listing.files, *listing.captions.values()}, dict(listing.ignored)
    for name in {name for name in names if any(str(parent) in names for parent in PurePosixPath(name).parents)}:
        # A bucket has no folders: `a` and `a/b` may both be objects.
        names.remove(name)
        ignored[name] = ("unusable name", "is below a name that is an object, and a file cannot be a folder too")
    read = partial(_read, client, (BotoCoreError, ClientError), config.aws_bucket_name)
    items = []
    for name in sorted(names):
        key = objects[name]["Key"]
        address = f"s3://{config.aws_bucket_name}/{key}"
        items.append(Item(address, name, partial(read, key), objects[name]["ETag"], objects[name]["Size"]))
    return Offer(items, ignored=ignored)


def _login(config: DatasetConfig) -> S3Login:
    return S3Login(
        endpoint_url=config.aws_endpoint_url,
        region=config.aws_region_name,
        access_key=config.aws_access_key_id,
        secret_key=config.aws_secret_access_key,
        session_token=config.aws_session_token,
        pool=config.aws_max_pool_connections,
    )


def _place(config: DatasetConfig) -> str:
    server = config.aws_endpoint_url or "Amazon S3"
    return f"the bucket {config.aws_bucket_name!r} of {server}, prefix {_prefix(config)!r},"


def _prefix(config: DatasetConfig) -> str:
    """The prefix as a folder: `photos` is `photos/`, so that it does not match `photos-old/`."""
    prefix = (config.aws_data_prefix or "").strip("/")
    return f"{prefix}/" if prefix else ""


def _objects(client: Any, config: DatasetConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Facts of each object by its name below the prefix; a key that ends in a slash stands for a folder."""
    prefix = _prefix(config)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=config.aws_bucket_name, Prefix=prefix)
    for page in pages:
        for facts in page.get("Contents", ()):
            if not facts["Key"].endswith("/"):
                yield facts["Key"].removeprefix(prefix), facts


def _problem(name: str) -> tuple[str, str] | None:
    """Why a key cannot be a path below a folder, or None; `..` counts as hidden."""
    parts = name.split("/")
    if any(not part or "\0" in part or "\\" in part or len(part.encode()) > LONGEST_NAME for part in parts):
        return "unusable name", "has a name that cannot be a path"
    return next((problem for part in parts if (problem := name_problem(part))), None)


def _read(client: Any, failures: tuple[type[Exception], ...], bucket: str | None, key: str) -> Iterator[bytes]:
    try:
        yield from client.get_object(Bucket=bucket, Key=key)["Body"].iter_chunks(CHUNK)
    except failures as error:
        raise DownloadError(f"cannot be read: {error}") from error
