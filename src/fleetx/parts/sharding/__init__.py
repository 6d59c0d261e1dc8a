from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.errors import NOT_BUILT
from fleetx.parts._blocks import row_bytes
from fleetx.parts.sharding import fsdp
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at

PASSES = 22  # reads or writes of all gradients, to encode and decode them


@settings
class Sharding(Part):
    """Shard parameters, gradients and optimizer state across ranks with torch's FSDP2 (`fully_shard`).

    Between steps each rank holds 1 / sharding_degree of every tensor. A segment of the model is gathered before its
    forward and backward, and its gradients are reduce-scattered. Equals data parallelism up to rounding.
    Reference: Rajbhandari et al. 2020, arXiv 1910.02054. Neutral: one rank.
    """

    sharding_degree: Annotated[int, Field(ge=1)] | None = None
    """Number of ranks that the model is sharded across; None: all."""
    stage: Literal[1, 2, 3] = 1
    """1, 2: a segment stays gathered between forward and backward; 3: it is freed and gathered again."""
    offload: bool = False
    """Keep the shards in host memory; a segment is on the device only while it is gathered."""
    hybrid_dp: bool = False
    """Use data parallelism between groups of `sharding_degree` ranks."""
    sharding_group_size: Annotated[int, Field(ge=1)] | None = None
    """Old name of `sharding_degree`."""
    sharding_segment_strategy: Literal["segment_broadcast_MB", "segment_anchors"] = "segment_broadcast_MB"
    """Choose segments by size or by name."""
    segment_broadcast_MB: Annotated[float, Field(gt=0)] | None = None  # noqa: N815  Paddle's name
    """Maximum size of a module that is gathered as one segment; None: 32."""
    fuse_broadcast_MB: Annotated[float, Field(gt=0)] | None = None  # noqa: N815  Paddle's name
    """Old name of `segment_broadcast_MB`."""
    segment_anchors: NameList = Field(default_factory=list)
    """Names of the modules that are segments, if they are chosen by name. `*` matches within one level."""
    gradient_bits: Literal[4, 8, 16, 32] = 32
    """Bits per value in the reduce-scatter of gradients. 32: unchanged; fewer: in blocks, rounded at random."""
    gradient_block: Annotated[int, Field(ge=2, multiple_of=2)] = 256
    """Number of values in a block, which share a 32-bit scale."""
    mp_degree: Annotated[int, Field(ge=1)] = 1
    """Degree of tensor parallelism. Only 1 is supported."""
    dp_degree: Annotated[int, Field(ge=1)] = 1
    """Number of replicas, which is ranks / sharding_degree with hybrid_dp. 1: not specified."""
    pp_degree: Annotated[int, Field(ge=1)] = 1
    """Degree of pipeline parallelism. Only 1 is supported."""
    gradient_merge_acc_step: Annotated[int, Field(ge=1)] = 1
    """Number of merged steps. Only 1 is supported."""
    optimize_offload: bool = False
    """Keep only the optimizer state in host memory. Not supported."""
    pp_allreduce_in_optimize: bool = False
    """In Paddle: when a pipeline inside sharding reduces."""

    no_meaning: ClassVar[dict[str, str]] = {"pp_allreduce_in_optimize": "sharding has no pipeline inside"}
    divides: ClassVar[bool] = True
    done_by_torch: ClassVar[dict[Stage, str]] = {
        Stage.REDUCE: "FSDP reduce-scatters the gradients of each segment during backward"
    }
    for_replicas: ClassVar[str] = "set a smaller sharding_degree, and hybrid_dp=True"
    instead: ClassVar[dict[str, str]] = {
        "fp16_allreduce": "set sharding_configs['gradient_bits'] = 16 instead of `fp16_allreduce`",
        "quantized_allreduce": "set sharding_configs['gradient_bits'] = 8 instead of `quantized_allreduce`",
    }
    neutral: ClassVar[dict[str, int]] = {"sharding_degree": 1}
    effect: ClassVar[Effect] = less("bytes_held", "a rank holds fewer parameters", than=0.9)
    example: ClassVar[dict[str, Any]] = {"sharding_degree": 2, "hybrid_dp": True}
    costs: ClassVar[str] = (
        "network: 1.5 times the traffic of data parallelism; memory: 1 / sharding_degree of the parameters, "
        "gradients and optimizer state, plus the gathered segments"
    )

    # --- checks -----------------------------------------------------------------------------------
    def problems(self) -> Iterator[str]:
        for new, old in (("sharding_degree", "sharding_group_size"), ("segment_broadcast_MB", "fuse_broadcast_MB")):
            a, b = getattr(self, new), getattr(self, old)
            if None not in (a, b) and a != b:
                yield f"{new} = {a} and {old} = {b} are the same setting: remove one"
        if self.gradient_bits == 32 and self.gradient_block != type(self)().gradient_block:
            yield "gradient_block has no effect with gradient_bits=32: set fewer bits, or remove it"
        if self.mp_degree != 1:
            yield f"mp_degree = {self.mp_degree}: tensor parallelism {NOT_BUILT}: leave it at 1"
        if self.pp_degree != 1:
            yield f"pp_degree = {self.pp_degree}: a pipeline inside sharding {NOT_BUILT}: use strategy.pipeline alone"
        if self.gradient_merge_acc_step != 1:
            steps = self.gradient_merge_acc_step
            yield f"gradient_merge_acc_step = {steps}: sharding itself merges no steps: use strategy.gradient_merge"
        if self.optimize_offload:
            yield "optimize_offload: FSDP2 offloads parameters, gradients and optimizer state together: set offload"
        if self.segment_anchors and self.sharding_segment_strategy != "segment_anchors":
            yield "segment_anchors has no effect without sharding_segment_strategy='segment_anchors': set both"
        if self.sharding_segment_strategy == "segment_anchors" and not self.segment_anchors:
            yield "sharding_segment_strategy='segment_anchors' needs module names: list them in segment_anchors"
        if self.sharding_segment_strategy == "segment_anchors" and (
            self.segment_broadcast_MB or self.fuse_broadcast_MB
        ):
            size = "segment_broadcast_MB" if self.segment_broadcast_MB else "fuse_broadcast_MB"
            yield f"segment_anchors choose segments by name, so a size has no effect: remove {size}"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        degree = self._degree(world.size)
        if world.size % degree:
            divisors = [n for n in range(1, world.size + 1) if world.size % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - degree))[:2])
            yield (
                f"sharding_degree = {degree} does not divide {world.size} rank{'s' if world.size > 1 else ''}: use "
                f"{' or '.join(map(str, near))}"
            )
        elif degree < world.size and not self.hybrid_dp:
            yield (
                f"sharding_degree = {degree} makes {world.size // degree} groups of ranks: set hybrid_dp=True for "
                f"data parallelism between them, or sharding_degree={world.size}"
            )
        elif degree == world.size > 1 and self.hybrid_dp:
            yield f"hybrid_dp needs several groups, but sharding_degree = {degree} takes all ranks: change one of them"
        elif self.dp_degree not in (1, world.size // degree):
            yield (
                f"dp_degree = {self.dp_degree}: must be {world.size // degree}, the number of ranks divided by "
                f"sharding_degree ({world.size} / {degree}): remove it"
            )
        if world.size > 1:
            yield from fsdp.incompatibilities(model, optimizer, self.segment_anchors)

    def shards(self, world: World) -> int:
        return self._degree(world.size)

    def _degree(self, ranks: int) -> int:
        return self.sharding_degree or self.sharding_group_size or ranks

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield from (Offer({"sharding_degree": cluster.ranks, "stage": stage}) for stage in (2, 3))
            yield Offer({"sharding_degree": cluster.ranks, "stage": 2, "gradient_bits": 8}, "lossy")
        if 1 < cluster.ranks_per_host < cluster.ranks:
            yield Offer({"sharding_degree": cluster.ranks_per_host, "stage": 2, "hybrid_dp": True})

    @property
    def _segment(self) -> int:
        return int((self.segment_broadcast_MB or self.fuse_broadcast_MB or 32.0) * 2**20)

    def cost(self, terms: CostTerms) -> None:
        ranks = self._degree(terms.cluster.ranks)
        terms.shards, terms.gathers, terms.segment = ranks, 2 if self.stage == 3 else 1, self._segment
        if self.gradient_bits < 32:
            terms.scattered = row_bytes(self.gradient_block, self.gradient_bits) / self.gradient_block / 4
            terms.streamed_per_step += PASSES * terms.gradients
        # Copies out of and into communication buffers.
        terms.streamed_per_step += 3 * terms.gathers * terms.parameters + 4 * terms.gradients

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL, makes={Fact.PARTED})
    def shard(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """shard parameters, gradients and optimizer state across the ranks"""
        if ctx.world.size > 1:
            # Ranks that use different modules would gather different segments.
            names = [] if ctx.finds_unused else fsdp.segments(model, self.segment_anchors, self._segment)
            ctx.notes["segments"] = names
            group, gathered = fsdp.shard(self, model, names, ctx)
            if self.gradient_bits < 32:
                gathered.code(self.gradient_bits, self.gradient_block, ctx)
            ctx.notes["forward"] = gathered.forward
            ctx.divide(group, reduced=True, leaves=gathered.leaves)
        return model

    @at(Stage.FORWARD, replay=False)
    def gather(self, ctx: StepContext) -> AbstractContextManager[None]:
        """gather each segment before it runs; outside forward and backward, the model holds this rank's shards"""
        forward = ctx.notes.get("forward", nullcontext)  # one rank gathers nothing
        return cast("AbstractContextManager[None]", forward())

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if self.stage == 1:
            yield "stage 1 runs as stage 2, because FSDP2 always shards gradients too"
        if self.offload and (ctx is None or ctx.device.type == "cpu"):
            yield "offload has no effect on the CPU, where everything is in host memory"
        if ctx is not None and ctx.finds_unused and "segments" in ctx.notes:
            yield "the model is one segment, because of find_unused_parameters"
        elif ctx is not None and (names := ctx.notes.get("segments")) is not None:
            yield (
                f"{len(names) + 1} segment{'s' if names else ''}: the root"
                + (f", {', '.join(names[:4])}" if names else "")
                + (" ..." if len(names) > 4 else "")
            )
