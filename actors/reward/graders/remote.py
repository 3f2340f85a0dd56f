"""The grader `remote_rm`: asks a server for a sample's reward, by one POST."""

import json
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from actors.reward.causes import Cause
from actors.reward.samples import GradedSample
from runtime.util.secrets import HIDDEN

URL: Final = "PHYSARUM_RM_URL"  # environment of grader processes: reward.rm_url and its key
KEY: Final = "PHYSARUM_RM_KEY"
MAX_ANSWER_BYTES: Final = 8 << 20
MAX_REDIRECTS: Final = 3
MAX_REASON: Final = 300
CHUNK_BYTES: Final = 1 << 16


class RemoteError(Exception):
    """A server gave no reward. `cause` or `status` says why."""

    def __init__(
        self, reason: str, *, status: int | None = None, cause: Cause | None = None, headers: Mapping[str, str] = {}
    ) -> None:
        """Describe the failure, without the key."""
        super().__init__(reason)
        self.status = status
        self.cause = cause
        self.headers = {"Retry-After": headers["Retry-After"]} if "Retry-After" in headers else {}


async def remote_rm(sample: GradedSample, url: str | None = None, key: str | None = None) -> Any:
    """Send a sample to a server and return the JSON of its answer. An async function.

    The server gets a POST with the JSON `{"prompt", "response", "label", "metadata"}`, and the key as
    `Authorization: Bearer`. It is sent once: the run repeats it by the cause of its failure (`reward.failures`), within
    its limits (`reward.limits.remote_rm`). Before that it waits as long as the answer's header Retry-After says, in
    seconds or as a date, but no longer than the timeout of one call.

    Args:
        sample: What is sent.
        url: The server; in a run `reward.rm_url`.
        key: Its API key; in a run that of `reward.rm_api_key_env` or `reward.rm_api_key_file`.

    Returns:
        The answer's JSON: a number, or a dict of which `reward.reward_key` names the reward. A run refuses null, text,
        lists and NaN with the cause `bad_answer`.

    Raises:
        RemoteError: The status is not a success (`rate_limited` for 429, `timeout` for 408, `refused` for others below
            500, `worker_lost` from 500 on), a redirect leads to another host (`refused`), the answer is not HTTP, not
            JSON or larger than 8 MiB (`bad_answer`), or it breaks off (`worker_lost`). The text never shows the key.
        aiohttp.ClientError: The connection was lost or refused (`worker_lost`).

    Edges:
        Redirects are followed on the same host, scheme and port, three times. It waits without limit of its own; a run
        ends it after `reward.timeout_s`. `boxed_remote_rm` does not exist.

    Source:
        slime's `remote_rm`, which sends no metadata, follows redirects and repeats a refused request ten times.
    """
    import aiohttp  # heavier than everything else here

    address, secret = url or os.environ.get(URL, ""), key or os.environ.get(KEY, "")
    if not address:
        raise RemoteError("remote_rm needs reward.rm_url", cause="refused")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {secret}"} if secret else {})}
    own_connection = aiohttp.TCPConnector(force_close=True)  # the server may close one after a redirect
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=own_connection) as session:
        for _ in range(MAX_REDIRECTS + 1):
            try:
                async with session.post(
                    address, data=_request_of(sample), headers=headers, allow_redirects=False
                ) as response:
                    if 300 <= response.status < 400:
                        address = str(_same_origin(response, secret))
                        continue
                    body = _masked(await _bounded(response), secret)
                    return _answer_in(response.status, body, response.headers)
            except aiohttp.ClientResponseError as error:  # its text has the headers, and so the key
                shown = _shown(_hidden(error.message, secret))
                raise RemoteError(f"the answer is not HTTP: {shown}", cause="bad_answer") from None
            except aiohttp.ClientPayloadError as error:
                cause = "bad_answer" if "content-encoding" in str(error) else "worker_lost"
                shown = _shown(_hidden(str(error), secret))
                raise RemoteError(f"the answer has no end: {shown}", cause=cause) from None
    raise RemoteError(f"the server redirected more than {MAX_REDIRECTS} times", cause="refused")


def remote_environment(url: str | None, key: str | None) -> Mapping[str, str]:
    """Variables with which grader processes call `remote_rm`. They are secret."""
    return {} if url is None else {URL: url, **({} if key is None else {KEY: key})}


def _request_of(sample: GradedSample) -> bytes:
    """The JSON of a request, in ASCII: a text may have lone surrogates."""
    request = {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}
    return json.dumps(request).encode()


def _same_origin(response: Any, secret: str) -> Any:
    """The place of a redirect.

    Raises:
        RemoteError: it is not the host that was asked, so it must not get the sample and the key.
    """
    target = response.headers.get("Location", "")
    try:
        place = response.url.join(type(response.url)(target))
        same = place.origin() == response.url.origin()
    except ValueError:
        same, place = False, None
    if not target or not same or response.status not in (307, 308):
        shown = _clipped(_hidden(target, secret)) or "nowhere"
        raise RemoteError(f"status {response.status}: redirected to {shown}, which is not followed", cause="refused")
    return place


async def _bounded(response: Any) -> bytes:
    read = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        read += chunk
        if len(read) > MAX_ANSWER_BYTES:
            raise RemoteError(f"the answer has more than {MAX_ANSWER_BYTES} bytes", cause="bad_answer")
    return bytes(read)


def _hidden(text: str, secret: str) -> str:
    """Hide the key in a text that quotes an answer, before it is cut."""
    return text.replace(secret, HIDDEN) if secret else text


def _masked(body: bytes, secret: str) -> bytes:
    """Hide the key in an answer that repeats it."""
    return body.replace(secret.encode(), HIDDEN.encode()) if secret else body


def _clipped(text: str) -> str:
    return text[:MAX_REASON].encode("utf-8", "replace").decode()


def _shown(text: str) -> str:
    return _clipped(" ".join(text.split()))


def _answer_in(status: int, body: bytes, headers: Mapping[str, str]) -> Any:
    shown = _shown(body.decode("utf-8", "replace"))
    if not 200 <= status < 300:
        raise RemoteError(f"status {status}{shown and f': {shown}'}", status=status, headers=headers)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteError(f"the answer is no JSON: {error} in {shown!r}", cause="bad_answer") from error
