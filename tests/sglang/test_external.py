"""The contract: what a server that others run says of itself is compared with the recipe."""

import re
from typing import Any, Final

import pytest

from actors.rollout.engines.checks import ServerRequirements, WrongEngine, check_engine
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.facts import KEPT_OF_INPUT
from tests.sglang.model import CONTEXT
from tests.sglang.server import Server

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

LONGEST: Final = CONTEXT - KEPT_OF_INPUT
RIGHT: Final = ServerRequirements(architectures=("Qwen3ForCausalLM",), dtype="float32", context=LONGEST)
WRONG: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"architectures": ("LlamaForCausalLM",)},
        "architectures = ['Qwen3ForCausalLM']; allowed: ['LlamaForCausalLM'], those of hf_checkpoint",
    ),
    ({"dtype": "bfloat16"}, "dtype = 'float32'; allowed: bfloat16, from model.dtype"),
    (
        {"context": LONGEST + 1},
        f"max_req_input_len = {LONGEST}; allowed: at least rollout.max_context_len = {LONGEST + 1}",
    ),
]


@pytest.mark.behaviour("a server of others that does not serve what the recipe asks for is refused by key and value")
async def test_what_it_says_is_compared(client: SglangClient, server: Server) -> None:
    says = await client.server_info(server.url) | await client.model_info(server.url)
    assert {"architectures", "is_generation", "dtype", "dp_size", "max_req_input_len"} <= set(says)
    await check_engine(client, server.url, RIGHT)
    for changes, message in WRONG:
        with pytest.raises(WrongEngine, match=re.escape(message)):
            await check_engine(client, server.url, RIGHT._replace(**changes))
