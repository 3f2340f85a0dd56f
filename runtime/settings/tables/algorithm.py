"""The table `algorithm`, and the tables in it that choose by `type`: KL, corrections, reduction, teacher, penalty.

Those of the losses are in losses.py, those of the estimators in estimators.py.
"""

from typing import Annotated, Final, Literal

import msgspec

from runtime.functions.table import POSTPROCESS, REDUCER, WEIGHTS
from runtime.settings.reading.access import Harmless
from runtime.settings.reading.config import Choice, Config
from runtime.settings.tables.estimators import Estimator, Grpo
from runtime.settings.tables.losses import Loss, PpoLoss
from runtime.settings.tables.values import Count, NonNegative, Positive, Text

AboveZero = Harmless[Annotated[float, msgspec.Meta(gt=0)]]
LogRatio = Harmless[Annotated[float, msgspec.Meta(gt=0, le=80)]]
MAX_TOPK: Final = 1024
Level = Literal["token", "sequence", "geometric"]


class KlTable(Choice, frozen=True, kw_only=True):
    """An estimate of the KL divergence from the reference model, by d = log(policy / reference) of sampled tokens."""

    harmless = True

    # Weight of the divergence in the loss. 0 turns it off: no reference model is loaded.
    loss_coef: NonNegative = 0.0
    # Weight of the divergence of the old policy from the reference model in the reward: each trained token loses
    # `reward_coef` times its divergence. It cannot be combined with `loss_coef`. An estimator of your own gets the
    # divergence as `inputs.kl`, and subtracts it itself. 0 turns it off.
    reward_coef: NonNegative = 0.0
    # Subtract the divergence of a whole sample from its reward before the rewards of its group are compared, as in
    # verl. By default it is subtracted from the advantage of each token afterwards, as in slime.
    before_normalization: Harmless[bool] = False
    # Number of train steps between measurements of the divergence, as a metric alone. The first train step is measured.
    # Other steps compute no log-probs of the reference. By default, 0, it is not measured and no reference model is
    # loaded. With `loss_coef` or `reward_coef` each step has the metric.
    metric_interval: Count = 0

    @property
    def is_unbiased(self) -> bool:
        """Whether the estimate is multiplied by the ratio of policy and old policy."""
        return False


class _Sampled(KlTable, frozen=True, kw_only=True):
    """An estimate for tokens that the policy sampled."""

    # Multiply the divergence in the loss by the ratio of policy and old policy, which makes it unbiased for tokens that
    # the old policy sampled.
    unbiased: Harmless[bool] = False

    @property
    def is_unbiased(self) -> bool:
        """Whether the estimate is multiplied by the ratio of policy and old policy."""
        return self.unbiased


class K1(_Sampled, frozen=True, kw_only=True, tag="k1"):
    """Unbiased, and may be negative."""

    formula = "d"


class K2(_Sampled, frozen=True, kw_only=True, tag="k2"):
    """Half the square of the log-ratio."""

    formula = "d^2 / 2"


class K3(_Sampled, frozen=True, kw_only=True, tag="k3"):
    """Unbiased, and never negative."""

    formula = "exp(-d) - 1 + d"


class LowVarKl(_Sampled, frozen=True, kw_only=True, tag="low_var_kl"):
    """k3, limited to 10 nats."""

    formula = "k3, at most 10"


class K1Plus(KlTable, frozen=True, kw_only=True, tag="k1+"):
    """The value of k1 and the gradient of k2, which is an unbiased gradient of the divergence."""

    formula = "k1, with the gradient of k2"


class K3Plus(KlTable, frozen=True, kw_only=True, tag="k3+"):
    """The value of low_var_kl and the gradient of k2, which is an unbiased gradient of the divergence."""

    formula = "low_var_kl, with the gradient of k2"


Kl = K1 | K2 | K3 | LowVarKl | K1Plus | K3Plus


