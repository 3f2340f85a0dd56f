"""Constants of SGLang's server: reserved tokens, names of arguments, environment variables and log words.

The tiny engine reserves the same tokens.
"""

from typing import Final

KEPT_OF_INPUT: Final = 6  # tokens that must remain free after a prompt, otherwise it is refused
KEPT_OF_RESPONSE: Final = 2  # tokens that the longest response leaves unused

NO_DIAGNOSTICS: Final = {  # a crashing server waits 65 s for its dumps and keeps requests open
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
}
CRASH_WORDS: Final = ("hit an exception",)  # logged by the scheduler before its server sends itself SIGKILL
OVERRIDES: Final = "json_model_override_args"  # argument: keys that replace those of config.json

TINY_ENGINE: Final = "physarum-embedded"  # version that the tiny engine reports in /server_info
FROM_PEER: Final = "remote_instance"  # load format of weights from a peer
UNLABELLED: Final = "default"  # label of weights that were never labelled
LAYOUT_KEYS: Final = (  # keys of /server_info; engines with equal values have equal tensors for equal files
    *("version", "device", "dtype", "quantization", "tp_size", "pp_size", "dp_size", "ep_size", "nnodes"),
    *("enable_dp_attention", "attention_backend", "moe_runner_backend", "json_model_override_args"),
)
