"""The rules of settings, except of engines: what is refused, with its key and message."""

import pytest

from runtime.settings.load import load_topology
from tests.runtime.settings.shipped import DISAGGREGATE, LAPTOP, problems

REF = ("algorithm.kl.loss_coef=0.1", 'engines.ref={kind = "tiny", hf_checkpoint = "x/y"}')
JUDGED = "reward.judges.j={template = '{response}'}"
AT_URL = "reward.judges.j={template = '{response}', url = 'http://h/v1', model = 'm'}"
PPO = "algorithm.estimator.type=ppo"
IN_PLACE = ("rollout.on_weight_update=in_place", "rollout.max_staleness=1", "engines.policy.kind=sglang")
ROUTED = "engines.policy.router=sglang-router"
ASKS = ("algorithm.opd.type=sglang",)
TOPK = (*ASKS, "algorithm.opd.kl_coef=0", "algorithm.opd.distillation={type='forward', coef=1}")


def test_gpus_of_a_node_that_has_none_are_refused() -> None:
    found = problems(LAPTOP, "trainer.device=cuda", "trainer.gpus=local:0-1")
    assert found == {"trainer.gpus": "there is no GPU local:0-1: nodes.local.gpus = 0"}


@pytest.mark.parametrize("address", ["auto", "127.0.0.1", "127.0.0.2", "::1"])
def test_external_graders_of_a_run_that_listens_are_no_problem(address: str) -> None:
    changes = ("reward.external=['judge']", "data.0.rm_type=judge", f"nodes.local.address={address}")
    assert load_topology(LAPTOP, changes).topology.reward.external == ("judge",)


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("rollout.over_sampling_batch_size=63",), "rollout.over_sampling_batch_size", "at least rollout.rollout_bat"),
        (("nodes.b.address=10.0.0.2", "bus.node=b"), "nodes.local.address", "other nodes cannot reach loopback"),
        (("nodes.local.address=http://10.0.0.1",), "nodes.local.address", "not an address: it stands without scheme"),
        (("nodes.local.address=10.0.0.1:4222",), "nodes.local.address", "not an address: it stands without scheme"),
        (("nodes.local.address=0.0.0.0",), "nodes.local.address", "not the address of one machine"),
        (("nodes.local.address=fe80::1",), "nodes.local.address", "a link-local address is not unique"),
        (("trainer.nodes=['other']",), "trainer.nodes", "no node other; allowed: local"),
        (("train.checkpoint_copies=2",), "train.checkpoint_copies", "the run has 1 node; allowed: up to that, or 1"),
        (
            (
                "train.checkpoint_copies=2",
                'nodes={local={address="10.0.0.1"}, b={address="10.0.0.2"}}',
                "bus.node=local",
                "trainer.nodes=['local','b']",
                "trainer.num_processes=2",
                "trainer.megatron.pipeline_model_parallel_size=2",
            ),
            "train.checkpoint_copies",
            "not implemented yet with weights in files",
        ),
        (
            ("trainer.nodes=['local']", "engines.policy.colocate=trainer", "engines.policy.weight_transport=ipc"),
            "trainer.nodes",
            "colocated engines on the CPU share memory with the trainer",
        ),
        (("reward.nodes=['other']",), "reward.nodes", "no node other; allowed: local"),
        (("reward.nodes=['local']", "share=[['reward','filter']]"), "reward.nodes", "a reward actor that shares a pro"),
        (
            ("reward.external=['judge']", "nodes.local.address=none"),
            "reward.external",
            'cannot reach the bus: set nodes.local.address to "auto", or to "127.0.0.1"',
        ),
        (("reward.external=['j','j']", "nodes.local.address=auto"), "reward.external", "names a grader twice"),
        (
            ("reward.external=['judge']", "reward.graders.judge=my:judge", "nodes.local.address=auto"),
            "reward.external",
            "judge is in reward.graders too: the run's own actors would run it",
        ),
        (("algorithm.num_steps_per_rollout=3",), "algorithm.num_steps_per_rollout", "must divide the number"),
        (("rollout.n_samples_per_prompt=1",), "rollout.n_samples_per_prompt", "algorithm.estimator.normalize = false"),
        (("rollout.temperature=0",), "rollout.temperature", "allowed: float > 0"),
        (("rollout.return_sampling_mask=true",), "rollout.return_sampling_mask", "has no effect unless rollout.top_p"),
        (("rollout.return_sampling_mask=true", "rollout.top_p=0.9"), "rollout.top_k", "allowed: 2 to 4096"),
        (("rollout.return_sampling_mask=true", "rollout.top_k=1"), "rollout.top_k", "leaves one token, whose log-prob"),
        (("rollout.max_context_len=16",), "rollout.max_prompt_len", "leaves no room for a response"),
        (("algorithm.use_kl_loss=true",), "algorithm.use_kl_loss=true", "algorithm.kl.loss_coef above 0 turns the KL"),
        (("algorithm.loss.eps_clip=1.5",), "algorithm.loss.eps_clip", "allowed: float > 0 and < 1"),
        (("model.ref_load=x/y",), "model.ref_load", "kl.loss_coef, reward_coef or metric_interval is above 0"),
        (("critic.lr=0.1",), "critic.lr", 'unless algorithm.estimator.type = "ppo"'),
        (("algorithm.estimator.critic_lambd=0.9",), "algorithm.estimator.critic_lambd", 'is a key of type = "ppo"'),
        (
            ("algorithm.ref_update_interval=2",),
            "algorithm.ref_update_interval",
            "unless algorithm.kl.loss_coef, reward_coef or metric_interval is above 0",
        ),
        (("model.opd_teacher_load=x/y",), "model.opd_teacher_load", "has no effect without algorithm.opd.type"),
        (("algorithm.opd.kl_coef=0.5",), "algorithm.opd.type", "missing; allowed: 'sglang', 'megatron'"),
        (("algorithm.opd.type=megatron",), "model.opd_teacher_load", "missing: the model of"),
        (
            (*ASKS, "algorithm.opd.distillation.type=forward", "algorithm.opd.distillation.topk=64"),
            "algorithm.opd.distillation.coef",
            "missing; expected float > 0",
        ),
        (
            (*TOPK, "algorithm.opd.distillation.mixed_kl_weight=0.2"),
            "algorithm.opd.distillation.mixed_kl_weight",
            'is a key of type = "mixed", not of "forward"',
        ),
        (
            (*TOPK, "algorithm.opd.distillation.zero_outside_topk=true"),
            "algorithm.opd.distillation.zero_outside_topk",
            'is a key of type = "reverse" or "mixed"',
        ),
        (
            ("algorithm.opd.type=megatron", "algorithm.opd.distillation.coef=1"),
            "algorithm.opd.distillation",
            'is a key of type = "sglang", not of "megatron"',
        ),
        ((*TOPK, "rollout.temperature=0.5"), "rollout.temperature", 'must be 1 with algorithm.opd.type = "sglang"'),
        (
            ("algorithm.opd.type=sglang", "rollout.temperature=0.5"),
            "rollout.temperature",
            "engines compute log-probs of given tokens at temperature 1",
        ),
        (("optimizer.min_lr=1",), "optimizer.min_lr", "is above optimizer.lr"),
        (("optimizer.lr_decay_style=cosine", "optimizer.lr_decay_iters=20"), "optimizer.lr_warmup_iters", "must end"),
        (("reward.group_rm=true", "data.0.rm_type=my:rank", "eval.0.rm_type=none"), "eval.0.rm_type", "single samples"),
        (
            ("reward.limits.f1.batch=64",),
            "reward.limits.f1.batch",
            "is for functions in reward.graders; a built-in grader gets one sample",
        ),
        (
            ("reward.graders.own=my:f", "reward.limits.own.batch=64", "reward.group_rm=true"),
            "reward.limits.own.batch",
            "cannot be combined with reward.group_rm",
        ),
        (("reward.limits.f1.wait_s=1",), "reward.limits.f1.wait_s", "no effect unless reward.limits.f1.batch is set"),
        (("reward.per=token",), "reward.per", '"grpo" reads one reward per sample: let the grader return the sum'),
        (
            (*IN_PLACE, ROUTED),
            "rollout.on_weight_update",
            'needs engines.policy.router = "direct" or engines.policy.sglang.disable_radix_cache = true',
        ),
        (
            (*IN_PLACE, ROUTED, "engines.policy.sglang.disable-radix-cache=false"),
            "rollout.on_weight_update",
            'allowed otherwise: "drain", "abort", "retract"',
        ),
        (("eval.0.max_response_len=64", "rollout.max_context_len=64"), "eval.0.max_response_len", "no room for a"),
        (("rollout.stale_tokens=mask",), "rollout.stale_tokens", "without rollout.max_token_staleness"),
        (("rollout.mask_off_policy=true", "rollout.on_halt=restart"), "rollout.mask_off_policy", "one weight version"),
        (("rollout.agent.adapter=gymnasium",), "rollout.agent.adapter", "needs rollout.agent.command"),
        (
            ("rollout.agent={command = ['a'], sandbox = 'none'}", "rollout.custom_generate='a.py:f'"),
            "rollout.custom_generate",
            "has no effect with rollout.agent",
        ),
        (
            ("rollout.agent={command = ['a'], sandbox = 'none'}",),
            "data.0.apply_chat_template",
            "programs get prompts as they are in the data",
        ),
        (("rollout.over_sampling_filter=sort_by_reward_std",), "rollout.over_sampling_filter", "nothing to choose"),
        (("rollout.keep_when_insufficient=true",), "rollout.keep_when_insufficient", "without rollout.dynamic_filter"),
        (("rollout.filter_fields=[\"texts\"]",), "rollout.filter_fields", "without a function of yours"),
        (("rollout.buffer_filter=newest", "rollout.on_halt=drop"), "rollout.buffer_filter", "has no effect with"),
        (("rollout.max_token_staleness=1", "rollout.max_staleness=2"), "rollout.max_token_staleness", "is below"),
        (("rollout.on_weight_update=abort",), "rollout.on_weight_update", "has no effect with rollout.max_staleness"),
        (("rollout.eval_overlap=false", "eval=[]"), "rollout.eval_overlap", "without an [[eval]] table"),
        (("data=[]",), "data", "at least one"),
        (("data.0.path=none",), "data.0.path", "or data.0.source_class, a class"),
        (("data.0.source=m:f",), "data.0.source", "allowed: one of a file, a function and a class"),
        (("data.0.source_class=m:C",), "data.0.source_class", "allowed: one of a file, a function and a class"),
        (("data.0.files.a=f",), "data.0.files", "has no effect without data.0.source_class"),
        (("data.0.source=m:f", "data.0.path=none"), "rollout.shuffle", "has no effect on data.0.source"),
        (("data.1.name=e", "data.1.source=m:f"), "data.1.source", "must be the only data source"),
        (("rollout.pools=[\"policy\"]", "rollout.custom_generate=m:f"), "rollout.pools", "is the pool of the model"),
        (("rollout.pools=[\"v\"]", "rollout.custom_generate=m:f"), "rollout.pools", "missing: the engines of"),
        (("rollout.pools=[\"v\"]",), "rollout.pools", "has no effect without rollout.custom_generate"),
        (("data.0.weight=1",), "data.0.weight", "has no effect on the only data source"),
        (("data.0.weight=1", "data.1.name=e", "data.1.path=f"), "data.1.weight", "another source has a weight"),
        (
            ("data.0.weight=1", "data.1.name=e", "data.1.path=f", "data.1.weight=2000"),
            "data.0.weight",
            "is below a thousandth of the sum of weights, 2001",
        ),
        (
            ("data.0.weight=1", "data.1.name=e", "data.1.path=f", "data.1.weight=2", "train={num_steps=0,num_epoch=2}"),
            "train.num_epoch",
            "have no common epoch",
        ),
        (("train.num_steps=0",), "train.num_steps", "the run has no length: set this or train.num_epoch"),
        (("train.num_epoch=2",), "train.num_epoch", "train.num_steps = 200 also sets the length of the run; unset one"),
        (("data.0.source=m:f", "train.num_steps=0", "train.num_epoch=2"), "train.num_epoch", "has no length"),
        (("run.name=a.b",), "run.name", "string matching"),
        (("run.name=",), "run.name", "string matching"),
        (("run.name=../x",), "run.name", "string matching"),
        (("data.0.name=a b",), "data.0.name", "string matching"),
        (("bus.node=n7",), "bus.node", "no such node; allowed: local"),
        (("bus.url=http://x",), "bus.url", "string matching"),
        (("bus.url=nats://x", "bus.port=4222"), "bus.port", "put the port into the URL"),
        (("bus.url=nats://x,http://y",), "bus.url", "string matching"),
        (("bus.unresponsive_after_s=20",), "bus.unresponsive_after_s", "(5 s) is below publish_timeout_s (30 s)"),
        (("bus.unresponsive_after_s=60",), "bus.unresponsive_after_s", "its default is 15"),
        (("bus.unresponsive_after_s=0.5",), "bus.unresponsive_after_s", ">= 1"),
        (("bus.url=nats://x", "bus.unresponsive_after_s=10"), "bus.unresponsive_after_s", "no effect with bus.url"),
        (("bus.url=nats://x", "bus.sync=always"), "bus.sync", "no effect with bus.url"),
        (("bus.sync=never",), "bus.sync", "never"),
        (("bus.replicas=3",), "bus.replicas", "needs bus.url, a cluster"),
        (("bus.url=nats://x,nats://y", "bus.replicas=2"), "bus.replicas", "2"),
        (("bus.data_bytes=1000",), "bus.data_bytes", "too small: this recipe can need"),
        (("rollout.max_response_len=2000000",), "rollout.max_response_len", "over the server's limit of 64 MiB"),
        (("trainer.device=cuda",), "trainer.gpus", "missing"),
        (
            ("engines.policy.weight_transport=collective", "trainer.full_export_interval=4"),
            "trainer.full_export_interval",
            'needs engines.policy.weight_transport = "disk" or "http"; allowed otherwise: 1',
        ),
        (
            ("engines.policy.colocate=trainer", "trainer.full_export_interval=4"),
            "trainer.full_export_interval",
            "deltas need engines on their own GPUs",
        ),
        (("trainer.full_export_interval=0",), "trainer.full_export_interval", ">= 1"),
        (("trainer.num_processes=3",), "trainer.megatron", "3 data-parallel replicas do not divide the 256 samples"),
        (("engines.policy.colocate=trainer", "rollout.max_staleness=1"), "rollout.max_staleness", "generate nothing"),
        (("trainer.log_probs_ahead=true",), "trainer.log_probs_ahead", "has no log-probs to compute"),
        (("observe.tokens=true",), "observe.tokens", "has no dumps to add to; set run.dump_details"),
        (
            ("observe.tokens=true", "run.dump_details=d", "run.only=rollout"),
            "observe.tokens",
            "no trainer computes log-probs of sampled tokens",
        ),
        (
            ("engines.policy.colocate=trainer", "trainer.log_probs_ahead=true", "algorithm.kl.loss_coef=0.1"),
            "trainer.log_probs_ahead",
            "the trainer has no GPU memory while colocated engines generate",
        ),
        (
            ("engines.policy.colocate=trainer", "trainer.weight_export=async"),
            "trainer.weight_export",
            "nothing trains while they generate",
        ),
        (("trainer.handover=copy",), "trainer.handover=copy", 'to trainer.weight_export: "live" (was "stream")'),
        (("critic.gpus=n0:0-3",), "critic.gpus=n0:0-3", "it is trainer.critic.gpus"),
        (("critic.device=cuda",), "critic.device=cuda", "the critic has the device of the actor, trainer.device"),
        (("trainer.critic.num_processes=2",), "trainer.critic", "has no effect without a critic"),
        ((PPO, "trainer.critic.nodes=['local']"), "trainer.critic", "set trainer.critic.num_processes"),
        ((PPO, "trainer.critic.gpus=local:0"), "trainer.critic.gpus", 'no meaning with trainer.device = "cpu"'),
        (
            (PPO, "trainer.critic.num_processes=2", "trainer.critic.nodes=['local','b']"),
            "trainer.critic.nodes",
            "no node b; allowed: local",
        ),
        (
            (PPO, "trainer.critic.num_processes=1", "trainer.critic.nodes=['local','local']"),
            "trainer.critic.nodes",
            "2 nodes, but trainer.critic.num_processes = 1: some have no rank",
        ),
        (
            (PPO, "trainer.critic.num_processes=3", "trainer.critic.megatron.pipeline_model_parallel_size=2"),
            "trainer.critic.megatron",
            "tensor x pipeline x context = 2 does not divide the critic's 3 ranks",
        ),
        (
            (PPO, "trainer.critic.num_processes=2", "trainer.critic.megatron.sequence_parallel=true"),
            "trainer.critic.megatron.sequence_parallel",
            "needs trainer.critic.megatron.tensor_model_parallel_size above 1",
        ),
        (
            (PPO, "trainer.critic.num_processes=1", "trainer.critic.megatron.mtp_num_layers=1"),
            "trainer.critic.megatron.mtp_num_layers",
            "the critic has no MTP layers",
        ),
        (("trainer.finetune=true",), "trainer.finetune=true", "renamed to trainer.load_weights_only"),
        ((*REF, "model.ref_load=x/y"), "model.ref_load", "contradicts engines.ref, which serves the reference"),
        ((*REF, "algorithm.ref_update_interval=2"), "algorithm.ref_update_interval", "engines.ref does not change"),
        ((*REF, "rollout.temperature=0.5"), "rollout.temperature", "must be 1 with engines.ref"),
        ((*REF, "engines.ref.num_engines=2", "trainer.log_probs_ahead=true"), "trainer.log_probs_ahead", "has no log"),
        ((*ASKS, "data.0.teacher=policy"), "data.0.teacher", "is the pool of the model that is trained"),
        (("data.0.teacher=math",), "data.0.teacher", "has no effect without algorithm.opd.type"),
        ((JUDGED,), "reward.judges.j.pool", "missing: the engines of this judge, engines.judge; or a URL"),
        ((JUDGED, "reward.judges.j.pool=policy"), "reward.judges.j.pool", "a judge has a pool of its own"),
        ((JUDGED, "reward.judges.j.model=m"), "reward.judges.j.model", "has no effect without reward.judges.j.url"),
        ((JUDGED, "reward.judges.j.url='http://h/v1'"), "reward.judges.j.model", "missing: the name of the model"),
        ((AT_URL, "reward.judges.j.pool=judge"), "reward.judges.j.pool", "contradicts reward.judges.j.url"),
        (
            (AT_URL, "reward.judges.j.api_key_env=A", "reward.judges.j.api_key_file=f"),
            "reward.judges.j.api_key_file",
            "contradicts reward.judges.j.api_key_env",
        ),
        ((AT_URL, "reward.judges.j.url='h:1'"), "reward.judges.j.url", "allowed"),
        ((AT_URL, "reward.judges.j.template='good?'"), "reward.judges.j.template", 'lacks "{response}"'),
        ((AT_URL, "reward.judges.j.parser=last"), "reward.judges.j.parser", "allowed: number, boxed, module:function"),
        ((AT_URL, "reward.judges.j.extra_body={n = 2}"), "reward.judges.j.extra_body.n", "not allowed"),
        ((AT_URL, 'reward.judges.j.extra_body={stop = [""]}'), "reward.judges.j.extra_body.stop", "an empty stop text"),
        ((AT_URL, 'reward.judges.j.extra_body={stop = ""}'), "reward.judges.j.extra_body.stop", "an empty stop text"),
        (
            (AT_URL, "reward.judges.j.extra_body={max_tokens = 2}"),
            "reward.judges.j.extra_body.max_tokens",
            "the run sets this field; set reward.judges.j.max_tokens",
        ),
        ((AT_URL, "reward.graders.j='a.py:b'"), "reward.judges.j", "reward.graders has a grader of this name too"),
        (
            ("reward.judges.j={url = 'http://h/v1', model = 'm'}", "data.0.rm_type=j"),
            "data.0.rm_type",
            "this judge scores no samples: set reward.judges.j.template",
        ),
        (("data.0.rm_type=code",), "data.0.rm_type", 'needs reward.sandbox = "isolated"'),
        (("data.0.rm_type=remote_rm",), "data.0.rm_type", "needs reward.rm_url, the server that it asks"),
        (
            ("data.0.rm_type=remote_rm", "reward.rm_url='http://h'", "reward.sandbox=isolated"),
            "data.0.rm_type",
            'cannot be combined with reward.sandbox = "isolated"',
        ),
        (("reward.rm_api_key_env=A",), "reward.rm_api_key_env", "has no effect without reward.rm_url"),
        (
            ("reward.rm_url='http://h'", "reward.rm_api_key_env=A", "reward.rm_api_key_file=f"),
            "reward.rm_api_key_file",
            "contradicts reward.rm_api_key_env",
        ),
        (("reward.rm_url='h:1'",), "reward.rm_url", "allowed"),
    ],
)  # fmt: skip
def test_rules_of_the_laptop_topology(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(LAPTOP, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ((PPO, "trainer.critic.gpus=n0:6-9"), "trainer.critic.gpus", "there is no GPU n0:8-9: nodes.n0.gpus = 8"),
        ((PPO, "trainer.critic.gpus=n0:6-7"), "trainer.critic.gpus", "n0:6-7 belong to the actor"),
        ((PPO, "trainer.critic.num_processes=2"), "trainer.critic.num_processes", "set trainer.critic.gpus"),
        (("trainer.megatron.pipeline_model_parallel_size=3",), "trainer.megatron", "= 6 does not divide"),
        (("trainer.megatron.expert_model_parallel_size=8",), "trainer.megatron.expert_model_parallel_size", "= 16"),
        (
            ("trainer.megatron.tensor_model_parallel_size=1",),
            "trainer.megatron.sequence_parallel",
            "tensor_model_parallel_size above 1",
        ),
        (
            ("trainer.megatron.mtp_num_layers=1", "trainer.megatron.mtp_loss_scaling_factor=0"),
            "trainer.megatron.mtp_loss_scaling_factor",
            "leave out trainer.megatron.mtp_num_layers instead",
        ),
        (("trainer.megatron.mtp_num_layers=2",), "trainer.megatron.mtp_num_layers", "only one MTP layer"),
        (
            (
                "trainer.megatron.mtp_num_layers=1",
                "trainer.megatron.pipeline_model_parallel_size=2",
                "trainer.ddp.overlap_grad_reduce=true",
            ),
            "trainer.megatron.mtp_num_layers",
            "needs trainer.ddp.overlap_grad_reduce = false",
        ),
        (
            ('trainer.megatron.recompute_modules=["mlp"]',),
            "trainer.megatron.recompute_modules",
            'has no effect without trainer.megatron.recompute_granularity = "selective"',
        ),
        (
            ("trainer.megatron.distribute_saved_activations=true",),
            "trainer.megatron.distribute_saved_activations",
            "without sequence_parallel",
        ),
        (
            ("trainer.ddp.pad_buckets_for_high_nccl_busbw=true", "trainer.optimizer.use_distributed_optimizer=false"),
            "trainer.ddp.pad_buckets_for_high_nccl_busbw",
            "needs trainer.optimizer.use_distributed_optimizer",
        ),
        (("trainer.num_processes=2",), "trainer.num_processes", "each GPU has one rank"),
        (("trainer.nodes=['n0','n1']",), "trainer.nodes", "ranks run where their GPUs are"),
        (("bus.url=nats://x",), "bus.node", "has no effect with bus.url"),
        (("bus.node=none",), "bus", "with several nodes"),
    ],
)  # fmt: skip
def test_rules_of_the_disaggregated_topology(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(DISAGGREGATE, *overrides)
    assert message in found[key]


def test_two_data_sources_or_sets_of_one_name_are_refused() -> None:
    found = problems(LAPTOP, "data.1.name=reverse-digits", "data.1.path=x", "eval.1.name=e", "eval.1.path=x",
                     "eval.1.interval=1", "eval.2.name=e", "eval.2.path=x", "eval.2.interval=1")  # fmt: skip
    assert found == {
        "data.1.name": "another [[data]] table has this name",
        "eval.2.name": "another [[eval]] table has this name",
    }


def test_all_broken_rules_are_reported_at_once() -> None:
    found = problems(LAPTOP, "rollout.n_samples_per_prompt=1", "bus.node=x", "model.ref_load=y")
    assert found.keys() == {"rollout.n_samples_per_prompt", "bus.node", "model.ref_load"}


def test_a_group_of_one_is_fine_without_reward_normalisation() -> None:
    load_topology(LAPTOP, ("rollout.n_samples_per_prompt=1", "algorithm.estimator.normalize=false"))
