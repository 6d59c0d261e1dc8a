"""The training that a strategy promises, in one process: plain PyTorch in float64 that knows nothing about fleetx.

Each virtual rank works on its share of each batch. There is one model, whose gradient is the mean over the shares. Only
if ranks update locally, or round a gradient on its way to the others, does each have its own model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fleetx.verify.oracle_updates import SwitchSettings, rule_for

Sample = tuple[Tensor, Tensor]
SampleLoss = Callable[[Tensor, Tensor], Tensor]

# Strategies that change where or when something is computed or sent, but no number beyond rounding.
NEUTRAL = {
    "recompute", "use_hierarchical_allreduce", "quantized_allreduce", "amp", "dgc", "noise_scale",
}  # fmt: skip
# For the others: the settings that are computed here, or that change no numbers.
READS = {
    "adaptive_localsgd": {"init_k_steps", "begin_step", "max_k_steps", "overlap_share", "allow_single"},
    "clip": {"clip_norm"},
    "ema": {"decay", "power"},
    "fp16_allreduce": {"dtype"},
    "gradient_merge": {"k_steps", "avg", "rampup", "rampup_unit", "rampup_feed", "rampup_lr"},
    "lamb": {"lamb_weight_decay"},
    "lars": {"lars_coeff", "lars_weight_decay", "epsilon"},
    "localsgd": {"k_steps", "begin_step", "overlap_share", "allow_single"},
    "muon": {"momentum", "nesterov", "ns_steps", "rms", "divide"},
    "pipeline": {
        "micro_batch", "accumulate_steps", "micro_batch_size", "schedule_mode", "stages", "degree", "p2p_cache_shape",
        "enable_partial_send_recv",
    },
    "sharding": {
        "sharding_degree", "sharding_group_size", "stage", "offload", "hybrid_dp", "dp_degree", "segment_anchors",
        "sharding_segment_strategy", "segment_broadcast_MB", "fuse_broadcast_MB", "pp_allreduce_in_optimize",
    },
    "sync_batch_norm": set[str](),
}  # fmt: skip
KNOWN = NEUTRAL | set(READS)
AVERAGED = "averaged."  # prefix of the names of averaged parameters


def train(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    settings: SwitchSettings,
    batches: Sequence[Sample],
    loss_fn: SampleLoss,
    replicas: int,
    *,
    flush: bool = False,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
) -> dict[str, Tensor]:
    """The state of rank 0's model after training on all batches, plus its moving average under `ema`.

    flush: at the end, update with what is left in the merge window, and average the ranks.
    schedule: makes a scheduler that is stepped after every batch.
    """
    local = settings.get("localsgd") or settings.get("adaptive_localsgd")
    groups = replicas // _group(settings, replicas)
    casts = "fp16_allreduce" in settings and groups > 1 and not local
    apart = local or casts
    models = [copy.deepcopy(model).double() for _ in range(groups if apart else 1)]
    optimizers = [make_optimizer(m) for m in models]
    schedulers = [schedule(optimizer) for optimizer in optimizers] if schedule is not None else []
    rules = [rule_for(m, optimizer, settings) for m, optimizer in zip(models, optimizers, strict=True)]
    merge = settings.get("gradient_merge", {})
    average = _Average(settings, models[0])
    followers = [_Follower(m, settings["ema"]) for m in models] if "ema" in settings else []
    window, waiting, rounds, samples, losses = 0, 0, 0, 0, [0.0]

    def merged() -> int:
        done = samples if merge.get("rampup_unit") == "samples" else rounds
        return next((k for end, k in merge.get("rampup", ()) if done < end), merge.get("k_steps", 1))

    def update() -> None:
        if casts:
            _reduce_in_half(models, settings)
        for m, rule, optimizer in zip(models, rules, optimizers, strict=True):
            divisor = window if merge.get("avg", True) else 1
            grads = {name: p.grad / divisor for name, p in m.named_parameters() if p.grad is not None}
            if "clip" in settings:
                _clip(grads, settings["clip"]["clip_norm"])
            with _rates_scaled(optimizer, merge, merged()):
                rule(grads)
            m.zero_grad()
        if local:
            average(models, losses)
        for follower in followers:
            follower.follow()

    for batch in batches:
        losses = _backward(models, batch, loss_fn, settings, replicas)
        window, waiting = window + 1, waiting + len(batch[0])
        if window == merged():
            update()
            window, rounds, samples, waiting = 0, rounds + 1, samples + waiting, 0
        for scheduler in schedulers:
            scheduler.step()
    if flush and window:
        update()
    if local and flush:
        average.now(models)
    means = {
        AVERAGED + name: torch.stack([follower.kept[name] for follower in followers]).mean(0)
        for name in (followers[0].kept if followers else ())
    }
    return models[0].state_dict() | means


def _group(settings: SwitchSettings, replicas: int) -> int:
    """How many ranks always have the same gradient: those that share one copy of the model."""
    sharding = settings.get("sharding")
    return (sharding["sharding_degree"] or sharding["sharding_group_size"] or replicas) if sharding else 1


@contextmanager
def _rates_scaled(optimizer: Optimizer, merge: Mapping[str, Any], merged: int) -> Iterator[None]:
    """During a ramp-up, the rate may follow the batch size."""
    share = merged / merge.get("k_steps", 1)
    factor = {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[merge.get("rampup_lr", "none")]
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    yield
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate


def _backward(
    models: Sequence[nn.Module], batch: Sample, loss_fn: SampleLoss, settings: SwitchSettings, replicas: int
) -> list[float]:
    """Add the gradients of this step to each model's. Returns each rank's loss."""
    pipeline = settings.get("pipeline", {})
    pieces = max(pipeline.get("micro_batch", 1), pipeline.get("accumulate_steps", 1))
    shares = [[part.chunk(pieces) for part in share] for share in zip(*(t.chunk(replicas) for t in batch), strict=True)]
    everyone = [models[rank * len(models) // replicas] for rank in range(replicas)]
    forward = _forward_together if "sync_batch_norm" in settings else _forward_apart
    losses = [0.0] * replicas
    for piece in range(pieces):
        outputs = forward(everyone, [x[piece].double() for x, _ in shares])
        total = torch.zeros((), dtype=torch.float64)
        for rank, (output, (_, y)) in enumerate(zip(outputs, shares, strict=True)):
            target = y[piece].double() if y[piece].is_floating_point() else y[piece]
            loss = loss_fn(output, target) / pieces
            losses[rank] += loss.item()
            total = total + loss
        (total * len(models) / replicas).backward()  # the mean over the ranks of each model
    return losses


def _forward_apart(models: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = []
    before: dict[nn.Module, dict[str, Tensor]] = {}
    for model, x in zip(models, inputs, strict=True):
        if model in before:  # begin with the buffers that the first rank had, and drop their changes
            outputs.append(functional_call(model, {name: b.clone() for name, b in before[model].items()}, x))
        else:
            before[model] = {name: b.clone() for name, b in model.named_buffers()}
            outputs.append(model(x))
    return outputs


def _forward_together(models: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run layer by layer on all ranks, because BatchNorm sees the inputs of all of them."""
    sizes = [len(x) for x in inputs]
    if all(model is models[0] for model in models):
        return list(models[0](torch.cat(list(inputs))).split(sizes))
    values = list(inputs)
    for layers in zip(*(model.children() for model in models), strict=True):
        norm = layers[0]
        if isinstance(norm, nn.BatchNorm1d):
            mixed = functional.batch_norm(
                torch.cat(values), norm.running_mean, norm.running_var, None, None, True, norm.momentum or 0.0, norm.eps
            )
            values = [x * own.weight + own.bias for x, own in zip(mixed.split(sizes), layers, strict=True)]
        else:
            values = [layer(x) for layer, x in zip(layers, values, strict=True)]
    return values


