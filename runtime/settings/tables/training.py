"""The tables `model`, `optimizer`, `critic` and `train`."""

from typing import Annotated, Literal

import msgspec

from runtime.functions.table import INIT_HOOK, LOG_PROB_HOOK, STEP_HOOK
from runtime.settings.reading.access import Code, Harmless, Reads, Writes
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Count, Fraction, NonNegative, Positive, Text

Beta = Harmless[Annotated[float, msgspec.Meta(ge=0, lt=1)]]


class ModelConfig(Config, frozen=True, kw_only=True):
    """The model, as a Hugging Face directory or hub name (organisation/model)."""

    harmless = True

    # Model directory or hub name, with config, tokenizer and (unless `random_init` is set) weights. A hub name is
    # taken from the local cache, or downloaded at the start.
    hf_checkpoint: Reads[Text]
    # Run code that comes with the model: in engines, and to load its tokenizer.
    trust_remote_code: Code[bool] = False
    # Initialize the weights from `run.seed`. The model directory then needs only config and tokenizer.
    random_init: Harmless[bool] = False
    # Dtype of weights and activations. If it is unset, the checkpoint's dtype applies: that in `config.json`, or else
    # that of most weights in its files. A start says which, and which tensors it rounds. On the CPU it is "float32" for
    # drawn weights, for models under 20 million weights, and on processors without `avx512_bf16` or `amx_bf16`.
    dtype: Harmless[Literal["float32", "bfloat16"]] = "float32"
    # Keys of `config.json` to leave out, one by one: the run trains the model as if it had none of them, and engines
    # that the run starts serve it so. For keys that a start refuses. A key that the model is built from, such as a
    # size, cannot be named. The start names the keys, and an export keeps their values as `_ignored_config_keys`.
    ignore_config_keys: Harmless[tuple[Text, ...]] = ()
    # Reference model of the KL loss and of DPO. By default the weights that training starts from: those of
    # `trainer.load`, or of `hf_checkpoint`.
    ref_load: Reads[Text | None] = None
    # Teacher that the trainer keeps with `algorithm.opd.type = "megatron"`: the directory of a model with the same
    # architecture.
    opd_teacher_load: Reads[Text | None] = None


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """AdamW and its learning rate schedule, counted in optimizer steps."""

    harmless = True

    # Learning rate after the warm-up.
    lr: NonNegative = 1e-6
    # Learning rate at the end of the decay.
    min_lr: NonNegative = 0.0
    # How the learning rate decays from `lr` to `min_lr`. "constant" does not decay.
    lr_decay_style: Harmless[Literal["constant", "linear", "cosine"]] = "constant"
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
    adam_eps: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 1e-8
    # Maximum gradient norm; larger gradients are scaled down to it. 0 turns clipping off.
    clip_grad: NonNegative = 1.0


class CriticConfig(Config, frozen=True, kw_only=True):
    """The critic of `algorithm.estimator.type` = "ppo". `trainer.critic` may give it ranks of its own."""

    # Model directory or hub name that the critic starts from: a policy, or a model with a value head. By default
    # `model.hf_checkpoint`.
    hf_checkpoint: Reads[Text | None] = None
    # Standard deviation of a new value head's weight. Its bias starts at 0.
    init_method_std: NonNegative = 0.02
    # Learning rate after the warm-up. By default `optimizer.lr`.
    lr: NonNegative | None = None
    # Learning rate at the end of the decay. By default `optimizer.min_lr`.
    min_lr: NonNegative | None = None
    # How the learning rate decays. By default `optimizer.lr_decay_style`.
    lr_decay_style: Harmless[Literal["constant", "linear", "cosine"] | None] = None
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
    adam_eps: Harmless[Annotated[float, msgspec.Meta(gt=0)] | None] = None
    # Maximum gradient norm. 0 turns clipping off. By default `optimizer.clip_grad`.
    clip_grad: NonNegative | None = None


class TrainConfig(Config, frozen=True, kw_only=True):
    """Length of the run, checkpoints, micro-batches."""

    harmless = True

    # Number of train steps. 0 derives it from `num_epoch`.
    num_steps: Count = 0
    # Number of passes over the data, counted in full batches when the run starts. Cannot be combined with `num_steps`.
    num_epoch: Positive | None = None
    # Number of train steps between checkpoints. By default one checkpoint is written, at the end.
    save_interval: Positive | None = None
    # Maximum number of tokens of a micro-batch on one rank. By default 9216; on the CPU micro-batches are smaller where
    # their activations would take more than an eighth of weights, gradients and moments, and more than 256 MB. A sample
    # may still have 9216 tokens.
    max_tokens_per_gpu: Positive | None = None
    # What to do with a sample over `max_tokens_per_gpu` times the context-parallel size: leave out its gradient
    # ("mask"), or end the run ("fail").
    on_too_long: Harmless[Literal["mask", "fail"]] = "mask"
    # What to do with a NaN or infinite loss or gradient: leave out the sample or optimizer step ("skip"), or end the
    # run ("fail").
    on_nonfinite: Harmless[Literal["skip", "fail"]] = "skip"
    # Maximum number of optimizer steps skipped in a row, across batches. One more ends the run.
    max_skipped: Count = 3
    # Number of most recent optimizer steps to which `max_skipped_share` applies.
    skip_window: Positive = 20
    # Maximum share of skipped steps in `skip_window`. A larger share ends the run.
    max_skipped_share: Fraction = 0.25
    # Number of newest checkpoints to keep.
    keep_checkpoints: Positive = 2
    # Number of machines on which each file of a checkpoint lies before the checkpoint counts. With 1 all ranks save
    # into one run directory, which nodes with ranks share. Above 1 the ranks of each node save into its own run
    # directory, and nodes copy the files over HTTP: a machine that is lost with its disk is replaced by another one,
    # which fetches the newest checkpoint.
    checkpoint_copies: Positive = 1
    # Function that each trainer process calls once, before it builds the model: "module:function" or
    # "path/file.py:function". At the start, the arguments of this function and of the next two are checked.
    custom_megatron_init: Annotated[Text | None, INIT_HOOK] = None
    # Function that each trainer process calls before it computes log-probs without training, with the model's chunks.
    custom_megatron_before_log_prob_hook: Annotated[Text | None, LOG_PROB_HOOK] = None
    # Function that each trainer process calls before each optimizer step, with the model's chunks and the optimizer.
    custom_megatron_before_train_step_hook: Annotated[Text | None, STEP_HOOK] = None
    # At the end, write the model to `hf/` in the run directory.
    save_hf: Writes[bool] = False