class TisTable(Choice, frozen=True, kw_only=True):
    """Importance weights of old policy over engine, which multiply the policy loss (truncated importance sampling)."""

    harmless = True

    # Upper bound of the importance weights.
    upper_bound: AboveZero = 2.0
    # Importance weight of a token: its own ratio ("token"), the product over its sample ("sequence"), or the geometric
    # mean over its sample ("geometric").
    level: Harmless[Level] = "token"
    # Divide the importance weights by their mean over the batch. This needs old log-probs before the first optimizer
    # step, which is one forward pass more.
    batch_normalize: Harmless[bool] = False


class TruncateTis(TisTable, frozen=True, kw_only=True, tag="truncate"):
    """Lower weights above the bound."""

    formula = "min(w, {upper_bound})"


class ClipTis(TisTable, frozen=True, kw_only=True, tag="clip"):
    """Move weights out of bounds to the bound."""

    formula = "clip(w, {lower_bound}, {upper_bound})"

    # Lower bound of the importance weights.
    lower_bound: NonNegative = 0.0


class MaskTis(ClipTis, frozen=True, kw_only=True, tag="mask"):
    """Set weights out of bounds to 0 (IcePop, masked importance sampling)."""

    formula = "w, or 0 outside of [{lower_bound}, {upper_bound}]"


class CustomTis(ClipTis, frozen=True, kw_only=True, tag="custom"):
    """Importance weights of your own. Only a function of slime reads the other keys, as its `args`."""

    formula = "{function}"

    # The function: "module:function" or "path/file.py:function". It is tried on two samples at the start.
    function: Annotated[Text, WEIGHTS]
    # What a function of slime reads as `tis_mode`.
    mode: Harmless[Literal["truncate", "clip", "mask"]] = "clip"


Tis = ClipTis | TruncateTis | MaskTis | CustomTis


class RsTable(Choice, frozen=True, kw_only=True):
    """Leave tokens out of the policy loss whose old policy and engine differ too much (rejection sampling)."""

    harmless = True

    # Level of what is compared: each token ("token"), its sample's product ("sequence") or geometric mean
    # ("geometric").
    level: Harmless[Level] = "token"
    # A token with a smaller ratio of old policy and engine takes its whole sample out of the policy loss. By default
    # there is no such threshold.
    veto_threshold: AboveZero | None = None


class RatioRs(RsTable, frozen=True, kw_only=True, tag="ratio"):
    """By the ratio of old policy and engine."""

    # Lower bound of the ratio. By default 1 / `upper_bound`.
    lower_bound: NonNegative | None = None
    # Upper bound of the ratio. By default that of `algorithm.tis`, and 2 without one.
    upper_bound: AboveZero | None = None


class BinaryKlRs(RsTable, frozen=True, kw_only=True, tag="binary_kl"):
    """By the larger of the two divergences between the probabilities that they give the token (KPop), in nats."""

    # Upper bound of the divergence, in nats.
    upper_bound: AboveZero = 0.1


Rs = RatioRs | BinaryKlRs


class ReductionTable(Choice, frozen=True, kw_only=True):
    """How token losses become one loss."""

    harmless = True


class _OverRollouts(ReductionTable, frozen=True, kw_only=True):
    """A mean over rollouts or samples."""

    # Count a rollout whose tokens are all masked in the denominator.
    count_masked_rollouts: Harmless[bool] = True


class RolloutMean(_OverRollouts, frozen=True, kw_only=True, tag="rollout-mean"):
    """The mean over rollouts of their token means."""

    formula = "mean over rollouts of their means over tokens"


class TokenMean(ReductionTable, frozen=True, kw_only=True, tag="token-mean"):
    """The mean over tokens."""

    formula = "mean over tokens"


class SeqMeanTokenMean(_OverRollouts, frozen=True, kw_only=True, tag="seq-mean-token-mean"):
    """The mean over samples of their token means."""

    formula = "mean over samples of their means over tokens"


class SeqMeanTokenSumNorm(_OverRollouts, frozen=True, kw_only=True, tag="seq-mean-token-sum-norm"):
    """The mean over rollouts of their token sums, divided by a constant length."""

    formula = "mean over rollouts of their sums over tokens / {scale}"

    # Constant length in tokens. By default `rollout.max_response_len`.
    scale_factor: Positive | None = None


