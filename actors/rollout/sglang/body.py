"""Bodies of /generate requests in SGLang's format."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messages import SamplingParams


def generate_body(
    rid: str,
    input_ids: Sequence[NDArray[np.int32]],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    seeds: Sequence[int] = (),
    version: int = 0,
    adapter: str = "",
) -> dict[str, Any]:
    """Build a request for one response per list of token ids, with log-probs.

    A batch is sampled without seeds. The router takes one set of sampling parameters for the whole batch, and a common
    seed would make its responses alike.

    Args:
        rid: id of the request.
        input_ids: prompts.
        params: sampling parameters.
        max_new_tokens: of each response.
        seeds: of the responses; empty: the server chooses them.
        version: weight version of the engines. Cached prefixes are shared only within a version: after an in-place
            update the cache still holds prefixes of older weights.
        adapter: name of a LoRA adapter; empty: the base model.
    """
    prompts = [ids.tolist() for ids in input_ids]  # JSON has no arrays
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    if len(seeds) == 1:
        sampling["sampling_seed"] = seeds[0]
    masks = {"return_sampling_mask": True} if params.return_sampling_mask else {}
    return {
        "rid": rid,
        "input_ids": prompts if len(prompts) > 1 else prompts[0],
        "sampling_params": sampling,
        "return_logprob": True,
        "extra_key": f"weights {version}",
        **masks,
        **_named(adapter),
    }


def probe_body(
    rid: str, token_ids: Sequence[int], start: int = 0, topk: int = 0, *, adapter: str = ""
) -> dict[str, Any]:
    """Build a request for the log-probs of a prompt only, from the token after `start` on.

    With `topk` it also asks for that number of likeliest tokens at each place.
    """
    return {
        "rid": rid,
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,  # 0 also keeps the engine from using KV cache of older weights
        **({"top_logprobs_num": topk} if topk else {}),
        **_named(adapter),
    }


def _named(adapter: str) -> dict[str, Any]:
    return {"lora_path": adapter} if adapter else {}
