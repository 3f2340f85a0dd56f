"""The other side of bench_transports: takes the bytes of weights, and does nothing else. Two ways.

- gloo: joins a group and receives broadcasts of so many bytes each.
- post: a server that decodes the body of each call, as SGLang takes it, and copies the tensors that it names.

Run: python -m tests.bench.transport_side gloo PORT NAME BYTES... | post PORT
"""

import asyncio
import base64
import pickle
import sys
from typing import Any

import torch
from aiohttp import web

from actors.tiny_engine.engine.updating import SENDER, join

LIMIT_S = 120.0


def main() -> int:
    torch.set_num_threads(1)
    how, port, *rest = sys.argv[1:]
    if how == "gloo":
        receive(int(port), rest[0], [int(size) for size in rest[1:]])
    else:
        asyncio.run(serve(int(port)))
    return 0


def receive(port: int, name: str, sizes: list[int]) -> None:
    group: Any = join("127.0.0.1", port, rank=1, world_size=2, name=name, timeout_s=LIMIT_S)
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    for size in sizes:
        group.broadcast(room[:size], SENDER).wait()


async def serve(port: int) -> None:
    """For ever."""
    kept: dict[str, torch.Tensor] = {}

    async def take(request: web.Request) -> web.Response:
        for payload in (await request.json())["serialized_named_tensors"]:
            value = pickle.loads(base64.b64decode(payload))
            flat = value["flattened_tensor"]
            for each in value["metadata"]:
                tensor = flat[each.start_idx : each.end_idx].view(each.dtype).view(each.shape)
                if each.name in kept:
                    kept[each.name].copy_(tensor)
                else:
                    kept[each.name] = tensor.clone()
        return web.json_response({"success": True})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/update_weights_from_tensor", take)
    app.router.add_get("/ready", lambda _: asyncio.sleep(0, web.Response()))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
