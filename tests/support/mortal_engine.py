"""The tiny engine, except that one prompt token ends its process a little later.

python -m tests.support.mortal_engine TOKEN ARGUMENTS OF THE ENGINE...
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from actors.tiny_engine import __main__ as engine
from actors.tiny_engine.engine import frontend
from actors.tiny_engine.http import serve
from actors.tiny_engine.http.api import Job

DIES_AFTER_S = 0.2  # other requests have arrived by then
EXIT_CODE = 7


class MortalFrontend(frontend.Frontend):
    """Ends the process when a prompt contains the deadly token."""

    @asynccontextmanager
    async def generation(self, jobs: Sequence[Job]) -> AsyncGenerator[frontend.GenerateCall]:
        if any(DEADLY in job.request.prompt_ids for job in jobs):
            await asyncio.sleep(DIES_AFTER_S)
            os._exit(EXIT_CODE)
        async with super().generation(jobs) as generation:
            yield generation


if __name__ == "__main__":
    DEADLY = int(sys.argv.pop(1))
    serve.Frontend = MortalFrontend
    sys.exit(engine.main())
