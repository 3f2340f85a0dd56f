"""Estimators of advantages, the tables `algorithm.estimator`: each has the settings of one, its formula and its source.

An estimator is one class here, one function in `actors/trainer/algorithms/` and a row in
`actors/trainer/step/estimator.py`, which names the function's inputs and the fields that it takes.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from runtime.functions.table import ADVANTAGE
from runtime.settings.reading.access import Harmless
from runtime.settings.reading.config import Choice
from runtime.settings.tables.values import Count, Fraction, Text

RewardName = Harmless[
    Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
]  # part of a metric's name
Weight = Harmless[Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]]
AboveZero = Harmless[Annotated[float, msgspec.Meta(gt=0)]]
RewardNames = Harmless[Annotated[tuple[RewardName, ...], msgspec.Meta(max_length=16)]]


class EstimatorTable(Choice, frozen=True, kw_only=True):
    """An estimator."""

    harmless = True
    compares: ClassVar[bool] = False  # the samples of a group
    of_tokens: ClassVar[str] = (
        ""  # sums the rewards of tokens: the token that has the sample's, "trained" or "response"
    )
    whitens: ClassVar[bool] = False  # needs algorithm.normalize_advantages
    allows: ClassVar[tuple[str, ...]] = ()  # of the settings OF_REWARDS in rules/algorithm.py


class _Compares(EstimatorTable, frozen=True, kw_only=True):
    """An estimator that compares the samples of a group."""

    compares = True
    allows = ("overlong_buffer_len", "length_penalty", "kl.before_normalization")

    # Advantage of a sample without others in its group: 0 ("zero"), or its reward ("reward").
    group_of_one: Harmless[Literal["zero", "reward"]] = "zero"


class _Scales(_Compares, frozen=True, kw_only=True):
    """An estimator that divides by a standard deviation."""

    # Divide by the standard deviation of the group's rewards.
    normalize_std: Harmless[bool] = True

    @property
    def over_std(self) -> str:
        """The divisor."""
        return " / (std of group + 1e-6)" if self.normalize_std else ""


class Grpo(_Scales, frozen=True, kw_only=True, tag="grpo"):
    """GRPO: the difference from the group's mean, over its standard deviation."""

    formula = "{difference}{over_std}"
    source = "GRPO, arXiv 2402.03300"

    # Subtract the mean of the group's rewards. With false rewards are used as they are.
    normalize: Harmless[bool] = True

    @property
    def difference(self) -> str:
        """What is divided."""
        return "(R - mean of group)" if self.normalize_std else "R - mean of group"


class Rloo(_Compares, frozen=True, kw_only=True, tag="rloo"):
    """RLOO: the difference from the mean of the group's other samples."""

    formula = "R - mean of the group's others"
    source = "RLOO, arXiv 2402.14740"


class Reinforce(EstimatorTable, frozen=True, kw_only=True, tag="reinforce"):
    """REINFORCE: the difference from the mean of the batch."""

    formula = "R - mean of batch"
    source = "REINFORCE, Williams 1992"
    allows = ("overlong_buffer_len", "kl.before_normalization")

    # Subtract the mean of the batch's rewards. With false rewards are used as they are.
    normalize: Harmless[bool] = True


class _Returns(EstimatorTable, frozen=True, kw_only=True):
    """An estimator that gives each token a return."""

    allows = ("overlong_buffer_len",)

    # Discount per token of returns.
    gamma: Fraction = 1.0
    # Count tokens within a response that do not train, such as tool output, in returns and GAE, which discount at them,
    # as in slime. With false they are skipped, as in verl.
    discount_tool_tokens: Harmless[bool] = True


class ReinforcePlusPlus(_Returns, frozen=True, kw_only=True, tag="reinforce_plus_plus"):
    """REINFORCE++: the discounted return of each token, without a baseline."""

    formula = "r + {gamma} A of the next token"
    source = "REINFORCE++, arXiv 2501.03262"
    of_tokens = "trained"
    whitens = True


class ReinforcePlusPlusBaseline(_Compares, frozen=True, kw_only=True, tag="reinforce_plus_plus_baseline"):
    """REINFORCE++ with a baseline: the difference from the group's mean."""

    formula = "R - mean of group"
    source = "REINFORCE++, arXiv 2501.03262"
    whitens = True

    # Subtract the mean of the group's rewards. With false rewards are used as they are.
    normalize: Harmless[bool] = True


class Opo(_Compares, frozen=True, kw_only=True, tag="opo"):
    """OPO: the difference from the group's mean, which is weighted by length."""

    formula = "R - mean of group weighted by length"
    source = "OPO, arXiv 2505.23585"


