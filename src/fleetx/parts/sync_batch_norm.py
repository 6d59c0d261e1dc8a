from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import named_modules
from fleetx.base.seams import BatchNormBase, is_fake
from fleetx.base.wrapping import Layer, wrap
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.errors import NOT_BUILT
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class SyncBatchNorm(Part):
    """Compute BatchNorm statistics over the batches of all ranks, weighted by batch size.

    Neutral: one rank. Equals BatchNorm on the concatenated batch. Unlike torch.nn.SyncBatchNorm, it also runs on the
    CPU, and modules keep their type.
    """

    neutral: ClassVar[dict[str, str]] = {}
    effect: ClassVar[Effect] = more("bytes_sent", "statistics are sent", by=6000)
    costs: ClassVar[str] = "network: two small collectives per BatchNorm, one in forward and one in backward"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        for name, module in _norms(model):
            if type(module).forward is not BatchNormBase.forward:
                yield (
                    f"sync_batch_norm with {name!r} {NOT_BUILT}: {type(module).__name__} has its own forward. Use a "
                    "BatchNorm of torch.nn there, or turn sync_batch_norm off"
                )

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and not any(_norms(ctx.model)):
            yield "no effect here: the model has no BatchNorm"

    @at(Stage.MODEL, makes={Fact.TOGETHER})
    def synchronize(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """make every BatchNorm use the batches of all ranks"""
        if ctx.replica_group.size > 1:
            for _, module in _norms(model):
                wrap(module, Layer.MATHEMATICS, functools.partial(_synchronized, ctx.replica_group))
        return model


def _norms(model: nn.Module) -> Iterator[tuple[str, BatchNormBase]]:
    return ((name, module) for name, module in named_modules(model) if isinstance(module, BatchNormBase))


def _synchronized(world: World, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    assert isinstance(module, BatchNormBase)
    if not module.training:  # evaluation never communicates, even without running statistics
        return inner(*args, **kwargs)
    (x,) = args or kwargs.values()
    seams.check_input_dim(module, x)
    y, mean, var, count = _Normalize.apply(x, module.weight, module.bias, module.eps, world)
    if module.track_running_stats:
        _track(module, mean, var, count)
    return y


@torch.no_grad()
def _track(module: BatchNormBase, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update the running statistics like BatchNorm, with the unbiased variance."""
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None
    assert module.running_var is not None
    module.num_batches_tracked.add_(1)
    factor = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    unbiased = var * count / (count - 1).clamp(min=1)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, world: World) -> Any:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        n = wide.numel() / wide.shape[1]
        var, mean = torch.var_mean(wide, dims, correction=0) if n else wide.new_zeros(2, wide.shape[1])
        # One gather of (mean, var, n) and Chan's rule: sums of squares would cancel if the mean is large.
        means, vars_, counts = _gather(mean, var, n, world)
        total = counts.sum()
        if n <= 1 and not is_fake(total) and total.item() <= 1:  # a pipeline traces on fake tensors
            raise ValueError(
                "sync_batch_norm needs more than one value per channel over all ranks in training: use a larger batch"
            )
        mean = (means * counts).sum(0) / total
        var = ((vars_ + (means - mean).square()) * counts).sum(0) / total
        scale = torch.rsqrt(var + eps)
        y = (wide - _per_channel(mean, x)).mul_(_per_channel(scale, x))
        if weight is not None:
            y.mul_(_per_channel(weight, x))
        if bias is not None:
            y.add_(_per_channel(bias, x))
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.world = world
        ctx.mark_non_differentiable(mean, var, total)
        return y.to(x.dtype), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        dy = grad.to(mean.dtype)
        hat = (x.to(mean.dtype) - _per_channel(mean, x)).mul_(_per_channel(scale, x))
        own = torch.stack([dy.sum(dims), (dy * hat).sum(dims)])
        # Each rank's own weight goes into the sums: under local updates the ranks' weights differ.
        summed = own.clone() if weight is None else own * weight
        ctx.world.sum(summed)
        bias_mean, hat_mean = summed / total
        weighted = dy if weight is None else dy * _per_channel(weight, x)
        dx = (weighted - _per_channel(bias_mean, x) - hat * _per_channel(hat_mean, x)).mul_(_per_channel(scale, x))
        needs = ctx.needs_input_grad
        return dx.to(x.dtype), own[1] if needs[1] else None, own[0] if needs[2] else None, None, None


def _gather(mean: Tensor, var: Tensor, count: float, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances of shape (ranks, channels), counts of shape (ranks, 1)."""
    gathered = world.gather(torch.cat([mean, var, mean.new_full((1,), count)]))
    channels = mean.numel()
    return gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]


def _per_channel(channel: Tensor, x: Tensor) -> Tensor:
    """Reshape a per-channel vector to broadcast over x."""
    return channel.view(1, -1, *(1,) * (x.dim() - 2))
