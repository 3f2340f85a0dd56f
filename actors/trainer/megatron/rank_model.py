"""One rank's model, gradient buffers and optimizer, driven by Megatron's schedules."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer.algorithms.log_probs import KeptTokens
from actors.trainer.data.batch import MicroBatch, empty_micro_batch
from actors.trainer.data.context import Context, Ints
from actors.trainer.lora.adapters import attach, initial_adapters, trained_tensors
from actors.trainer.lora.saved import SavedLora
from actors.trainer.megatron.build import build_chunks, expert_biases, nothing, with_gradients
from actors.trainer.megatron.columns import on_device
from actors.trainer.megatron.config import DTYPES, optimizer_config, transformer_config
from actors.trainer.megatron.imports import (
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
    quiet,
)
from actors.trainer.megatron.kept_weights import KeptWeights
from actors.trainer.megatron.layers.head import HeadRequest, MtpRequest
from actors.trainer.megatron.layers.router import Routers
from actors.trainer.megatron.layers.rows import own_context, packing
from actors.trainer.megatron.memory import Offloaded, PeakMemory, host_copy
from actors.trainer.models.config import HfConfig, trained_model, with_value_head
from actors.trainer.models.files import WeightSource, base_source, value_head_source
from actors.trainer.models.shapes import check_weights
from actors.trainer.models.sharding import load_weights, tensors_of
from actors.trainer.step.skips import Skips
from runtime.models.safetensors import read_tensors
from runtime.settings.derived import replays_experts
from runtime.settings.topology import Topology


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of the last pipeline stage for the trained tokens of a micro-batch, [M], nats, float32."""

    log_probs: Tensor
    entropy: Tensor
    columns_M: Tensor  # positions of those tokens in the batch's columns
    mtp: Tensor | None = None  # log-probs [F] by the MTP layer
    topk: Tensor | None = None  # log-probs [M, K] of the teacher's likeliest tokens; None: a pass without gradients


@dataclass(frozen=True)
class TokenValues:
    """Outputs of a model with a value head for the trained tokens of a micro-batch, [M], float32.

    The value of a token is computed before it: at the position that predicts it.
    """

    values: Tensor
    columns_M: Tensor  # as in `TokenOutputs`


TokenLoss = Callable[[MicroBatch, Any], Tensor]  # loss summed over the tokens of a micro-batch, from the outputs


def _no_hook(_store_prefix: str) -> None:
    """Do nothing before log-probs."""


