"""Losses, the tables `algorithm.loss`: each has the settings of one loss, its formula and its source.

A loss is one class here and one function in `actors/trainer/algorithms/`. The fields are the function's arguments. All
else follows from the class: what `--check` refuses, the formula of `--plan`, and the pages of the reference.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from runtime.functions.table import LOSS
from runtime.settings.reading.access import Harmless
from runtime.settings.reading.config import Choice
from runtime.settings.tables.values import Fraction, NonNegative, Text

AboveZero = Harmless[Annotated[float, msgspec.Meta(gt=0)]]
Smoothing = Harmless[Annotated[float, msgspec.Meta(ge=0, lt=0.5)]]


class LossTable(Choice, frozen=True, kw_only=True):
    """A loss. {old} in a formula is the old policy."""

    harmless = True
    learns_from: ClassVar[Literal["samples", "demonstrations", "pairs"]] = "samples"
    has_ratio: ClassVar[bool] = True  # limited by algorithm.max_log_ratio
    reads_old: ClassVar[bool] = True  # log-probs of the old policy
    reads_engine: ClassVar[bool] = False  # the engine's log-probs, so that no correction may do it again

    @property
    def vanishes(self) -> bool:
        """Whether tokens with an advantage of 0 have no loss and no gradient, whatever their log-probs are."""
        return False


class _Proportional(LossTable, frozen=True, kw_only=True):
    """A loss that is a product with the advantage."""

    @property
    def vanishes(self) -> bool:
        """Whether tokens with an advantage of 0 have no loss and no gradient, whatever their log-probs are."""
        return True


class _Clipped(_Proportional, frozen=True, kw_only=True):
    """A loss with clipped ratios."""

    # Lower clip range of the probability ratio: it is clipped at 1 - `eps_clip`.
    eps_clip: AboveZero = 0.2
    # Upper clip range: the ratio is clipped at 1 + `eps_clip_high`. By default `eps_clip`.
    eps_clip_high: AboveZero | None = None

    @property
    def low(self) -> float:
        """Smallest ratio."""
        return 1 - self.eps_clip

    @property
    def above(self) -> float:
        """Upper clip range."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def high(self) -> float:
        """Largest ratio."""
        return 1 + self.above


class PpoLoss(_Clipped, frozen=True, kw_only=True, tag="ppo"):
    """PPO's clipped surrogate."""

    formula = "max(-r A, -clip(r, {low}, {high}) A){dual}, r = policy / {old}"
    source = "PPO, arXiv 1707.06347"

    # Lower clip range of the probability ratio: it is clipped at 1 - `eps_clip`.
    eps_clip: Harmless[Annotated[float, msgspec.Meta(gt=0, lt=1)]] = 0.2
    # Dual clip: bound of the ratio for negative advantages. By default it is off.
    eps_clip_c: Harmless[Annotated[float, msgspec.Meta(gt=1)] | None] = None

    @property
    def dual(self) -> str:
        """The bound of the loss for negative advantages."""
        return "" if self.eps_clip_c is None else f", at most -{self.eps_clip_c:g} A for A < 0"


class GspoLoss(PpoLoss, frozen=True, kw_only=True, tag="gspo"):
    """GSPO: PPO's loss with one ratio for each sample, the geometric mean over its tokens."""

    formula = "max(-s A, -clip(s, {low}, {high}) A){dual}, s = geometric mean of policy / {old} over the sample"
    source = "GSPO, arXiv 2507.18071"


class DecoupledPpoLoss(PpoLoss, frozen=True, kw_only=True, tag="decoupled_ppo"):
    """Decoupled PPO: PPO around the old policy, weighted by old policy over engine."""

    formula = "sg(old policy / engine) max(-r A, -clip(r, {low}, {high}) A){dual}, r = policy / {old}"
    source = "decoupled PPO, arXiv 2505.24298"
    reads_engine = True

    # Largest importance weight of old policy over engine; tokens above it have no loss. By default there is no limit.
    behav_imp_weight_cap: AboveZero | None = None


