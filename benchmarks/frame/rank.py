"""One rank: python -m benchmarks.frame.rank PARENT FOLDER RANK. Reads the call and writes its result."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.frame.declare import CannotRunError


def main(parent: int, folder: Path, rank: int) -> int:
    _die_with(parent)
    function, args, size, seconds = pickle.loads((folder / "call").read_bytes())
    try:
        if size > 1:
            result = _in_group(function, args, folder=folder, rank=rank, size=size, seconds=seconds)
        else:
            result = function(*args)
    except CannotRunError as error:
        _write(folder / f"error.{rank}", error)
        return 1
    except BaseException:
        _write(folder / f"error.{rank}", traceback.format_exc())
        return 1
    _write(folder / f"result.{rank}", result)
    while not all((folder / f"result.{other}").exists() for other in range(size)):
        time.sleep(0.01)  # who leaves first may break the last collective of the others
    return 0


def _in_group(function: Callable[..., Any], args: Any, *, folder: Path, rank: int, size: int, seconds: float) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Through a file, because a port that was free a ctx ago may not be free now.
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    return function(*args)


def _write(path: Path, value: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.replace(path)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # it ended before the kernel could be asked
        os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: gloo's threads abort an orderly exit now and then, even after destroy_process_group
