"""Writes peer_edges.json: what functions of slime, verl, prime-rl and NeMo-RL return for many kinds of inputs.

    python -m tests.actors.trainer.algorithms.peer_edges --verl DIR --slime GIT --prime-rl GIT --nemo-rl GIT

The arguments are those of peer_numbers.py, which has other inputs and further functions. A case names the peer's
function, and how ours is called: `tests/actors/trainer/algorithms/test_peer_edges.py`.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.actors.trainer.algorithms.peer_inputs import NEMO_RL, PRIME_RL, SLIME, Options, functions, rounded, shown

EDGES: Final = Path(__file__).with_suffix(".json")
CLIP: Final = {"eps_clip": 0.2, "eps_clip_high": 0.28}
Case = dict[str, Any]


def kinds() -> Iterator[tuple[str, Case]]:
    """Columns of tokens of every kind, in float32: near and far, one token, no spread, advantages by token."""
    draw = np.random.default_rng(21)
    for name, lengths, spread, by_token in (
        ("near", (3, 1, 4), 0.05, False),
        ("far", (2, 5, 1), 2.0, False),
        ("very far", (2, 2), 7.0, False),
        ("one token", (1,), 0.4, False),
        ("equal", (3, 2), 0.0, False),
        ("by token", (4, 2), 0.5, True),
        ("no advantage", (2, 2), 0.5, False),
    ):
        size = sum(lengths)
        new = -np.abs(draw.normal(0, 1.5, size)) - 0.05
        columns = {key: np.minimum(new + draw.normal(0, spread, size), -1e-3) for key in ("old", "rollout", "ref")}
        advantages = draw.normal(size=size if by_token else len(lengths)) * (name != "no advantage")
        columns |= {"new": new, "advantages": advantages if by_token else np.repeat(advantages, lengths)}
        plain = {key: [float(np.float32(value)) for value in values] for key, values in columns.items()}
        yield name, plain | {"lengths": list(lengths)}


class Given:
    """The columns of one kind as float32 tensors, packed and as rows."""

    def __init__(self, columns: Case) -> None:
        self.lengths: list[int] = columns["lengths"]
        self.packed = {key: torch.tensor(values) for key, values in columns.items() if key != "lengths"}
        self.new = self.packed["new"].requires_grad_()
        self.mask = self.rows(torch.ones(sum(self.lengths)))
        self.ones = [torch.ones(length) for length in self.lengths]

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        return pad_sequence(list(values.split(self.lengths)), batch_first=True)

    def row_of(self, key: str) -> torch.Tensor:
        return self.rows(self.packed[key])

    def case(self, peer: str, ours: str, loss: torch.Tensor, reduced: str, **more: Any) -> Case:
        """A loss and its gradient; `reduced` says how ours has to be reduced."""
        (gradient,) = torch.autograd.grad(loss, self.new, allow_unused=True)
        found = {"loss": loss.item(), "gradient": torch.zeros_like(self.new) if gradient is None else gradient}
        return {"peer": peer, "ours": ours, "reduced": reduced, **more, **found, "gradient": found["gradient"].tolist()}


def losses_of_verl(source: str, masked: Any, kind: str, given: Given) -> Iterator[Case]:
    config = type("ActorConfig", (Options,), {})
    settings = config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, tau_pos=1.0)
    settings.tau_neg, settings.global_batch_info = 1.05, {"loss_scale_factor": None}
    losses: dict[str, tuple[str, Case]] = {
        "vanilla": ("ppo_loss", CLIP | {"eps_clip_c": 3.0}),
        "gspo": ("gspo_loss", CLIP),
        "cispo": ("cispo_loss", CLIP),
        "dppo_tv": ("dppo_loss", CLIP | {"eps_clip_c": 3.0}),
        "dppo_kl": ("dppo_loss", CLIP | {"divergence": "kl", "eps_clip_c": 3.0}),
        "sapo": ("sapo_loss", {}),
        "geo_mean": ("gmpo_loss", CLIP),
        "gpg": ("gpg_loss", {}),
    }
    names = [f"compute_policy_loss_{name}" for name in losses]
    known = {"verl_F": masked, "ActorConfig": config, "AlgoConfig": type("AlgoConfig", (), {}), "Optional": Any}
    peer = functions(source, ("agg_loss", "kl_penalty", "kl_penalty_forward", *names), **known)
    for name, (ours, options) in losses.items():
        if kind == "by token" and name in ("gspo", "geo_mean"):
            continue  # of one advantage a sequence alone
        modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
        for mode in ("seq-mean-token-mean",) if name in ("sapo", "geo_mean") else modes:
            loss, metrics = getattr(peer, f"compute_policy_loss_{name}")(
                old_log_prob=given.row_of("old"),
                log_prob=given.row_of("new"),
                advantages=given.row_of("advantages"),
                response_mask=given.mask,
                loss_agg_mode=mode,
                config=settings,
            )
            kept = (
                {} if name == "geo_mean" else {key.replace("actor", "train"): value for key, value in metrics.items()}
            )
            yield given.case(f"compute_policy_loss_{name}", ours, loss, mode, options=options, metrics=kept)
    for name in ("k1", "k2", "low_var_kl", "k3+"):
        found = peer.kl_penalty(given.new, given.packed["ref"], name)
        yield given.case("kl_penalty", "kl_divergence", found.sum(), "sum", options={"estimator": name})


def losses_of_slime(git: Path, given: Given) -> Iterator[Case]:
    names = ("compute_approx_kl", "compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss")
    peer = functions(shown(git, SLIME, "slime/utils/ppo_utils.py"), names)
    old, new, advantages = given.packed["old"], given.new, given.packed["advantages"]
    of_sequences = peer.compute_gspo_kl(new.split(given.lengths), old.split(given.lengths), given.ones, given.ones)
    for ours, kl, dual in (
        ("ppo_loss", old - new, None),
        ("ppo_loss", old - new, 3.0),
        ("gspo_loss", of_sequences, 3.0),
    ):
        loss, clipped = peer.compute_policy_loss(kl, advantages, 0.2, 0.28, dual)
        metrics = {"train/pg_clipfrac": clipped.mean().item()}
        yield given.case(
            "compute_policy_loss", ours, loss.sum(), "sum", options=CLIP | {"eps_clip_c": dual}, metrics=metrics
        )
    loss, clipped = peer.compute_cispo_loss(old - new, new, advantages, 0.2, 0.28)
    metrics = {"train/pg_clipfrac": clipped.mean().item()}
    yield given.case("compute_cispo_loss", "cispo_loss", loss.sum(), "sum", options=CLIP, metrics=metrics)
    for name in ("k1", "k2", "k3", "low_var_kl"):
        for ratio in (None, torch.exp(new - old)):
            found = peer.compute_approx_kl(new, given.packed["ref"], name, ratio).sum()
            options = {"estimator": name, "unbiased": ratio is not None}
            yield given.case("compute_approx_kl", "kl_divergence", found, "sum", options=options)


def losses_of_prime_rl(git: Path, given: Given) -> Iterator[Case]:
    names = ("default_loss_fn", "ipo_loss_fn", "_safe_mean", "compute_importance_ratio_and_mismatch_kl")
    peer = functions(shown(git, PRIME_RL, "src/prime_rl/trainer/rl/loss.py"), names, LossOutputs=SimpleNamespace)
    for adv_tau in (1.0, 0.5):
        options = {"adv_tau": adv_tau, "kl_tau": 1e-3}
        settings = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=0.1, **options)
        inputs = SimpleNamespace(
            trainer_logprobs=given.new,
            inference_logprobs=given.packed["rollout"],
            advantages=given.packed["advantages"],
            loss_mask=torch.ones(len(given.new), dtype=torch.bool),
            loss_weights=None,
        )
        for name, ours in (("default_loss_fn", "prime_rl_loss"), ("ipo_loss_fn", "prime_rl_ipo_loss")):
            found = getattr(peer, name)(inputs, settings)
            metrics = {
                f"train/{key}": found.metrics[key].item() for key in found.metrics if key.startswith("is_masked")
            }
            yield given.case(name, ours, found.loss, "sum", options=options, metrics=metrics)


def losses_of_nemo_rl(git: Path, given: Given) -> Iterator[Case]:
    utils = functions(shown(git, NEMO_RL, "nemo_rl/algorithms/utils.py"), ("calculate_kl", "masked_mean"))
    names = {"LossFunction": object, "LossType": SimpleNamespace(TOKEN_LEVEL="token", SEQUENCE_LEVEL="sequence")}
    names |= {"LossInputType": SimpleNamespace(LOGPROB=None), "MetricNormalizer": SimpleNamespace()}
    for name in ("TOKENS", "SEQUENCES", "NONE"):
        setattr(names["MetricNormalizer"], name, None)
    peer = functions(
        shown(git, NEMO_RL, "nemo_rl/algorithms/loss/loss_functions.py"), ("ClippedPGLossFn",), **names, **vars(utils)
    )
    flags = ("disable_ppo_ratio", "sequence_level_importance_ratios", "use_kl_in_reward", "use_cispo")
    flags += ("use_importance_sampling_correction", "use_on_policy_kl_approximation", "force_on_policy_ratio")
    off: Case = dict.fromkeys(flags, False) | {"token_level_loss": True, "ratio_clip_c": None}
    off |= {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0}
    off |= {"reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}
    off |= {"positive_example_nll_weight": 0.0}
    off |= {f"truncated_importance_sampling_{name}": None for name in ("type", "ratio", "ratio_min")}
    weighted = {"use_importance_sampling_correction": True}
    tis = weighted | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
    pop = tis | {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio_min": 0.5}
    sequences = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    variants: tuple[tuple[str, Case, Case], ...] = (
        ("ppo_loss", CLIP, {}),
        ("ppo_loss", CLIP | {"eps_clip_c": 3.0}, {"ratio_clip_c": 3.0}),
        ("gspo_loss", CLIP, sequences),
        ("cispo_loss", CLIP, {"use_cispo": True}),
        ("gpg_loss", {}, {"disable_ppo_ratio": True}),
        ("ppo_loss", CLIP | {"weights": {"mode": "clip", "low": 0.0, "high": 2.0}}, tis),
        ("ppo_loss", CLIP | {"weights": {"mode": "mask", "low": 0.5, "high": 2.0}}, pop),
    )

    def shifted(key: str) -> torch.Tensor:
        return torch.nn.functional.pad(given.row_of(key), (1, 0))

    mask = torch.nn.functional.pad(given.mask, (1, 0))
    names = {"prev_logprobs": "old", "generation_logprobs": "rollout", "reference_policy_logprobs": "ref"}
    data = {name: shifted(key) for name, key in (names | {"advantages": "advantages"}).items()}
    data |= {"token_mask": mask, "sample_mask": torch.ones(len(given.lengths))}
    for ours, options, settings in variants:
        loss = peer.ClippedPGLossFn(SimpleNamespace(**off | settings))
        value, _ = loss(given.row_of("new"), data, torch.tensor(float(len(given.lengths))), given.mask.sum())
        mode = "seq-mean-token-mean" if "token_level_loss" in settings else "token-mean"
        yield given.case("ClippedPGLossFn", ours, value, mode, options=options)


def batches() -> Iterator[tuple[str, list[float], list[Any], list[int]]]:
    """Rewards, groups and lengths. Groups have at least two samples and a spread, but where the name says so."""
    draw = np.random.default_rng(22)
    for name, groups in (
        ("in turn", [0, 1, 0, 1, 0, 1]),
        ("texts", ["b", "a", "c", "a", "b", "c", "a"]),
        ("large numbers", [2**40 + 1, 5, 2**40 + 1, 5, 5]),
        ("one of one", [3, 1, 3, 7, 3]),
    ):
        for kind in ("normal", "binary", "tenths"):
            size = len(groups)
            rewards = draw.normal(size=size) if kind == "normal" else (np.arange(size) + groups.index(groups[-1])) % 2
            if kind == "tenths":
                rewards = draw.permutation(size) / 10
            yield f"{name}, {kind}", [float(np.float32(x)) for x in rewards], groups, draw.integers(1, 9, size).tolist()


def advantages_of_verl(source: str, masked: Any) -> Iterator[Case]:
    of_groups = {"group_of_one": "reward"}
    estimators: dict[str, tuple[str, Case]] = {
        "grpo": ("grpo_advantages", of_groups),
        "rloo": ("rloo_advantages", of_groups),
        "rloo_vectorized": ("rloo_advantages", {}),
        "opo": ("opo_advantages", of_groups),
        "gpg": ("gpg_advantages", of_groups),
        "grpo_passk": ("passk_advantages", {}),
    }
    names = {name: f"compute_{name}_outcome_advantage" for name in estimators}
    known = {"verl_F": masked, "AlgoConfig": type("AlgoConfig", (), {}), "Optional": Any}
    peer = functions(source, tuple(names.values()), **known)
    for kind, rewards, groups, lengths in batches():
        mask = pad_sequence([torch.ones(length) for length in lengths], batch_first=True)
        given = torch.zeros_like(mask)
        given[:, 0] = torch.tensor(rewards)
        for name, (ours, options) in estimators.items():
            with contextlib.suppress(ValueError):  # pass@k of a group of one
                call = {
                    "token_level_rewards": given.clone(),
                    "response_mask": mask,
                    "index": np.array(groups, dtype=object),
                }
                if name == "rloo_vectorized":
                    call["index"] = np.array(groups)
                found, _ = getattr(peer, names[name])(**call, config=Options())
                case = {"peer": names[name], "ours": ours, "kind": kind, "options": options, "rewards": rewards}
                yield case | {"groups": groups, "lengths": lengths, "found": found[:, 0].tolist()}


def returns_of(source: str, slime: Path) -> Iterator[Case]:
    """Values that are not whitened."""
    plain = SimpleNamespace(masked_whiten=lambda values, mask: values)
    names = ("compute_gae_advantage_return", "compute_reinforce_plus_plus_outcome_advantage")
    verl = functions(source, names, verl_F=plain, Optional=Any, AlgoConfig=type("AlgoConfig", (), {}))
    names = ("chunked_discounted_returns", "chunked_gae", "vanilla_gae")
    peer = functions(shown(slime, SLIME, "slime/utils/ppo_utils.py"), names)
    draw = np.random.default_rng(23)
    for shape, gamma, lambd in (((2, 5), 1.0, 0.95), ((1, 1), 0.9, 0.5), ((3, 40), 0.99, 1.0), ((2, 4), 0.0, 0.5)):
        rewards, values = (torch.tensor(draw.normal(size=shape), dtype=torch.float32) for _ in range(2))
        for masks in (torch.ones(shape), torch.tensor(draw.random(shape) < 0.7, dtype=torch.float32)):
            given = {"gamma": gamma, "lambd": lambd, "rewards": rewards.tolist(), "values": values.tolist()}
            given["mask"] = masks.tolist()
            found = verl.compute_gae_advantage_return(rewards, values, masks, gamma, lambd)
            yield {"peer": names[0], "ours": "gae", **given, "found": [column.tolist() for column in found]}
            ended = rewards * masks
            _, returns = verl.compute_reinforce_plus_plus_outcome_advantage(ended, masks, Options(gamma=gamma))
            yield {
                "peer": "compute_reinforce_plus_plus",
                "ours": "discounted_returns",
                **given,
                "found": returns.tolist(),
            }
        found = peer.vanilla_gae(rewards, values, gamma, lambd)
        given["mask"] = torch.ones(shape).tolist()
        yield {"peer": "vanilla_gae", "ours": "gae", **given, "found": [column.tolist() for column in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--verl", "--slime", "--prime-rl", "--nemo-rl"):
        parser.add_argument(name, type=Path, required=True)
    paths = parser.parse_args()
    source = (paths.verl / "verl/trainer/ppo/core_algos.py").read_text()
    masked = functions(
        (paths.verl / "verl/utils/torch_functional.py").read_text(), ("masked_sum", "masked_mean", "clip_by_value")
    )
    losses: list[Case] = []
    columns = dict(kinds())
    for kind, given_columns in columns.items():
        given = Given(given_columns)
        found = [*losses_of_verl(source, masked, kind, given), *losses_of_slime(paths.slime, given)]
        found += [*losses_of_prime_rl(paths.prime_rl, given), *losses_of_nemo_rl(paths.nemo_rl, given)]
        losses += [case | {"kind": kind} for case in found]
    numbers = {
        "columns": columns,
        "losses": losses,
        "advantages": list(advantages_of_verl(source, masked)),
        "returns": list(returns_of(source, paths.slime)),
    }
    EDGES.write_text(json.dumps(rounded(numbers)) + "\n")


if __name__ == "__main__":
    main()
