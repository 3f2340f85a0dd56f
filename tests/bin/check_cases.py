"""Topologies that `--check` accepts, since a start trains a step, and those that it refuses, with key and words."""

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "topologies/laptop.toml"
SFT = ROOT / "topologies/boxed-copy-sft.toml"
COLOCATE = ROOT / "topologies/colocate-8gpu.toml"
DISAGGREGATE = ROOT / "topologies/disaggregate-2x8gpu.toml"
MODEL = ROOT / "topologies/demo/models/reverse-digits"
BOXED = ROOT / "topologies/demo/models/boxed-copy"
TINY = (
    "rollout.rollout_batch_size=2",
    "algorithm.num_steps_per_rollout=1",
    "optimizer.lr_warmup_iters=0",
    "train.num_steps=1",
)
GENERATES = ("rollout.n_samples_per_prompt=2", "eval=[]")
GRADER = "def grade(sample):\n    return float(len(sample.response))\n\n\ndef two(a, b):\n    return 0\n"


class Case(NamedTuple):
    """A topology, and which key of it is refused with which words; none: it trains a step."""

    overrides: tuple[str, ...]
    key: str | None = None
    words: str = ""
    file: Path = LAPTOP


ACCEPTED = {
    "as shipped": Case(()),
    "tensor and sequence parallel": Case(
        (
            "trainer.num_processes=2",
            "trainer.megatron.tensor_model_parallel_size=2",
            "trainer.megatron.sequence_parallel=true",
            "trainer.megatron.recompute_granularity=selective",
            'trainer.megatron.recompute_modules=["core_attn", "mlp"]',
            "trainer.megatron.disable_bf16_reduced_precision_matmul=true",
            "trainer.optimizer.use_distributed_optimizer=true",
            "trainer.ddp.pad_buckets_for_high_nccl_busbw=true",
            "trainer.ddp.bucket_size=100000",
            "model.dtype=bfloat16",
        )
    ),
    "reference, few slots, shared processes": Case(
        (
            "algorithm.kl.loss_coef=0.1",
            "engines.policy.concurrency=1",
            'share=[["rollout", "reward"], ["buffer", "filter"]]',
        )
    ),
    "turns in the same memory": Case(("engines.policy.colocate=trainer", "rollout.release_when=batch_ready")),
    "two engines, own grader, one step off": Case(
        (
            "engines.policy.num_engines=2",
            "data.0.rm_type=TMP/graders.py:grade",
            "data.0.label_key=none",
            "rollout.max_staleness=1",
            "rollout.over_sampling_batch_size=4",
            "rollout.on_surplus=drop",
        )
    ),
    "a copy by broadcast": Case(
        ("engines.policy.weight_transport=collective", "trainer.weight_export=async", "rollout.max_staleness=1")
    ),
    "Parquet, an epoch, a response cut by the context": Case(
        (
            "data.0.path=TMP/rows.parquet",
            "train.num_steps=0",
            "train.num_epoch=1",
            "rollout.max_response_len=64",
            "rollout.max_context_len=20",
            "trainer.num_processes=2",
            "trainer.megatron.context_parallel_size=2",
            "trainer.packed=true",
        )
    ),
    "demonstrations": Case((), file=SFT),
    "a bus that is there": Case(
        ("bus.url=nats://127.0.0.1:LOCKED", "bus.credentials=TMP/right.toml", "run.name=nobodys")
    ),
}
REFUSED = {
    # what is written
    "unknown key": Case(("train.num_stepz=1",), "train.num_stepz", "unknown key"),
    "out of bounds": Case(("rollout.temperature=0",), "rollout.temperature", "allowed: float > 0"),
    "no tokens left": Case(("rollout.top_k=0",), "rollout.top_k", "at least 1"),
    "nothing kept": Case(
        (
            "rollout.n_samples_per_prompt=1",
            "algorithm.estimator.normalize=false",
            "rollout.dynamic_filter=nonzero_std",
        ),
        "rollout.n_samples_per_prompt",
        "drops every group",
    ),
    # data and graders
    "no data file": Case(("data.0.path=TMP/none.jsonl",), "data.0.path", "no such file"),
    "a row that is no JSON": Case(("data.0.path=TMP/torn.jsonl",), "data.0.path", "torn.jsonl:2"),
    "no such column": Case(("data.0.input_key=question",), "data.0.path", "no column 'question'"),
    "no label": Case(("data.0.label_key=none",), "data.0.label_key", "the grader positional_match needs"),
    "no grader": Case(("data.0.rm_type=none",), "data.0.path", "no grader: set rm_type"),
    "a grader that is not built in": Case(("data.0.rm_type=nonsense",), "data.0.rm_type", "no grader 'nonsense'"),
    "a grader without its extra": Case(("data.0.rm_type=ifbench",), "data.0.rm_type", "physarum[instructions]"),
    "a part of a sum": Case(
        ("reward.sums.total.dapo=1", "data.0.rm_type=total"), "reward.reward_key", "the grader dapo of"
    ),
    "a dict without a key": Case(("data.0.rm_type=dapo",), "reward.reward_key", "set reward_key to say"),
    "a row that names none": Case(("data.0.path=TMP/named.jsonl",), "data.0.path", "no grader 'nonsense'"),
    "no such function": Case(("data.0.rm_type=TMP/graders.py:grad",), "data.0.rm_type", "did you mean 'grade'"),
    "a function of two": Case(("data.0.rm_type=TMP/graders.py:two",), "data.0.rm_type", "takes (a, b)"),
    "no module": Case(("rollout.dynamic_filter=no.such:keep",), "rollout.dynamic_filter", "no module named 'no'"),
    "every prompt too long": Case(("rollout.max_prompt_len=1",), "data.0.path", "no row is short enough"),
    # models
    "no model": Case(("model.hf_checkpoint=TMP/none",), "model.hf_checkpoint", "no such directory"),
    "a name of the hub": Case(("model.hf_checkpoint=Qwen/Qwen3-4B",), "model.hf_checkpoint", "HF_HUB_OFFLINE forbids"),
    "no weights": Case(("model.random_init=false",), "model.hf_checkpoint", "no weights in this directory"),
    "no tokenizer": Case(("model.hf_checkpoint=TMP/bare",), "model.hf_checkpoint", "no tokenizer"),
    "a broken tokenizer": Case(("model.hf_checkpoint=TMP/broken",), "model.hf_checkpoint", "tokenizer.json"),
    "no chat template": Case(("model.hf_checkpoint=TMP/plain",), "data.0.path", "no chat template"),
    "another family": Case(("model.hf_checkpoint=TMP/mixtral",), "model.hf_checkpoint", "model_type 'mixtral'"),
    "yarn": Case(("model.hf_checkpoint=TMP/yarn",), "model.hf_checkpoint", "rope_type 'yarn'"),
    "a key that only transformers reads": Case(
        ("model.hf_checkpoint=TMP/unmasked",), "model.hf_checkpoint", "is_causal false is not supported"
    ),
    "biases": Case(("model.hf_checkpoint=TMP/biased",), "model.hf_checkpoint", "attention_bias is not supported"),
    "weights of another": Case(
        ("model.hf_checkpoint=TMP/other", "model.random_init=false"),
        "model.hf_checkpoint",
        "tokens.weight is [8, 8]",
    ),
    "weights with holes": Case(
        ("model.hf_checkpoint=TMP/holes", "model.random_init=false"),
        "model.hf_checkpoint",
        "no tensor model.emb",
    ),
    "a config of texts": Case(("model.hf_checkpoint=TMP/texts",), "model.hf_checkpoint", "Expected `int`, got `str`"),
    "too small a vocabulary": Case(("model.hf_checkpoint=TMP/few",), "model.hf_checkpoint", "its vocabulary has 8"),
    "another reference": Case(
        ("algorithm.kl.loss_coef=0.1", f"model.ref_load={BOXED}"), "model.ref_load", "no weights in this directory"
    ),
    "beyond the model": Case(("rollout.max_context_len=999",), "rollout.max_context_len", "the model's context has 64"),
    "no room": Case(("rollout.max_response_len=64",), "rollout.max_response_len", "the model's context has 64"),
    "up to what engines keep free": Case(
        ("rollout.max_context_len=59",), "rollout.max_context_len", "at most 58: the model's context has 64 tokens"
    ),
    "a stop text of no tokens": Case(("rollout.stop=['é']",), "rollout.stop", "tokenizer cannot encode 'é'"),
    "more tokens than the model": Case(
        ("model.hf_checkpoint=TMP/more",),
        "model.hf_checkpoint",
        "it has token 99, but the vocabulary of the model has 16",
    ),
    "a token it has not": Case(("rollout.stop_token_ids=[99]",), "rollout.stop_token_ids", "99 is not a token"),
    # checkpoints of other runs
    "no run to begin from": Case(("trainer.load=TMP/none",), "trainer.load", "no such directory"),
    "nothing saved": Case(("trainer.load=TMP/dumped",), "trainer.load", "neither a run with a complete checkpoint"),
    "a checkpoint of another model": Case(
        ("trainer.load=TMP/saved", "trainer.load_weights_only=true"),
        "trainer.load",
        "vocab_size is 8 in the checkpoint, and 16 in config.json",
    ),
    "its own checkpoint, of another model": Case(
        ("run.dir=TMP", "run.name=saved"),
        "model.hf_checkpoint",
        "vocab_size is 8 in the checkpoint, and 16 in config.json",
    ),
    "weights of nobody": Case(
        ("trainer.load_weights_only=true",), "trainer.load_weights_only", "no effect without trainer.load"
    ),
    # layouts
    "a layer in halves": Case(
        ("trainer.num_processes=2", "trainer.megatron.pipeline_model_parallel_size=2"),
        "trainer.megatron",
        "num_hidden_layers = 1 of the model: 1 layer cannot be split equally over 2 pipeline stages",
    ),
    "ranks left over": Case(
        ("trainer.num_processes=3", "trainer.megatron.tensor_model_parallel_size=2"), "trainer.megatron", "3 ranks"
    ),
    "one rank in two stages": Case(
        ("trainer.megatron.virtual_pipeline_model_parallel_size=2",),
        "trainer.megatron.virtual_pipeline_model_parallel_size",
        "needs trainer.megatron.pipeline_model_parallel_size above 1",
    ),
    "two ranks interleaved": Case(
        (
            "trainer.num_processes=2",
            "trainer.megatron.pipeline_model_parallel_size=2",
            "trainer.megatron.virtual_pipeline_model_parallel_size=2",
        ),
        "trainer.megatron.virtual_pipeline_model_parallel_size",
        "gloo mixes up their messages",
    ),
    "recomputed how": Case(
        ("trainer.megatron.recompute_granularity=full",), "trainer.megatron.recompute_method", '"uniform" or "block"'
    ),
    "gathered late": Case(
        ("trainer.ddp.overlap_param_gather=true",),
        "trainer.ddp.overlap_param_gather",
        "needs trainer.optimizer.use_distributed_optimizer",
    ),
    "a further layer of no model": Case(
        ("trainer.megatron.mtp_num_layers=1",), "model.hf_checkpoint", "the model has 0 MTP layers"
    ),
    "expert parallel": Case(
        ("trainer.num_processes=2", "trainer.megatron.expert_model_parallel_size=2"),
        "trainer.megatron",
        "the model has no experts to distribute",
    ),
    "experts kept": Case(("algorithm.use_routing_replay=true",), "algorithm.use_routing_replay", "has no experts"),
    "experts of the engine": Case(
        ("algorithm.use_rollout_routing_replay=true",),
        "algorithm.use_rollout_routing_replay",
        "not implemented yet with engines",
    ),
    "tokens gathered in a pipeline": Case(
        (
            "trainer.num_processes=2",
            "trainer.megatron.pipeline_model_parallel_size=2",
            "trainer.megatron.moe_token_dispatcher_type=allgather",
        ),
        "trainer.megatron.moe_token_dispatcher_type",
        "those of a pipeline differ",
    ),
    "an address of another machine": Case(
        ("nodes.local.address=203.0.113.9",),
        "nodes.local.address",
        "this machine does not have the address 203.0.113.9",
    ),
    "a name that does not resolve": Case(
        ("nodes.local.address=n0.invalid",),
        "nodes.local.address",
        "neither an interface of this machine nor a DNS name",
    ),
    "a tracker whose package is not in its interpreter": Case(
        ("observe.mlflow.enabled=true", f"observe.mlflow.python={sys.executable}"),
        "observe.mlflow.enabled",
        "run bin/setup --with mlflow",
    ),
    "a tracker whose key is not there": Case(
        ("observe.wandb.enabled=true", f"observe.wandb.python={sys.executable}", "observe.wandb.key_file=no/key"),
        "observe.wandb.key_file",
        "No such file or directory",
    ),
    # engines
    "weights by shared memory of a copy": Case(
        ("engines.policy.weight_transport=ipc", "engines.policy.colocate=trainer", "trainer.weight_export=async"),
        "trainer.weight_export",
        "nothing trains while they generate",
    ),
    "handles of several stages": Case(
        ("engines.policy.sglang.pp_size=2",),
        "engines.policy.sglang.pp_size",
        "a memory handle is valid for one pipeline stage only",
        COLOCATE,
    ),
    "engines in turns that others run": Case(
        ("engines.policy.colocate=trainer", "engines.policy.urls=['http://127.0.0.1:9']"),
        "engines.policy.colocate",
        "a run does not release the memory of external engines",
    ),
    "ranks on the CPU without a node for each": Case(
        ("nodes.local.address=auto", "nodes.n1.address=10.0.0.2", "bus.node=local", "trainer.nodes=['local','n1']"),
        "trainer.nodes",
        "2 nodes, but trainer.num_processes = 1: some have no rank",
    ),
    "GPUs that are not here": Case(("nodes.local.gpus=99",), "nodes.local.gpus", "this machine has"),
    "SGLang of nobody": Case(("engines.policy.kind=sglang",), "engines.policy.kind", "SGLang is not installed"),
    "SGLang not in it": Case(
        ("engines.policy.kind=sglang", f"engines.policy.python={sys.executable}"),
        "engines.policy.python",
        "SGLang is not installed in this interpreter",
    ),
    "a layer that SGLang gives experts": Case(
        ("engines.policy.kind=sglang", "model.hf_checkpoint=TMP/dense-layer"),
        "model.hf_checkpoint",
        "dense-layer/config.json: mlp_only_layers = [1], which SGLang ignores: it builds another model; allowed: []",
    ),
    "layers that SGLang gives experts": Case(
        ("engines.policy.kind=sglang", "model.hf_checkpoint=TMP/dense-layers"),
        "model.hf_checkpoint",
        "dense-layers/config.json: decoder_sparse_step = 2, which SGLang ignores: it builds another model; allowed: 1",
    ),
    "no such interpreter": Case(
        ("engines.policy.kind=sglang", "engines.policy.python=~/none/bin/python"),
        "engines.policy.python",
        "no such interpreter",
    ),
    "nobody's engine": Case(
        ("engines.policy.urls=['http://127.0.0.1:FREE']",), "engines.policy.urls", "no engine answers there"
    ),
    "no engine at all": Case(
        ("engines.policy.urls=['http://127.0.0.1:OTHER']",), "engines.policy.urls", "http://127.0.0.1:OTHER/server_info"
    ),
    "an engine of another dtype": Case(
        ("engines.policy.urls=['http://127.0.0.1:BFLOAT']",),
        "engines.policy.urls",
        "does not fit the recipe: dtype = 'bfloat16'; allowed: float32, from model.dtype",
    ),
    "too many at once": Case(("engines.policy.concurrency=5000",), "engines.policy.concurrency", "at most 4096"),
    "too few tokens": Case(("engines.policy.max_total_tokens=6",), "engines.policy.max_total_tokens", "too small"),
    # bus and run directory
    "nobody's bus": Case(("bus.url=nats://127.0.0.1:FREE",), "bus.url", "no server answers there"),
    "a bus without a log": Case(("bus.url=nats://127.0.0.1:PLAIN",), "bus.url", "runs without JetStream"),
    "another server": Case(("bus.url=nats://127.0.0.1:OTHER",), "bus.url", "not that of a NATS server"),
    "a wrong password in the URL": Case(
        ("bus.url=nats://me:wrong@127.0.0.1:LOCKED",), "bus.url", "the server refused this login"
    ),
    "a wrong password in a file": Case(
        ("bus.url=nats://127.0.0.1:LOCKED", "bus.credentials=TMP/wrong.toml"),
        "bus.credentials",
        "the server refused this login",
    ),
    "no password": Case(("bus.url=nats://127.0.0.1:LOCKED",), "bus.url", "requires a login"),
    "an account without a log": Case(
        ("bus.url=nats://bare:right@127.0.0.1:LOCKED",), "bus.url", "JetStream not enabled for account"
    ),
    "a login that may not delete streams": Case(
        ("bus.url=nats://few:right@127.0.0.1:LOCKED",), "bus.url", "publish $JS.API.STREAM.DELETE.phy-checked-event"
    ),
    "a server that is no cluster": Case(
        ("bus.url=nats://me:right@127.0.0.1:LOCKED", "bus.replicas=3"), "bus.url", "this server is in no cluster"
    ),
    "streams of another": Case(
        ("bus.url=nats://me:right@127.0.0.1:LOCKED",), "bus.url", "on this bus belong to /there on host, not to"
    ),
    "a port in use": Case(("bus.port=TAKEN",), "bus.port", "the port cannot be opened"),
    "a file for a directory": Case(("run.dir=TMP/graders.py",), "run.dir", "is a file"),
    "nowhere to dump": Case(("run.dump_details=TMP/graders.py/x",), "run.dump_details", "is a file"),
    "dumps of another": Case(("run.dump_details=TMP/dumped",), "run.dump_details", "dumps of another run, somebody"),
    "no dump": Case(("run.only=trainer", "run.load=TMP/none"), "run.load", "no such directory"),
}
