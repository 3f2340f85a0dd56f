"""What is trained: model, prompts, rollout, algorithm, evaluation. A key that exists in slime keeps its name."""

from typing import Annotated, Any, Literal

import msgspec

from runtime.settings.reading.config import Config

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Temperature = Annotated[float, msgspec.Meta(gt=0)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
RowBytes = Annotated[int, msgspec.Meta(ge=1, le=64 << 20)]
TopK = Annotated[int, msgspec.Meta(ge=-1)]  # -1: off
LogRatio = Annotated[float, msgspec.Meta(gt=0, le=80)]
Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]  # one subject token, one file name


class ModelConfig(Config, frozen=True, kw_only=True):
    """The model, as a Hugging Face directory or hub name (organisation/model)."""

    hf_checkpoint: Text  # config, tokenizer and (unless random_init) weights; of a hub name, its cache comes first
    trust_remote_code: bool = False  # run code that comes with the model: in engines, and to load its tokenizer
    random_init: bool = False  # weights drawn from run.seed; the directory needs config and tokenizer only
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations; on a GPU by default the model's
    ref_load: Text | None = None  # reference model; none: the weights training starts from


class DataConfig(Config, frozen=True, kw_only=True):
    """One source of training prompts: a data file or a function, and the names of its columns."""

    name: Name  # of the source, in events and logs
    path: Text | None = None  # JSONL or Parquet; "file@[a:b]" for some of its rows
    source: Text | None = None  # instead: "module:function" or "path/file.py:function", called with a prompt's number
    input_key: Text = "input"  # column of the prompt: a text or a list of chat messages
    label_key: Text | None = None  # column of the label that graders compare with; none: there is none
    metadata_key: Text = "metadata"  # column of what graders get beside: an object, or a string of JSON
    tool_key: Text = "tools"  # column of tools for the chat template: a list, or a string of JSON
    apply_chat_template: bool = False  # render prompts by the tokenizer's chat template
    apply_chat_template_kwargs: dict[str, Any] = {}  # passed to the chat template
    rm_type: Text | None = None  # grader: a built-in, "module:function" or "path/file.py:function"
    max_row_bytes: RowBytes = 16 << 20  # of a row's prompt, label and metadata; a larger row is refused


