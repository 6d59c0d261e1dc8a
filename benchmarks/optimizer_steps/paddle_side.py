"""Paddle's optimizers. Run by an interpreter that has PaddlePaddle:

    python paddle_side.py OPTIMIZER SHAPES STREAM    SHAPES: JSON; STREAM: the library of the unit

For each input line, `step` or `stream` (one pass of the unit), prints the seconds it took. Each optimizer runs in its
faster mode: LAMB in dynamic mode, LARS as a static program without PIR.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import warnings

os.environ["FLAGS_enable_pir_api"] = "0"  # noqa: SIM112  Paddle reads this name, when imported

import numpy as np

import paddle

RANDOM = np.random.default_rng(0)


def lamb(shapes: list[list[int]]):
    params = []
    for i, shape in enumerate(shapes):
        values = paddle.nn.initializer.Assign(RANDOM.uniform(-0.05, 0.05, shape).astype("float32"))
        p = paddle.create_parameter(shape, "float32", name=name(i, shape), default_initializer=values)
        p.grad = paddle.to_tensor(RANDOM.uniform(-0.01, 0.01, shape).astype("float32"))
        params.append(p)
    made = paddle.optimizer.Lamb(
        1e-4, lamb_weight_decay=0.01, parameters=params, exclude_from_weight_decay_fn=lambda p: "bias" in p.name
    )
    return made.step


def lars(shapes: list[list[int]]):
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        pairs = []
        for i, shape in enumerate(shapes):
            values = paddle.nn.initializer.Uniform(-0.05, 0.05)
            p = paddle.create_parameter(shape, "float32", name=name(i, shape), default_initializer=values)
            pairs.append((p, paddle.static.create_global_var(shape, 0.005, "float32", persistable=True, name=f"g{i}")))
        paddle.incubate.optimizer.LarsMomentumOptimizer(
            0.01, 0.9, lars_coeff=0.001, lars_weight_decay=5e-4, exclude_from_weight_decay=["bias"]
        ).apply_gradients(pairs)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    return lambda: executor.run(main)


def name(i: int, shape: list[int]) -> str:
    return f"bias_{i}" if len(shape) == 1 else f"weight_{i}"


def stream(library: str, elements: int):
    arrays = [np.zeros(elements, "float32") for _ in range(4)]
    call = ctypes.CDLL(library).stream
    call.restype = None
    return lambda: call(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.c_ssize_t(elements))


def main() -> None:
    optimizer, shapes, library = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what Paddle prints out of the answers
    warnings.filterwarnings("ignore")
    paddle.set_device("cpu")
    works = {
        "step": {"lamb": lamb, "lars": lars}[optimizer](shapes),
        "stream": stream(library, sum(int(np.prod(s)) for s in shapes)),
    }
    print(paddle.__version__, file=answers, flush=True)
    for line in sys.stdin:
        work = works[line.strip()]
        start = time.perf_counter()
        work()
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main()