class CispoLoss(_Clipped, frozen=True, kw_only=True, tag="cispo"):
    """CISPO: policy gradient weighted by the clipped ratio, which has no gradient."""

    formula = "-sg(clip(r, {low}, {high})) A log p, r = policy / {old}"
    source = "CISPO, arXiv 2506.13585"


class DppoTvLoss(_Proportional, frozen=True, kw_only=True, tag="dppo_tv"):
    """DPPO: drop tokens whose probability has moved too far in the direction of their advantage."""

    formula = (
        "-A sg(min(r, {eps_clip_c})) log p, A = 0 where A > 0 and p - p_old > {above}, or A <= 0 and "
        "p_old - p > {eps_clip}, r = policy p / {old}"
    )
    source = "DPPO, arXiv 2602.04879"

    # Largest divergence of tokens that became less likely.
    eps_clip: AboveZero = 0.2
    # Largest divergence of tokens that became likelier. By default `eps_clip`.
    eps_clip_high: AboveZero | None = None
    # Upper bound of the ratio.
    eps_clip_c: Harmless[Annotated[float, msgspec.Meta(gt=1)]] = 20.0

    @property
    def above(self) -> float:
        """Largest divergence of tokens that became likelier."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class DppoKlLoss(DppoTvLoss, frozen=True, kw_only=True, tag="dppo_kl"):
    """DPPO with the divergence of Bernoulli distributions in place of the change of the probability."""

    formula = (
        "-A sg(min(r, {eps_clip_c})) log p, A = 0 where A > 0, p > p_old and KL(p_old, p) > {above}, or A <= 0, "
        "p < p_old and KL(p_old, p) > {eps_clip}, r = policy p / {old}"
    )


class _OverEngine(LossTable, frozen=True, kw_only=True):
    """A loss of prime-rl, with the ratio of policy and engine."""

    reads_old = False
    reads_engine = True

    # Factor of the advantages.
    adv_tau: NonNegative = 1.0
    # Weight of the squared log-ratio of policy and engine.
    kl_tau: NonNegative = 1e-3

    @property
    def vanishes(self) -> bool:
        """Whether tokens with an advantage of 0 have no loss and no gradient, whatever their log-probs are."""
        return self.kl_tau == 0

    @property
    def adv(self) -> str:
        """The factor of the advantages, if it is not 1."""
        return "" if self.adv_tau == 1 else f"{self.adv_tau:g} "


class PrimeRlLoss(_OverEngine, frozen=True, kw_only=True, tag="prime_rl"):
    """prime-rl's default loss: policy over engine, without tokens whose probability has moved too far."""

    formula = (
        "-{adv}A r + {kl_tau} (log r)^2, A = 0 where A > 0 and p - q > {dppo_mask_high}, or A <= 0 and "
        "q - p > {dppo_mask_low}, r = policy p / engine q"
    )
    source = "prime-rl's default; arXiv 2602.04879"

    # Largest loss of probability of a token whose advantage is not positive.
    dppo_mask_low: Fraction = 0.2
    # Largest gain of probability of a token with a positive advantage.
    dppo_mask_high: Fraction = 0.2


class PrimeRlIpoLoss(_OverEngine, frozen=True, kw_only=True, tag="prime_rl_ipo"):
    """prime-rl's loss with the mask that it calls IPO, of tokens whose probability has moved too far either way."""

    formula = "-{adv}A r + {kl_tau} (log r)^2, A = 0 where |p - q| > {ipo_threshold}, r = policy p / engine q"
    source = "prime-rl"

    # Largest change of a token's probability.
    ipo_threshold: Fraction = 0.1


class SapoLoss(_Proportional, frozen=True, kw_only=True, tag="sapo"):
    """SAPO: a smooth gate of the ratio in place of a clip."""

    formula = "-A sigmoid(t (r - 1)) 4 / t, t = {tau_pos} for A > 0, else {tau_neg}, r = policy / {old}"
    source = "SAPO, arXiv 2511.20347"

    # Temperature of the gate for positive advantages.
    tau_pos: AboveZero = 1.0
    # Temperature of the gate for other advantages.
    tau_neg: AboveZero = 1.05


