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
TopK = Annotated[int, msgspec.Meta(ge=-1)]  # -1: off
Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]  # one subject token, one file name


class ModelConfig(Config, frozen=True, kw_only=True):
    """The model, as a Hugging Face directory or hub name."""

    hf_checkpoint: Text  # config, tokenizer and (unless random_init) weights
    random_init: bool = False  # weights drawn from run.seed; the directory needs config and tokenizer only
    dtype: Literal["float32", "bfloat16"] = "float32"
    ref_load: Text | None = None  # reference model; none: the weights training starts from


class DataConfig(Config, frozen=True, kw_only=True):
    """One source of training prompts: a data file or a function, and the names of its columns."""

    name: Name
    path: Text | None = None  # JSONL or Parquet; "file@[a:b]" for some of its rows
    source: Text | None = None  # instead: "module:function" or "path/file.py:function", called with a prompt's number
    input_key: Text = "input"  # a string or a list of chat messages
    label_key: Text | None = None
    metadata_key: Text = "metadata"  # an object, or a string of JSON
    tool_key: Text = "tools"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = {}
    rm_type: Text | None = None  # a built-in, "module:function" or "path/file.py:function"


class RolloutConfig(Config, frozen=True, kw_only=True):
    """How samples are generated and collected."""

    rollout_batch_size: Positive  # prompt groups per train step
    over_sampling_batch_size: Positive | None = None  # groups asked for at a time; none: rollout_batch_size
    n_samples_per_prompt: Positive = 1
    max_prompt_len: Positive | None = None  # tokens; longer prompts are left out and counted
    max_response_len: Positive  # tokens
    max_context_len: Positive | None = None  # tokens, prompt and response
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    stop: tuple[Text, ...] = ()
    stop_token_ids: tuple[Count, ...] = ()
    skip_special_tokens: bool = False
    shuffle: bool = False
    seed: int = 42  # of the shuffle
    refill: Literal["batch", "group"] = "batch"  # ask for a whole over_sampling_batch_size again, or top up to it
    dynamic_filter: Text | None = None  # a built-in such as "nonzero_std", "module:function" or "path/file.py:function"
    over_sampling_filter: Text | None = None  # orders a full over_sampling_batch_size, of which the first are trained
    buffer_filter: Text = "fifo"  # which halted groups go on first: also "newest", "by_reward" or a function
    keep_when_insufficient: bool = False  # after max_barren_groups train what the filter dropped, instead of failing
    on_halt: Literal["resume", "restart", "drop"] = "resume"
    mask_off_policy: bool = False  # of a resumed sample, train only what its newest weights sampled
    max_token_staleness: Count | None = None  # train steps between the weights of a token and those being trained
    stale_tokens: Literal["drop", "mask"] = "drop"  # beyond that: drop the group, or mask the tokens
    spill_every_s: NonNegative = 30.0  # store what long samples have so far; 0: only at their end
    custom_generate: Text | None = None  # "module:function" or "path/file.py:function" in place of one request
    max_staleness: Count = 0  # train steps; 0 is synchronous
    on_weight_update: Literal["drain", "abort", "retract", "in_place"] = "drain"  # what running requests do meanwhile
    eval_overlap: bool = True  # generate and train beside an evaluation; else everything waits for it
    max_attempts: Positive = 5  # issues of one prompt group before it fails
    max_barren_groups: Positive | None = None  # dropped or failed in a row before the run fails; none: 16 refills


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Advantages and loss."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"  # sft_loss trains demonstrations, without engines
    advantage_estimator: Literal["grpo"] = "grpo"
    num_steps_per_rollout: Positive = 1  # optimizer steps per batch
    eps_clip: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    eps_clip_high: Annotated[float, msgspec.Meta(gt=0)] | None = None  # none: eps_clip
    eps_clip_c: Annotated[float, msgspec.Meta(gt=1)] | None = None  # dual clip
    use_kl_loss: bool = False
    kl_loss_coef: NonNegative = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    entropy_coef: NonNegative = 0.0
    entropy_coef_end: NonNegative | None = None  # reached linearly at the last planned train step; none: constant
    disable_rewards_normalization: bool = False
    disable_grpo_std_normalization: bool = False
    calculate_per_token_loss: bool = False
    use_rollout_logprobs: bool = False  # as the old policy's, instead of a trainer forward pass


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """AdamW and its schedule, counted in optimizer steps."""

    lr: NonNegative = 1e-6
    min_lr: NonNegative = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: Count = 0
    lr_decay_iters: Positive | None = None  # none: every planned optimizer step
    weight_decay: NonNegative = 0.01
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.999
    adam_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-8
    clip_grad: NonNegative = 1.0  # norm; 0: off


class TrainConfig(Config, frozen=True, kw_only=True):
    """Length of the run, checkpoints, micro-batches."""

    num_steps: Count = 0  # train steps; 0: so many as num_epoch has
    num_epoch: Positive | None = None  # passes over the data; counted in full batches when the run starts
    save_interval: Positive | None = None  # train steps; none: at the end only
    max_tokens_per_gpu: Positive = 9216  # per micro-batch and rank; a longer sample sits alone
    keep_checkpoints: Positive = 2
    save_hf: bool = False


class EvalConfig(Config, frozen=True, kw_only=True):
    """One evaluation set. What is unset is taken from the rollout table, and from the first data source for columns."""

    name: Name
    path: Text  # as of a data source
    interval: Positive  # train steps
    n_samples_per_eval_prompt: Positive = 1
    temperature: NonNegative | None = None  # 0: greedy
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_response_len: Positive | None = None
    input_key: Text | None = None
    label_key: Text | None = None
    metadata_key: Text | None = None
    tool_key: Text | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    rm_type: Text | None = None
    skip_eval_before_train: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
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


def over_sampling_batch_size(rollout: RolloutConfig) -> int:
    """Groups asked for at a time."""
    return rollout.over_sampling_batch_size or rollout.rollout_batch_size


def rollout_sampling(recipe: Recipe) -> Sampling:
    """How training samples are drawn."""
    rollout = recipe.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_response_len=rollout.max_response_len,
    )


def eval_sampling(recipe: Recipe, item: EvalConfig) -> Sampling:
    """How an evaluation set is drawn: its own settings over the rollout's."""
    rollout = recipe.rollout
    return Sampling(
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
    )


def max_prompt_len(rollout: RolloutConfig) -> int | None:
    """The longest prompt that is used, in tokens: as set, else one less than the context, else no limit."""
    if rollout.max_prompt_len is not None or rollout.max_context_len is None:
        return rollout.max_prompt_len
    return rollout.max_context_len - 1
