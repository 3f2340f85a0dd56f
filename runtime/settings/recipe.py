"""Recipe settings: model, prompts, rollout, algorithm, evaluation. Keys that exist in slime keep slime's name."""

from typing import Annotated, Any, Final, Literal

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
RewardName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]  # part of a metric's name
Weight = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]  # one subject token, one file name


Estimator = Literal[
    "grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "maxrl",
    "grpo_passk",
    "gdpo",
    "remax",
    "ppo",
]
LossMode = Literal[
    "ppo",
    "gspo",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "prime_rl",
    "prime_rl_ipo",
    "sapo",
    "gmpo",
    "decoupled_ppo",
    "gpg",
]
LossType = Literal["policy_loss", "sft_loss", "dpo_loss", "rm_loss"]
MAX_TOPK: Final = 1024
PAIR_LOSSES: Final = ("dpo_loss", "rm_loss")
Level = Literal["token", "sequence", "geometric"]
Custom = Literal["custom"]  # a function of the user in place of a named choice
AggMode = Literal["rollout-mean", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class ModelConfig(Config, frozen=True, kw_only=True):
    """The model, as a Hugging Face directory or hub name (organisation/model)."""

    # Model directory or hub name, with config, tokenizer and (unless `random_init` is set) weights. A hub name is
    # taken from the local cache, or downloaded at the start.
    hf_checkpoint: Text
    # Run code that comes with the model: in engines, and to load its tokenizer.
    trust_remote_code: bool = False
    # Initialize the weights from `run.seed`. The model directory then needs only config and tokenizer.
    random_init: bool = False
    # Dtype of weights and activations. If it is unset and the trainer uses GPUs, the checkpoint's dtype applies.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Reference model of the KL loss and of DPO. By default the weights that training starts from: those of
    # `trainer.load`, or of `hf_checkpoint`.
    ref_load: Text | None = None
    # Teacher that the trainer keeps with `algorithm.opd_type = "megatron"`: the directory of a model with the same
    # architecture.
    opd_teacher_load: Text | None = None


class DataConfig(Config, frozen=True, kw_only=True):
    """One source of training prompts: a data file, a function or a class, and the names of its columns."""

    # Name of the source in events and logs.
    name: Name
    # Data file, JSONL or Parquet. "file@[a:b]" reads only these rows.
    path: Text | None = None
    # Function to use instead of `path`: "module:function" or "path/file.py:function". It gets a prompt's number and
    # returns its row. It runs in a process of its own.
    source: Text | None = None
    # Class to use instead of `path`: "module:Class" or "path/file.py:Class". It draws the rows, gets the outcomes of
    # their prompt groups, and has a state that is stored with each issue. It runs in a process of its own.
    source_class: Text | None = None
    # Data files for the class in `source_class`, by names of your own. Its constructor gets their rows.
    files: dict[Name, Text] = {}
    # Seconds that the class in `source_class` may take for one issue of prompt groups, and the function in `source` for
    # one row. After that the run ends.
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    # Column of the prompt: a text or a list of chat messages.
    input_key: Text = "input"
    # Column of the label that graders compare with. By default there is no label.
    label_key: Text | None = None
    # Column of the better response of a preference pair, with "dpo_loss" and "rm_loss": a text, a list of chat messages
    # that follow the prompt, or a whole conversation in a row without the column `input_key`.
    chosen_key: Text | None = None
    # Column of the worse response of a preference pair, in the same form.
    rejected_key: Text | None = None
    # Column of metadata for graders: an object, or a string of JSON.
    metadata_key: Text = "metadata"
    # Column of tools for the chat template: a list, or a string of JSON.
    tool_key: Text = "tools"
    # Render prompts with the tokenizer's chat template.
    apply_chat_template: bool = False
    # Extra arguments of the chat template.
    apply_chat_template_kwargs: dict[str, Any] = {}
    # Grader of the samples: a built-in, "module:function", "path/file.py:function", or a name in `reward.graders`,
    # `reward.judges`, `reward.sums` or `reward.external`. With `algorithm.use_opd` it may be left out: rewards are 0
    # then.
    rm_type: Text | None = None
    # Engine pool of the teacher of these samples, with `algorithm.opd_type = "sglang"`: a name in `engines`. By default
    # "teacher".
    teacher: Name | None = None
    # Share of the prompts that are of this source, relative to the sum of all weights. By default each source
    # contributes in proportion to its size. If one source has a weight, all need one.
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Size limit of a row's prompt, label and metadata in bytes. A larger row ends the start with its file and line.
    max_row_bytes: RowBytes = 16 << 20  # expert


FilterField = Literal["tokens", "log_probs", "texts"]


class RolloutConfig(Config, frozen=True, kw_only=True):
    """How samples are generated and collected."""

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
    return_sampling_mask: bool = False
    # Texts that end a response.
    stop: tuple[Text, ...] = ()
    # Token ids that end a response, in addition to the model's own.
    stop_token_ids: tuple[Count, ...] = ()
    # Leave special tokens out of the response text that graders see.
    skip_special_tokens: bool = False
    # Shuffle the prompts anew in each epoch.
    shuffle: bool = False
    # Seed of `shuffle`.
    seed: int = 42
    # How to replace groups that did not reach the batch: issue another full `over_sampling_batch_size` ("batch"), or
    # only the missing groups ("group").
    refill: Literal["batch", "group"] = "batch"
    # Filter that judges each completed group: a built-in, "module:function" or "path/file.py:function". By default all
    # groups are kept.
    dynamic_filter: Text | None = None
    # What a filter of yours gets in addition to the summary of a group: token ids and log-probs of the responses, and
    # the texts of prompt, label and responses. They are read from the bus for each group.
    filter_fields: tuple[FilterField, ...] = ()
    # Function that selects the batch from `over_sampling_batch_size` completed groups. By default the first ones to
    # complete.
    over_sampling_filter: Text | None = None
    # Order in which halted groups are issued again: "fifo", "newest", "by_reward", or your own function.
    buffer_filter: Text = "fifo"
    # After `max_barren_groups`, fill the batch with groups that the filter dropped. By default the run fails then.
    keep_when_insufficient: bool = False
    # What halted groups do: continue from their tokens ("resume"), begin anew ("restart"), or end ("drop").
    on_halt: Literal["resume", "restart", "drop"] = "resume"
    # With colocation, when the engines release their memory: after running groups end ("idle"), or as soon as the
    # batch is ready, which halts them ("batch_ready").
    release_when: Literal["idle", "batch_ready"] = "idle"
    # What to do with completed groups that do not fit into their round's batch: "train" keeps them for a later batch.
    on_surplus: Literal["train", "drop"] = "train"
    # Train only the tokens of a resumed sample that its newest weights sampled.
    mask_off_policy: bool = False
    # Maximum age of a token's weights, in train steps. By default there is no limit.
    max_token_staleness: Count | None = None
    # What to do with tokens beyond `max_token_staleness`: drop their group, or mask the tokens.
    stale_tokens: Literal["drop", "mask"] = "drop"
    # Log pass@k of each batch as `passrate/pass@k`, for k = 1, 2, 4 and so on up to `n_samples_per_prompt`. A sample
    # with a reward of exactly 1 passes. Evaluation sets always have it.
    log_passrate: bool = False
    # Seconds between spills: long-running samples store the tokens that they have so far. 0 stores samples only at
    # their end.
    spill_every_s: NonNegative = 30.0
    # Async function that generates a sample in several turns: "module:function" or "path/file.py:function". By default
    # a sample is one request.
    custom_generate: Text | None = None
    # Async function that decides how and in which order the samples of a prompt group are generated: "module:function"
    # or "path/file.py:function". By default each is generated as soon as an engine has room.
    custom_rollout: Text | None = None
    # Maximum number of prompt groups of a round that `custom_rollout` gets at once. With 1 it gets a group, otherwise a
    # list of groups.
    custom_rollout_prompts: Positive = 1
    # Engine pools whose models a generate function may choose for a turn: names in `engines`. Their turns do not train.
    pools: tuple[Name, ...] = ()
    # Seconds that a generate function may take between two turns of the model, without those in which it waits for a
    # grader, and a rollout or evaluation function without a sample that generates. With more the prompt group or the
    # evaluation of the set fails.
    custom_generate_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    # Number of train steps that generation may be ahead of training. 0 is synchronous.
    max_staleness: Count = 0
    # What running requests do during a weight update: end first ("drain"), be aborted and continued ("abort"), or be
    # frozen ("retract" recomputes their KV cache, "in_place" keeps it).
    on_weight_update: Literal["drain", "abort", "retract", "in_place"] = "drain"
    # Seconds that one request may take. If engines that are up answer no request for this long, the run ends.
    generate_timeout_s: Positive = 14_400
    # Generate during an evaluation, and train if `max_staleness` is above 0. If false, both wait until it ends.
    eval_overlap: bool = True
    # Number of attempts at a prompt group that may bring neither a token nor a score. Then the group is dropped.
    max_attempts: Positive = 5
    # Number of groups that may be dropped or fail in a row before the run fails. By default 16 times
    # `over_sampling_batch_size`.
    max_barren_groups: Positive | None = None


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Settings of advantages, loss and KL."""

    # Loss to train with. "sft_loss" trains on demonstrations, "dpo_loss" on preference pairs. "rm_loss" trains a reward
    # model on preference pairs: the model gets a value head. None of the three runs engines.
    loss_type: LossType = "policy_loss"
    # Loss of preference pairs with "dpo_loss": DPO ("sigmoid") or IPO ("ipo").
    preference_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    # Weight of the distance from the reference model, with "dpo_loss".
    dpo_beta: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    # Probability that the responses of a preference pair are swapped, with "sigmoid" and with "rm_loss".
    label_smoothing: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0
    # Estimator that turns rewards into advantages.
    # "reinforce" subtracts the mean of the batch; "gpg" and "maxrl" scale differences from the group's mean;
    # "reinforce_plus_plus" gives each token its discounted return, without a baseline;
    # "opo" weights that mean by length; "grpo_passk" rewards the best sample of a group alone. "gspo" and "cispo" are
    # "grpo" with the loss of that name. "gdpo" trains several rewards. "remax" subtracts the reward of a greedy sample,
    # which each prompt gets in addition to `rollout.n_samples_per_prompt`. "ppo" estimates them with a critic (table
    # `critic`).
    advantage_estimator: Estimator = "grpo"
    # Function that computes the advantages, in place of `advantage_estimator`: "module:function" or
    # "path/file.py:function". It is tried on two samples at the start.
    custom_advantage: Text | None = None
    # Names of the rewards in a grader's dict that "gdpo" trains, at most 16. A sample without a finite number under
    # each of them fails.
    gdpo_reward_keys: Annotated[tuple[RewardName, ...], msgspec.Meta(max_length=16)] = ()
    # Weights of these rewards, in their order. By default each has weight 1.
    gdpo_reward_weights: Annotated[tuple[Weight, ...], msgspec.Meta(max_length=16)] = ()
    # Length of the zone before `rollout.max_response_len` in which rewards fall, in tokens (DAPO). The penalty grows
    # linearly from 0 at the start of the zone to `overlong_penalty_factor` at its end. By default there is no penalty.
    overlong_buffer_len: Positive | None = None
    # Penalty of a response with `rollout.max_response_len` tokens, in reward units. Longer responses lose more.
    overlong_penalty_factor: NonNegative = 1.0
    # Lower the rewards of samples that are long compared with the longest of their group, by shares of the group's mean
    # reward (prime-rl). By default there is no penalty.
    length_penalty: Literal["linear"] | None = None
    # Share of the mean reward that the sample with the most sampled tokens loses. 0 turns the term off.
    num_output_tokens_weight: NonNegative = 0.25
    # Share of the mean reward that the sample with the most input tokens loses: prompt and tool output. 0 turns the
    # term off.
    num_input_tokens_weight: NonNegative = 0.1
    # Share of the mean reward that the sample with the most turns loses. 0 turns the term off.
    num_turns_weight: NonNegative = 0.1
    # Advantage of a sample without others in its group, for estimators that compare a group's samples: 0 ("zero"), or
    # its reward ("reward").
    group_of_one: Literal["zero", "reward"] = "zero"
    # Discount per token of returns, with "reinforce_plus_plus" and "ppo".
    gamma: Fraction = 1.0
    # Count tokens within a response that do not train, such as tool output, in returns and GAE: `gamma` and `lambd`
    # discount at them, as in slime. With false they are skipped, as in verl.
    discount_tool_tokens: bool = True
    # Lambda of generalized advantage estimation, with "ppo".
    lambd: Fraction = 1.0
    # Weight of the KL divergence of the old policy from the reference model in the reward: each trained token loses
    # `kl_coef` times its divergence, by the estimator `kl_loss_type`. It cannot be combined with `kl_loss_coef`. A
    # `custom_advantage` gets the divergence as `inputs.kl`, and subtracts it itself. 0 turns it off.
    kl_coef: NonNegative = 0.0
    # Subtract the divergence of a whole sample from its reward before the rewards of its group are compared, as in
    # verl. By default it is subtracted from the advantage of each token afterwards, as in slime.
    kl_before_normalization: bool = False
    # Whiten the advantages: shift and scale them to mean 0 and variance 1 over all trained tokens of the batch.
    normalize_advantages: bool = False
    # Number of optimizer steps per batch.
    num_steps_per_rollout: Positive = 1
    # Policy loss. "prime_rl" and "prime_rl_ipo" compare with the engine and need no old log-probs. By default "ppo", or
    # the loss of `advantage_estimator` "gspo" or "cispo".
    loss_mode: LossMode | None = None
    # Policy loss of your own in place of `loss_mode`: "module:function" or "path/file.py:function". It is tried on two
    # samples at the start.
    custom_loss: Text | None = None
    # Lower clip range of the probability ratio: it is clipped at 1 - `eps_clip`. With "dppo_tv" and "dppo_kl" the
    # largest divergence, with "gmpo" the largest change of a log-prob.
    eps_clip: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    # Upper clip range: the ratio is clipped at 1 + `eps_clip_high`. By default `eps_clip`.
    eps_clip_high: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Dual clip: bound of the ratio for negative advantages. By default it is off.
    eps_clip_c: Annotated[float, msgspec.Meta(gt=1)] | None = None
    # Largest importance weight of old policy over engine in "decoupled_ppo"; tokens above it have no loss. By default
    # there is no limit.
    behav_imp_weight_cap: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Largest loss of probability of a token whose advantage is not positive, with "prime_rl".
    dppo_mask_low: Fraction = 0.2
    # Largest gain of probability of a token with a positive advantage, with "prime_rl".
    dppo_mask_high: Fraction = 0.2
    # Largest change of a token's probability, with "prime_rl_ipo".
    ipo_threshold: Fraction = 0.1
    # Factor of the advantages, with "prime_rl" and "prime_rl_ipo".
    adv_tau: NonNegative = 1.0
    # Weight of the squared log-ratio of policy and engine, with "prime_rl" and "prime_rl_ipo".
    kl_tau: NonNegative = 1e-3
    # Temperature of the gate for positive advantages, with "sapo".
    tau_pos: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    # Temperature of the gate for other advantages, with "sapo".
    tau_neg: Annotated[float, msgspec.Meta(gt=0)] = 1.05
    # Correct the policy loss for the distance between engine and trainer, by importance weights of old policy over
    # engine (truncated importance sampling). They multiply the policy loss alone.
    use_tis: bool = False
    # Upper bound of the importance weights.
    tis_clip: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    # Lower bound of the importance weights. "truncate" has none.
    tis_clip_low: NonNegative = 0.0
    # Importance weight of a token: its own ratio ("token"), the product over its sample ("sequence"), or the geometric
    # mean over its sample ("geometric").
    tis_level: Level = "token"
    # What to do with importance weights out of bounds: lower those above ("truncate"), move them to the bound ("clip"),
    # or set them to 0 ("mask": IcePop, masked importance sampling).
    tis_mode: Literal["truncate", "clip", "mask"] = "clip"
    # Function that computes the importance weights, in place of `tis_level`, `tis_mode` and their bounds. It needs
    # `use_tis`, and is tried on two samples at the start.
    custom_tis: Text | None = None
    # Divide the importance weights by their mean over the batch. This needs old log-probs before the first optimizer
    # step, which is one forward pass more.
    tis_batch_normalize: bool = False
    # Leave tokens out of the policy loss whose ratio of old policy and engine is out of bounds (rejection sampling).
    use_rs: bool = False
    # Level of that ratio, as in `tis_level`.
    rs_level: Level = "token"
    # What `use_rs` compares: the ratio of old policy and engine ("ratio"), or the larger of the two divergences between
    # the probabilities that they give the token ("binary_kl": KPop), in nats.
    rs_metric: Literal["ratio", "binary_kl"] = "ratio"
    # Lower bound of that ratio. A divergence has none. By default 1 / `rs_upper_bound`.
    rs_lower_bound: NonNegative | None = None
    # Upper bound of that ratio or divergence. By default `tis_clip` for a ratio, and 0.1 nats for a divergence.
    rs_upper_bound: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # A token with a smaller ratio of old policy and engine takes its whole sample out of the policy loss. By default
    # there is no such threshold.
    rs_veto_threshold: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Compare the policy being trained with the engine in `use_tis` and `use_rs`, not the old policy. This needs no old
    # log-probs. Losses with a ratio to the old policy need `use_rollout_logprobs` then, and allow `use_rs` alone.
    bypass_mode: bool = False
    # Leave tokens with a negative advantage out of the policy loss, in samples whose log-probs fell by more than
    # `opsm_delta` per token since they were old log-probs (off-policy sequence masking).
    use_opsm: bool = False
    # Threshold of `use_opsm`, in nats per token.
    opsm_delta: NonNegative = 1e-4
    # Function that may mask tokens of a batch, or change its advantages, before the batch trains:
    # "module:function" or "path/file.py:function". It needs the old log-probs of all samples, which is one forward pass
    # more unless `use_rollout_logprobs` is set. It is tried on two samples at the start.
    rollout_data_postprocess: Text | None = None
    # Weight of the KL divergence from the reference model in the loss. 0 turns it off: no reference model is loaded.
    kl_loss_coef: NonNegative = 0.0
    # Number of train steps between updates of the reference model: it takes the weights of the policy. By default it
    # stays as it was loaded. Checkpoints then contain the reference, too.
    ref_update_interval: Positive | None = None
    # Number of train steps between measurements of the KL divergence from the reference model, as a metric alone. The
    # first train step is measured. Other steps compute no log-probs of the reference. By default, 0, it is not measured
    # and no reference model is loaded. With `kl_loss_coef` or `kl_coef` each step has the metric.
    kl_metric_interval: Count = 0
    # Estimator of the KL divergence. "low_var_kl" is k3 clipped at 10 nats. "k3+" has the value of low_var_kl and the
    # gradient of k2.
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "k3+"] = "k1"
    # Multiply the KL divergence by the ratio of policy and old policy, which makes it unbiased for tokens that the old
    # policy sampled.
    use_unbiased_kl: bool = False
    # Weight of the negative log-likelihood of samples with a reward above 0, as in VAPO. It is a mean over the tokens
    # of these samples alone. 0 turns it off.
    positive_example_nll_weight: NonNegative = 0.0
    # On-policy distillation: subtract the reverse KL to a teacher from the advantage of each token. Without a grader
    # all rewards are 0, and the teacher alone is followed.
    use_opd: bool = False
    # Where the teacher computes log-probs, with `use_opd`: in an engine pool ("sglang"), or in the trainer
    # ("megatron").
    opd_type: Literal["sglang", "megatron"] | None = None
    # Weight of the reverse KL to the teacher in the advantage. With 0 here and in `distillation_loss_coef` no teacher
    # computes log-probs.
    opd_kl_coef: NonNegative = 1.0
    # Weight of a KL divergence between teacher and policy over the teacher's likeliest tokens, in the loss, with
    # `use_opd` and `opd_type = "sglang"`. 0 turns it off.
    distillation_loss_coef: NonNegative = 0.0
    # Number of the teacher's likeliest tokens at each place of a response. Each costs 8 bytes a token in the run's
    # data stream.
    distillation_topk: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPK)] = 32
    # Divergence over these tokens, with p of the teacher and q of the policy: "forward" is the sum of p log(p / q),
    # "reverse" the sum of q log(q / p), "mixed" a weighted mean of both.
    distillation_kl_type: Literal["forward", "reverse", "mixed"] = "forward"
    # Weight of the forward divergence in "mixed".
    mixed_kl_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    # Take the teacher's log-prob of all other tokens as -100, in the reverse divergence. By default they do not count.
    zero_outside_topk: bool = False
    # Weight of the entropy bonus.
    entropy_coef: NonNegative = 0.0
    # Weight of the entropy bonus at the last planned train step, reached linearly. By default the weight is constant.
    entropy_coef_end: NonNegative | None = None
    # Use rewards as they are, without subtracting their group's mean.
    disable_rewards_normalization: bool = False
    # Subtract the mean of the group's rewards, but do not divide by their standard deviation.
    disable_grpo_std_normalization: bool = False
    # Average the loss over all tokens. By default it is averaged over each sample first, then over samples.
    calculate_per_token_loss: bool = False
    # How token losses become one loss: the mean over rollouts of their token means ("rollout-mean"), the mean over
    # tokens ("token-mean"), the mean over samples of their token means ("seq-mean-token-mean"), or the mean over
    # rollouts of their token sums divided by `loss_scale_factor` ("seq-mean-token-sum-norm"). By default
    # "rollout-mean", or "token-mean" with `calculate_per_token_loss`.
    loss_agg_mode: AggMode | None = None
    # Function that decides how token losses become one loss, in place of `loss_agg_mode`. It is tried on two samples
    # at the start.
    custom_pg_loss_reducer: Text | None = None
    # Constant length in tokens for "seq-mean-token-sum-norm". By default `rollout.max_response_len`.
    loss_scale_factor: Positive | None = None
    # Count a rollout whose tokens are all masked in the denominator of means over rollouts or samples.
    count_masked_rollouts: bool = True
    # Bound of the losses' log-ratios, in nats. Near 88 their gradients would become NaN or infinite in float32.
    max_log_ratio: LogRatio = 20.0
    # MoE routing replay (R2): train tokens with the experts that computed the old log-probs.
    use_routing_replay: bool = False
    # MoE rollout routing replay (R3): train tokens with the engine's experts. Not implemented yet: reading them from an
    # engine, so they must come from a dump.
    use_rollout_routing_replay: bool = False
    # Compute the old log-probs of each token with the weights that sampled it, not with those before the train step.
    # The trainer and its checkpoints keep the weights of the last `rollout.max_token_staleness` train steps, which must
    # be set.
    keep_old_actor: bool = False
    # Use the engines' log-probs as those of the old policy. This saves a forward pass.
    use_rollout_logprobs: bool = False
    # Set the optimizer's moments and step counts to 0 before each train step.
    reset_optimizer_states: bool = False
    # Lambda of the returns that the critic learns. By default that of the advantages. VAPO and NeMo-RL's recipes of it
    # have 1.
    gae_lambda_value: Fraction | None = None
    # Lambda of the advantages by response length: 1 - 1 / (`length_adaptive_alpha` x tokens of the response), at least
    # 0, in place of `lambd` (VAPO). 0 turns it off.
    length_adaptive_alpha: NonNegative = 0.0
    # Largest change of a value that lowers the critic's loss, in reward units.
    value_clip: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    # Factor of the critic's squared error: 1 as in slime; verl and NeMo-RL have 0.5.
    value_loss_coef: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    # Number of first train steps that train the critic alone. The actor keeps its weights, and its learning rate's
    # schedule begins after them. With all train steps or more the actor is never trained.
    num_critic_only_steps: Count = 0
    # Compute trainer log-probs for all samples, and report the trainer/engine mismatch as `train/mis_kl`, perplexities
    # and other metrics. With `use_rollout_logprobs` they are otherwise computed only for the first optimizer step.
    get_mismatch_metrics: bool = False


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """AdamW and its learning rate schedule, counted in optimizer steps."""

    # Learning rate after the warm-up.
    lr: NonNegative = 1e-6
    # Learning rate at the end of the decay.
    min_lr: NonNegative = 0.0
    # How the learning rate decays from `lr` to `min_lr`. "constant" does not decay.
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    # Number of optimizer steps of linear warm-up.
    lr_warmup_iters: Count = 0
    # Optimizer step at which the learning rate reaches `min_lr`. By default the last planned one.
    lr_decay_iters: Positive | None = None
    # Weight decay, decoupled as in AdamW.
    weight_decay: NonNegative = 0.01
    # Decay of the gradients' moving average.
    adam_beta1: Beta = 0.9
    # Decay of the squared gradients' moving average.
    adam_beta2: Beta = 0.999
    # Constant added to the denominator, the root of the squared gradients' average.
    adam_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-8
    # Maximum gradient norm; larger gradients are scaled down to it. 0 turns clipping off.
    clip_grad: NonNegative = 1.0


class CriticConfig(Config, frozen=True, kw_only=True):
    """The critic of `algorithm.advantage_estimator` = "ppo". `trainer.critic` may give it ranks of its own."""

    # Model directory or hub name that the critic starts from: a policy, or a model with a value head. By default
    # `model.hf_checkpoint`.
    hf_checkpoint: Text | None = None
    # Standard deviation of a new value head's weight. Its bias starts at 0.
    init_method_std: NonNegative = 0.02
    # Learning rate after the warm-up. By default `optimizer.lr`.
    lr: NonNegative | None = None
    # Learning rate at the end of the decay. By default `optimizer.min_lr`.
    min_lr: NonNegative | None = None
    # How the learning rate decays. By default `optimizer.lr_decay_style`.
    lr_decay_style: Literal["constant", "linear", "cosine"] | None = None
    # Number of optimizer steps of linear warm-up. By default `optimizer.lr_warmup_iters`.
    lr_warmup_iters: Count | None = None
    # Optimizer step at which the learning rate reaches `min_lr`. By default `optimizer.lr_decay_iters`.
    lr_decay_iters: Positive | None = None
    # Weight decay. By default `optimizer.weight_decay`.
    weight_decay: NonNegative | None = None
    # Decay of the gradients' moving average. By default `optimizer.adam_beta1`.
    adam_beta1: Beta | None = None
    # Decay of the squared gradients' moving average. By default `optimizer.adam_beta2`.
    adam_beta2: Beta | None = None
    # Constant added to the denominator. By default `optimizer.adam_eps`.
    adam_eps: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Maximum gradient norm. 0 turns clipping off. By default `optimizer.clip_grad`.
    clip_grad: NonNegative | None = None


class TrainConfig(Config, frozen=True, kw_only=True):
    """Length of the run, checkpoints, micro-batches."""

    # Number of train steps. 0 derives it from `num_epoch`.
    num_steps: Count = 0
    # Number of passes over the data, counted in full batches when the run starts. Cannot be combined with `num_steps`.
    num_epoch: Positive | None = None
    # Number of train steps between checkpoints. By default one checkpoint is written, at the end.
    save_interval: Positive | None = None
    # Maximum number of tokens of a micro-batch on one rank.
    max_tokens_per_gpu: Positive = 9216
    # What to do with a sample over `max_tokens_per_gpu` times the context-parallel size: leave out its gradient
    # ("mask"), or end the run ("fail").
    on_too_long: Literal["mask", "fail"] = "mask"
    # What to do with a NaN or infinite loss or gradient: leave out the sample or optimizer step ("skip"), or end the
    # run ("fail").
    on_nonfinite: Literal["skip", "fail"] = "skip"
    # Maximum number of optimizer steps skipped in a row, across batches. One more ends the run.
    max_skipped: Count = 3
    # Number of most recent optimizer steps to which `max_skipped_share` applies.
    skip_window: Positive = 20
    # Maximum share of skipped steps in `skip_window`. A larger share ends the run.
    max_skipped_share: Fraction = 0.25
    # Number of newest checkpoints to keep.
    keep_checkpoints: Positive = 2
    # Function that each trainer process calls once, before it builds the model: "module:function" or
    # "path/file.py:function". At the start, the arguments of this function and of the next two are checked.
    custom_megatron_init: Text | None = None
    # Function that each trainer process calls before it computes log-probs without training, with the model's chunks.
    custom_megatron_before_log_prob_hook: Text | None = None
    # Function that each trainer process calls before each optimizer step, with the model's chunks and the optimizer.
    custom_megatron_before_train_step_hook: Text | None = None
    # At the end, write the model to `hf/` in the run directory.
    save_hf: bool = False


class EvalConfig(Config, frozen=True, kw_only=True):
    """One evaluation set. Unset keys take their values from the rollout table and the first data source.

    With "dpo_loss" and "rm_loss" it holds preference pairs, which the trainer evaluates without generating.
    """

    # Name of the set. Its metrics begin with `eval/<name>`.
    name: Name
    # Data file, as in a data source.
    path: Text
    # Number of train steps between evaluations.
    interval: Positive
    # Number of samples per prompt. The metric is their mean. Not for preference pairs, like the next four keys.
    n_samples_per_eval_prompt: Positive = 1
    # Sampling temperature; 0 is greedy. By default `rollout.temperature`.
    temperature: NonNegative | None = None
    # Nucleus sampling. By default `rollout.top_p`.
    top_p: TopP | None = None
    # Number of likeliest tokens to sample from. By default `rollout.top_k`.
    top_k: TopK | None = None
    # Maximum response length in tokens. By default `rollout.max_response_len`.
    max_response_len: Positive | None = None
    # Column of the prompt. By default that of the first data source.
    input_key: Text | None = None
    # Column of the label. By default that of the first data source.
    label_key: Text | None = None
    # Column of metadata for graders. By default that of the first data source.
    metadata_key: Text | None = None
    # Column of tools for the chat template. By default that of the first data source.
    tool_key: Text | None = None
    # Render prompts with the tokenizer's chat template. By default as in the first data source.
    apply_chat_template: bool | None = None
    # Extra arguments of the chat template. By default those of the first data source.
    apply_chat_template_kwargs: dict[str, Any] | None = None
    # Grader of the samples. By default that of the first data source.
    rm_type: Text | None = None
    # Async function that generates the samples of this set: "module:function" or "path/file.py:function". By default
    # `rollout.custom_generate`.
    custom_generate: Text | None = None
    # Async function that evaluates this set: it gets all prompts, and decides of which it asks for how many samples, at
    # most `n_samples_per_eval_prompt`: "module:function" or "path/file.py:function". By default each prompt has
    # `n_samples_per_eval_prompt` samples.
    custom_evaluation: Text | None = None
    # Function that computes further metrics from all graded samples of this set, in a process of its own:
    # "module:function" or "path/file.py:function". They are `eval/<name>/<metric>`.
    custom_metrics: Text | None = None
    # Do not evaluate the weights that training starts from.
    skip_eval_before_train: bool = False


class Recipe(Config, frozen=True, kw_only=True):
    """All settings that decide what is learnt. Where it runs is in the topology."""

    model: ModelConfig
    # At least one is needed.
    data: tuple[DataConfig, ...]
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    train: TrainConfig
    eval: tuple[EvalConfig, ...] = ()
