"""GRPO written again from the formulae, on transformers and torch.optim.AdamW.

Each formula is of one sample. The model reads all samples of a step at once, which takes a tenth of the time of a pass
for each; sums of float32 are then rounded in another order.
"""

import copy
import math
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from actors.trainer.data.batch import TrainBatch
from runtime.settings.topology import Topology


class ReferenceTrainer:
    """Trains a transformers model; shares no code with the trainer."""

    def __init__(
        self, topology: Topology, model: Any, reference_model: Any = None, teacher: Any = None, *, apart: bool = False
    ) -> None:
        """Prepare to train a model; `apart`: each sample in a pass of its own, for a comparison to the last digits."""
        self.model = model
        self._apart = apart
        self._reference_model = reference_model
        self._teacher = teacher
        self._topology = topology
        self._mean_weight = 1.0
        self._past: dict[int, Any] = {}  # models before each train step, if old actors are kept
        config = topology.optimizer
        self._parameters = dict(model.named_parameters())  # a tied weight once
        decayed = [parameter for parameter in self._parameters.values() if parameter.ndim > 1]
        others = [parameter for parameter in self._parameters.values() if parameter.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )

    def train(self, batch: TrainBatch) -> list[dict[str, float]]:
        """Metrics of each optimizer step."""
        samples = [self._sample(batch, index) for index in range(len(batch.lengths_B))]
        algorithm = self._topology.algorithm
        if algorithm.keep_old_actor:
            self._past[batch.step] = copy.deepcopy(self.model)
        with torch.no_grad():
            self._set_log_probs("before", self.model, samples)
            ages = {age for sample in samples for age in sample["age"].tolist()} - {-1, 0}
            for age in ages if algorithm.keep_old_actor else ():
                self._set_log_probs("older", self._past[batch.step - age], samples)
                for sample in samples:
                    sample["before"] = torch.where(sample["age"] == age, sample["older"], sample["before"])
            for sample in samples:
                sample["old"] = sample["engine"] if algorithm.use_rollout_logprobs else sample["before"]
            if algorithm.opd is not None and algorithm.opd.kl_coef:
                self._set_log_probs("teacher", self._teacher, samples)
            if algorithm.kl.loss_coef or algorithm.kl.reward_coef:
                self._set_log_probs("ref", self._reference_model, samples)
        self._set_advantages(samples)
        if algorithm.tis is not None and algorithm.tis.batch_normalize:
            weights = sum((self._weight(sample) * sample["mask"]).sum() for sample in samples)
            self._mean_weight = float(weights / sum(sample["mask"].sum() for sample in samples))
        num_rollouts = samples[-1]["rollout"] + 1
        size = num_rollouts // algorithm.num_steps_per_rollout
        return [
            self._step([sample for sample in samples if first <= sample["rollout"] < first + size], batch.step)
            for first in range(0, num_rollouts, size)
        ]

    def _sample(self, batch: TrainBatch, index: int) -> dict[str, Any]:
        begin = int(batch.starts_B[index])
        tokens = slice(begin, begin + int(batch.lengths_B[index]))
        topk = {}
        if batch.teacher_topk_ids_N is not None and batch.teacher_topk_log_probs_N is not None:
            topk["topk_ids"] = torch.from_numpy(batch.teacher_topk_ids_N[tokens])[1:].long()
            topk["topk"] = torch.from_numpy(batch.teacher_topk_log_probs_N[tokens])[1:]
        return topk | {
            "tokens": torch.from_numpy(batch.tokens_N[tokens]).long(),
            "mask": torch.from_numpy(batch.loss_mask_N[tokens])[1:].float(),
            "age": torch.from_numpy(batch.staleness_N[tokens])[1:],
            "engine": torch.from_numpy(batch.rollout_log_probs_N[tokens])[1:],
            "reward": float(batch.rewards_B[index]) + self._overlong(batch.response_lens_B, index),
            "baseline": float(batch.baseline_rewards_B[index]) + self._overlong(batch.baseline_lens_B, index),
            "named": [] if batch.named_rewards_B is None else batch.named_rewards_B[index].tolist(),
            "group": int(batch.groups_B[index]),
            "rollout": int(batch.rollouts_B[index]),
        }

    def _overlong(self, lengths: Any, index: int) -> float:
        algorithm, longest = self._topology.algorithm, self._topology.rollout.max_response_len
        if algorithm.overlong_buffer_len is None:
            return 0.0
        excess = int(lengths[index]) - longest + algorithm.overlong_buffer_len
        return -max(excess, 0) / algorithm.overlong_buffer_len * algorithm.overlong_penalty_factor

    def _set_advantages(self, samples: list[dict[str, Any]]) -> None:
        algorithm = self._topology.algorithm
        if algorithm.estimator.type == "gdpo":
            columns = [[sample["named"][place] for sample in samples] for place in range(len(samples[0]["named"]))]
            weighted = zip(algorithm.estimator.reward_weights, columns, strict=True)
            parts = [[weight * one for one in self._compared(samples, rewards)] for weight, rewards in weighted]
            found = [sum(of_sample) for of_sample in zip(*parts, strict=True)]
        elif algorithm.estimator.type == "reinforce_plus_plus":
            found = [self._returns(sample) for sample in samples]
        else:
            penalties = [self._divergence(sample) * algorithm.kl.reward_coef for sample in samples]
            before = algorithm.kl.before_normalization
            lost = [float(penalty.sum()) if before else 0.0 for penalty in penalties]
            rewards = [sample["reward"] - less for sample, less in zip(samples, lost, strict=True)]
            compared = self._compared(samples, rewards)
            found = [one - (0.0 if before else less) for one, less in zip(compared, penalties, strict=True)]
        for sample, advantage in zip(samples, found, strict=True):
            sample["advantage"] = torch.zeros_like(sample["old"]) + advantage
            if "teacher" in sample:
                gap = sample["old"] - sample["teacher"]
                sample["advantage"] = sample["advantage"] - algorithm.opd.kl_coef * gap
        if algorithm.normalize_advantages:
            self._whiten(samples)

    def _divergence(self, sample: dict[str, Any]) -> torch.Tensor:
        """Of the old policy from the reference, by k1 or k3; 0 where the token does not train."""
        if not self._topology.algorithm.kl.reward_coef:
            return torch.zeros_like(sample["old"])
        x = sample["old"] - sample["ref"]
        k1 = self._topology.algorithm.kl.type == "k1"
        return (x if k1 else (-x).exp() - 1 + x) * sample["mask"]

    def _returns(self, sample: dict[str, Any]) -> torch.Tensor:
        """Discounted return of each token; the reward is on the last one that trains."""
        algorithm, mask = self._topology.algorithm, sample["mask"]
        rewards = -algorithm.kl.reward_coef * self._divergence(sample)
        if mask.any():
            rewards[mask.nonzero()[-1]] += sample["reward"]
        found, following = torch.zeros_like(rewards), 0.0
        for token in range(len(rewards) - 1, -1, -1):
            following = float(rewards[token]) + algorithm.estimator.gamma * following
            found[token] = following
        return found

    def _compared(self, samples: list[dict[str, Any]], rewards: list[float]) -> list[float]:
        rollouts: dict[tuple[int, int], list[float]] = {}
        for sample, reward in zip(samples, rewards, strict=True):
            rollouts.setdefault((sample["group"], sample["rollout"]), []).append(reward)
        found = []
        for sample, reward in zip(samples, rewards, strict=True):
            votes = [sum(parts) / len(parts) for (group, _), parts in rollouts.items() if group == sample["group"]]
            found.append(self._advantage(sample, reward, votes))
        return found

    def _advantage(self, sample: dict[str, Any], reward: float, votes: list[float]) -> float:
        """Of a reward among the votes of its group's rollouts."""
        mean, number = sum(votes) / len(votes), len(votes)
        if self._topology.algorithm.estimator.type == "remax":
            return reward - sample["baseline"]
        if self._topology.algorithm.estimator.type == "rloo":
            return reward - (sum(votes) - reward) / (number - 1)
        if self._topology.algorithm.estimator.type == "maxrl":
            return (reward - mean) / mean if mean > 0 else 0.0
        if not getattr(self._topology.algorithm.estimator, "normalize_std", False):
            return reward - mean
        std = math.sqrt(sum((vote - mean) ** 2 for vote in votes) / (number - 1))
        return (reward - mean) / (std + 1e-6)

    def _whiten(self, samples: list[dict[str, Any]]) -> None:
        tokens = torch.cat([sample["advantage"][sample["mask"] > 0] for sample in samples]).tolist()
        mean = sum(tokens) / len(tokens)
        variance = sum((token - mean) ** 2 for token in tokens) / (len(tokens) - 1)
        for sample in samples:
            sample["advantage"] = (sample["advantage"] - mean) / math.sqrt(variance + 1e-8)

    def _set_log_probs(self, name: str, model: Any, samples: list[dict[str, Any]]) -> None:
        for sample, spread in zip(samples, self._spreads(model, samples), strict=True):
            sample[name] = spread.gather(1, sample["tokens"][1:, None])[:, 0]

    def _spreads(self, model: Any, samples: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Of each sample, the log-probs of the whole vocabulary before each token after the first.

        Shorter samples are padded at their end, which no token before it sees.
        """
        if self._apart and len(samples) > 1:
            return [self._spreads(model, [sample])[0] for sample in samples]
        logits_BTV = model(pad_sequence([sample["tokens"] for sample in samples], batch_first=True)).logits
        spreads_BTV = (logits_BTV / self._topology.rollout.temperature).log_softmax(-1)
        return [spread[: len(sample["tokens"]) - 1] for spread, sample in zip(spreads_BTV, samples, strict=True)]

    def _token_losses(self, sample: dict[str, Any], spread: torch.Tensor) -> dict[str, torch.Tensor]:
        algorithm = self._topology.algorithm
        log_probs = spread.gather(1, sample["tokens"][1:, None])[:, 0]
        entropy = -(spread.exp() * spread).sum(-1)
        pg_loss = self._policy_loss(sample, log_probs)
        if algorithm.tis is not None:
            pg_loss = pg_loss * self._weight(sample, log_probs.detach()) / self._mean_weight
        if algorithm.rs is not None:  # the denominators, the entropy and the divergence of rejected tokens stay
            ratio = (sample["before"] - sample["engine"]).exp()
            pg_loss = pg_loss * ((ratio >= algorithm.rs.lower_bound) & (ratio <= algorithm.rs.upper_bound))
        loss = pg_loss - algorithm.entropy_coef * entropy
        terms = {"pg_loss": pg_loss, "entropy_loss": entropy}
        if algorithm.kl.loss_coef:
            x = log_probs - sample["ref"]
            terms["kl_loss"] = (-x).exp() - 1 + x  # k3
            loss = loss + algorithm.kl.loss_coef * terms["kl_loss"]
        if algorithm.positive_example_nll_weight:
            terms["positive_nll_loss"] = -log_probs * (sample["reward"] > 0)
        if "teacher" in sample:
            terms["opd_reverse_kl"] = sample["old"] - sample["teacher"]
        if getattr(algorithm.opd, "distillation", None) is not None:
            terms["distillation_kl"] = self._distillation(sample, spread)
            loss = loss + algorithm.opd.distillation.coef * terms["distillation_kl"]
        return terms | {"loss": loss}

    def _distillation(self, sample: dict[str, Any], spread: torch.Tensor) -> torch.Tensor:
        """Of each token, over the teacher's likeliest tokens, from the logits of the whole vocabulary."""
        algorithm = self._topology.algorithm
        teacher = torch.full_like(spread, -100.0).scatter(1, sample["topk_ids"], sample["topk"])
        among = torch.zeros_like(spread).scatter(1, sample["topk_ids"], 1.0)
        forward = (among * teacher.exp() * (teacher - spread)).sum(-1)
        counted = torch.ones_like(spread) if getattr(algorithm.opd.distillation, "zero_outside_topk", False) else among
        reverse = (counted * spread.exp() * (spread - teacher)).sum(-1)
        share = {"forward": 1.0, "reverse": 0.0, "mixed": getattr(algorithm.opd.distillation, "mixed_kl_weight", 0.5)}[
            algorithm.opd.distillation.type
        ]
        return share * forward + (1 - share) * reverse

    def _weight(self, sample: dict[str, Any], current: torch.Tensor | None = None) -> torch.Tensor:
        policy = current if self._topology.algorithm.bypass_mode else sample["before"]
        log_ratio = (policy - sample["engine"]) * sample["mask"]
        if self._topology.algorithm.tis.level == "geometric":
            log_ratio = (log_ratio.sum() / sample["mask"].sum().clamp(min=1)).expand_as(log_ratio)
        return log_ratio.exp().clamp(self._topology.algorithm.tis.lower_bound, self._topology.algorithm.tis.upper_bound)

    def _policy_loss(self, sample: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor:
        algorithm, advantage = self._topology.algorithm, sample["advantage"]
        log_ratio = log_probs - sample["old"]
        if algorithm.loss.type == "gspo":
            mean = (log_ratio * sample["mask"]).sum() / sample["mask"].sum().clamp(min=1)
            log_ratio = mean.expand_as(log_ratio)
        if algorithm.loss.type == "prime_rl":
            over_engine = log_probs - sample["engine"]
            moved = (log_probs.exp() - sample["engine"].exp()) * torch.where(advantage > 0, 1, -1)
            kept = (moved <= 0.2).float().detach()
            return -advantage * over_engine.exp() * kept + 1e-3 * over_engine**2
        if algorithm.loss.type == "gpg":
            return -advantage * log_probs
        ratio = log_ratio.exp()
        high = algorithm.loss.eps_clip if algorithm.loss.eps_clip_high is None else algorithm.loss.eps_clip_high
        clipped = ratio.clamp(1 - algorithm.loss.eps_clip, 1 + high)
        if algorithm.loss.type == "cispo":
            return -clipped.detach() * advantage * log_probs
        return torch.max(-ratio * advantage, -clipped * advantage)

    def _step(self, samples: list[dict[str, Any]], train_step: int) -> dict[str, float]:
        del train_step
        totals: dict[str, torch.Tensor] = {}
        num_tokens = sum(sample["mask"].sum() for sample in samples)
        num_rollouts, algorithm = len({sample["rollout"] for sample in samples}), self._topology.algorithm
        for sample, spread in zip(samples, self._spreads(self.model, samples), strict=True):
            siblings = [other["mask"].sum() for other in samples if other["rollout"] == sample["rollout"]]
            weight = (
                1 / num_tokens
                if algorithm.reduction.type == "token-mean"
                else 1 / (sum(siblings).clamp(min=1) * num_rollouts)
            )
            if algorithm.reduction.type == "seq-mean-token-sum-norm":
                weight = 1 / (algorithm.reduction.scale_factor * num_rollouts)
            if algorithm.reduction.type == "seq-mean-token-mean":
                weight = 1 / (sample["mask"].sum().clamp(min=1) * len(samples))
            good = sum(other["mask"].sum() for other in samples if other["reward"] > 0)
            for name, values in self._token_losses(sample, spread).items():
                share = 1 / max(good, 1) if name == "positive_nll_loss" else weight
                totals[name] = totals.get(name, torch.zeros(())) + (values * sample["mask"]).sum() * share
        if algorithm.positive_example_nll_weight:
            totals["loss"] = totals["loss"] + algorithm.positive_example_nll_weight * totals["positive_nll_loss"]
        self._adam.zero_grad()
        totals["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._topology.optimizer.clip_grad)
        if norm > 0:  # AdamW alone would move weights by its momentum, which a gradient of exactly 0 must not do
            self._adam.step()
        return {name: value.item() for name, value in totals.items()} | {"grad_norm": norm.item()}