class RolloutConfig(Config, frozen=True, kw_only=True):
    """How samples are generated and collected."""

    rollout_batch_size: Positive  # prompt groups per train step
    over_sampling_batch_size: Positive | None = None  # groups asked for at a time; none: rollout_batch_size
    n_samples_per_prompt: Positive = 1  # samples of a prompt group
    max_prompt_len: Positive | None = None  # tokens; longer prompts are left out; none: what max_context_len leaves
    max_response_len: Positive  # tokens of a response at most
    max_context_len: Positive | None = None  # tokens of prompt and response at most; none: no limit of its own
    temperature: Temperature = 1.0  # of sampling; log-probs are taken at it too
    top_p: TopP = 1.0  # share of probability to sample from; 1: off
    top_k: TopK = -1  # number of likeliest tokens to sample from; -1: off
    stop: tuple[Text, ...] = ()  # texts that end a response
    stop_token_ids: tuple[Count, ...] = ()  # tokens that end a response, beside the model's own
    skip_special_tokens: bool = False  # leave special tokens out of a response's text, as graders see it
    shuffle: bool = False  # a new order of prompts in each epoch
    seed: int = 42  # of shuffle
    refill: Literal["batch", "group"] = "batch"  # ask for a whole over_sampling_batch_size again, or top up to it
    dynamic_filter: Text | None = None  # a built-in, "module:function" or "path/file.py:function"; none: keeps all
    over_sampling_filter: Text | None = None  # chooses the batch from over_sampling_batch_size groups; none: the first
    buffer_filter: Text = "fifo"  # which halted groups go on first: also "newest", "by_reward" or a function
    keep_when_insufficient: bool = False  # after max_barren_groups train what the filter dropped, instead of failing
    on_halt: Literal["resume", "restart", "drop"] = "resume"  # halted groups go on with their tokens, begin anew, end
    release_when: Literal["idle", "batch_ready"] = "idle"  # colocated: running groups end first, or are halted
    on_surplus: Literal["train", "drop"] = "train"  # groups of a round that its batch has no room for
    mask_off_policy: bool = False  # of a resumed sample, train only what its newest weights sampled
    max_token_staleness: Count | None = None  # train steps that a token's weights may be behind; none: no limit
    stale_tokens: Literal["drop", "mask"] = "drop"  # with those beyond: drop their group, or mask them
    spill_every_s: NonNegative = 30.0  # store what long samples have so far; 0: only at their end
    custom_generate: Text | None = None  # "module:function" or "path/file.py:function" in place of one request
    max_staleness: Count = 0  # train steps that generation may be ahead of training; 0: synchronous
    on_weight_update: Literal["drain", "abort", "retract", "in_place"] = "drain"  # what running requests do meanwhile
    generate_timeout_s: Positive = 14_400  # of one request, whole s; engines that answer none for so long end the run
    eval_overlap: bool = True  # generate and train beside an evaluation; else everything waits for it
    max_attempts: Positive = 5  # issues of a prompt group that bring no token and no score, before it is dropped
    max_barren_groups: Positive | None = None  # dropped or failed in a row before the run fails; none: 16 refills


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Advantages and loss."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"  # sft_loss trains demonstrations, without engines
    advantage_estimator: Literal["grpo"] = "grpo"  # how rewards become advantages
    num_steps_per_rollout: Positive = 1  # optimizer steps per batch
    eps_clip: Annotated[float, msgspec.Meta(gt=0)] = 0.2  # the probability ratio is clipped at 1 - eps_clip
    eps_clip_high: Annotated[float, msgspec.Meta(gt=0)] | None = None  # and at 1 + eps_clip_high; none: eps_clip
    eps_clip_c: Annotated[float, msgspec.Meta(gt=1)] | None = None  # dual clip of negative advantages; none: off
    use_kl_loss: bool = False  # add the divergence from the reference model to the loss
    kl_loss_coef: NonNegative = 0.0  # its weight
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"  # its estimator; low_var_kl is k3 limited to 10 nats
    entropy_coef: NonNegative = 0.0  # weight of the entropy bonus
    entropy_coef_end: NonNegative | None = None  # reached linearly at the last planned train step; none: constant
    disable_rewards_normalization: bool = False  # use rewards as they are, not centred in their group
    disable_grpo_std_normalization: bool = False  # centre rewards without dividing by their standard deviation
    calculate_per_token_loss: bool = False  # mean of the loss over tokens; else over samples of their means
    max_log_ratio: LogRatio = 20.0  # nats; log-ratios of losses are cut there: near 88 their gradient is no number
    use_routing_replay: bool = False  # tokens train with the experts that they had for the old log-probs
    use_rollout_routing_replay: bool = False  # with those of the engine, which for now a dump must tell
    use_rollout_logprobs: bool = False  # the engines' log-probs are the old policy's: saves a forward pass
    get_mismatch_metrics: bool = False  # do it, and measure the distance on all samples, not on the first step's


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """AdamW and its schedule, counted in optimizer steps."""

    lr: NonNegative = 1e-6  # learning rate after the warm-up
    min_lr: NonNegative = 0.0  # where the decay ends
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"  # how lr falls to min_lr
    lr_warmup_iters: Count = 0  # optimizer steps of linear warm-up
    lr_decay_iters: Positive | None = None  # optimizer steps at whose end lr is min_lr; none: all that are planned
    weight_decay: NonNegative = 0.01  # decoupled, as in AdamW
    adam_beta1: Beta = 0.9  # decay of the mean of gradients
    adam_beta2: Beta = 0.999  # decay of the mean of their squares
    adam_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-8  # added to the root of the latter
    clip_grad: NonNegative = 1.0  # norm to which gradients are clipped; 0: off


class TrainConfig(Config, frozen=True, kw_only=True):
    """Length of the run, checkpoints, micro-batches."""

    num_steps: Count = 0  # train steps; 0: so many as num_epoch has
    num_epoch: Positive | None = None  # passes over the data; counted in full batches when the run starts
    save_interval: Positive | None = None  # train steps between checkpoints; none: at the end only
    max_tokens_per_gpu: Positive = 9216  # tokens of a micro-batch on a rank
    on_too_long: Literal["mask", "fail"] = "mask"  # samples over max_tokens_per_gpu: without a gradient, or an error
    on_nonfinite: Literal["skip", "fail"] = "skip"  # a loss or gradient that is not finite: without it, or an error
    max_skipped: Count = 3  # optimizer steps that may be skipped in a row, across batches; one more ends the run
    skip_window: Positive = 20  # last optimizer steps of which max_skipped_share may be skipped
    max_skipped_share: Fraction = 0.25  # more skipped steps than this share of skip_window end the run
    keep_checkpoints: Positive = 2  # so many newest ones
    save_hf: bool = False  # write the model to hf/ in the run directory at the end


