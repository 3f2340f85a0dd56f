"""Returns and advantages per token: discounted returns, GAE, REINFORCE++. B samples, N tokens of all samples.

Columns of tokens hold the samples one after the other, as in `AdvantageInputs`. `mask` chooses the tokens that count;
the others are skipped: the token before them is followed by the token after them, and their own result is 0. Train
steps pass the response mask. Then a tool's output counts like any token, as in slime. With the loss mask it is
skipped, as in verl. No value follows a sample's last token: V is 0 there. All results are float64.

Example:
    ```python
    import numpy as np

    from actors.trainer.algorithms.returns import discounted_returns, gae, token_rewards

    lengths, mask = np.array([3, 2]), np.array([False, True, True, True, True])  # the first token is a prompt
    kl = np.array([0.0, 1.0, 0.0, 0.0, 2.0])
    rewards = token_rewards(np.array([1.0, 4.0]), lengths, mask, kl, kl_coef=0.5)
    assert rewards.tolist() == [0.0, -0.5, 1.0, 0.0, 3.0]
    assert discounted_returns(rewards, lengths, mask, gamma=0.5).tolist() == [0.0, 0.0, 1.0, 1.5, 3.0]
    found = gae(rewards, np.array([9.0, 0.5, 0.5, 1.0, 1.0]), lengths, mask, gamma=1.0, lambd=0.5)
    assert found.advantages.tolist() == [0.0, -0.25, 0.5, 1.0, 2.0]
    assert found.returns.tolist() == [0.0, 0.25, 1.0, 2.0, 3.0]
    ```
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from actors.trainer.algorithms.advantage_inputs import Advantages, Flags, Floats, Ints, sample_sums
from actors.trainer.algorithms.arguments import array, column, floats
from actors.trainer.algorithms.group_baselines import GroupOfOne, grpo_advantages, usable_rewards

CHUNK: Final = 32  # tokens in a row of a matrix product
BLOCK: Final = 256 * CHUNK  # tokens at once: they stay in the cache, and BLAS starts no threads for so few


def token_rewards(
    rewards: ArrayLike,
    lengths: ArrayLike,
    mask: ArrayLike,
    kl: ArrayLike | None = None,
    rewards_per_token: ArrayLike | None = None,
    *,
    kl_coef: float = 0.0,
) -> Floats:
    """Put a sample's reward on its last token, or on the tokens that earned it, and subtract the KL divergence of each.

    r_t = g_t - kl_coef * kl_t, + the sample's reward less the sum of its g at its last token of the mask.

    Args:
        rewards: [B], reward units: all that a sample earned, its g included.
        lengths: [B], tokens of each sample.
        mask: [N], true for tokens that count.
        kl: [N], divergence from the reference, nats. None: 0.
        rewards_per_token: [N], g, rewards of single tokens. None: 0.
        kl_coef: Reward units per nat.

    Returns:
        [N], float64, 0 outside of the mask.

    Raises:
        ValueError: A coefficient that is not 0, but no divergence. A column of another length.

    Edges:
        A sample without tokens in the mask has no reward anywhere. A reward that is not finite stays one. Only the
        divergence of tokens in the mask is read. The g of a token outside of the mask counts at the last token of the
        mask before it, or at the sample's first one.

    Source:
        PPO of InstructGPT, arXiv 2203.02155. In slime the reward is on the last response token for "ppo", and on the
        last trained token for "reinforce_plus_plus"; here the mask decides.
    """
    sizes = column("lengths", lengths).astype(np.int64)
    num_samples, num_tokens = len(sizes), int(sizes.sum())
    of_samples, counted = floats("rewards", rewards, num_samples), column("mask", mask, num_tokens).astype(bool)
    found = np.zeros(num_tokens)
    if kl_coef:
        found[counted] = -kl_coef * _divergence(kl, kl_coef, num_tokens)[counted]
    last = np.cumsum(sample_sums(counted.astype(np.int64), sizes))
    has_tokens = np.diff(last, prepend=0) > 0
    if rewards_per_token is not None:
        of_tokens = floats("rewards_per_token", rewards_per_token, num_tokens)
        found += _moved_to(counted, of_tokens, sizes)
        of_samples = of_samples - sample_sums(of_tokens, sizes)
    found[np.flatnonzero(counted)[last[has_tokens] - 1]] += of_samples[has_tokens]
    return found


def _moved_to(counted: Flags, values: Floats, sizes: Ints) -> Floats:
    """Add the value of each token to that of the last counted one up to it, or of the sample's first counted one."""
    places = np.flatnonzero(counted)
    if not len(places):
        return np.zeros(len(values))
    ends = np.cumsum(sizes)
    before, until = np.searchsorted(places, ends - sizes), np.searchsorted(places, ends)  # of each sample
    nearest = np.maximum(np.cumsum(counted) - 1, np.repeat(before, sizes))
    kept = np.repeat(until > before, sizes)  # the sample has counted tokens
    found = np.zeros(len(values))
    np.add.at(found, places[nearest[kept]], values[kept])
    return found


