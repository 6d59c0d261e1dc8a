from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import SGD, Optimizer

from fleetx.base.module_names import sparse_modules
from fleetx.comm.world import World
from fleetx.engine.context import Bucket, Context, SetupContext, StepContext
from fleetx.errors import UsageError
from fleetx.optim.layerwise import become
from fleetx.parts.dgc import exchange, native
from fleetx.parts.dgc.optimizer import CarriedMomentum
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at

SMALLEST = 16384  # elements; smaller tensors travel whole
PASSES = 14  # over the gradients, to gather, to choose and to add up, as one that reads or writes them
PLAIN = 3.5  # times as many where the compiled codec is missing


@settings
class DGC(Part):
    """Deep gradient compression: send only the largest values, keep the rest with momentum for later steps.

    On each rank, for each tensor of at least 16384 elements: u <- m * u + g, v <- v + u; the largest |v| are sent, and
    set to zero in v and u; p <- p - lr * (mean over ranks of what was sent). Lin et al. 2018, arXiv 1712.01887.
    Neutral: sparsity=[0.0] is SGD with momentum.
    """

    rampup_begin_step: Annotated[int, Field(ge=0)] = 0
    """The round at which compression begins; before it gradients are averaged whole, and the optimizer has momentum."""
    rampup_step: Annotated[int, Field(ge=1)] = 1
    """Rounds over which `sparsity` is walked through."""
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.999])
    """The share of values that is not sent, in order of time."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Shorten the gradient of each tensor on each rank to clip_norm / sqrt(ranks) before it is gathered."""
    value_dtype: Literal["float32", "float16"] = "float32"
    """What values travel in. What float16 rounds off stays on the rank for later."""
    allow_single: bool = False
    """Do not mind that there is one rank only, for debugging."""

    neutral: ClassVar[dict[str, Any]] = {"allow_single": True}
    per_rank_state: ClassVar[bool] = True
    costs: ClassVar[str] = (
        "network: 1 - sparsity of the gradients and their places; memory: two copies of the parameters, four in fp16"
    )

    def problems(self) -> Iterator[str]:
        if not self.sparsity:
            yield "sparsity is empty: give at least one share, such as [0.999]"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if world.size == 1 and not self.allow_single:
            yield (
                "dgc: there is one worker, so there is nothing to communicate: start more with fleetrun, or set "
                "strategy.dgc_configs['allow_single'] = True for debugging"
            )
        if type(optimizer) is not SGD:
            yield f"dgc carries the momentum of torch.optim.SGD, not the state of {type(optimizer).__name__}: pass SGD"
            return
        for option in ("nesterov", "dampening", "maximize", "differentiable"):
            if any(group[option] for group in optimizer.param_groups):
                yield f"dgc has no {option}: leave it out of SGD"
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if loose := [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
            yield f"dgc: {', '.join(loose[:3])} need a gradient and are in no group of the optimizer: freeze them"
        if sparse := sparse_modules(model):
            yield f"dgc cannot take sparse gradients, which {sparse} makes: use sparse=False there"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        large = {name: p for name, p in params.items() if _compressed(p)}
        return {part: {name: torch.zeros_like(p) for name, p in large.items()} for part in ("u", "v")}

    def keeps(self, params: Iterable[Tensor], *, scaled: bool) -> int:
        return (4 if scaled else 2) * sum(p.nbytes for p in params if _compressed(p))

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield Offer({"sparsity": [0.999], "rampup_step": 1}, "lossy")

    def cost(self, terms: CostTerms) -> None:
        terms.sent *= (
            2 * (1 - self.sparsity[-1]) * terms.cluster.ranks / 2
        )  # values and places, of every rank to every one
        slow = terms.cluster.device == "cpu" and not native.available()
        terms.streamed += PASSES * (PLAIN if slow else 1.0) * terms.gradients
        terms.extra_bytes -= terms.gradients  # what the optimizer gathers is gathered here instead

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL)
    def prepare(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """open a way for messages of unequal length"""
        ctx.network.messages = True
        ctx.notes["line"] = ctx.network.new_thread("dgc")
        ctx.notes["params"] = {name: p for p, name in ctx.names.items()}
        return model

    @at(Stage.REDUCE, makes={Fact.MOMENTUM})
    def send(self, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
        """gather momentum and residual on each rank, send the largest values, add up what comes"""
        if ctx.round < self.rampup_begin_step:
            return ctx.network.mean(bucket.buffer, bucket.index)
        self._note_sent(bucket, ctx)
        work = exchange.Exchange(
            tensors=[self._tensor(name, g, ctx) for name, g in zip(bucket.names, bucket.gradients, strict=True)],
            sparsity=self.share(ctx.round),
            factor=ctx.factor,
            half=self.value_dtype == "float16",
            limit=self.clip_norm and self.clip_norm / ctx.replica_group.size**0.5,
        )
        return ctx.notes["line"].ask(lambda: work.run(bucket, ctx.network))

    @at(Stage.UPDATE, needs={Fact.MOMENTUM})
    def carry(self, optimizer: Optimizer, ctx: SetupContext) -> Optimizer:
        """take momentum and decay from the optimizer where the gradient carries them"""
        made: Any = become(optimizer, CarriedMomentum)
        made.carries = partial(self._carries, ctx)
        return made

    @at(Stage.PARAMETER, needs={Fact.MOMENTUM})
    def settle_residuals(self, params: list[Tensor], ctx: StepContext) -> None:
        """keep the new residuals, or the old ones where the update was skipped"""
        new = ctx.notes.pop("new", {})
        ctx.notes["rounds"] = ctx.notes.get("rounds", 0) + 1
        named = ctx.notes["params"]
        sent = [name for name in ctx.notes.get("under_way", ()) if _compressed(named[name])]
        lost = [name for name in sent if named[name].grad is None]
        if lost and ctx.updated and ctx.round > self.rampup_begin_step:
            raise UsageError(f"dgc has sent values of {lost[0]!r}, which no rank had used: freeze it before distribute")
        if ctx.updated:
            for name, (u, v) in new.items():
                ctx.notes.setdefault("spare", {})[name] = ctx.state["u"][name], ctx.state["v"][name]
                ctx.state["u"][name], ctx.state["v"][name] = u, v
        else:
            ctx.notes.setdefault("spare", {}).update(new)

    def _note_sent(self, bucket: Bucket, ctx: StepContext) -> None:
        """What was sent carries momentum and has left the residuals: no other gradient can be added to it."""
        sent = ctx.notes.setdefault("under_way", {})
        if any(sent.get(name) == ctx.round for name in bucket.names):
            raise UsageError(
                "under dgc a second backward came before optimizer.step(), and the first one has been sent already: "
                "merge backwards with strategy.gradient_merge, and take a step after each"
            )
        sent.update(dict.fromkeys(bucket.names, ctx.round))

    # --- numbers ----------------------------------------------------------------------------------
    def share(self, round: int) -> float:
        """The sparsity of this round."""
        stage = (round - self.rampup_begin_step) * len(self.sparsity) // self.rampup_step
        return self.sparsity[min(stage, len(self.sparsity) - 1)]

    def _carries(self, ctx: Context, p: Tensor) -> bool:
        return ctx.replica_group.size > 1 and ctx.round >= self.rampup_begin_step and _compressed(p)

    def _tensor(self, name: str, g: Tensor, ctx: StepContext) -> exchange.Carried | Tensor:
        p = ctx.notes["params"][name]
        if not _compressed(p):
            return g
        for kept in (ctx.state["u"], ctx.state["v"]):
            if kept[name].stride() != p.stride():  # saved by a model in another memory format
                kept[name] = torch.zeros_like(p).copy_(kept[name])
        u, v = ctx.state["u"][name], ctx.state["v"][name]
        state = ctx.optimizer.state.get(p, {})
        if (velocity := state.pop("momentum_buffer", None)) is not None:
            u.copy_(velocity)  # of the rounds before compression
        group = self._groups(ctx)[p]
        new = None
        if ctx.scaled:  # an overflow may be found later, on another rank: the old ones are kept until then
            new = ctx.notes.setdefault("spare", {}).pop(name, None) or (torch.empty_like(u), torch.empty_like(v))
            ctx.notes.setdefault("new", {})[name] = new
        return exchange.Carried(g, p, u, v, new, group["momentum"], group["weight_decay"])

    def _groups(self, ctx: Context) -> dict[Tensor, dict[str, Any]]:
        """The group of each parameter, found anew when groups were added."""
        groups = ctx.optimizer.param_groups
        known = ctx.notes.get("groups")
        if known is None or known[0] != len(groups) or known[1] is not groups[0]:
            known = len(groups), groups[0], {p: group for group in groups for p in group["params"]}
            ctx.notes["groups"] = known
        return known[2]

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and ctx.notes.get("rounds") and ctx.replica_group.size > 1:
            sent = ctx.network.traffic.sent / ctx.notes["rounds"]
            dense = sum(p.numel() * p.element_size() for p in ctx.names if p.requires_grad)
            if whole := [n for p, n in ctx.names.items() if p.numel() >= SMALLEST and p.dtype is not torch.float32]:
                yield f"{len(whole)} large parameters are not in float32 and travel whole ({whole[0]} ...)"
            yield f"{sent / 1e6:.3g} MB sent in a round by this rank; whole gradients are {dense / 1e6:.3g} MB"


def _compressed(p: Tensor) -> bool:
    return p.requires_grad and p.numel() >= SMALLEST and p.dtype is torch.float32
