"""What is said of a request that JetStream refuses until the deadline."""

from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from runtime.bus.errors import BusUnavailable
from runtime.bus.limits import BusLimits
from runtime.bus.nats.connection import Connection, RawMessage
from runtime.bus.nats.store import ApiFailed, api_call

pytestmark = pytest.mark.anyio

NOT_ENABLED = b'{"error": {"code": 503, "err_code": 10039, "description": "JetStream not enabled for account"}}'


class _Refuses:
    """A connection whose server refuses once and then has no time left to answer."""

    limits = BusLimits()

    def __init__(self) -> None:
        self._answers = [NOT_ENABLED]

    def time(self) -> float:
        return 0.0

    async def retry(self, subject: str, *_request: Any) -> RawMessage:
        if self._answers:
            return Msg(_client=cast("Any", None), subject=subject, data=self._answers.pop())
        raise BusUnavailable(f"{subject}: no answer after 0.001 s")

    async def pause(self, *_failure: Any) -> bool:
        return True


async def test_a_refusal_is_told_rather_than_a_last_attempt_that_had_no_time() -> None:
    with pytest.raises(ApiFailed, match="JetStream not enabled for account"):
        await api_call(cast("Connection", _Refuses()), "INFO")
