"""The body of a /generate request, in SGLang's words."""

from collections.abc import Sequence
from typing import Any

from messages import SamplingParams


def generate_body(
    rid: str, input_ids: Sequence[Sequence[int]], params: SamplingParams, *, max_new_tokens: int
) -> dict[str, Any]:
    """Ask for one response to each list of token ids, with log-probs."""
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
    return {
        "rid": rid,
        "input_ids": input_ids if len(input_ids) > 1 else input_ids[0],
        "sampling_params": sampling,
        "return_logprob": True,
    }
