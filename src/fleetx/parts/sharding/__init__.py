from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fleetx.base.module_names import named_modules
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.parts.sharding import fsdp
from fleetx.parts.sharding.gather import Undivided
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.part import Names, Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class Sharding(Part):
    """Keep only a part of the parameters, gradients and optimizer state on each rank: torch's FSDP2 (`fully_shard`).

    Between steps a rank holds 1 / sharding_degree of each tensor. A segment of the model is gathered before its forward
    and its backward; its gradients are reduced to the ranks that hold them. Equal to data parallelism, to rounding.
    Reference: Rajbhandari et al. 2020, arXiv 1910.02054. Neutral: one rank.
    """

    sharding_degree: Annotated[int, Field(ge=1)] = 8
    """Ranks over which the model is divided."""
    stage: Literal[1, 2, 3] = 1
    """1, 2: a segment stays gathered between forward and backward; 3: it is let go and gathered again."""
    offload: bool = False
    """Keep what is divided in host memory, and bring a segment to the device while it is gathered."""
    hybrid_dp: bool = False
    """Data parallelism between groups of `sharding_degree` ranks."""
    sharding_group_size: Annotated[int, Field(ge=1)] = 8
    """The earlier name of `sharding_degree`."""
    sharding_segment_strategy: Literal["segment_broadcast_MB", "segment_anchors"] = "segment_broadcast_MB"
    """How segments are found: by their size, or by name."""
    segment_broadcast_MB: Annotated[float, Field(gt=0)] = 32.0  # noqa: N815  Paddle's name
    """Modules of at most this size are gathered whole."""
    fuse_broadcast_MB: Annotated[float, Field(gt=0)] = 32.0  # noqa: N815  Paddle's name
    """The earlier name of `segment_broadcast_MB`."""
    segment_anchors: Names = Field(default_factory=list)
    """Names of the modules that are gathered as one, with segment_anchors; patterns, level by level."""
    mp_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of tensor parallelism."""
    dp_degree: Annotated[int, Field(ge=1)] = 1
    """Replicas of the divided model: with hybrid_dp, ranks / sharding_degree. 1: not said."""
    pp_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of pipeline parallelism."""
    gradient_merge_acc_step: Annotated[int, Field(ge=1)] = 1
    """Merged steps."""
    optimize_offload: bool = False
    """Keep the optimizer state alone in host memory."""
    pp_allreduce_in_optimize: bool = False
    """In Paddle: when the pipeline inside of sharding reduces."""

    no_meaning: ClassVar[dict[str, str]] = {"pp_allreduce_in_optimize": "there is no pipeline inside of sharding"}
    divides: ClassVar[bool] = True
    done_by_torch: ClassVar[dict[Stage, str]] = {
        Stage.REDUCE: "FSDP reduces each segment's gradients to the ranks that hold them, while backward runs"
    }
    neutral: ClassVar[dict[str, int]] = {"sharding_degree": 1}
    costs: ClassVar[str] = (
        "network: one and a half times the traffic of data parallelism; memory: 1 / sharding_degree of the "
        "parameters, gradients and optimizer state, and the segments that are gathered"
    )

    # --- what cannot be ---------------------------------------------------------------------------
    def problems(self) -> Iterator[str]:
        for new, old in (("sharding_degree", "sharding_group_size"), ("segment_broadcast_MB", "fuse_broadcast_MB")):
            before, now, default = getattr(self, old), getattr(self, new), getattr(type(self)(), new)
            if default not in (before, now) and before != now:
                yield f"{new} = {now} and {old} = {before} mean the same: keep one"
        if self.mp_degree != 1:
            yield f"mp_degree = {self.mp_degree}: there is no tensor parallelism here"
        if self.pp_degree != 1:
            yield f"pp_degree = {self.pp_degree}: use strategy.pipeline, without sharding"
        if self.gradient_merge_acc_step != 1:
            yield f"gradient_merge_acc_step = {self.gradient_merge_acc_step}: use strategy.gradient_merge"
        if self.optimize_offload:
            yield "optimize_offload: FSDP2 moves parameters, gradients and optimizer state together: use offload"
        if self.segment_anchors and self.sharding_segment_strategy != "segment_anchors":
            yield "segment_anchors has no effect without sharding_segment_strategy='segment_anchors'"
        if self.sharding_segment_strategy == "segment_anchors" and not self.segment_anchors:
            yield "sharding_segment_strategy='segment_anchors' needs names in segment_anchors"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        degree = self._degree
        good = [n for n in range(1, world.size + 1) if world.size % n == 0]
        if degree > world.size or world.size % degree:
            near = sorted(sorted(good, key=lambda n: abs(n - degree))[:2])
            yield (
                f"sharding_degree = {degree} does not divide {world.size} rank{'s' if world.size > 1 else ''}: use "
                f"{' or '.join(map(str, near))}"
            )
        elif degree < world.size and not self.hybrid_dp:
            yield (
                f"sharding_degree = {degree} leaves {world.size // degree} groups of ranks: set hybrid_dp=True for "
                f"data parallelism between them, or sharding_degree={world.size}"
            )
        elif degree == world.size > 1 and self.hybrid_dp:
            yield f"hybrid_dp needs several groups, and sharding_degree = {degree} takes all ranks: choose one"
        elif self.dp_degree not in (1, world.size // degree):
            yield f"dp_degree = {self.dp_degree}: {world.size} ranks by {degree} are {world.size // degree} replicas"
        if optimizer.state:
            yield "sharding needs an optimizer that has not stepped yet: use fleet.save, and fleet.load after this"
        if isinstance(model, DistributedDataParallel):
            yield "sharding takes the model itself"
        yield from fsdp.incompatibilities(model, self.segment_anchors)
        for name, module in named_modules(model):
            if any(p.is_complex() for p in module.parameters(recurse=False)):
                yield f"sharding cannot divide the complex parameters of {name!r}"

    @property
    def _degree(self) -> int:
        found: int = self._said("sharding_degree", "sharding_group_size")
        return found

    def _said(self, new: str, old: str) -> Any:
        """One of two names of a setting: that which is not at its default."""
        value = getattr(self, new)
        return getattr(self, old) if value == getattr(type(self)(), new) else value

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield from (Offer({"sharding_degree": cluster.ranks, "stage": stage}) for stage in (2, 3))
        if 1 < cluster.ranks_per_host < cluster.ranks:
            yield Offer({"sharding_degree": cluster.ranks_per_host, "stage": 2, "hybrid_dp": True})

    @property
    def _segment(self) -> int:
        return int(self._said("segment_broadcast_MB", "fuse_broadcast_MB") * 2**20)

    def cost(self, terms: CostTerms) -> None:
        terms.shards, terms.gathers, terms.segment = self._degree, 2 if self.stage == 3 else 1, self._segment
        terms.streamed_per_step += (
            3 * terms.gathers * terms.parameters + 4 * terms.gradients
        )  # copied out of, and into, what travels

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL, makes={Fact.PARTED})
    def divide(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """divide parameters, gradients and optimizer state between the ranks"""
        if ctx.world.size > 1:
            names = fsdp.segments(model, self.segment_anchors, self._segment)
            ctx.notes["segments"] = names
            whole = Undivided(model)
            group = fsdp.divide(
                model, names, ctx.world, self._degree,
                again=self.stage == 3, offload=self.offload and ctx.world.device.type != "cpu",
            )  # fmt: skip
            ctx.divide(group, reduced=True)
            ctx.on_release(lambda: whole.restore(ctx.optimizer))
        return model

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if self.stage == 1:
            yield "stage 1 is run as stage 2, which FSDP2 has: gradients are divided too"
        if self.offload and (ctx is None or ctx.device.type == "cpu"):
            yield "offload: on the CPU everything is in host memory already"
        if ctx is not None and (names := ctx.notes.get("segments")) is not None:
            yield (
                f"{len(names) + 1} segments: the model itself"
                + (f", {', '.join(names[:4])}" if names else "")
                + (" ..." if len(names) > 4 else "")
            )
