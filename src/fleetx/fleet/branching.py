"""The strategy of a short run of `fleetx batch`, which merges more steps than the script says."""

from __future__ import annotations

import copy

from fleetx.base.branch_order import ordered
from fleetx.errors import UsageError
from fleetx.strategy import DistributedStrategy


def branched(strategy: DistributedStrategy) -> DistributedStrategy:
    order = ordered()
    if order is None:
        return strategy
    if strategy.auto:
        raise UsageError("fleetx batch changes gradient_merge, which `auto` chooses: load the strategy that auto wrote")
    made = copy.deepcopy(strategy)
    merge = dict(made.gradient_merge_configs) if made.gradient_merge else {}
    if not merge.get("avg", True):
        raise UsageError("fleetx batch needs the mean over merged steps: remove gradient_merge_configs['avg'] = False")
    made.gradient_merge = {"k_steps": merge.get("k_steps", 1) * order.merge}
    made.batch = False
    return made