class EvalConfig(Config, frozen=True, kw_only=True):
    """One evaluation set. What is unset is taken from the rollout table, and from the first data source for columns."""

    name: Name  # of the set, in metrics: eval/<name>
    path: Text  # data file, as of a data source
    interval: Positive  # train steps between evaluations
    n_samples_per_eval_prompt: Positive = 1  # samples of a prompt; the metric is their mean
    temperature: NonNegative | None = None  # of sampling; 0: greedy; none: rollout.temperature
    top_p: TopP | None = None  # none: rollout.top_p
    top_k: TopK | None = None  # none: rollout.top_k
    max_response_len: Positive | None = None  # tokens; none: rollout.max_response_len
    input_key: Text | None = None  # none: that of the first data source
    label_key: Text | None = None  # none: that of the first data source
    metadata_key: Text | None = None  # none: that of the first data source
    tool_key: Text | None = None  # none: that of the first data source
    apply_chat_template: bool | None = None  # none: that of the first data source
    apply_chat_template_kwargs: dict[str, Any] | None = None  # none: those of the first data source
    rm_type: Text | None = None  # grader; none: that of the first data source
    skip_eval_before_train: bool = False  # no evaluation of the weights that training starts from


class FilledSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings with every default filled in."""

    temperature: float
    top_p: float
    top_k: int
    max_response_len: int  # tokens


class Recipe(Config, frozen=True, kw_only=True):
    """Everything that decides what is learnt, and nothing about where."""

    model: ModelConfig
    data: tuple[DataConfig, ...]  # at least one
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    eval: tuple[EvalConfig, ...] = ()


def trains_demonstrations(recipe: Recipe) -> bool:
    """Whether the data holds the samples that are trained, so that nothing is generated and nothing graded."""
    return recipe.algorithm.loss_type == "sft_loss"


def replays_experts(algorithm: AlgorithmConfig) -> bool:
    """Whether tokens are trained with the experts that they had before: the engine's, or of the old log-probs."""
    return algorithm.use_routing_replay or algorithm.use_rollout_routing_replay


def measures_all(recipe: Recipe) -> bool:
    """Whether the trainer's log-probs before the first optimizer step are asked for of what later ones train, too."""
    algorithm = recipe.algorithm
    return not trains_demonstrations(recipe) and (algorithm.get_mismatch_metrics or not algorithm.use_rollout_logprobs)


def computes_old_ahead(recipe: Recipe) -> bool:
    """Whether they can be computed of a group that no batch has yet: while it waits, the weights are those already."""
    steps, experts = recipe.algorithm.num_steps_per_rollout, replays_experts(recipe.algorithm)
    return measures_all(recipe) and steps > 1 and not experts and recipe.rollout.max_staleness == 0


def over_sampling_batch_size(rollout: RolloutConfig) -> int:
    """Groups asked for at a time."""
    return rollout.over_sampling_batch_size or rollout.rollout_batch_size


def rollout_sampling(recipe: Recipe) -> FilledSampling:
    """How training samples are drawn."""
    rollout = recipe.rollout
    return FilledSampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_response_len=rollout.max_response_len,
    )


def eval_sampling(recipe: Recipe, item: EvalConfig) -> FilledSampling:
    """How an evaluation set is drawn: its own settings over the rollout's."""
    rollout = recipe.rollout
    return FilledSampling(
        temperature=rollout.temperature if item.temperature is None else item.temperature,
        top_p=rollout.top_p if item.top_p is None else item.top_p,
        top_k=rollout.top_k if item.top_k is None else item.top_k,
        max_response_len=item.max_response_len or rollout.max_response_len,
    )


def eval_data(recipe: Recipe, item: EvalConfig) -> DataConfig:
    """An evaluation set as a data source: its own columns and reward over those of the first data source."""
    first = recipe.data[0]
    kwargs = item.apply_chat_template_kwargs
    template = item.apply_chat_template
    return DataConfig(
        name=item.name,
        path=item.path,
        input_key=item.input_key or first.input_key,
        label_key=item.label_key or first.label_key,
        metadata_key=item.metadata_key or first.metadata_key,
        tool_key=item.tool_key or first.tool_key,
        apply_chat_template=first.apply_chat_template if template is None else template,
        apply_chat_template_kwargs=first.apply_chat_template_kwargs if kwargs is None else kwargs,
        rm_type=item.rm_type or first.rm_type,
        max_row_bytes=first.max_row_bytes,
    )


def max_prompt_len(rollout: RolloutConfig) -> int | None:
    """The longest prompt that is used, in tokens: as set, else one less than the context, else no limit."""
    if rollout.max_prompt_len is not None or rollout.max_context_len is None:
        return rollout.max_prompt_len
    return rollout.max_context_len - 1
