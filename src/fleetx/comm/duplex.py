"""All-to-all and all-gather that use both directions of a link at the same time.

gloo sends data only once the receiver has announced, over the same connection, that it is ready. Its own all-to-all and
all-gather start to send before they announce what they will receive, so the announcement waits behind the data: the
other rank cannot begin until this one is done, and the link carries one direction at a time. Here, receives come first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send each rank its share of the rows. Returns what each rank sent here, by rank."""
    out = torch.empty_like(rows)
    if not _by_gloo(rows, group):
        dist.all_to_all_single(out, rows, group=group)
        return out
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    theirs, mine = out.view(ranks, -1), rows.view(ranks, -1)
    before, after = [(rank - i) % ranks for i in range(1, ranks)], [(rank + i) % ranks for i in range(1, ranks)]
    under_way = [dist.irecv(theirs[other], group=group, group_src=other) for other in before]
    under_way += [dist.isend(mine[other], group=group, group_dst=other) for other in after]
    theirs[rank] = mine[rank]
    for work in under_way:
        _wait(work)
    return out


def all_gather(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks, by rank. Uses a ring, so that few of them cross the links between hosts."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    out = mine.new_empty(ranks * len(mine), *mine.shape[1:])
    if not _by_gloo(mine, group):
        dist.all_gather_single(out, mine, group=group)
        return out
    rows, left, right = out.view(ranks, -1), (rank - 1) % ranks, (rank + 1) % ranks
    # In the order in which the left neighbour sends them: its own row, then that of its left neighbour, and so on.
    coming = [dist.irecv(rows[(left - i) % ranks], group=group, group_src=left) for i in range(ranks - 1)]
    rows[rank] = mine.view(-1)
    going = []
    for i, received in enumerate(coming):
        going.append(dist.isend(rows[(rank - i) % ranks], group=group, group_dst=right))
        _wait(received)
    for sent in going:
        _wait(sent)
    return out


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # this rank is a member of the group
    work.wait()


def _by_gloo(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"