class Replica:
    """The model on this rank. Every method is a collective of all ranks that share the model or its gradients."""

    def __init__(self, topology: Topology, device: torch.device, *, value_head_std: float | None = None) -> None:
        """Build the model and set its initial weights.

        Args:
            topology: Its model and optimizer tables describe the model.
            device: Device of this rank.
            value_head_std: Standard deviation of a critic's new value head. None: the run's own model, a policy or a
                reward model, whose new head is as random as the model's weights. Files with a value head keep it.

        Raises:
            ValueError, OSError: The model directory cannot be used; the text says why.
        """
        directory = Path(topology.model.hf_checkpoint)
        self._layout = topology.trainer.megatron
        self.hf: HfConfig = trained_model(topology)
        if value_head_std is not None:
            self.hf = with_value_head(self.hf)
        self.device = device
        self.dtype = DTYPES[topology.model.dtype]
        has_kernel = device.type == "cuda" and self.dtype is torch.bfloat16  # variable-length attention kernel
        self.packed: bool = has_kernel if topology.trainer.packed is None else topology.trainer.packed
        self._temperature = topology.rollout.temperature
        self._describe_lora = partial(SavedLora.of, topology, self.hf)
        if not topology.model.random_init:
            check_weights(directory, self.hf)
        source = base_source(topology, self.hf)
        if self.hf.has_value_head:
            stored = () if topology.model.random_init else read_tensors(directory)
            std = self.hf.initializer_range if value_head_std is None else value_head_std
            source = value_head_source(source, self.hf, stored, seed=topology.run.seed, std=std)
        with quiet():
            self.config = transformer_config(self.hf, self._layout, dtype=self.dtype)
            self.chunks = build_chunks(self.hf, self.config)
            for chunk in self.chunks:
                load_weights(chunk, self.hf, source)
            attach(self.chunks, self.hf, topology.trainer.lora, initial_adapters(topology, self.hf))
            biases = [bias.clone() for bias in self._expert_biases]
            self._ddp = [with_gradients(chunk, self.config, topology.trainer) for chunk in self.chunks]
            for bias, before in zip(self._expert_biases, biases, strict=True):
                bias.data = before  # the bfloat16 wrapper has rounded them
            self.optimizer = get_megatron_optimizer(optimizer_config(topology, self.dtype), self._ddp)
        for group in self.optimizer.param_groups:
            group["fused"] = True  # torch's fused AdamW: one pass over the weights, also on the CPU
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if topology.trainer.ddp.overlap_grad_reduce:  # reduce with the last micro-batch only
            no_sync = [ddp.no_sync for ddp in self._ddp]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.is_distributed = topology.trainer.optimizer.use_distributed_optimizer
        self._gathers_late = topology.trainer.ddp.overlap_param_gather
        self._routers = Routers(self.chunks, sequence_parallel=self._layout.sequence_parallel, device=device)
        self._replays_experts = replays_experts(topology.algorithm)
        self._biases_before: list[Tensor] = []
        self.memory = PeakMemory(device)
        self.offloaded: Offloaded | None = None
        self._rests_at: Path | None = None  # where the optimizer state is between optimizer steps; None: on the device
        self._resting: Offloaded | None = None
        self.between: Callable[[], object] = nothing  # called before each micro-batch, on all ranks of a pipeline stage
        self.before_log_probs: Callable[[str], None] = _no_hook  # called with the name of the weights; of the user
        self.before_change: Callable[[], object] = nothing  # called before weights or optimizer state change
        self.kept: dict[str, KeptWeights] = {}  # copies of earlier weights that checkpoints contain, by name
        self.steps_before = 0  # train steps of the checkpoint that the run started from
        self.untrained_before = 0  # those of them that trained the critic alone, and not this model
        self.first_step = 0  # train step of this run that trains the model first
        self.skips = Skips()  # skipped optimizer steps of the run so far

    @property
    def length_multiple(self) -> int:
        """Divisor of the length of every row."""
        return self.context.multiple * (
            self._layout.tensor_model_parallel_size if self._layout.sequence_parallel else 1
        )

    @property
    def context(self) -> Context:
        """Context-parallel rank and size."""
        return own_context()

    @cached_property
    def layer_weights(self) -> int:
        """Parameters of the last layer that one token uses, over all tensor-parallel ranks."""
        return self.hf.layers[-1].weights_of_a_token(self.hf.hidden_size, matrices_only=False)

    @property
    def lora(self) -> SavedLora | None:
        """Description of the adapters, for checkpoints; reads the base model's files once. None: all weights train."""
        return self._describe_lora()

    def num_micro_batches(self, wanted: int) -> int:
        """Return the number of micro-batches to run: at least `wanted`, and valid for the pipeline schedule.

        The interleaved schedule needs a multiple of the number of pipeline stages. On the CPU it needs at least twice
        that number. With fewer, the first stages run all forward passes before they receive a gradient. Gloo's sends
        wait for their receiver, and then deadlock.
        """
        if len(self.chunks) == 1:
            return wanted
        stages = self._layout.pipeline_model_parallel_size
        wanted = max(wanted, stages if self.device.type == "cuda" else 2 * stages)
        return -(-wanted // stages) * stages

    def complete_chunks(self) -> list[Any]:
        """Return this rank's model chunks after pending parameter all-gathers have finished."""
        if self._gathers_late:
            for ddp in self._ddp:
                ddp.start_param_sync(force_sync=True)
        return self.chunks

    @property
    def _expert_biases(self) -> list[Tensor]:
        return [bias for chunk in self.chunks for _, bias in expert_biases(chunk)]

    def weights(self) -> Iterator[Any]:
        """Yield this rank's tensors that training changes: adapters, or parameters and expert biases."""
        for chunk in self.complete_chunks():
            yield from trained_tensors(chunk) or (tensor for _, tensor in tensors_of(chunk))

    def set_weights(self, source: WeightSource) -> None:
        """Replace the weights, including the optimizer's copies."""
        self.before_change()
        for chunk in self.chunks:
            load_weights(chunk, self.hf, source)
        self.optimizer.reload_model_params()

    def weights_copy(self) -> list[Tensor]:
        """Copy this rank's weights to the host, for `exchange_weights`."""
        return [host_copy(weight.detach()) for weight in self.weights()]

    @torch.no_grad()
    def keep_weights(self, kept: KeptWeights, step: int) -> None:
        """Copy this rank's weights, which contain `step` train steps, in place of earlier ones."""
        self.before_change()
        for weight, copy in zip(self.weights(), kept.tensors, strict=True):
            copy.copy_(weight)
        kept.step = step

    @torch.no_grad()
    def exchange_weights(self, weights: Sequence[Tensor]) -> None:
        """Swap this rank's weights with `weights`. The optimizer's copies stay unchanged."""
        self.before_change()
        for weight, other in zip(self.weights(), weights, strict=True):
            before = weight.clone()
            weight.copy_(other)
            other.copy_(before)

    def offload(self, folder: Path, *, weights: bool = False) -> int:
        """Move gradient buffers, main parameters and optimizer state to the host, until `onload`. The weights stay.

        Args:
            folder: Directory for an unnamed file that takes the host's place when training on the CPU. The file
                disappears with the process.
            weights: Move the weights, too. Nothing can be computed then until `onload`.

        Returns:
            Bytes freed.
        """
        assert self.offloaded is None
        self.before_change()
        self.offloaded = Offloaded(self._ddp, self.optimizer, folder, weights=weights)
        return self.offloaded.size_bytes

    def onload(self) -> None:
        """Undo `offload`. Afterwards a train step, a checkpoint or `set_weights` is possible again."""
        assert self.offloaded is not None
        self.offloaded.onload()
        self.offloaded = None

    def rest(self, folder: Path) -> None:
        """Keep the optimizer state on the host from now on, except inside `optimizer_at_hand`.

        Args:
            folder: As for `offload`.
        """
        self._rests_at = folder
        with self.optimizer_at_hand():
            pass

    @contextmanager
    def optimizer_at_hand(self) -> Generator[None]:
        """Keep the optimizer state on the device inside the block."""
        rested, self._resting = self._resting, None
        if rested is not None:
            rested.onload()
        yield
        if self._rests_at is not None:
            self.before_change()
            self._resting = Offloaded(self._ddp, self.optimizer, self._rests_at, gradients=False, before=rested)

    def backward(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss) -> None:
        """Set the gradients of one optimizer step. The loss is a sum, divided by the input tokens of all replicas.

        Padding does not count as input. The router losses are sums over tokens. The division makes them means, however
        the tokens are laid out.

        Args:
            micro_batches: Micro-batches of this replica. Each replica has the same number, one that
                `num_micro_batches` allows.
            loss: Returns the summed loss of a micro-batch.
        """
        self._routers.begin()
        self._biases_before = [bias.clone() for bias in self._expert_biases]  # the backward pass changes them
        for ddp in self._ddp:
            ddp.zero_grad_buffer()
        with quiet():
            self.optimizer.zero_grad()
        self._run(micro_batches, loss, self._routers.train)

    @torch.no_grad()
    def fill_log_probs(
        self,
        micro_batches: Sequence[MicroBatch],
        column_N: NDArray[np.float32],
        *,
        temperature: float | None = None,
        is_policy: bool = False,
    ) -> None:
        """Write the log-probs of the trained tokens into a column, on the last pipeline stage only.

        Args:
            micro_batches: Micro-batches of this replica. Each replica has the same number.
            column_N: One number per token.
            temperature: Temperature of the log-probs of tokens without one of their own. None: the rollout temperature.
            is_policy: True for the policy that is trained: if experts are replayed, keep its choice of experts.
        """
        route = self._routers.keep if is_policy and self._replays_experts else self._routers.look
        self._fill(micro_batches, column_N, lambda outputs: outputs.log_probs, route, temperature)

    @torch.no_grad()
    def fill_values(self, micro_batches: Sequence[MicroBatch], column_N: NDArray[np.float32]) -> None:
        """Write the values of the trained tokens into a column, as `fill_log_probs` does. Needs a value head."""
        self._fill(micro_batches, column_N, lambda outputs: outputs.values, self._routers.look, None)

    def _fill(
        self,
        micro_batches: Sequence[MicroBatch],
        column_N: NDArray[np.float32],
        chosen: Callable[[Any], Tensor],
        route: Callable[[MicroBatch], None],
        temperature: float | None,
    ) -> None:
        filled: list[tuple[Ints, Tensor]] = []  # copied to the host at once: each copy waits for the device

        def fill(micro_batch: MicroBatch, outputs: Any) -> Tensor:
            filled.append((micro_batch.columns_M, chosen(outputs)))
            return filled[-1][1].sum()

        missing = self.num_micro_batches(len(micro_batches)) - len(micro_batches)
        empty = empty_micro_batch(packed=self.packed, multiple=self.length_multiple, context=self.context)
        self._run([*micro_batches, *([empty] * missing)], fill, route, temperature=temperature, forward_only=True)
        if filled:
            columns, outputs = zip(*filled, strict=True)
            column_N[np.concatenate(columns)] = torch.cat(outputs).cpu().numpy()

    def optimizer_step(self, *, learning_rate: float, weight_decay: float) -> float:
        """Clip and apply the gradients, unless their norm is 0 or not finite. Then nothing changes.

        Adam would change weights even for a gradient of 0, by weight decay and by the momentum of earlier steps.

        Returns:
            The gradient norm before clipping, over all ranks and therefore the same on each.
        """
        self.before_change()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay * group["wd_mult"]
        with quiet(), torch.no_grad(), self.optimizer_at_hand():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if math.isfinite(norm) and norm:
                self._move(norm)
            else:
                self.restore_biases()
        return norm

    def reset_optimizer(self) -> None:
        """Set AdamW's moments and step counts to 0, as before its first step. The main parameters stay."""
        self.before_change()
        with self.optimizer_at_hand(), torch.no_grad():
            for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                for state in part.optimizer.state.values():
                    for name in ("step", "exp_avg", "exp_avg_sq"):
                        state[name].zero_()

    def _move(self, norm: float) -> None:
        """Do the part of Megatron's `optimizer.step` that follows the norm."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            factor = part.config.clip_grad / (norm + 1e-6)
            gradients = [parameter.grad for parameter in part.get_parameters() if parameter.grad is not None]
            if factor < 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        self.optimizer.step_with_ready_grads()

    @torch.no_grad()
    def restore_biases(self) -> None:
        """Restore the expert biases from before `backward`, which changes them."""
        for bias, before in zip(self._expert_biases, self._biases_before, strict=True):
            bias.copy_(before)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: TokenLoss,
        route: Callable[[MicroBatch], None],
        *,
        forward_only: bool = False,
        temperature: float | None = None,
    ) -> None:
        with quiet():
            get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, loss, route, temperature or self._temperature),
                data_iterator=[iter(micro_batches) for _ in self._ddp] if len(self._ddp) > 1 else iter(micro_batches),
                model=self._ddp,
                num_microbatches=len(micro_batches),
                seq_length=max(micro_batch.tokens.shape[1] for micro_batch in micro_batches),
                micro_batch_size=max(micro_batch.tokens.shape[0] for micro_batch in micro_batches),
                forward_only=forward_only,
            )

    def _forward_step(
        self,
        loss: TokenLoss,
        route: Callable[[MicroBatch], None],
        temperature: float,
        micro_batches: Any,
        model: Any,
    ) -> tuple[Tensor, Callable[..., Any]]:
        self.between()
        micro_batch: MicroBatch = next(micro_batches)
        route(micro_batch)
        read = np.array(micro_batch.num_tokens)
        tokens, rows, targets, columns, num_tokens = on_device(
            [micro_batch.tokens, micro_batch.rows_M, micro_batch.targets_M, micro_batch.columns_M, read], self.device
        )
        kept = None if micro_batch.kept is None else KeptTokens(*on_device([*micro_batch.kept], self.device))
        topk = None
        if micro_batch.topk is not None and torch.is_grad_enabled():  # passes for log-probs alone do not read it
            (topk,) = on_device([micro_batch.topk.ids], self.device)
        of_targets: float | Tensor = temperature
        if micro_batch.temperatures_M is not None:
            own = torch.from_numpy(micro_batch.temperatures_M).to(self.device)
            of_targets = torch.where(own > 0, own, temperature)
        request = HeadRequest(rows, targets, of_targets, kept, topk, self._mtp_request(micro_batch))
        packed = packing(micro_batch.bounds, self.device, micro_batch.shared)
        output = model(tokens, None, None, labels=request, packed_seq_params=packed)
        return output, partial(self._token_loss, loss, micro_batch, columns, num_tokens)

    def _mtp_request(self, micro_batch: MicroBatch) -> MtpRequest | None:
        mtp = micro_batch.mtp
        if mtp is None or not torch.is_grad_enabled():  # passes for log-probs alone do not read it
            return None
        return MtpRequest(*on_device([mtp.tokens, mtp.rows_F, mtp.targets_F], self.device))

    def _token_loss(
        self, loss: TokenLoss, micro_batch: MicroBatch, columns: Tensor, num_tokens: Tensor, outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute the loss from the head's outputs. The schedule calls this on the last pipeline stage."""
        if self.hf.has_value_head:
            return loss(micro_batch, TokenValues(outputs[0], columns)), num_tokens.int(), {}
        log_probs, entropy, *further = outputs
        has_topk = micro_batch.topk is not None and torch.is_grad_enabled()
        topk = further.pop(0) if has_topk else None
        total = loss(micro_batch, TokenOutputs(log_probs, entropy, columns, *further, topk=topk))
        return total, num_tokens.int(), {}
