"""Starts what is trained on the device: `cuda_children.py FOLDER`. Forks, because importing torch takes seconds."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback

import cuda_child  # first: it loads the device before torch
import cuda_device
import cuda_sharding

from fleetx.launch.runner import die_with


def main(folder):
    cuda_device.install()
    import torch._dynamo
    import torch.distributed.fsdp

    from fleetx import fleet  # noqa: F401  after the device is installed, and before the forks

    torch._dynamo.reset = lambda: None  # where there is CUDA it imports the compiler, which nothing here needs
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    gc.freeze()
    children = [
        fork(cuda_child.main, "alone", f"{folder}/alone"),
        fork(cuda_sharding.main, f"{folder}/sharding"),
        *(fork(cuda_child.main, "ranks", f"{folder}/rank {r}", **world, RANK=str(r)) for r in range(2)),
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"exit codes of alone, sharding, rank 0 and rank 1: {codes}")


def fork(job, *args, **variables):
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with(parent)
        os.environ |= variables
        try:
            job(*args)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


if __name__ == "__main__":
    main(sys.argv[1])
