"""The table `rollout`: how samples are generated and collected."""

from typing import Annotated, Literal

import msgspec

from runtime.functions.table import BUFFER_FILTER, FILTER, GENERATE, OVER_SAMPLING_FILTER, ROLLOUT, SAMPLING
from runtime.settings.reading.access import Harmless
from runtime.settings.reading.config import Config
from runtime.settings.tables.agent import AgentConfig
from runtime.settings.tables.values import Count, Name, NonNegative, Positive, Temperature, Text, TopK, TopP

FilterField = Literal["tokens", "log_probs", "texts"]


class RolloutConfig(Config, frozen=True, kw_only=True):
    """How samples are generated and collected."""

    harmless = True

    # Node of each rollout actor: ["n0", "n0", "n1"] are two on n0 and one on n1. Each drives engines of the policy of
    # its own, those of its node first. By default there is one, on the node with the bus, and it drives all engines.
    nodes: tuple[Name, ...] = ()
    # Number of prompt groups per train step.
    rollout_batch_size: Positive
    # Number of prompt groups to issue at a time. By default `rollout_batch_size`.
    over_sampling_batch_size: Positive | None = None
    # Number of samples per prompt group.
    n_samples_per_prompt: Positive = 1
    # Maximum prompt length in tokens; longer prompts are left out and counted. By default one token less than
    # `max_context_len`.
    max_prompt_len: Positive | None = None
    # Maximum response length in tokens. A response that reaches it ends as truncated.
    max_response_len: Positive
    # Maximum length of prompt and response together, in tokens. By default only the model's context limits it.
    max_context_len: Positive | None = None
    # Sampling temperature. Log-probs are computed at this temperature too.
    temperature: Temperature = 1.0
    # Nucleus sampling: sample from the likeliest tokens with this total probability. 1 turns it off.
    top_p: TopP = 1.0
    # Sample from this number of likeliest tokens. -1 turns it off.
    top_k: TopK = -1
    # Compute log-probs over the tokens that `top_p` and `top_k` kept, in the engine and in the trainer. By default both
    # compute them over the whole vocabulary, and `--check` notes that samples come from another distribution. Needs
    # `top_k` of 2 to 4096, because the engine lists the kept tokens of each sampled token.
    return_sampling_mask: Harmless[bool] = False
    # Texts that end a response.
    stop: Harmless[tuple[Text, ...]] = ()
    # Token ids that end a response, in addition to the model's own.
    stop_token_ids: tuple[Count, ...] = ()
    # Leave special tokens out of the response text that graders see.
    skip_special_tokens: Harmless[bool] = False
    # Shuffle the prompts anew in each epoch.
    shuffle: Harmless[bool] = False
    # Seed of `shuffle`.
    seed: Harmless[int] = 42
    # How to replace groups that did not reach the batch: issue another full `over_sampling_batch_size` ("batch"), or
    # only the missing groups ("group").
    refill: Harmless[Literal["batch", "group"]] = "batch"
    # Filter that judges each completed group: a built-in, "module:function" or "path/file.py:function". By default all
    # groups are kept.
    dynamic_filter: Annotated[Text | None, FILTER] = None
    # What a filter of yours gets in addition to the summary of a group: token ids and log-probs of the responses, and
    # the texts of prompt, label and responses. They are read from the bus for each group.
    filter_fields: Harmless[tuple[FilterField, ...]] = ()
    # Function that selects the batch from `over_sampling_batch_size` completed groups. By default the first ones to
    # complete.
    over_sampling_filter: Annotated[Text | None, OVER_SAMPLING_FILTER] = None
    # Order in which halted groups are issued again: "fifo", "newest", "by_reward", or your own function.
    buffer_filter: Annotated[Text, BUFFER_FILTER] = "fifo"
    # After `max_barren_groups`, fill the batch with groups that the filter dropped. By default the run fails then.
    keep_when_insufficient: Harmless[bool] = False
    # What halted groups do: continue from their tokens ("resume"), begin anew ("restart"), or end ("drop").
    on_halt: Harmless[Literal["resume", "restart", "drop"]] = "resume"
    # With colocation, when the engines release their memory: after running groups end ("idle"), or as soon as the
    # batch is ready, which halts them ("batch_ready").
    release_when: Harmless[Literal["idle", "batch_ready"]] = "idle"
    # What to do with completed groups that do not fit into their round's batch: "train" keeps them for a later batch.
    on_surplus: Harmless[Literal["train", "drop"]] = "train"
    # Train only the tokens of a resumed sample that its newest weights sampled.
    mask_off_policy: Harmless[bool] = False
    # Maximum age of a token's weights, in train steps. By default there is no limit.
    max_token_staleness: Count | None = None
    # What to do with tokens beyond `max_token_staleness`: drop their group, or mask the tokens.
    stale_tokens: Harmless[Literal["drop", "mask"]] = "drop"
    # Log pass@k of each batch as `passrate/pass@k`, for k = 1, 2, 4 and so on up to `n_samples_per_prompt`. A sample
    # with a reward of exactly 1 passes. Evaluation sets always have it.
    log_passrate: Harmless[bool] = False
    # Seconds between spills: long-running samples store the tokens that they have so far. 0 stores samples only at
    # their end.
    spill_every_s: NonNegative = 30.0
    # Async function that generates a sample in several turns: "module:function" or "path/file.py:function". By default
    # a sample is one request.
    custom_generate: Annotated[Text | None, GENERATE] = None
    agent: AgentConfig = AgentConfig()
    # What a training sample does whose generate function raises, takes too long or generates nothing: end alone
    # ("drop_sample"), with its whole prompt group ("drop"), or train its tokens with reward 0 ("zero"). A group with
    # fewer than 2 samples left fails. If the first calls all fail, at least 8 in at least 4 groups, the run ends.
    on_exception: Harmless[Literal["drop_sample", "drop", "zero"]] = "drop_sample"
    # Async function that decides how and in which order the samples of a prompt group are generated: "module:function"
    # or "path/file.py:function". By default each is generated as soon as an engine has room.
    custom_rollout: Annotated[Text | None, ROLLOUT] = None
    # Function that chooses the sampling parameters of a training prompt from its text, label and metadata:
    # "module:function" or "path/file.py:function". It runs in a process of its own. By default all prompts have those
    # of this table.
    custom_sampling: Annotated[Text | None, SAMPLING] = None
    # Maximum number of prompt groups of a round that `custom_rollout` gets at once. With 1 it gets a group, otherwise a
    # list of groups.
    custom_rollout_prompts: Positive = 1
    # Engine pools whose models a generate function may choose for a turn: names in `engines`. Their turns do not train.
    pools: tuple[Name, ...] = ()
    # Seconds that a generate function may take between two turns of the model, without those in which it waits for a
    # grader, and a rollout or evaluation function without a sample that generates. With more the sample, by
    # `on_exception`, the rollout function's prompt groups or the evaluation of the set fail.
    custom_generate_timeout_s: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 300.0
    # Number of train steps that generation may be ahead of training. 0 is synchronous.
    max_staleness: Count = 0
    # What running requests do during a weight update: end first ("drain"), be aborted and continued ("abort"), or be
    # frozen ("retract" recomputes their KV cache, "in_place" keeps it).
    on_weight_update: Harmless[Literal["drain", "abort", "retract", "in_place"]] = "drain"
    # Seconds that one request may take. If engines that are up answer no request for this long, the run ends. A
    # generate function is held over a halt for at most this long.
    generate_timeout_s: Positive = 14_400
    # Generate during an evaluation, and train if `max_staleness` is above 0. If false, both wait until it ends.
    eval_overlap: Harmless[bool] = True
    # Number of attempts at a prompt group that may bring neither a token nor a score. Then the group is dropped.
    # Attempts whose generate functions are held over their halt do not count.
    max_attempts: Positive = 5
    # Number of groups that may be dropped or fail in a row before the run fails. By default 16 times
    # `over_sampling_batch_size`.
    max_barren_groups: Positive | None = None
