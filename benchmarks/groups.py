"""Our process groups against those of torch's DeviceMesh."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.frame import Run, Sides, benchmark
from fleetx import fleet
from fleetx.comm.session import current
from fleetx.comm.world import World


@benchmark(ours="World", theirs="DeviceMesh", ranks=4, rounds=60)
def replicas_of_stages(run: Run) -> Sides:
    """Make and destroy what two replicas of two stages need: the groups of ranks that train the same stage."""
    fleet.init()
    return run.compare(partial(by_world, current().here()), by_mesh)


def by_world(world: World) -> None:
    owned = world.owned(by_world)
    owned.split([[0, 2], [1, 3]])
    dist.barrier()  # a rank may still be connecting
    owned.destroy_groups()


def by_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    dist.barrier()
    for group in mesh.get_all_groups():
        dist.destroy_process_group(group)