class CustomReduction(ReductionTable, frozen=True, kw_only=True, tag="custom"):
    """A reduction of your own."""

    formula = "{function}"

    # The function: "module:function" or "path/file.py:function". It is tried on two samples at the start.
    function: Annotated[Text, REDUCER]


Reduction = RolloutMean | TokenMean | SeqMeanTokenMean | SeqMeanTokenSumNorm | CustomReduction


class TopkKl(Choice, frozen=True, kw_only=True):
    """A KL divergence between teacher (p) and policy (q) over the teacher's likeliest tokens, in the loss."""

    harmless = True

    # Weight of the divergence in the loss.
    coef: AboveZero
    # Number of the teacher's likeliest tokens at each place of a response. Each costs 8 bytes a token in the run's
    # data stream.
    topk: Harmless[Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPK)]] = 32


class ForwardKl(TopkKl, frozen=True, kw_only=True, tag="forward"):
    """The sum of p log(p / q)."""

    formula = "p log(p / q)"


class ReverseKl(TopkKl, frozen=True, kw_only=True, tag="reverse"):
    """The sum of q log(q / p)."""

    formula = "q log(q / p)"

    # Take the teacher's log-prob of all other tokens as -100, in the reverse divergence. By default they do not count.
    zero_outside_topk: Harmless[bool] = False


class MixedKl(ReverseKl, frozen=True, kw_only=True, tag="mixed"):
    """A weighted mean of both."""

    formula = "{mixed_kl_weight} p log(p / q) + {rest} q log(q / p)"

    # Weight of the forward divergence.
    mixed_kl_weight: Harmless[Annotated[float, msgspec.Meta(ge=0, le=1)]] = 0.5

    @property
    def rest(self) -> float:
        """Weight of the reverse divergence."""
        return 1 - self.mixed_kl_weight


class OpdTable(Choice, frozen=True, kw_only=True):
    """On-policy distillation: subtract the reverse KL to a teacher from the advantage of each token.

    Without a grader all rewards are 0, and the teacher alone is followed.
    """

    harmless = True

    # Weight of the reverse KL to the teacher in the advantage. With 0 here and without `distillation` no teacher
    # computes log-probs.
    kl_coef: NonNegative = 1.0


class SglangTeacher(OpdTable, frozen=True, kw_only=True, tag="sglang"):
    """The teacher computes log-probs in an engine pool."""

    # A divergence over the teacher's likeliest tokens, in the loss. By default there is none.
    distillation: ForwardKl | ReverseKl | MixedKl | None = None


class MegatronTeacher(OpdTable, frozen=True, kw_only=True, tag="megatron"):
    """The trainer keeps the teacher and computes its log-probs."""


class LinearPenalty(Choice, frozen=True, kw_only=True, tag="linear"):
    """Lower the rewards of samples that are long compared with the longest of their group, as in prime-rl.

    Each term is a share of the group's mean reward.
    """

    harmless = True

    # Share of the mean reward that the sample with the most sampled tokens loses. 0 turns the term off.
    num_output_tokens_weight: NonNegative = 0.25
    # Share of the mean reward that the sample with the most input tokens loses: prompt and tool output. 0 turns the
    # term off.
    num_input_tokens_weight: NonNegative = 0.1
    # Share of the mean reward that the sample with the most turns loses. 0 turns the term off.
    num_turns_weight: NonNegative = 0.1


