"""Clients for S3 and compatible stores, with explicit credentials or those that boto3 finds.

boto3 is in the extra `[s3]` and imported when a client is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class S3Login:
    """Address and credentials of a store; boto3 fills in None (profiles, variables, instance roles).

    Attributes:
        endpoint_url: address of a store other than Amazon's; buckets are then part of the path, not of the host name.
        region: signed with requests; other stores accept any, such as `auto`.
        pool: maximum number of connections.
        headers: headers of every request.
    """

    endpoint_url: str | None = None
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    profile: str | None = None
    use_ssl: bool = True
    pool: int = 10
    headers: Mapping[str, str] = field(default_factory=dict)

    def client(self) -> Any:
        """A thread-safe boto3 client.

        Raises:
            botocore.exceptions.BotoCoreError: the profile does not exist, or the address is invalid.
        """
        import boto3
        from botocore.config import Config

        settings = Config(
            max_pool_connections=self.pool,
            retries={"mode": "standard", "max_attempts": 5},
            connect_timeout=10,
            # Bucket host names need DNS entries and a matching certificate, which few other stores have.
            s3={"addressing_style": "path" if self.endpoint_url else "auto"},
            # By default, boto3 adds checksums that other stores do not support.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        region = self.region or ("auto" if self.endpoint_url else None)
        keys = self.access_key, self.secret_key, self.session_token
        session = boto3.Session(*keys, region_name=region, profile_name=self.profile)
        client = session.client("s3", endpoint_url=self.endpoint_url, use_ssl=self.use_ssl, config=settings)

        def add_headers(request: Any, **_: object) -> None:
            for name, value in self.headers.items():
                request.headers[name] = value

        # Before signing: a header added later would break the signature.
        client.meta.events.register("before-sign.s3", add_headers)
        return client
