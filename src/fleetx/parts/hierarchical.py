from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from fleetx.comm.paths import inside_hosts
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.strategy.cost_model import Cluster, CostTerms, Link, Offer
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Stage, at


@settings
class Hierarchical(Part):
    """Reduce inside of each group of ranks, all-reduce between the leaders of the groups, broadcast inside.

    A group is meant to be a host: then every byte crosses the link between two hosts once.
    Neutral: groups of one rank are the flat all-reduce.
    """

    inter_nranks: Annotated[int, Field(ge=1)] = 1
    """Ranks in a group, which follow one another; 1: as many as there are on a host."""

    switch: ClassVar[str] = "use_hierarchical_allreduce"
    flat: ClassVar[dict[str, str]] = {"hierarchical_allreduce_inter_nranks": "inter_nranks"}
    neutral: ClassVar[dict[str, int]] = {}
    costs: ClassVar[str] = "network: between hosts the gradients once, inside of them twice"

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
        if world.size == 1:
            return
        found = self._inside(world)
        if found == 0:
            yield (
                "use_hierarchical_allreduce: the hosts do not have equally many workers that follow one another "
                "in rank: set strategy.hierarchical_allreduce_inter_nranks"
            )
        elif world.size % found:
            good = [n for n in range(2, world.size + 1) if world.size % n == 0]
            yield (
                f"hierarchical_allreduce_inter_nranks = {found} does not divide {world.size} ranks: "
                f"use {' or '.join(map(str, good))}"
            )

    def _inside(self, world: World) -> int:
        return self.inter_nranks if self.inter_nranks > 1 else inside_hosts(world.hosts())

    @at(Stage.MODEL)
    def arrange(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """reduce inside of each host, all-reduce between their leaders, broadcast inside"""
        if ctx.replica_group.size > 1:
            ctx.network.inside = self._inside(ctx.replica_group)
        return model

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is None or ctx.replica_group.size == 1:
            return
        inside, size = ctx.network.inside, ctx.replica_group.size
        if inside == size:
            yield f"all {size} ranks are in one group: there is nothing between groups, and the flat way is faster"
        elif inside == 1:
            yield "every host has one worker: this is the flat way"
        else:
            yield f"{size // inside} groups of {inside} ranks"


def _tiers(cluster: Cluster, inside: int, groups: int) -> Link:
    """Up to the leader and down again inside of a host, one rank after the other; a ring between the leaders."""
    rounds, share = 2 * (groups - 1), 2 * (groups - 1) / groups
    return Link(
        latency=2 * (inside - 1) * cluster.inner.latency + rounds * cluster.outer.latency,
        speed=1 / (2 * (inside - 1) / cluster.inner.speed + share / cluster.outer.speed),
        busy=2 * cluster.inner.busy + share * cluster.outer.busy,
    )
