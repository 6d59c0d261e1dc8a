from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from fleetx.base.suggest import either
from fleetx.comm.paths import inside_hosts
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.errors import StrategyError
from fleetx.strategy.cost_model import Cluster, CostTerms, Link, Offer
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class Hierarchical(Part):
    """Reduce within each group of ranks, all-reduce between the group leaders, broadcast within each group.

    A group is typically a host, so that every byte crosses the link between two hosts once.
    Neutral: groups of one rank, which is the flat all-reduce.
    """

    inter_nranks: Annotated[int, Field(ge=1)] = 1
    """Consecutive ranks per group; 1: as many as there are per host."""

    switch: ClassVar[str] = "use_hierarchical_allreduce"
    flat: ClassVar[dict[str, str]] = {"hierarchical_allreduce_inter_nranks": "inter_nranks"}
    neutral: ClassVar[dict[str, int]] = {}
    dense: ClassVar[bool] = True
    effect: ClassVar[Effect] = more("most_bytes_sent", "leaders send more bytes", by=1000, replicas=4)
    example: ClassVar[dict[str, int]] = {"inter_nranks": 2}
    costs: ClassVar[str] = "network: the gradients once between hosts, twice within them"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if 1 < cluster.ranks_per_host < cluster.ranks:
            yield Offer({"inter_nranks": cluster.ranks_per_host})

    def cost(self, terms: CostTerms) -> None:
        inside = self.inter_nranks if self.inter_nranks > 1 else terms.cluster.ranks_per_host
        groups = terms.cluster.ranks // inside
        if groups > 1 and inside > 1:
            terms.link = _tiers(terms.cluster, inside, groups)

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        yield from super().incompatibilities(model, optimizer, world)
        if world.size == 1:
            return
        yield from self._misfits(self._group_size(world), world.size)

    @staticmethod
    def _misfits(size: int, ranks: int) -> Iterator[str]:
        if size == 0:
            yield (
                "use_hierarchical_allreduce: not every host has the same number of workers with consecutive ranks: "
                "set strategy.hierarchical_allreduce_inter_nranks"
            )
        elif ranks % size:
            divisors = [n for n in range(2, ranks + 1) if ranks % n == 0]
            yield (
                f"hierarchical_allreduce_inter_nranks = {size} does not divide {ranks} ranks: use {either(divisors)}"
            )

    def _group_size(self, world: World, shards: int = 1) -> int:
        return max(self.inter_nranks // shards, 1) if self.inter_nranks > 1 else inside_hosts(world.hosts())

    @at(Stage.MODEL, makes={Fact.ROUTED})
    def group_ranks(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """reduce within each host, all-reduce between host leaders, broadcast within each host"""
        replicas = ctx.network.world
        if replicas.size > 1:
            shards = ctx.replica_group.size // replicas.size  # one in this many ranks holds the same shard
            if self.inter_nranks % shards and shards % self.inter_nranks:
                where = f"hierarchical_allreduce_inter_nranks = {self.inter_nranks}"
                raise StrategyError(f"{where} with {shards} shards: use a multiple of {shards}")
            inside = self._group_size(replicas, shards)
            if problems := list(self._misfits(inside, replicas.size)):
                divided = (
                    f" (only the {replicas.size} ranks that hold the same part of the model reduce with each other)"
                )
                raise StrategyError([problem + divided for problem in problems])
            ctx.network.inside = inside if inside < replicas.size else 1  # one group: the flat all-reduce is faster
        return model

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is None:
            return
        if ctx.network.world.size == 1:
            yield "no effect here: there is one replica of the model, so nothing is sent"
            return
        inside, size = ctx.network.inside, ctx.network.world.size
        if inside > 1:
            yield f"{size // inside} groups of {inside} ranks"
        else:
            yield f"no effect here: the {size} ranks are one group, or each is a group, so this is the flat all-reduce"


def _tiers(cluster: Cluster, inside: int, groups: int) -> Link:
    """Within a host, one rank after the other sends to the leader and back; between the leaders, a ring."""
    rounds, share = 2 * (groups - 1), 2 * (groups - 1) / groups
    return Link(
        latency=2 * (inside - 1) * cluster.inner.latency + rounds * cluster.outer.latency,
        speed=1 / (2 * (inside - 1) / cluster.inner.speed + share / cluster.outer.speed),
        busy=2 * cluster.inner.busy + share * cluster.outer.busy,
    )
