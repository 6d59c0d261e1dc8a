"""`dgc`: send only the largest values of the gradient.

exchange.py           reduces one bucket
codec.py              one tensor: gradient to payload, and payload added to a tensor
payload.py            the format of a payload
native.py             the compiled codec (codec.c, decode.c, wire.h)
plain.py, rice.py     the same with torch and numpy
on_device.py          messages of fixed length, for accelerators
selection.py          selects the values to send there, in torch or in Triton (triton_kernels.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import SGD, Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import Context, Outgoing, SetupContext, StepContext
from fleetx.engine.dtensors import local
from fleetx.errors import NOT_BUILT, UsageError
from fleetx.optim.adopt import become
from fleetx.optim.layerwise import sgd_update
from fleetx.parts.dgc import codec, exchange, native
from fleetx.strategy.compose import Plan
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at

MIN_ELEMENTS = 16384  # smaller tensors are not compressed
PASSES = 14  # reads or writes of all gradients, to accumulate, select and add
PLAIN = 3.5  # times as many without the compiled codec


def _corrects(dgc: DGC) -> bool:
    return dgc.momentum_correction is not False


@settings
class DGC(Part):
    """Deep gradient compression: send only the largest values, and accumulate the rest with momentum for later steps.

    On each rank, for each tensor of at least 16384 elements: u <- m * u + g, v <- v + u; send the largest |v| and set
    them to zero in v and u; p <- p - lr * (mean over ranks of what was sent). Lin et al. 2018, arXiv 1712.01887.
    Without momentum_correction: v <- v + g, and the optimizer uses the mean of what was sent as the gradient.
    Neutral: sparsity=[0.0] is SGD with momentum, or any other optimizer without momentum_correction.
    """

    rampup_begin_step: Annotated[int, Field(ge=0)] = 0
    """The round in which compression starts. Until then, gradients are averaged uncompressed."""
    rampup_step: Annotated[int, Field(ge=1)] = 1
    """Number of rounds over which to step through the values of `sparsity`."""
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.999])
    """Fraction of values that are not sent, one entry per step of the ramp-up."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the gradient of each tensor on each rank to clip_norm / sqrt(ranks) before it is accumulated."""
    value_dtype: Literal["float32", "float16"] = "float32"
    """The type of the values on the wire. Rounding errors of float16 stay on the rank for later steps."""
    momentum_correction: bool | None = None
    """Accumulate SGD's momentum on each rank. None: yes, unless `lars`, `lamb`, `muon` or `localsgd` is on."""
    allow_single: bool = False
    """Allow a single rank, for debugging."""

    dense: ClassVar[bool] = True
    neutral: ClassVar[dict[str, Any]] = {"allow_single": True}
    per_rank_state: ClassVar[bool] = True
    own_per_parameter: ClassVar[tuple[str, ...]] = ("u", "v")
    effect: ClassVar[Effect] = less("bytes_sent", "fewer bytes are sent", than=0.8, in_part=0.97)
    example: ClassVar[dict[str, Any]] = {"sparsity": [0.9]}
    lossless: ClassVar[dict[str, Any]] = {"sparsity": [0.0]}
    instead: ClassVar[dict[str, str]] = {
        "clip": "set dgc_configs['clip_norm'] instead of `clip`, or set dgc_configs['momentum_correction'] = False",
        "fp16_allreduce": "set dgc_configs['value_dtype'] = 'float16' instead of `fp16_allreduce`",
    }
    costs: ClassVar[str] = (
        "network: the largest gradients, a share of 1 - sparsity, and their indices; memory: up to four copies "
        "of the parameters, so that an update can be skipped"
    )

    def problems(self) -> Iterator[str]:
        if not self.sparsity:
            yield "sparsity is empty: give at least one value, such as [0.999]"

    def adapted_to(self, parts: Iterable[Part]) -> DGC:
        others = [act for part in parts if part is not self for act in part.acts()]
        elsewhere = any(act.stage is Stage.UPDATE or Fact.LOCAL in act.claim.makes for act in others)
        if self.momentum_correction is None and elsewhere:
            return replace(self, momentum_correction=False)
        return self

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        yield from super().incompatibilities(model, optimizer, world)
        if self.momentum_correction is not False:
            yield from self._momentum_problems(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if missing := [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
            yield f"dgc: {', '.join(missing[:3])} require a gradient but are not in the optimizer: add or freeze them"

    def _momentum_problems(self, optimizer: Optimizer) -> Iterator[str]:
        instead = "or set dgc_configs['momentum_correction'] = False"
        if type(optimizer) is not SGD:
            name = type(optimizer).__name__
            yield f"dgc takes over the momentum of torch.optim.SGD, which {name} does not have: use SGD, {instead}"
            return
        for option in ("nesterov", "dampening", "maximize", "differentiable"):
            if any(group[option] for group in optimizer.param_groups):
                yield f"dgc with SGD's {option} {NOT_BUILT}: remove it, {instead}"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"u": {}, "v": {}}  # by parameter name, for what this rank holds, once it has been compressed

    def keeps(self, params: Iterable[Tensor], plan: Plan) -> int:
        copies = 2 if plan.makes(Fact.LOCAL) else 4  # u and v, and the old ones while an update may be withheld
        return copies * sum(p.nbytes for p in params if _compressed(p))

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield Offer({"sparsity": [0.999], "rampup_step": 1}, "lossy")

    def cost(self, terms: CostTerms) -> None:
        # Values and indices, from every rank to every rank.
        terms.sent *= 2 * (1 - self.sparsity[-1]) * terms.cluster.ranks / 2
        slow = terms.cluster.device == "cpu" and not native.available()
        terms.streamed_per_exchange += PASSES * (PLAIN if slow else 1.0) * terms.gradients
        if self.momentum_correction is not False:
            terms.extra_bytes -= terms.gradients  # u replaces the optimizer's momentum

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL)
    def set_up(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """set up process groups and a thread for messages of unequal length"""
        ctx.network.messages = True
        ctx.notes["thread"] = ctx.network.new_thread("dgc")
        ctx.notes["rounds"] = 0
        ctx.notes["spare"] = {}  # buffers to reuse as `new`
        return model

    @at(
        Stage.WIRE,
        bars={Fact.LOCAL},
        because="each rank's optimizer has already applied its momentum to what is sent then",
        makes={Fact.MOMENTUM, Fact.RESIDUAL},
        when=_corrects,
    )
    def send(self, bucket: Outgoing, ctx: StepContext) -> Future[Tensor]:
        """accumulate momentum and residuals on each rank, send the largest values, and average what was sent"""
        return self._exchange(bucket, ctx)

    @at(Stage.WIRE, makes={Fact.RESIDUAL}, when=lambda self: not _corrects(self))
    def send_without_momentum(self, bucket: Outgoing, ctx: StepContext) -> Future[Tensor]:
        """accumulate what is exchanged on each rank, send the largest values, and average what was sent"""
        return self._exchange(bucket, ctx)

    def _exchange(self, bucket: Outgoing, ctx: StepContext) -> Future[Tensor]:
        if ctx.round < self.rampup_begin_step:
            return bucket.network.mean(bucket.buffer, bucket.index)
        sent = ctx.in_progress.setdefault("sent", {})  # the round in which each parameter was last sent
        if bucket.undoable and any(sent.get(name) == ctx.round for name in bucket.names):
            raise UsageError(
                "dgc: a second backward before optimizer.step() cannot work, because the gradients of the first were "
                "already sent: use strategy.gradient_merge, with a step after each backward"
            )
        sent.update(dict.fromkeys(bucket.names, ctx.round))
        groups = {p: group for group in ctx.optimizer.param_groups for p in group["params"]}
        work = exchange.Exchange(
            tensors=[
                self._tensor(name, g, groups, ctx, undoable=bucket.undoable and ctx.withholds)
                for name, g in zip(bucket.names, bucket.gradients, strict=True)
            ],
            sparsity=self.sparsity_at(ctx.round),
            factor=bucket.factor,
            half=self.value_dtype == "float16",
            norm_limit=self.clip_norm and self.clip_norm / bucket.network.parties**0.5,
        )
        return work.start(bucket, ctx.notes["thread"])

    @at(Stage.UPDATE, needs={Fact.MOMENTUM}, when=_corrects)
    def drop_momentum(self, optimizer: Optimizer, ctx: SetupContext) -> Optimizer:
        """skip SGD's momentum and weight decay where the gradient already includes them"""
        made: Any = become(optimizer, MomentumInGrad)
        made.in_grad = partial(self._in_grad, ctx)
        return made

    @at(Stage.PARAMETER)
    def commit_residuals(self, params: list[Tensor], ctx: StepContext) -> None:
        """keep the new residuals, or restore the old ones if the update was skipped"""
        notes, state = ctx.notes, ctx.state
        new = ctx.in_progress.pop("new", {})
        notes["rounds"] += 1
        if not ctx.updated:
            notes["spare"].update(new)
        else:
            sent = ctx.in_progress.get("sent", ())
            known = _params(ctx)
            unused = [n for n in sent if _compressed(p := known[n]) and p.grad is None and not ctx.per_rank]
            if unused and ctx.round > self.rampup_begin_step:
                raise UsageError(
                    f"dgc sent values of {unused[0]!r}, which no rank used: freeze it before fleet.distribute"
                )
            for name, (u, v) in new.items():
                notes["spare"][name] = state["u"][name], state["v"][name]
                state["u"][name], state["v"][name] = u, v

    def sparsity_at(self, round: int) -> float:
        step = (round - self.rampup_begin_step) * len(self.sparsity) // self.rampup_step
        return self.sparsity[min(step, len(self.sparsity) - 1)]

    def _in_grad(self, ctx: Context, p: Tensor) -> bool:
        return ctx.network.world.size > 1 and ctx.round >= self.rampup_begin_step and _compressed(p)

    def _tensor(
        self, name: str, g: Tensor, groups: Mapping[Tensor, Mapping[str, Any]], ctx: StepContext, *, undoable: bool
    ) -> exchange.LargeTensor | Tensor:
        p, notes = _params(ctx)[name], ctx.notes
        if not _compressed(p) or not g.numel():
            return g
        mine = local(p).detach().to(g.device)  # shards may be offloaded
        for kept in (ctx.state["u"], ctx.state["v"]):
            if name not in kept:
                kept[name] = torch.zeros_like(mine)
            if kept[name].stride() != mine.stride():  # saved by a model in another memory format
                kept[name] = torch.zeros_like(mine).copy_(kept[name])
        u, v = ctx.state["u"][name], ctx.state["v"][name]
        momentum, decay = 0.0, 0.0
        if _corrects(self):
            momentum, decay = groups[p]["momentum"], groups[p]["weight_decay"]
            if (buffer := ctx.optimizer.state.get(p, {}).pop("momentum_buffer", None)) is not None:
                u.copy_(local(buffer))  # from the rounds before compression
        new = None
        if undoable:  # a gradient of another rank or bucket may not be finite, so keep the old u and v
            new = notes["spare"].pop(name, None) or (torch.empty_like(u), torch.empty_like(v))
            ctx.in_progress.setdefault("new", {})[name] = new  # until the update is known to be applied
        return exchange.LargeTensor(g, mine, u, v, new, momentum, decay)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is None:
            return
        if ctx.network.world.size == 1:
            yield "no effect here: there is one replica of the model, so nothing is sent"
        elif not any(map(_compressed, ctx.names)):
            yield f"no effect here: no float32 parameter has {MIN_ELEMENTS} elements, so nothing is compressed"
        else:
            yield codec.kernels_remark(ctx.replica_group.device)
        if ctx.notes["rounds"] and ctx.network.world.size > 1:
            sent = ctx.network.traffic.sent / ctx.notes["rounds"]
            dense = sum(local(p).nbytes for p in ctx.names if p.requires_grad)
            other = [n for p, n in ctx.names.items() if p.numel() >= MIN_ELEMENTS and p.dtype is not torch.float32]
            if other:
                yield f"{len(other)} large parameters are not float32, so they are not compressed ({other[0]} ...)"
            yield f"this rank sends {sent / 1e6:.3g} MB per round; the full gradients are {dense / 1e6:.3g} MB"


def _params(ctx: StepContext) -> dict[str, Tensor]:
    """The parameters by name, looked up once, after the model was set up."""
    found: dict[str, Tensor] = ctx.notes.get("params") or {name: p for p, name in ctx.names.items()}
    ctx.notes["params"] = found
    return found


def _compressed(p: Tensor) -> bool:
    """Is this parameter compressed? Its full size counts, even if this rank holds only a shard."""
    return p.requires_grad and p.numel() >= MIN_ELEMENTS and p.dtype is torch.float32


class MomentumInGrad(SGD):
    """SGD, except that p <- p - lr * g where `in_grad(p)`: the gradient already includes momentum and weight decay."""

    in_grad: Callable[[Tensor], bool] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            split: dict[bool, list[Tensor]] = {False: [], True: []}
            for p in group["params"]:
                if p.grad is not None:
                    split[self.in_grad is not None and self.in_grad(p)].append(p)
            if split[False]:
                sgd_update(self, group, split[False], group["momentum"], group["weight_decay"])
            if split[True]:
                sgd_update(self, group, split[True], 0.0, 0.0)
        return loss