class AlgorithmConfig(Config, frozen=True, kw_only=True):
    """Settings of advantages, loss and KL."""

    harmless = True

    # Loss to train with. "sft" trains on demonstrations, "dpo" and "preference_ipo" on preference pairs. "rm" trains a
    # reward model on preference pairs. None of the four runs engines.
    loss: Loss = PpoLoss()
    # Estimator that turns rewards into advantages.
    estimator: Estimator = Grpo()
    # How token losses become one loss.
    reduction: Reduction = RolloutMean()
    # KL divergence from the reference model, in the loss or in the reward.
    kl: Kl = K1()
    # Correct the policy loss for the distance between engine and trainer by importance weights. By default it is not.
    tis: Tis | None = None
    # Leave tokens out of the policy loss by the distance between engine and trainer. By default none is.
    rs: Rs | None = None
    # On-policy distillation from a teacher. By default there is none.
    opd: SglangTeacher | MegatronTeacher | None = None
    # Penalty of long samples. By default there is none.
    length_penalty: LinearPenalty | None = None
    # Length of the zone before `rollout.max_response_len` in which rewards fall, in tokens (DAPO). The penalty grows
    # linearly from 0 at the start of the zone to `overlong_penalty_factor` at its end. By default there is no penalty.
    overlong_buffer_len: Positive | None = None
    # Penalty of a response with `rollout.max_response_len` tokens, in reward units. Longer responses lose more.
    overlong_penalty_factor: NonNegative = 1.0
    # Whiten the advantages: shift and scale them to mean 0 and variance 1 over all trained tokens of the batch.
    normalize_advantages: Harmless[bool] = False
    # Number of optimizer steps per batch.
    num_steps_per_rollout: Positive = 1
    # Compare the policy being trained with the engine in `tis` and `rs`, not the old policy. This needs no old
    # log-probs. Losses with a ratio to the old policy need `use_rollout_logprobs` then, and allow `rs` alone.
    bypass_mode: Harmless[bool] = False
    # Leave tokens with a negative advantage out of the policy loss, in samples whose log-probs fell by more than this
    # since they were old log-probs (off-policy sequence masking), in nats per token. slime has 1e-4. By default it is
    # off.
    opsm_delta: NonNegative | None = None
    # Function that may mask tokens of a batch, or change its advantages, before the batch trains:
    # "module:function" or "path/file.py:function". It needs the old log-probs of all samples, which is one forward pass
    # more unless `use_rollout_logprobs` is set. It is tried on two samples at the start.
    rollout_data_postprocess: Annotated[Text | None, POSTPROCESS] = None
    # Number of train steps between updates of the reference model: it takes the weights of the policy. By default it
    # stays as it was loaded. Checkpoints then contain the reference, too.
    ref_update_interval: Positive | None = None
    # Weight of the negative log-likelihood of samples with a reward above 0, as in VAPO. It is a mean over the tokens
    # of these samples alone. 0 turns it off.
    positive_example_nll_weight: NonNegative = 0.0
    # Weight of the entropy bonus.
    entropy_coef: NonNegative = 0.0
    # Weight of the entropy bonus at the last planned train step, reached linearly. By default the weight is constant.
    entropy_coef_end: NonNegative | None = None
    # Bound of the losses' log-ratios, in nats. Near 88 their gradients would become NaN or infinite in float32.
    max_log_ratio: LogRatio = 20.0
    # MoE routing replay (R2): train tokens with the experts that computed the old log-probs.
    use_routing_replay: Harmless[bool] = False
    # MoE rollout routing replay (R3): train tokens with the engine's experts. Not implemented yet: reading them from an
    # engine, so they must come from a dump.
    use_rollout_routing_replay: Harmless[bool] = False
    # Compute the old log-probs of each token with the weights that sampled it, not with those before the train step.
    # The trainer and its checkpoints keep the weights of the last `rollout.max_token_staleness` train steps, which must
    # be set.
    keep_old_actor: Harmless[bool] = False
    # Use the engines' log-probs as those of the old policy. This saves a forward pass.
    use_rollout_logprobs: Harmless[bool] = False
    # Set the optimizer's moments and step counts to 0 before each train step.
    reset_optimizer_states: Harmless[bool] = False
    # Compute trainer log-probs for all samples, and report the trainer/engine mismatch as `train/mis_kl`, perplexities
    # and other metrics. With `use_rollout_logprobs` they are otherwise computed only for the first optimizer step.
    get_mismatch_metrics: Harmless[bool] = False
