"""The unit of time: the memory traffic of AdamW (4 arrays read, 3 written) with hardly any arithmetic.

In C, because no torch function reads four arrays in one pass without more arithmetic. It is linked with the OpenMP
library that torch has loaded, to run on torch's threads rather than on a second, competing pool.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.frame import CannotRunError

BYTES = 28  # per parameter

SOURCE = """
#include <stddef.h>
void stream(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, ptrdiff_t n) {
    #pragma omp parallel for simd schedule(static)
    for (ptrdiff_t i = 0; i < n; i++) {
        p[i] = 0.5f * p[i] + g[i];
        m[i] = 0.5f * m[i] + g[i];
        v[i] = 0.5f * v[i] + g[i];
    }
}
"""


def stream(elements: int) -> Callable[[], None]:
    """One pass over four fp32 arrays of this many elements."""
    import torch

    arrays = [torch.zeros(elements) for _ in range(4)]
    with tempfile.TemporaryDirectory(prefix="stream-") as folder:
        call = ctypes.CDLL(str(built(Path(folder)))).stream
    call.restype = None
    arguments = [*(ctypes.c_void_p(a.data_ptr()) for a in arrays), ctypes.c_ssize_t(elements)]

    def walk(keep: object = arrays) -> None:
        call(*arguments)

    return walk


def built(folder: Path) -> Path:
    """Compile the library for this machine into a folder."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CannotRunError("no C compiler (cc, gcc, clang or $CC) to build the stream with")
    (folder / "stream.c").write_text(SOURCE)
    made = folder / "stream.so"
    options = ["-O3", "-march=native", "-fopenmp", "-fPIC"]
    for command in (
        [compiler, *options, "-c", str(folder / "stream.c"), "-o", str(folder / "stream.o")],
        [compiler, "-shared", str(folder / "stream.o"), *_openmp(), "-o", str(made)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CannotRunError(f"cannot compile the stream: {' '.join(command)}: {done.stderr.strip()[-300:]}")
    return made


def _openmp() -> list[str]:
    """The OpenMP library of this process, or else the compiler's."""
    lines = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    loaded = [line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line]
    return loaded[:1] or ["-fopenmp"]
