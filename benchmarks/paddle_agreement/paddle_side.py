"""Paddle's own kernels, on the files that compare.py writes. Run by an interpreter that has PaddlePaddle:

    python paddle_side.py FOLDER      reads FOLDER/cases.json and FOLDER/<i>.npz, writes FOLDER/<i>.out.npz

Uses a static program without PIR, like Fleet at its time. The gradients are fed and passed to the optimizer directly
(`apply_gradients`), without a loss or a backward pass, so that nothing else rounds. A loss would be hard to write, too:
in 3.3.1 many functions, such as `paddle.sum` and `paddle.matmul`, reject the variables of such a program.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["FLAGS_enable_pir_api"] = "0"  # noqa: SIM112  Paddle reads this name, when imported

import numpy as np

import paddle


def optimizer_of(case: dict, rate: object) -> object:
    s = dict(case["settings"])
    decay = s.pop("weight_decay")
    if case["optimizer"] == "lars":
        # A listed string excludes every name that contains it.
        return paddle.incubate.optimizer.LarsMomentumOptimizer(
            rate, lars_weight_decay=decay, exclude_from_weight_decay=case["excluded"], **s
        )
    return paddle.optimizer.Lamb(
        rate, lamb_weight_decay=decay, exclude_from_weight_decay_fn=lambda p: p.name in case["excluded"], **s
    )


def run(case: dict, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = case["names"]
    rates = given["rates"]
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        pairs = []
        for n in names:
            start = given[f"{n}.start"]
            initial = paddle.nn.initializer.Assign(start)
            p = paddle.create_parameter(list(start.shape), "float32", name=n, default_initializer=initial)
            pairs.append((p, paddle.static.data(f"{n}_grad", list(start.shape), "float32")))
        rate = paddle.optimizer.lr.LambdaDecay(1.0, lambda t: float(rates[min(t, len(rates) - 1)]))
        optimizer_of(case, rate).apply_gradients(pairs)
    executor = paddle.static.Executor(paddle.CPUPlace())
    scope = paddle.static.Scope()
    paths: dict[str, list] = {n: [given[f"{n}.start"]] for n in names}
    with paddle.static.scope_guard(scope):
        executor.run(startup)
        for t in range(len(rates)):
            executor.run(main, feed={f"{n}_grad": given[f"{n}.gradient"][t] for n in names})
            rate.step()
            for n in names:
                paths[n].append(np.array(scope.find_var(n).get_tensor()))
    return {n: np.stack(path) for n, path in paths.items()}


def old_rates(steps: int, *, rate: float, total: int) -> dict[str, np.ndarray]:
    """The components of linear_warmup_decay: the counter of a program, and the decay over all its steps."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        counter = paddle.optimizer.lr._decay_step_counter()
    executor = paddle.static.Executor(paddle.CPUPlace())
    with paddle.static.scope_guard(paddle.static.Scope()):
        executor.run(startup)
        counted = [float(executor.run(main, fetch_list=[counter])[0].item()) for _ in range(steps)]
    decay = paddle.optimizer.lr.PolynomialDecay(rate, decay_steps=total, end_lr=0.0, power=1.0)
    decayed = []
    for _ in range(steps):
        decayed.append(decay.last_lr)
        decay.step()
    return {"counter": np.array(counted), "decayed": np.array(decayed)}


def main() -> None:
    folder = Path(sys.argv[1])
    paddle.enable_static()
    for i, case in enumerate(json.loads((folder / "cases.json").read_text())):
        np.savez(folder / f"{i}.out.npz", **run(case, dict(np.load(folder / f"{i}.npz"))))
    np.savez(folder / "rates.npz", **old_rates(**json.loads((folder / "rates.json").read_text())))
    (folder / "version").write_text(paddle.__version__)


if __name__ == "__main__":
    main()