def discounted_returns(
    rewards: ArrayLike, lengths: ArrayLike | None = None, mask: ArrayLike | None = None, *, gamma: float = 1.0
) -> Floats:
    """Sum the rewards from each token to the end of its sample, discounted.

    G_t = r_t + gamma * G_{t+1}, where t + 1 is the next token of the mask.

    Args:
        rewards: [N], reward units per token; or [B, T], a row per sample, without lengths.
        lengths: [B], tokens of each sample. None: rewards are [B, T].
        mask: [N] or [B, T], true for tokens that count; padding is not in it. None: all tokens.
        gamma: Discount per token, 0 to 1.

    Returns:
        G, with the shape of the rewards, float64, 0 outside of the mask.

    Edges:
        gamma = 0 returns the rewards. One token: its reward. A sample without tokens changes nothing. A reward that is
        not finite makes tokens of its sample NaN, none of another sample.

    Source:
        Sutton and Barto, Reinforcement Learning, section 3.3.
    """
    packed = _Packed(rewards, lengths, mask)
    (given,) = packed.columns(rewards)
    given = np.where(np.isfinite(given), given, np.nan)
    found, following = np.empty(len(given)), 0.0
    for block in packed.blocks():
        following = 0.0 if block.is_last else following
        own = found[block.tokens] = _scan(given[block.tokens].astype(np.float64), gamma, following)
        following = own[0]
    return packed.restored(found)


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    critic_lambd: float | None = None,
    length_adaptive_alpha: float | None = None,
) -> Advantages:
    """Generalized advantage estimation, and the returns that the critic learns.

    The next token is that of the mask. The return of a token is its advantage with critic_lambd, plus its value.

    Args:
        rewards: [N], reward units per token; or [B, T], a row per sample, without lengths.
        values: [N] or [B, T], V, of the critic, before the token.
        lengths: [B], tokens of each sample. None: rewards are [B, T].
        mask: [N] or [B, T], true for tokens that count; padding is not in it. None: all tokens.
        gamma: Discount per token, 0 to 1.
        lambd: Lambda of the advantages, 0 to 1.
        critic_lambd: Lambda of the returns, 0 to 1. None: lambd.
        length_adaptive_alpha: With it, lambda of the advantages is 1 - 1 / max(length_adaptive_alpha * L, 1) for a
            sample with L tokens in the mask. None: lambd for all.

    Returns:
        Advantages before whitening, and returns; both with the shape of the rewards, float64, 0 outside of the mask.

    Edges:
        The value after a sample's last token is 0. One token: A = r - V, and its return is r. lambd = 1: the return is
        the discounted return. A sample without tokens changes nothing. A value or reward that is not finite makes
        tokens of its sample NaN, none of another sample.

    Source:
        Schulman et al., arXiv 1506.02438. Lambda of its own for the returns, and by length: VAPO, arXiv 2504.05118,
        as in NeMo-RL. Unlike verl's function it does not whiten.
    """
    packed = _Packed(rewards, lengths, mask)
    given, before = packed.columns(rewards, values)
    advantages, returns = np.empty(len(given)), np.empty(len(given))
    of_returns = lambd if critic_lambd is None else critic_lambd
    next_value = next_advantage = next_error = 0.0
    for block in packed.blocks():
        if block.is_last:
            next_value = next_advantage = next_error = 0.0
        own = lambd
        if length_adaptive_alpha is not None:
            own = 1.0 - 1.0 / max(length_adaptive_alpha * block.size, 1.0)
        current = before[block.tokens].astype(np.float64)
        deltas = given[block.tokens] - current
        deltas[:-1] += gamma * current[1:]
        deltas[-1] += gamma * next_value
        estimated = advantages[block.tokens] = _scan(deltas, gamma * own, next_advantage)
        errors = estimated if own == of_returns else _scan(deltas, gamma * of_returns, next_error)
        returns[block.tokens] = errors + current
        next_value, next_advantage, next_error = current[0], estimated[0], errors[0]
    return Advantages(packed.restored(advantages), packed.restored(returns))


