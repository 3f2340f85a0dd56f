"""What answers the calls of a process in test_together.py."""

import asyncio

from runtime.functions.answers import Answers


async def answer(payload: bytes) -> bytes:
    """Wait if asked to, and answer in capitals."""
    if payload == b"raise":
        raise KeyError("as told")
    if payload == b"forever":
        await asyncio.Event().wait()
    return payload.upper()


def answering(hello: bytes) -> Answers:
    return Answers(bytes, hello[::-1], together=answer)
