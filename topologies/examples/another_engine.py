"""The generate function of another-engine.toml: the tokens come from a server that is not SGLang.

It calls the server as one calls vLLM: POST /v1/completions takes token ids, and returns token ids and log-probs.
"""

import asyncio
import os
from pathlib import Path

import aiohttp

SERVER = os.environ.get("ANOTHER_ENGINE", "http://127.0.0.1:8777")
WEIGHTS = Path("runs/another-engine/weights")  # the trainer writes each version there, complete or not at all
LIMIT_S = 60
loading = asyncio.Lock()
loaded = None


async def generate(conversation):
    """One turn, from the newest weights, with the log-probs of the server at the temperature that it sampled at."""
    ends = {}

    async def engine(ids):
        async with aiohttp.ClientSession(SERVER, timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            await load_newest(session)
            request = {
                "prompt": ids,
                "max_tokens": conversation.room,
                "temperature": conversation.sampling.temperature,
                "logprobs": 1,
                "return_token_ids": True,
            }
            (choice,) = (await post(session, "/v1/completions", request))["choices"]
        ends["reason"] = choice["finish_reason"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    await conversation.generate_by(engine)
    if ends.get("reason") == "length":  # nothing after a replay, which does not ask again
        conversation.end("truncated")


async def load_newest(session):
    """Let the server load the newest weights of the run, once for each version."""
    global loaded
    async with loading:
        newest = newest_weights()
        if newest != loaded:
            await post(session, "/load", {"path": str(newest)})
            loaded = newest


def newest_weights():
    """The directory of the newest version, such as v000007."""
    return max(WEIGHTS.glob("v*")).resolve()


async def post(session, path, body):
    """Send JSON and return the answer. A failure raises, and the sample's group fails with the reason."""
    global loaded
    async with session.post(path, json=body) as answer:
        if answer.status != 200:
            loaded = None  # a server that was started again has no weights: the next sample loads them
            raise RuntimeError(f"{path} answered {answer.status}: {(await answer.text())[:200]}")
        return await answer.json()