class GmpoLoss(_Clipped, frozen=True, kw_only=True, tag="gmpo"):
    """GMPO: one ratio for each sample, the geometric mean of its tokens' clipped ratios."""

    formula = (
        "-mean(A) exp(mean(d)), d = log r, at most {above} where A > 0, at least -{eps_clip} where A < 0, "
        "r = policy / {old}"
    )
    source = "GMPO, arXiv 2507.20673"

    # Largest fall of a log-prob, in nats.
    eps_clip: AboveZero = 0.2
    # Largest rise of a log-prob, in nats. By default `eps_clip`.
    eps_clip_high: AboveZero | None = None


class GpgLoss(_Proportional, frozen=True, kw_only=True, tag="gpg"):
    """Policy gradient without a ratio."""

    formula = "-A log p"
    source = "GPG, arXiv 2504.02546"
    has_ratio = False
    reads_old = False


class CustomLoss(LossTable, frozen=True, kw_only=True, tag="custom"):
    """A policy loss of your own."""

    formula = "{function}"
    source = "algorithm.loss.function"

    # The function: "module:function" or "path/file.py:function". It is tried on two samples at the start.
    function: Annotated[Text, LOSS]


class SftLoss(LossTable, frozen=True, kw_only=True, tag="sft"):
    """Cross-entropy of demonstrations. Runs no engines."""

    formula = "-log p"
    source = "cross-entropy"
    learns_from = "demonstrations"


class IpoLoss(LossTable, frozen=True, kw_only=True, tag="preference_ipo"):
    """IPO, a loss of preference pairs. Runs no engines."""

    formula = "(h - {target})^2"
    source = "IPO, arXiv 2310.12036"
    learns_from = "pairs"

    # Weight of the distance from the reference model.
    beta: AboveZero = 0.1

    @property
    def target(self) -> float:
        """The margin that is learnt."""
        return 1 / (2 * self.beta)


class _Preferred(LossTable, frozen=True, kw_only=True):
    """A loss of preference pairs by the probability that the chosen response wins."""

    formula = "-{kept}log sigmoid({margin}){swapped}"
    learns_from = "pairs"

    # Probability that the responses of a preference pair are swapped.
    label_smoothing: Smoothing = 0.0

    @property
    def margin(self) -> str:
        """By how much the chosen response is ahead."""
        return "h"

    @property
    def kept(self) -> str:
        """The factor of a pair that is not swapped, if it is not 1."""
        return f"{1 - self.label_smoothing:g} " if self.label_smoothing else ""

    @property
    def swapped(self) -> str:
        """The term of a swapped pair."""
        return f" - {self.label_smoothing:g} log sigmoid(-{self.margin})" if self.label_smoothing else ""


class DpoLoss(_Preferred, frozen=True, kw_only=True, tag="dpo"):
    """DPO, a loss of preference pairs. Runs no engines."""

    source = "DPO, arXiv 2305.18290"

    # Weight of the distance from the reference model.
    beta: AboveZero = 0.1

    @property
    def margin(self) -> str:
        """By how much the chosen response is ahead."""
        return f"{self.beta:g} h"


class RmLoss(_Preferred, frozen=True, kw_only=True, tag="rm"):
    """Loss of a reward model, which preference pairs train: the model gets a value head. Runs no engines."""

    source = "Bradley-Terry; InstructGPT, arXiv 2203.02155"


Loss = (
    PpoLoss
    | GspoLoss
    | CispoLoss
    | DppoTvLoss
    | DppoKlLoss
    | PrimeRlLoss
    | PrimeRlIpoLoss
    | SapoLoss
    | GmpoLoss
    | DecoupledPpoLoss
    | GpgLoss
    | CustomLoss
    | SftLoss
    | DpoLoss
    | IpoLoss
    | RmLoss
)
