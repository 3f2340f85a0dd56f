"""An engine that takes no time: SGLang's HTTP API with the same four tokens for every sample.

Run: python -m tests.bench.zero_engine PORT
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web

IDS = [7, 4, 2, 1]
TEXT = "74"
MODEL = str(Path(__file__).parents[2] / "topologies/demo/models/reverse-digits")  # the router looks for its tokenizer


class GenerateBody(msgspec.Struct):
    """What is looked at of a request."""

    rid: str
    input_ids: list[int | list[int]]  # a prompt, or several


class UpdateBody(msgspec.Struct):
    """What is looked at of a weight update."""

    weight_version: str


class ZeroEngine:
    """Answers at once; knows only its weight version."""

    def __init__(self) -> None:
        self._version = "0"
        self._decoder = msgspec.json.Decoder(GenerateBody)

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Every endpoint."""
        body = await request.read()
        match request.path:
            case "/generate":
                answer = self._generate(self._decoder.decode(body))
            case "/update_weights_from_disk":
                self._version = msgspec.json.decode(body, type=UpdateBody).weight_version
                answer = {"success": True, "message": "", "num_paused_requests": 0}
            case "/weights_checker":
                answer = {"success": True, "message": "", "ranks": [], "per_engine_checksum": "sum"}
            case _:
                answer = {"model_path": MODEL, "is_generation": True, "weight_version": self._version}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def _generate(self, body: GenerateBody) -> Any:
        if isinstance(body.input_ids[0], int):
            return self._answer(body.rid)
        return [self._answer(f"{body.rid}_{index}") for index in range(len(body.input_ids))]

    def _answer(self, rid: str) -> dict[str, Any]:
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": len(IDS)},
            "weight_version": self._version,
            "weight_versions": [{"version": self._version, "start": 0, "end": len(IDS)}],
            "output_token_logprobs": [(-0.5, token, None) for token in IDS],
        }
        return {"text": TEXT, "output_ids": IDS, "meta_info": meta}


async def serve(port: int) -> None:
    """Listen until the process is ended."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router greets in HTTP/2 first
    runner = web.ServerRunner(web.Server(ZeroEngine().handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    uvloop.run(serve(parser.parse_args(argv).port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
