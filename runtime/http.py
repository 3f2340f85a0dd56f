"""Asking a server over HTTP whether it lives: one GET on a connection of its own."""

import aiohttp


async def status_of(url: str, *, timeout_s: float) -> int | None:
    """The status that a GET is answered with; None if there is no answer in time."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            return response.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