class Gpg(_Compares, frozen=True, kw_only=True, tag="gpg"):
    """GPG: the difference from the group's mean, scaled by the share of samples with a reward."""

    formula = "(R - mean of group) samples / samples with R other than 0"
    source = "GPG, arXiv 2504.02546"


class MaxRl(EstimatorTable, frozen=True, kw_only=True, tag="maxrl"):
    """MaxRL: the difference from the group's mean, over that mean. Rewards must not be negative."""

    formula = "(R - mean of group) / mean of group"
    source = "MaxRL, arXiv 2602.02710"
    compares = True


class GrpoPassk(_Scales, frozen=True, kw_only=True, tag="grpo_passk"):
    """GRPO for pass@k: the best sample of a group alone has an advantage."""

    formula = "{difference}{over_std} for the best sample, else 0"
    source = "arXiv 2503.19595"
    allows = ("overlong_buffer_len", "kl.before_normalization")

    @property
    def difference(self) -> str:
        """What is divided."""
        return "(best R - second best R)"


class Gdpo(_Scales, frozen=True, kw_only=True, tag="gdpo"):
    """GDPO: GRPO for each of several rewards, added."""

    formula = "sum of {difference}{over_std} over {rewards}"
    source = "GDPO, arXiv 2601.05242"
    whitens = True
    allows = ()

    # Names of the rewards in a grader's dict, at most 16. A sample without a finite number under each of them fails.
    reward_keys: RewardNames = ()
    # Weights of these rewards, in their order. By default each has weight 1.
    reward_weights: Harmless[Annotated[tuple[Weight, ...], msgspec.Meta(max_length=16)]] = ()

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each reward by its name."""
        return dict(zip(self.reward_keys, self.reward_weights or (1.0,) * len(self.reward_keys), strict=False))

    @property
    def difference(self) -> str:
        """What is divided."""
        return "w (R_k - mean of group)"

    @property
    def rewards(self) -> str:
        """The rewards with their weights."""
        named = ", ".join(f"{weight:g} {key}" for key, weight in self.weights.items())
        return named or "reward_keys with reward_weights"


class Remax(EstimatorTable, frozen=True, kw_only=True, tag="remax"):
    """ReMax: the difference from the reward of a greedy sample.

    Each prompt gets this sample in addition to `rollout.n_samples_per_prompt`.
    """

    formula = "R - R of the prompt's greedy sample"
    source = "ReMax, arXiv 2310.10505"
    allows = ("overlong_buffer_len",)


class Gae(_Returns, frozen=True, kw_only=True, tag="ppo"):
    """Generalized advantage estimation with a critic (table `critic`), as in PPO."""

    formula = "sum of ({gamma} x {lambda_})^k (r_k + {gamma} V_k+1 - V_k) over the next tokens"
    source = "GAE, arXiv 1506.02438"
    of_tokens = "response"

    # Lambda of the advantages.
    lambd: Fraction = 1.0
    # Lambda of the returns that the critic learns. By default that of the advantages. VAPO and NeMo-RL's recipes of it
    # have 1.
    critic_lambd: Fraction | None = None
    # Lambda of the advantages by response length: 1 - 1 / (`length_adaptive_alpha` x tokens of the response), at least
    # 0, in place of `lambd` (VAPO). By default it is off.
    length_adaptive_alpha: AboveZero | None = None
    # Largest change of a value that lowers the critic's loss, in reward units.
    value_clip: AboveZero = 0.2
    # Factor of the critic's squared error: 1 as in slime; verl and NeMo-RL have 0.5.
    value_loss_coef: AboveZero = 1.0
    # Number of first train steps that train the critic alone. The actor keeps its weights, and its learning rate's
    # schedule begins after them. With all train steps or more the actor is never trained.
    num_critic_only_steps: Count = 0

    @property
    def lambda_(self) -> str:
        """Lambda of the advantages in formulas."""
        alpha = self.length_adaptive_alpha
        return f"{self.lambd:g}" if alpha is None else f"(1 - 1 / ({alpha:g} x length))"


class CustomEstimator(EstimatorTable, frozen=True, kw_only=True, tag="custom"):
    """An estimator of your own."""

    formula = "{function}"
    source = "algorithm.estimator.function"
    allows = ("overlong_buffer_len", "length_penalty")

    # The function: "module:function" or "path/file.py:function". It is tried on two samples at the start.
    function: Annotated[Text, ADVANTAGE]
    # Names of the rewards in a grader's dict that the function reads, at most 16. A sample without a finite number
    # under each of them fails.
    reward_keys: RewardNames = ()


Estimator = (
    Grpo
    | Rloo
    | Reinforce
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Opo
    | Gpg
    | MaxRl
    | GrpoPassk
    | Gdpo
    | Remax
    | Gae
    | CustomEstimator
)