def ppo_advantages(
    rewards: ArrayLike,
    values: ArrayLike,
    lengths: ArrayLike,
    response_mask: ArrayLike,
    kl: ArrayLike | None = None,
    rewards_per_token: ArrayLike | None = None,
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lambd: float = 1.0,
    critic_lambd: float | None = None,
    length_adaptive_alpha: float | None = None,
) -> Advantages:
    """PPO with a critic: GAE on the rewards of `token_rewards`.

    advantages, returns = gae(token_rewards(rewards, kl), values). Both come from the same rewards, so that actor and
    critic see the same KL divergence.

    Args:
        rewards: [B], reward units.
        values: [N], V, of the critic, before the token.
        lengths: [B], tokens of prompt and response.
        response_mask: [N], true from a sample's first sampled token to its end, tool output included.
        kl: [N], divergence from the reference, nats, 0 where the token does not train. None: 0.
        rewards_per_token: [N], rewards of single tokens, part of `rewards`. None: it is on the last response token.
        kl_coef: Reward units per nat.
        gamma: Discount per token, 0 to 1.
        lambd: Lambda of the advantages, 0 to 1.
        critic_lambd: Lambda of the returns. None: lambd.
        length_adaptive_alpha: Factor of the response length in a lambda by length. None: lambd for all.

    Returns:
        Advantages before whitening, and returns, [N].

    Raises:
        ValueError: A coefficient that is not 0, but no divergence.

    Edges:
        A sample whose reward is not finite in float32 is NaN. A sample without a response is 0.

    Source:
        slime, for "ppo". There the divergence of tool output counts, too, and the critic sees rewards without the
        divergence.
    """
    tokens = token_rewards(rewards, lengths, response_mask, kl, rewards_per_token, kl_coef=kl_coef)
    found = gae(
        tokens,
        values,
        lengths,
        response_mask,
        gamma=gamma,
        lambd=lambd,
        critic_lambd=critic_lambd,
        length_adaptive_alpha=length_adaptive_alpha,
    )
    assert found.returns is not None
    return Advantages(*(_without_unusable(values, rewards, lengths) for values in (found.advantages, found.returns)))


def reinforce_plus_plus_advantages(
    rewards: ArrayLike,
    lengths: ArrayLike,
    loss_mask: ArrayLike,
    response_mask: ArrayLike,
    kl: ArrayLike | None = None,
    rewards_per_token: ArrayLike | None = None,
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> Advantages:
    """REINFORCE++: the discounted return of each token, without a baseline.

    The rewards r are those of `token_rewards`, of trained tokens; tokens follow each other over the response. Train
    steps whiten the result.

    Args:
        rewards: [B], reward units.
        lengths: [B], tokens of prompt and response.
        loss_mask: [N], true where the token trains.
        response_mask: [N], true from a sample's first sampled token to its end, tool output included.
        kl: [N], divergence from the reference, nats. None: 0.
        rewards_per_token: [N], rewards of single tokens, part of `rewards`. None: it is on the last trained token.
        kl_coef: Reward units per nat.
        gamma: Discount per token, 0 to 1. A token of tool output discounts, too.

    Returns:
        Advantages before whitening, and returns, [N]; both are G.

    Raises:
        ValueError: A coefficient that is not 0, but no divergence.

    Edges:
        A sample without trained tokens is 0; slime ends the run there. A sample whose reward is not finite in float32
        is NaN. Tokens after the last trained one are 0.

    Source:
        REINFORCE++, arXiv 2501.03262, as in slime. verl does not discount at tokens that do not train: that is
        response_mask = loss_mask.
    """
    tokens = token_rewards(rewards, lengths, loss_mask, kl, rewards_per_token, kl_coef=kl_coef)
    found = _without_unusable(discounted_returns(tokens, lengths, response_mask, gamma=gamma), rewards, lengths)
    return Advantages(found, found)


def reinforce_plus_plus_baseline_advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    rollouts: ArrayLike | None,
    lengths: ArrayLike,
    kl: ArrayLike | None = None,
    *,
    kl_coef: float = 0.0,
    normalize: bool = True,
    group_of_one: GroupOfOne = "zero",
) -> Advantages:
    """REINFORCE++ with the mean reward of the prompt group as a baseline, and the KL divergence of each token.

    Each token loses kl_coef times its divergence. Train steps whiten the result.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, the prompt group of each sample, in any order.
        rollouts: [B], integers or texts, equal for samples that are parts of one rollout. None: no sample has parts.
        lengths: [B], tokens of prompt and response.
        kl: [N], divergence from the reference, nats, 0 where the token does not train. None: 0.
        kl_coef: Reward units per nat.
        normalize: Subtract the mean. False: the rewards themselves.
        group_of_one: Advantage of a group with a single rollout: 0, or its reward.

    Returns:
        Advantages before whitening, and returns, [N]; both are A.

    Raises:
        ValueError: A coefficient that is not 0, but no divergence.

    Edges:
        Those of `grpo_advantages` without a standard deviation. kl_coef = 0: the same number for all tokens of a
        sample.

    Source:
        REINFORCE++, arXiv 2501.03262, as in slime, where the divergence of tool output counts, too. verl subtracts the
        divergence from the rewards before.
    """
    per_sample = grpo_advantages(
        rewards, groups, rollouts, normalize=normalize, normalize_std=False, group_of_one=group_of_one
    )
    found = np.repeat(per_sample, column("lengths", lengths, len(per_sample)).astype(np.int64))
    if kl_coef:
        found = found - kl_coef * _divergence(kl, kl_coef, len(found))
    return Advantages(found, found)


