"""The strategies and their peers. Each takes a model and an optimizer, and returns a training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from fleetx import fleet

H = 8  # local steps of LocalSGD
SPARSITY = 0.999
WALK = [0.75, 0.9375, 0.984375, 0.996, 0.999]  # DGC's ramp-up, as in its paper
ONE_BUCKET_MB = 10_000.0  # torch's PowerSGD aborts on gloo with more than one bucket


@dataclass(frozen=True)
class Loop:
    model: nn.Module
    optimizer: Any  # torch's PostLocalSGDOptimizer is not quite an Optimizer
    backward: Callable[[Tensor], None]
    end: Callable[[], object] = lambda: None  # what follows the last step

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> Tensor:
        loss = loss_of(self.model)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


Prepare = Callable[[nn.Module, SGD], Loop]


@dataclass(frozen=True)
class Method:
    name: str
    title: str
    prepare: Prepare
    period: int = 1  # steps between two communications
    background: bool = False  # does it communicate during the next period?
    few: bool = False  # does it send so little that a step is short on any link?

    @property
    def ours(self) -> bool:
        return self.name not in ("alone", "ddp", "fp16_hook", "power1", "power4", "post_local")


def ours(**switches: Any) -> Prepare:
    def prepare(model: nn.Module, optimizer: SGD) -> Loop:
        made, stepped = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**switches))
        return Loop(
            made,
            stepped,
            lambda loss: fleet.backward(loss, optimizer=stepped),
            end=lambda: fleet.flush(optimizer=stepped),
        )

    return prepare


def alone(model: nn.Module, optimizer: SGD) -> Loop:
    return Loop(model, optimizer, Tensor.backward)


def ddp(hook: Callable[[], tuple[Any, Any]] | None = None, *, bucket_cap_mb: float | None = None) -> Prepare:
    def prepare(model: nn.Module, optimizer: SGD) -> Loop:
        made = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
        if hook is not None:
            made.register_comm_hook(*hook())
        return Loop(made, optimizer, Tensor.backward)

    return prepare


def power(rank: int) -> Prepare:
    def hook() -> tuple[Any, Any]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook

    return ddp(hook, bucket_cap_mb=ONE_BUCKET_MB)


def post_local(period: int, island: Callable[[], dist.ProcessGroup] | None = None) -> Prepare:
    """torch's LocalSGD, set up as in its documentation. With an island, gradients are averaged within it."""

    def hook() -> tuple[Any, Any]:
        within = island and island()
        state = post_localSGD_hook.PostLocalSGDState(None, within, 1, post_local_gradient_allreduce=within is not None)
        return state, post_localSGD_hook.post_localSGD_hook

    def prepare(model: nn.Module, optimizer: SGD) -> Loop:
        from torch.distributed.optim import PostLocalSGDOptimizer  # importing it warns

        averager = PeriodicModelAverager(period=period, warmup_steps=0)
        return Loop(ddp(hook)(model, optimizer).model, PostLocalSGDOptimizer(optimizer, averager), Tensor.backward)

    return prepare


def fp16_hook() -> tuple[Any, Any]:
    return dist.group.WORLD, default_hooks.fp16_compress_hook


def dgc(dtype: str, **settings: Any) -> Prepare:
    return ours(dgc={"sparsity": [SPARSITY], "value_dtype": dtype, **settings})


STEPS = [
    Method("alone", "no communication", alone, few=True),
    Method("ddp", "DDP, fp32", ddp()),
    Method("fp16_hook", "DDP, torch's fp16 hook", ddp(fp16_hook)),
    Method("power1", "DDP, torch's PowerSGD, rank 1", power(1), few=True),
    Method("power4", "DDP, torch's PowerSGD, rank 4", power(4), few=True),
    Method("post_local", f"torch's PostLocalSGD, H={H}", post_local(H), period=H),
    Method("dense", "no strategy", ours()),
    Method("fp16", "fp16_allreduce", ours(fp16_allreduce=True)),
    Method("quantized8", "quantized_allreduce, 8 bits", ours(quantized_allreduce=True)),
    Method("quantized4", "quantized_allreduce, 4 bits", ours(quantized_allreduce={"bits": 4})),
    Method("dgc32", f"dgc {SPARSITY}, values in fp32", dgc("float32"), few=True),
    Method("dgc16", f"dgc {SPARSITY}, values in fp16", dgc("float16"), few=True),
    Method("local", f"localsgd k={H}", ours(localsgd={"k_steps": H}), period=H),
    Method("overlap", f"localsgd k={H}, overlap", ours(localsgd={"k_steps": H, "overlap": True}), period=H,
        background=True),
    Method("adaptive", f"adaptive_localsgd, period {H}", ours(adaptive_localsgd={"init_k_steps": H}), period=H),
    Method("hierarchical", "use_hierarchical_allreduce", ours(use_hierarchical_allreduce=True)),
]  # fmt: skip


def sgd(model: nn.Module, rate: float) -> SGD:
    return SGD(model.parameters(), lr=rate, momentum=0.9)


def mean_over_ranks(values: list[Tensor]) -> list[Tensor]:
    for value in values:
        dist.all_reduce(value.div_(dist.get_world_size()))
    return values


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
