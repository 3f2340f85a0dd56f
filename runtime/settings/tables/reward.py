"""The table `reward`: graders, judges, and samples without a score."""

from typing import Annotated, Any, Literal

import msgspec

from runtime.functions.table import GRADER, PARSER
from runtime.settings.reading.access import Address, Code, Harmless, NamesSecret, Reads, SecretFile
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Name, NonNegative, Positive, Text, Timeout, Variable
from runtime.util.rewards import MAX_REWARD


class JudgeConfig(Config, frozen=True, kw_only=True):
    """A judge: a language model that scores samples. Reward actors send its requests.

    Its model is served by an engine pool of the run, or by a server with OpenAI's API.
    """

    # Engine pool of the judge's model: a name in `engines`. By default "judge", unless `url` is set.
    pool: Name | None = None
    # Base URL of a server with OpenAI's API, up to "/v1", in place of a pool.
    url: Address[Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s]+$")] | None] = None
    # Name of the model on the server of `url`.
    model: Harmless[Text | None] = None
    # Environment variable with the API key of `url`. It must be set where the node daemon starts, on each node with a
    # reward actor.
    api_key_env: NamesSecret[Variable | None] = None
    # File with the API key of `url`, on each node with a reward actor. Only its owner may be able to read it.
    api_key_file: SecretFile[Text | None] = None
    # Message to the judge. "{prompt}", "{response}", "{label}" and "{metadata.KEY}" stand for the sample's values.
    # Without a template only functions of yours call the judge, and no sample names it as its grader.
    template: Harmless[Text | None] = None
    # How a score is read from the answer: "number" takes the last number, "boxed" the number in the last box.
    # "module:function" or "path/file.py:function" is a grader that reads `sample.judge_answer`.
    parser: Annotated[Text, PARSER] = "number"
    # Sampling temperature of the judge. 0 takes the likeliest token.
    temperature: NonNegative = 0.0
    # Maximum length of an answer in tokens. The parsers "number" and "boxed" refuse an answer that reached it.
    max_tokens: Positive = 1024
    # More fields of the request, such as `chat_template_kwargs`.
    extra_body: Harmless[dict[str, Any]] = {}
    # Seconds that one request to the judge may take.
    timeout_s: Timeout = 60.0
    # Number of requests for one score that may fail. Then the sample fails. Requests that an engine of the pool lost
    # because it ended do not count, nor do those that a server refused because it limits the rate.
    max_tries: Positive = 3
    # Seconds that a request may wait for an engine of the pool: for the first one, or for one in place of an engine
    # that ended. Then the sample fails. It also bounds the wait for a server that limits the rate.
    wait_s: Timeout = 600.0
    # Number of requests that the run may send. Those that the server answers with an error status, such as 429, do not
    # count. Further samples fail. Reward actors share it equally.
    budget_requests: Positive | None = None
    # Number of tokens of prompts and answers that the run may use, as the server reports them. Further samples fail.
    # Reward actors share it equally. Requests in flight may exceed it.
    budget_tokens: Positive | None = None
    # Bytes of answers that each reward actor keeps in the run directory. An equal request gets the kept answer. With 0
    # none are kept.
    cache_bytes: Harmless[Annotated[int, msgspec.Meta(ge=0)]] = 0
    # Use the kept answers in evaluation too.
    cache_in_eval: Harmless[bool] = False
    # Number of requests in flight per reward actor. By default 64 for a URL, and for a pool its `concurrency` times its
    # engines, divided by the number of reward actors.
    concurrency: Positive | None = None


class GraderLimits(Config, frozen=True, kw_only=True):
    """Limits of the calls of one grader."""

    # Seconds that one call may take, in place of `reward.timeout_s`. Waits for a core of the programs that `code` runs
    # do not count, up to 5 times these seconds.
    timeout_s: Harmless[Annotated[float, msgspec.Meta(gt=0)] | None] = None
    # Calls per second and reward actor. Further calls wait for their turn. By default there is no limit.
    requests_per_s: Harmless[Annotated[float, msgspec.Meta(gt=0)] | None] = None
    # Number of samples that one call gets at most, as a list. They may be of many prompt groups and of evaluations. By
    # default a call gets one sample. Only for names in `graders`.
    batch: Harmless[Annotated[int, msgspec.Meta(ge=1, le=4096)] | None] = None
    # Seconds that a sample waits for others of its batch while a process is free.
    wait_s: Harmless[Annotated[float, msgspec.Meta(ge=0, le=60)]] = 0.05


FailureAction = (
    Literal["retry", "drop_sample", "drop_group"] | Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
)


