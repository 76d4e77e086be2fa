"""A bucket with the S3 API. Credentials and endpoint are those of boto3's environment and files.

All methods but :meth:`S3Store.signed_get` and :meth:`S3Store.signed_put` call the store, and block.
"""

from __future__ import annotations

import base64
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.object_calls import CONTENT_TYPE

log = logging.getLogger(__name__)

_LOCATION = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([\w.=/-]{0,400}))?")
_MOST_SIGNED = 1 << 14
_GET_LIFE = 3600  # a slow line reads an anchor for so long
_AT_ONCE = 1000  # objects that one request may remove


class StoreFailed(Exception):
    """The store did not do what it was asked. The message has no secret."""


class S3Store:
    """The objects below a prefix of a bucket. Several threads may use it.

    Args:
        client: of boto3.
        life: of a signed URL for an upload, in seconds.
    """

    def __init__(self, client: Any, bucket: str, prefix: str, life: int) -> None:
        self._client, self._bucket, self._prefix, self._life = client, bucket, prefix, life
        self._lock = threading.Lock()
        self._signed: dict[str, tuple[float, str]] = {}  # signing takes milliseconds, and all read the same

    @classmethod
    def at(cls, location: str, life: int) -> Self:
        """The store at ``s3://BUCKET[/PREFIX]``. Raises HetnodeError BAD_OPTION. Needs the extra s3."""
        bucket, prefix = parsed(location)
        import boto3  # noqa: PLC0415  it takes a second, and few coordinators have a store
        from botocore.config import Config  # noqa: PLC0415
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        logging.getLogger("botocore").setLevel(logging.INFO)  # below, it tells signatures
        config = Config(
            signature_version="s3v4",
            # A URL would be signed for a checksum of an empty body; ours are for that of the payload.
            request_checksum_calculation="when_required",
            connect_timeout=5,
            read_timeout=20,
            retries={"total_max_attempts": 2},
        )
        try:
            session = boto3.Session()
            if session.get_credentials() is None:
                raise ValueError("there are no credentials")
            client = session.client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise HetnodeError(
                ErrorCode.BAD_OPTION,
                f"The object store {location} cannot be used: {error}.",
                "Give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and for another endpoint than that of AWS "
                "AWS_ENDPOINT_URL_S3, in the environment or in boto3's files.",
            ) from None
        if urlsplit(client.meta.endpoint_url).scheme != "https":
            log.warning("the object store speaks HTTP: who listens on the way sees payloads and URLs")
        return cls(client, bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else "", life)

    def signed_put(self, key: str, nbytes: int, sha256: str) -> str:
        """A URL that takes exactly the body with this length and hash (hex), as this object."""
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
        exact = {"ContentLength": nbytes, "ContentType": CONTENT_TYPE, "ChecksumSHA256": checksum}
        return self._url("put_object", key, exact, self._life)

    def signed_get(self, key: str) -> str:
        """A URL that reads this object for at least half an hour."""
        now = time.monotonic()
        with self._lock:
            made, url = self._signed.get(key, (0.0, ""))
            if url and now - made < _GET_LIFE / 2:
                return url
            if len(self._signed) >= _MOST_SIGNED:
                self._signed.clear()
        url = self._url("get_object", key, {}, _GET_LIFE)
        with self._lock:
            self._signed[key] = now, url
        return url

    def objects(self, below: str) -> Iterator[tuple[str, int]]:
        """Key and size of each object below a key. Raises StoreFailed."""
        with _told("list objects"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + below):
                for each in page.get("Contents", ()):
                    yield each["Key"].removeprefix(self._prefix), each["Size"]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects. Raises StoreFailed."""
        with _told("remove objects"):
            for start in range(0, len(keys), _AT_ONCE):
                named = [{"Key": self._prefix + key} for key in keys[start : start + _AT_ONCE]]
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": named, "Quiet": True})

    def _url(self, method: str, key: str, more: dict[str, Any], life: int) -> str:
        params = {"Bucket": self._bucket, "Key": self._prefix + key, **more}
        return str(self._client.generate_presigned_url(method, Params=params, ExpiresIn=life))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns the errors of boto3 into StoreFailed, around an attempt to do `what`."""
    try:
        yield
    except Exception as error:  # its types are made at run time
        why = getattr(error, "response", {}).get("Error", {}).get("Code") or type(error).__name__
        raise StoreFailed(f"the object store does not {what}: {why}") from None


def parsed(location: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://BUCKET[/PREFIX]``. Raises HetnodeError BAD_OPTION."""
    if (found := _LOCATION.fullmatch(location)) is None:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"--objects {location!r:.80} names no bucket.",
            "Give s3://BUCKET or s3://BUCKET/PREFIX; endpoint and credentials are in the environment.",
        )
    return found[1], found[2] or ""
