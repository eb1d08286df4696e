"""A mirror in an S3 bucket of Amazon or a compatible store, by direct S3 requests.

Every object and part is sent with its MD5, which the store checks, and its size is then read back.
A manifest is created with `If-None-Match: *`. At most `PARTS_AT_ONCE` parts are sent at a time, so
memory stays bounded for files of any size.

Credentials and region come from the same places as for any AWS tool. The endpoint of another
store comes from `HOLDFAST_S3_ENDPOINT` or `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from holdfast.contracts import environment
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.errors import MirrorError
from holdfast.trainer.mirror import store

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 60.0
DELETES_AT_ONCE: Final = 1000
# Answers that a retry will not change.
_REFUSALS: Final = frozenset(
    {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "NoSuchBucket"}
    | {"InvalidBucketName", "ExpiredToken", "InvalidToken", "MethodNotAllowed", "404"}
)
_NOT_THERE: Final = frozenset({"404", "NoSuchKey", "NotFound"})
_THERE_ALREADY: Final = frozenset({"412", "PreconditionFailed"})
_SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class S3Error(MirrorError):
    """The store's error, with its `code` (`NoSuchKey`, `412` …). Empty if there was no answer."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, is_passing=code not in _REFUSALS)
        self.code = code


@dataclass(frozen=True)
class _Part:
    """A part of a file. `source` is an object with the same bytes at `at`, "" if there is none."""

    key: str
    upload: str
    number: int
    at: int
    content: bytes
    source: str
    etag: str = ""
    copied: int = 0

    @property
    def address(self) -> dict[str, Any]:
        return {"Key": self.key, "UploadId": self.upload, "PartNumber": self.number}