class FailuresConfig(Config, frozen=True, kw_only=True):
    """What a sample without a score does, by the cause. A number becomes its reward. By default `reward.on_failure`.

    "drop_sample" trains the other samples of the group, "drop_group" none. "retry" grades the sample again, `max_tries`
    times in all, and then follows `reward.on_failure`. Requests to a judge are repeated by the judge alone.
    """

    # The call took longer than its timeout or its CPU time.
    timeout: Harmless[FailureAction | None] = None
    # A server that the grader needs did not answer or failed, or no reward worker answered.
    worker_lost: Harmless[FailureAction | None] = "retry"
    # The grader's process, or the sandbox in which `code` runs a program, ended before it answered, or the program
    # waited too long for a core. The sample is tried `max_tries` times first, whatever the action.
    sandbox_lost: Harmless[FailureAction | None] = "retry"
    # A server that the grader needs answered with status 429.
    rate_limited: Harmless[FailureAction | None] = "retry"
    # A server refused the request, or the sample cannot be graded: it is too large, or its grader is not allowed.
    refused: Harmless[FailureAction | None] = None
    # The answer is not a number of at most 1e15: null, text, a list, NaN or infinity, or a dict without the reward key.
    bad_answer: Harmless[FailureAction | None] = None
    # The function raised an exception.
    raised: Harmless[FailureAction | None] = None


SampleField = Literal["prompt_ids", "tokens", "log_probs", "turns"]
RewardPer = Literal["sample", "turn", "token"]


class RewardConfig(Config, frozen=True, kw_only=True):
    """Reward workers, and how failed scores are handled."""

    # Nodes with a reward actor, one each. By default there is one, on the node with the bus.
    nodes: tuple[Name, ...] = ()
    # Number of grader processes per reward actor, and as many again for async functions.
    processes: Positive = 2
    # Number of calls of async functions that run together in a grader process. Plain functions run one call at a time.
    concurrency: Positive = 64
    # Limits of single graders: of a built-in one by its name, or of your functions by their names in `graders`.
    limits: dict[Name, GraderLimits] = {}
    # Seconds that one score may take. After that the sample fails and its grader process is killed.
    timeout_s: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 10.0
    # Number of grader processes that may die while grading one sample. Then the sample fails.
    max_tries: Positive = 3
    # What a sample without a score does: "drop_sample" drops it alone, "drop" its group, and "zero" trains it with
    # reward 0. A group with fewer than 2 samples left fails.
    on_failure: Harmless[Literal["drop_sample", "drop", "zero"]] = "drop_sample"
    # What a sample without a score does, by the cause.
    failures: FailuresConfig = FailuresConfig()
    # Key of the reward in a dict that a grader returns.
    reward_key: Harmless[Text | None] = None
    # What a list holds that a grader returns for one sample: "turn", a reward for each turn of the model, or "token",
    # one for each token of the response. The sample's reward is their sum. By default a list is not a reward.
    per: Harmless[RewardPer] = "sample"
    # Call the grader once per prompt group, with all of its samples.
    group_rm: Harmless[bool] = False
    # Further fields of the samples that graders get: token ids of the prompt; token ids, log-probs and turns of the
    # response. Without them score requests stay small.
    sample_fields: Harmless[tuple[SampleField, ...]] = ()
    # Your own grader functions by name. Rows, `data.rm_type` and `eval.rm_type` may use these names.
    graders: Annotated[dict[Name, Text], GRADER] = {}
    # Names of graders that only external workers run. `data.rm_type`, `eval.rm_type` and rows may use these names. With
    # them the bus accepts external clients also at a loopback address of the only node, with TLS.
    external: tuple[Name, ...] = ()
    # Judges by name: language models that score samples. Rows, `data.rm_type` and `eval.rm_type` may use these names.
    judges: dict[Name, JudgeConfig] = {}
    # URL to which the grader `remote_rm` posts samples.
    rm_url: Address[Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s]+$")] | None] = None
    # Environment variable with the API key of `rm_url`. It must be set where the node daemon starts, on each node with
    # a reward actor.
    rm_api_key_env: NamesSecret[Variable | None] = None
    # File with the API key of `rm_url`, on each node with a reward actor. Only its owner may be able to read it.
    rm_api_key_file: SecretFile[Text | None] = None
    # Folder with NLTK's data, for rules of the graders `ifeval` and `ifbench` that need it. By default NLTK looks in
    # its own folders and in the environment variable NLTK_DATA. Nothing is downloaded.
    nltk_data: Reads[Text | None] = None
    # Weighted sums of graders by name: the weight of each part. Parts are built-in graders, and names in `graders` and
    # `judges`. They run together. Rows, `data.rm_type` and `eval.rm_type` may use these names.
    sums: Harmless[dict[Name, dict[Name, float]]] = {}
    # Isolation of grader processes: "process" limits resources, "isolated" also blocks network, files and other
    # processes, "none" sets no limits.
    sandbox: Code[Literal["none", "process", "isolated"]] = "process"
    # Environment variables that graders, filters and selections get in addition to PATH, HOME and the like.
    env: NamesSecret[tuple[Text, ...]] = ()
    # Memory limit of the process of a grader, filter or selection in bytes (data segment). Beyond it an allocation
    # raises MemoryError.
    memory_bytes: Positive = 8 << 30
    # CPU seconds of one call of a plain function. A call that uses more fails; by default twice `timeout_s`.
    cpu_s: Harmless[Annotated[float, msgspec.Meta(gt=0)] | None] = None
    # Number of files that a grader process may have open at a time.
    max_files: Positive = 1024  # expert
    # Number of running processes that a grader process may have started. With more they are killed and the sample is
    # tried again.
    max_processes: Positive = 64  # expert