class _Block(NamedTuple):
    """Tokens of one sample that follow each other."""

    tokens: slice
    size: int  # tokens of the whole sample
    is_last: bool  # the sample ends with this block


class _Packed:
    """Tokens of the mask, sample after sample, and the way back to the shape that was given."""

    def __init__(self, like: ArrayLike, lengths: ArrayLike | None, mask: ArrayLike | None) -> None:
        self._shape = array(like).shape
        if lengths is None:
            if len(self._shape) != 2:
                raise ValueError(f"tokens have shape {self._shape}: without lengths they are [B, T]")
            lengths = np.full(self._shape[0], self._shape[1])
        self._sizes: Ints = column("lengths", lengths).astype(np.int64)
        num_tokens = int(np.prod(self._shape))
        if self._sizes.sum() != num_tokens:
            raise ValueError(f"lengths sum to {self._sizes.sum()}, but there are {num_tokens} tokens")
        self._counted: Flags | None = None
        if mask is not None:
            counted = array(mask).astype(bool)
            if counted.shape != self._shape:
                raise ValueError(f"mask has shape {counted.shape}, expected {self._shape}")
            if not counted.all():
                self._counted = counted.ravel()
                self._sizes = sample_sums(self._counted.astype(np.int64), self._sizes)

    def columns(self, *columns: ArrayLike) -> list[Floats]:
        """Return columns of the tokens that count.

        Raises:
            ValueError: A column has another shape.
        """
        found = [array(values) for values in columns]
        for values in found:
            if values.shape != self._shape:
                raise ValueError(f"a column has shape {values.shape}, expected {self._shape}")
        return [values.ravel() if self._counted is None else values.ravel()[self._counted] for values in found]

    def blocks(self) -> Iterator["_Block"]:
        """Yield each sample's tokens in blocks, from its last to its first."""
        for end, size in zip(np.cumsum(self._sizes).tolist(), self._sizes.tolist(), strict=True):
            for stop in range(end, end - size, -BLOCK):
                yield _Block(slice(max(stop - BLOCK, end - size), stop), size, stop == end)

    def restored(self, values: Floats) -> Floats:
        """Put a column back where its tokens were."""
        if self._counted is None:
            return values.reshape(self._shape)
        found = np.zeros(len(self._counted))
        found[self._counted] = values
        return found.reshape(self._shape)


def _scan(values: Floats, factor: float, following: float = 0.0) -> Floats:
    """Sum from each token on: found_t = value_t + factor * found_{t+1}, with `following` after the last token.

    Rows of CHUNK tokens are summed by a matrix product. What follows a row is the same sum over the first tokens of
    rows, with factor ** CHUNK.
    """
    size, powers = len(values), _powers(factor)
    if size <= CHUNK:
        found = values @ powers[:size, :size]
        return found + following * factor ** np.arange(size, 0, -1) if following else found
    num_rows = -(-size // CHUNK)
    rows = np.zeros((num_rows, CHUNK))
    rows.reshape(-1)[:size] = values
    rows.reshape(-1)[size - 1] += factor * following
    found = rows @ powers
    after = _scan(found[:, 0], factor**CHUNK)[1:]
    found[:-1] += np.multiply.outer(after, factor ** np.arange(CHUNK, 0, -1))
    return found.reshape(-1)[:size]


@lru_cache(maxsize=16)
def _powers(factor: float) -> Floats:
    """Return the matrix that sums a chunk: factor ** (i - j) for i >= j, 0 above."""
    distances = np.subtract.outer(np.arange(CHUNK), np.arange(CHUNK))
    return np.where(distances >= 0, float(factor) ** np.maximum(distances, 0), 0.0)


def _divergence(kl: ArrayLike | None, kl_coef: float, num_tokens: int) -> Floats:
    if kl is None:
        raise ValueError(f"kl_coef = {kl_coef:g} needs the KL divergence of each token")
    return floats("kl", kl, num_tokens)


def _without_unusable(values: Floats, rewards: ArrayLike, lengths: ArrayLike) -> Floats:
    """Set samples without a usable reward to NaN."""
    usable, sizes = usable_rewards(rewards), column("lengths", lengths).astype(np.int64)
    return values if usable.all() else np.where(np.repeat(usable, sizes), values, np.nan)