class S3Store:
    """A prefix in a bucket. Its methods may be called from several threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._bucket, _, place = url.partition("://")[2].partition("/")
        self._root = f"{place.strip('/')}/" if place.strip("/") else ""
        self._fs = _connect(url)
        # False once the store has shown that it cannot copy parts of its own objects.
        self._copies = True
        self._pool = ThreadPoolExecutor(store.PARTS_AT_ONCE, thread_name_prefix="mirror")

    def put_file(
        self, key: str, path: Path, entry: FileEntry, former: store.FormerFile | None = None
    ) -> int:
        parts = store.checked_parts(path, entry)
        first = next(parts)
        copied = 0
        if len(first) == entry.bytes:
            # `parts` checks the bytes against the entry when it reaches the end of the file.
            self._put(key, b"".join((first, *parts)))
        else:
            copied = self._put_parts(key, chain((first,), parts), former)
        self._confirm(key, entry.bytes)
        return copied

    def put_new(self, key: str, content: bytes) -> bool:
        try:
            # The commit: of two processes, one creates the manifest.
            self._put(key, content, IfNoneMatch="*")
        except S3Error as error:
            if error.code in _THERE_ALREADY:
                return False
            if error.code not in {"501", "NotImplemented"}:
                raise
            # Without conditional requests, check first. Only one process writes this name.
            if self.read(key) is not None:
                return False
            self._put(key, content)
        return True

    def put(self, key: str, content: bytes) -> None:
        self._put(key, content)

    def read(self, key: str) -> bytes | None:
        try:
            return self._get(key, None)
        except S3Error as error:
            if error.code in _NOT_THERE:
                return None
            raise

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        starts = iter(range(0, size_bytes, store.PART_BYTES))
        ahead: deque[Future[bytes]] = deque()
        try:
            # Requests ahead of the reader, but few, so that memory stays bounded.
            while True:
                while (
                    len(ahead) < store.PARTS_AT_ONCE and (start := next(starts, None)) is not None
                ):
                    end = min(start + store.PART_BYTES, size_bytes) - 1
                    ahead.append(self._pool.submit(self._get, key, f"bytes={start}-{end}"))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def sizes(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for page in self._list(prefix, {}):
            for item in page.get("Contents", ()):
                found[item["Key"][len(self._root) :]] = int(item["Size"])
        return found

    def folders(self, prefix: str) -> list[str]:
        inside = len(self._root) + len(prefix.rstrip("/")) + 1
        found = set()
        for page in self._list(prefix, {"Delimiter": "/"}):
            for item in page.get("CommonPrefixes", ()):
                found.add(item["Prefix"][inside:].rstrip("/"))
        return sorted(found - {""})

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETES_AT_ONCE):
            names = [{"Key": self._root + key} for key in keys[start : start + DELETES_AT_ONCE]]
            answer = self._call("delete_objects", Delete={"Objects": names, "Quiet": True})
            for problem in answer.get("Errors", ()):
                raise S3Error(
                    f"{self._url}: deleting {problem.get('Key')}: {problem.get('Message')}",
                    str(problem.get("Code", "")),
                )

    def abort_uploads(self, prefix: str) -> int:
        return self._abort_all(prefix, lambda _: True)

    # --- requests -------------------------------------------------------------------------

    def _abort_all(self, prefix: str, is_wanted: Callable[[str], bool]) -> int:
        """Abort the uploads under `prefix` whose key is wanted, and return their number."""
        count = 0
        markers: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=self._root + prefix, **markers)
            for upload in page.get("Uploads", ()):
                key = upload["Key"][len(self._root) :]
                if not is_wanted(key):
                    continue
                # Another process may complete or abort it at this moment.
                with contextlib.suppress(S3Error):
                    self._abort(key, upload["UploadId"])
                    count += 1
            if not page.get("IsTruncated"):
                return count
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def _put(self, key: str, content: bytes, **conditions: str) -> None:
        self._call(
            "put_object", Key=self._root + key, Body=content, ContentMD5=_md5(content), **conditions
        )

    def _put_parts(self, key: str, parts: Iterable[bytes], former: store.FormerFile | None) -> int:
        """Send parts as they are read, some in parallel. The object exists if all are correct.

        Returns the bytes that the store copied from `former`.
        """
        # An earlier upload of this file that was killed cannot be continued.
        # Parts of a killed upload cost space until they are aborted, and no listing of objects
        # shows them.
        self._abort_all(key, lambda found: found == key)
        upload = self._call("create_multipart_upload", Key=self._root + key)["UploadId"]
        done: list[_Part] = []
        under_way: deque[Future[_Part]] = deque()
        at = 0
        try:
            for number, content in enumerate(parts, start=1):
                source = former.key if former is not None and at in former.parts else ""
                part = _Part(self._root + key, upload, number, at, content, source)
                under_way.append(self._pool.submit(self._put_part, part))
                at += len(content)
                if len(under_way) >= store.PARTS_AT_ONCE:
                    done.append(under_way.popleft().result())
            done += [future.result() for future in under_way]
            self._call(
                "complete_multipart_upload",
                Key=self._root + key,
                UploadId=upload,
                MultipartUpload={
                    "Parts": [{"PartNumber": part.number, "ETag": part.etag} for part in done]
                },
            )
            return sum(part.copied for part in done)
        except BaseException:
            for future in under_way:
                future.cancel()
            with contextlib.suppress(S3Error):
                self._abort(key, upload)
            raise

    def _put_part(self, part: _Part) -> _Part:
        """Copy a part within the store or send it. Return it with its entity tag."""
        if part.source and self._copies and (etag := self._copy_part(part)):
            return dataclasses.replace(part, content=b"", etag=etag, copied=len(part.content))
        answer = self._call(
            "upload_part",
            **part.address,
            Body=part.content,
            # The store compares the MD5 and refuses a part that was damaged on the way. fsspec's
            # `put_file` sends none, see decision 13.
            ContentMD5=_md5(part.content),
        )
        return dataclasses.replace(part, content=b"", etag=answer["ETag"])

    def _copy_part(self, part: _Part) -> str:
        """Let the store copy a part of another object. Return its entity tag, "" if it is not ours.

        S3's entity tag of a part is the MD5 of its bytes, unless a key of KMS encrypts them.
        """
        try:
            answer = self._call(
                "upload_part_copy",
                **part.address,
                CopySource={"Bucket": self._bucket, "Key": self._root + part.source},
                CopySourceRange=f"bytes={part.at}-{part.at + len(part.content) - 1}",
            )
        except S3Error as error:
            # The other object may be deleted meanwhile. After any other error, or with other tags,
            # this process sends all parts: that is never wrong.
            self._copies = error.code in _NOT_THERE
            return ""
        etag = str(answer.get("CopyPartResult", {}).get("ETag", ""))
        md5 = hashlib.md5(part.content, usedforsecurity=False).hexdigest()
        self._copies = etag.strip('"') == md5
        return etag if self._copies else ""

    def _abort(self, key: str, upload: str) -> None:
        self._call("abort_multipart_upload", Key=self._root + key, UploadId=upload)

    def _confirm(self, key: str, size_bytes: int) -> None:
        found = int(self._call("head_object", Key=self._root + key)["ContentLength"])
        if found != size_bytes:
            raise S3Error(f"{self._url}: {key} has {found} bytes, expected {size_bytes}", "")

    def _get(self, key: str, byte_range: str | None) -> bytes:
        wanted = {"Range": byte_range} if byte_range else {}

        async def read(**given: Any) -> bytes:
            answer = await self._fs._call_s3("get_object", **given)
            async with answer["Body"] as body:
                content: bytes = await body.read()
            return content

        found: bytes = self._run(
            "get_object", read, Bucket=self._bucket, Key=self._root + key, **wanted
        )
        return found

    def _list(self, prefix: str, more: dict[str, str]) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            place = f"{self._root}{prefix.rstrip('/')}/"
            page = self._call("list_objects_v2", Prefix=place, **more, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, name: str, **given: Any) -> dict[str, Any]:
        """Send one request, bounded in time. Raises `S3Error` with the store's own code."""
        answer: dict[str, Any] = self._run(
            name, self._fs._call_s3, name, Bucket=self._bucket, **given
        )
        return answer

    def _run(self, name: str, act: Any, *given: Any, **named: Any) -> Any:
        from fsspec.asyn import FSTimeoutError, sync

        try:
            return sync(self._fs.loop, act, *given, timeout=store.CALL_TIMEOUT_S, **named)
        except FSTimeoutError as error:
            raise S3Error(
                f"{self._url}: {name}: no answer within {store.CALL_TIMEOUT_S:.0f} s", ""
            ) from error
        except Exception as error:
            # The library raises many types without a common base. Each means a failed request.
            raise S3Error(_describe(self._url, name, error), _code_of(error)) from error


