"""The contract: log-probs of tokens that another model sampled, as a teacher's engine computes them."""

from pathlib import Path

import pytest
import torch

from actors.rollout.sglang.client import SglangClient
from tests.sglang.rig import Rig
from tests.sglang.server import Server
from tests.sglang.test_answers import with_weights
from tests.support.tiny_models import all_logits, teacher_forced

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

CLOSE = 1e-4  # nats, between float32 passes of the engine and of transformers
PROMPT = [3, 4, 5]
LIKELIEST = 5
RESPONSES = ([9], [10, 2, 30, 30, 61, 7], [2 + place * 7 % 60 for place in range(200)])


@pytest.mark.behaviour("log-probs of given tokens after a prompt equal transformers'")
async def test_log_probs_of_given_tokens(
    rig: Rig, server: Server, client: SglangClient, contract_model: Path, weights: dict[int, Path]
) -> None:
    model = with_weights(contract_model, weights[1])
    responses = (*RESPONSES, RESPONSES[1])  # the last one finds its tokens in the cache
    expected = [teacher_forced(model, PROMPT, response).tolist() for response in responses]
    await rig.update(1)
    for number, (response, log_probs) in enumerate(zip(responses, expected, strict=True)):
        rid, topk = f"given-{number}", number % 2 * LIKELIEST  # every second one asks for its likeliest tokens, too
        found = await client.given_log_probs(server.url, rid, PROMPT + response, len(PROMPT), 120.0, topk)
        assert found.log_probs == pytest.approx(log_probs, abs=CLOSE)
        assert (found.topk is None) == (topk == 0)
        if found.topk is not None:
            spread = all_logits(model, PROMPT, response).log_softmax(-1)
            assert found.topk.log_probs.ravel() == pytest.approx(spread.topk(topk).values.flatten(), abs=CLOSE)
            own = spread.gather(1, torch.from_numpy(found.topk.ids))  # near ties may be in another order
            assert found.topk.log_probs.ravel() == pytest.approx(own.flatten(), abs=CLOSE)
