"""The table `algorithm`: loss, advantages, KL and corrections."""

from typing import Annotated, Final, Literal

import msgspec

from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Count, Fraction, NonNegative, Positive, Text

LogRatio = Annotated[float, msgspec.Meta(gt=0, le=80)]
RewardName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]  # part of a metric's name
Weight = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


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