@torch.no_grad()
def _reduce_in_half(models: Sequence[nn.Module], settings: SwitchSettings) -> None:
    """Give every model the mean gradient. Gradients are cast first, then added in pairs of neighbours."""
    amp = settings.get("amp", {})
    scale = amp["init_loss_scaling"] if amp.get("dtype") == "float16" else 1.0  # it does not change within a few steps
    for same in zip(*(m.parameters() for m in models), strict=True):
        grads = [p.grad * scale for p in same if p.grad is not None]
        mean = _mean_in_half(grads, len(models), settings) / scale if grads else None
        for p in same:
            p.grad = mean


def _mean_in_half(values: Sequence[Tensor], ranks: int, settings: SwitchSettings) -> Tensor:
    half = torch.float16 if settings["fp16_allreduce"]["dtype"] == "float16" else torch.bfloat16
    sums = [(value / ranks).to(half) for value in values]
    while len(sums) > 1:
        sums = [sum(sums[i + 1 : i + 2], start=sums[i]) for i in range(0, len(sums), 2)]
    return sums[0].to(values[0].dtype)


def _clip(grads: dict[str, Tensor], limit: float) -> None:
    norm = torch.stack([g.abs().square().sum() for g in grads.values()]).sum().sqrt()
    for g in grads.values():
        g.mul_(min(1.0, limit / (float(norm) + 1e-6)))


class _Follower:
    """A moving average of a model's parameters."""

    def __init__(self, model: nn.Module, ema: Mapping[str, Any]):
        self._model, self._ema, self._updates = model, ema, 0
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def follow(self) -> None:
        self._updates += 1
        share = self._ema["decay"]
        if self._ema["power"] is not None:
            share = min(share, (1 - 1 / self._updates) ** (self._ema["power"] + 1))
        for name, p in self._model.named_parameters():
            self.kept[name] = share * self.kept[name] + (1 - share) * p.detach()


class _Average:
    """Decides when local models are averaged, and how: fp16_allreduce casts their changes since the last average."""

    def __init__(self, settings: SwitchSettings, model: nn.Module):
        self._adaptive = settings.get("adaptive_localsgd")
        own = self._adaptive or settings.get("localsgd") or {}
        self._begin: int = own.get("begin_step", 1)
        self._k: int = own.get("init_k_steps", own.get("k_steps", 1))
        self._round, self._last, self._first_loss = 0, 0, 0.0
        self._settings, self._anchors = settings, [p.detach().clone() for p in model.parameters()]

    def __call__(self, models: Sequence[nn.Module], losses: Sequence[float]) -> None:
        self._round += 1
        loss = sum(losses) / len(losses)
        self._first_loss = self._first_loss or loss
        if self._round > self._begin and self._round - self._last < self._k:
            return
        self._last = self._round
        self.now(models)
        if self._adaptive and self._round > self._begin:  # the learning rate is constant here
            k = math.ceil(math.sqrt(loss / self._first_loss) * self._adaptive["init_k_steps"])
            self._k = min(max(k, 1), self._adaptive["max_k_steps"])

    @torch.no_grad()
    def now(self, models: Sequence[nn.Module]) -> None:
        for same, anchor in zip(zip(*(m.parameters() for m in models), strict=True), self._anchors, strict=True):
            if "fp16_allreduce" in self._settings and len(models) > 1:
                anchor += _mean_in_half([p - anchor for p in same], len(models), self._settings)
            else:
                anchor.copy_(torch.stack(list(same)).mean(0))
            for p in same:
                p.copy_(anchor)