def _connect(url: str) -> Any:
    """Return an s3fs file system for the environment. Raises `MirrorError` without s3fs."""
    try:
        import s3fs
    except ImportError as error:
        raise MirrorError(
            f"{url}: s3fs is not installed ({error}). Install Holdfast with the extra `s3` in "
            "this environment"
        ) from error
    if problem := environment.problem_with_address(environment.S3_ENDPOINT, os.environ):
        raise MirrorError(problem)
    endpoint = os.environ.get(environment.S3_ENDPOINT) or None
    system = s3fs.S3FileSystem(
        endpoint_url=endpoint,
        use_listings_cache=False,
        # Holdfast retries requests itself, because it counts and journals the retries.
        config_kwargs={
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            # Each object has its MD5. Older stores do not support the newer checksum trailers.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )
    # s3fs has more retries above those of botocore.
    system.retries = 1
    return system


def _md5(content: bytes) -> str:
    digest = hashlib.md5(content, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def _code_of(error: BaseException) -> str:
    """Return the store's code from the error or one of its causes. Empty if there is none."""
    at: BaseException | None = error
    while at is not None:
        answer = getattr(at, "response", None)
        if isinstance(answer, dict) and "Error" in answer:
            return str(answer["Error"].get("Code", ""))
        at = at.__cause__ or at.__context__
    return "404" if isinstance(error, FileNotFoundError) else ""


def _describe(url: str, name: str, error: BaseException) -> str:
    """Return the message of a failed request, without the secrets that a library may quote."""
    text = f"{url}: {name}: {type(error).__name__}: {error}"
    for variable in _SECRETS:
        secret = os.environ.get(variable)
        if secret:
            text = text.replace(secret, "***")
    return text
