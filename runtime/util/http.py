"""HTTP health check: one GET on a new connection."""

import aiohttp


async def status_of(url: str, *, timeout_s: float) -> int | None:
    """Status of the answer to a GET; None without an answer in time."""
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
