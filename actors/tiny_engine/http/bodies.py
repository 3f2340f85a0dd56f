"""Request bodies of the HTTP API, with SGLang's field names."""

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

MAX_STOPS: Final = 32  # stop texts per request
MAX_MASK: Final = 4096  # tokens of a sampling mask: SGLang's default of --sampling-mask-max-tokens
MAX_BATCH: Final = 4096  # requests in one call, n included
DEFAULT_NEW_TOKENS: Final = 128

DEFAULT_GROUP: Final = "weight_update_group"

Selector = Literal["all", "target", "draft"]
OneOrMany = str | list[str] | None


class SchemaError(ValueError):
    """A body is not JSON, or a field has the wrong type."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request. The fields in UNSUPPORTED_SAMPLING must keep their defaults."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    min_new_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)] = 1
    stop: OneOrMany = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # no effect with fast tokenizers, as in SGLang
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None
    custom_params: dict[str, Any] | None = None  # for logit processors, which are not supported

    stop_regex: OneOrMany = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    beam_width: int | None = None


UNSUPPORTED_SAMPLING: Final = (
    *("stop_regex", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("json_schema", "regex", "ebnf", "structural_tag", "beam_width"),
)
NEUTRAL: Final = SamplingParams()


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /generate. Unknown keys are ignored, as in SGLang. Fields of the second block must stay unset."""

    input_ids: msgspec.Raw = msgspec.Raw(b"null")
    text: OneOrMany = None
    sampling_params: msgspec.Raw = msgspec.Raw(b"null")
    rid: OneOrMany = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_sampling_mask: bool | list[bool] | None = None
    top_logprobs_num: int | list[int] | None = None
    lora_path: str | list[str | None] | None = None  # name of an adapter; None: the base model

    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    sampling_logprobs_mode: str | None = None
    return_entropy: bool | None = None
    custom_logit_processor: Any = None
    session_params: Any = None
    session_id: Any = None


UNSUPPORTED_FIELDS: Final = (
    *("input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob"),
    *("return_hidden_states", "sampling_logprobs_mode", "return_entropy"),
    *("custom_logit_processor", "session_params", "session_id"),
)


class AbortBody(msgspec.Struct, frozen=True):
    """Body of POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(msgspec.Struct, frozen=True):
    """Body of POST /continue_generation."""

    torch_empty_cache: bool = True


class UpdateFromDiskBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_disk. GPU options are accepted and have no effect."""

    model_path: str
    load_format: Literal["auto", "safetensors", "dummy"] | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    keep_pause: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    is_async: bool = False
    token_step: int = 0
    manifest: None = None


class InitGroupBody(msgspec.Struct, frozen=True):
    """Body of POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = DEFAULT_GROUP
    backend: str = "nccl"


class DestroyGroupBody(msgspec.Struct, frozen=True):
    """Body of POST /destroy_weights_update_group."""

    group_name: str = DEFAULT_GROUP


class BeginUpdateBody(msgspec.Struct, frozen=True):
    """Body of POST /begin_weight_update."""

    selector: Selector = "all"


class EndUpdateBody(msgspec.Struct, frozen=True):
    """Body of POST /end_weight_update."""


class _BucketBody(msgspec.Struct, frozen=True, kw_only=True):
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False


class UpdateFromDistributedBody(_BucketBody, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP


class UpdateFromTensorBody(_BucketBody, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_tensor: a base64-encoded pickle per rank."""

    serialized_named_tensors: list[str]


BucketBody = UpdateFromDistributedBody | UpdateFromTensorBody


class UpdateVersionBody(msgspec.Struct, frozen=True):
    """Body of POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class CheckerBody(msgspec.Struct, frozen=True):
    """Body of POST /weights_checker."""

    action: Literal["checksum"] = "checksum"
    skip_tensor_list: tuple[str, ...] | None = None
    selector: Any = None
    allow_quant_error: bool = False


class MemoryBody(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation. Without tags, it means all tags."""

    tags: tuple[Literal["kv_cache", "weights", "cuda_graph"], ...] | None = None


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /load_lora_adapter."""

    lora_name: str
    lora_path: str  # a directory in peft's format
    pinned: bool = False  # never unloaded to make room for another one


class LoadAdapterFromTensorsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /load_lora_adapter_from_tensors: a base64-encoded pickle of a dict of tensors per rank."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: list[str]
    pinned: bool = False
    load_format: str | None = None
    expected_checksums: dict[str, str] | None = None  # sha256 of each tensor's bytes, in hexadecimal digits


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /unload_lora_adapter."""

    lora_name: str


class SlowDownBody(msgspec.Struct, frozen=True):
    """Body of POST /slow_down: seconds added to every step, for tests and benchmarks."""

    forward_sleep_time: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None


T = TypeVar("T")


class _Streams(msgspec.Struct, frozen=True):
    stream: bool = False


def is_stream(data: bytes) -> bool:
    """Whether the body of a POST /generate requests a stream.

    Raises:
        SchemaError: the body is not JSON, or `stream` has the wrong type.
    """
    return decode_body(data, _Streams).stream


def decode_body(data: bytes | msgspec.Raw, struct: type[T]) -> T:
    """Decode a JSON body.

    Raises:
        SchemaError: the body is not JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=struct)
    except msgspec.DecodeError as error:
        raise SchemaError(str(error)) from error
