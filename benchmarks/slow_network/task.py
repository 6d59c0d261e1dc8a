"""The workers' side of training Fashion-MNIST on a slow link: python -m benchmarks.slow_network.task REQUEST.

All methods see the same images in the same order. Each uses its best learning rate: the one with the highest accuracy
on held-out images, after trainings on the unshaped link. The parameters are copied every EVERY steps, which takes a
millisecond, and evaluated on the test images after the clock has stopped. If the ranks differ, their mean is evaluated.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.large_batch.data import FOLDER, Images, load
from benchmarks.netlab import counters
from benchmarks.slow_network import methods
from benchmarks.slow_network.methods import WALK, H, Method, ours
from benchmarks.slow_network.shaping import Shaping
from fleetx import fleet

EVERY = 32  # steps; a multiple of every fixed period, so that copies are made just after an average
EVAL_BATCH = 1000
JUDGED = 8192  # training images for the loss
# Also run with the learning rate of dense, to compare losses.
COMPARED = ("local2", "local4", "local8", "local16", "adaptive8", "adaptive16", "adaptive32")


@dataclass(frozen=True)
class Plan:
    steps: int = 417
    batch: int = 128  # per worker
    width: int = 704  # of the two hidden layers: a million parameters
    learning_rates: list[float] = field(default_factory=lambda: [0.1, 0.2])  # 0.05 is best for no method
    hold_out: int = 10_000  # training images to choose the learning rate with
    rate: str = "100mbit"
    data: str = str(FOLDER)
    methods: list[str] | None = None


def local(period: int, **more: Any) -> Method:
    words = "".join(f", {word}" for word in more)
    name = "_".join([f"local{period}", *more])
    return Method(name, f"localsgd k={period}{words}", ours(localsgd={"k_steps": period, **more}))


def adaptive(first: int, **more: Any) -> Method:
    words = "".join(f", {word}" for word in more)
    settings = {"init_k_steps": first, "max_k_steps": max(16, first), **more}
    return Method("_".join([f"adaptive{first}", *more]), f"adaptive_localsgd from k={first}{words}",
               ours(adaptive_localsgd=settings))  # fmt: skip


def all_methods(steps: int) -> list[Method]:
    walk = {"sparsity": WALK, "rampup_step": max(1, steps // 5)}
    return [
        Method("ddp", "DDP, fp32 (H=1)", methods.ddp()),
        Method("fp16", "fp16_allreduce", ours(fp16_allreduce=True)),
        local(2), local(4), local(H), local(16),
        local(H, overlap=True), local(16, overlap=True), local(32, overlap=True),
        adaptive(H), adaptive(16), adaptive(32), adaptive(16, overlap=True),
        Method("power1", "DDP, torch's PowerSGD, rank 1", methods.power(1)),
        Method("power4", "DDP, torch's PowerSGD, rank 4", methods.power(4)),
        Method("dgc16", "dgc 0.999, values in fp16", methods.dgc("float16", **walk)),
        Method("dgc32", "dgc 0.999, values in fp32", methods.dgc("float32", **walk)),
    ]  # fmt: skip


def main(request: Path) -> None:
    job = json.loads(request.read_text())
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    plan = Plan(**job["plan"])
    shaping = Shaping([tuple(end) for end in job["ends"]])
    split = load(Path(plan.data), train=-plan.hold_out)  # all but these
    pixels = split.train.normalised().flatten(1)  # once, because the network is so small that this would dominate

    def accuracies(method: Method, learning_rate: float, rate: str | None, judged_on: Images) -> dict[str, Any]:
        return trained(method, plan, learning_rate, rate, pixels, split.train.labels, judged_on, shaping)

    shared = None  # the learning rate of the first method, which is dense
    for method in all_methods(plan.steps):
        if plan.methods is None or method.name in plan.methods:
            tried = {}
            if len(plan.learning_rates) > 1:
                found = {lr: accuracies(method, lr, None, split.choose) for lr in plan.learning_rates}
                tried = {lr: one["moments"][-1]["accuracy"] for lr, one in found.items()}
            best = max(tried, key=lambda lr: tried[lr]) if tried else plan.learning_rates[0]
            shared = shared or best
            row = {"way": method.name, "title": method.title, "rate": plan.rate, "learning_rate": best, "tried": tried}
            keep(Path(job["results"]), row | accuracies(method, best, plan.rate, split.test))
            if best != shared and method.name in COMPARED:
                row |= {"learning_rate": shared, "tried": {}, "same_rate": True}
                keep(Path(job["results"]), row | accuracies(method, shared, plan.rate, split.test))
    fleet.barrier_worker()


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def trained(
    method: Method, plan: Plan, learning_rate: float, rate: str | None, pixels: Tensor, labels: Tensor, test: Images,
    shaping: Shaping,
) -> dict[str, Any]:  # fmt: skip
    model = network(plan.width)
    loop = method.prepare(model, methods.sgd(model, learning_rate))
    schedule = LambdaLR(loop.optimizer, lambda step: 1 - step / plan.steps)
    mine = order(len(labels), plan)[:, fleet.worker_index()]
    snapshots: list[tuple[int, float, Tensor]] = []
    shaping.to(rate)
    dist.barrier()
    before, began = counters.here(), time.perf_counter()
    for step, which in enumerate(mine, start=1):
        loop.step(lambda model, which=which: cross_entropy(model(pixels[which]), labels[which]))
        schedule.step()
        if step % EVERY == 1:
            snapshots.append((step, time.perf_counter() - began, methods.flat(model)))
    if method.ours:
        fleet.flush(optimizer=loop.optimizer)
    ended = time.perf_counter() - began
    snapshots.append((plan.steps, ended, methods.flat(model)))
    dist.barrier()
    sent = (counters.here() - before).sent / plan.steps
    shaping.to(None)
    steps, seconds, copies = zip(*snapshots, strict=True)
    judged = [judge(network(plan.width), c, pixels, labels, test) for c in methods.mean_over_ranks([*copies])]
    del loop, model, schedule
    gc.collect()
    moments = [asdict(m) for m in map(Evaluation, steps, slowest(seconds), *zip(*judged, strict=True))]
    return {"moments": moments, "sent": slowest([sent])[0], "bytes": 4 * copies[0].numel()}


@dataclass(frozen=True)
class Evaluation:
    step: int
    seconds: float
    accuracy: float
    loss: float | None  # None: not finite


def order(images: int, plan: Plan) -> Tensor:
    """The images that each worker sees in each step, of shape (steps, workers, batch)."""
    wanted = plan.steps * fleet.worker_num() * plan.batch
    epochs = -(-wanted // images)
    generator = torch.Generator().manual_seed(1)
    every = torch.cat([torch.randperm(images, generator=generator) for _ in range(epochs)])
    return every[:wanted].view(plan.steps, fleet.worker_num(), plan.batch)


@torch.no_grad()
def judge(
    model: nn.Module, parameters: Tensor, pixels: Tensor, labels: Tensor, test: Images
) -> tuple[float, float | None]:
    """Accuracy on test images and loss on training images; each worker evaluates its share."""
    vector_to_parameters(parameters, model.parameters())
    rank, size = fleet.worker_index(), fleet.worker_num()
    judged = min(JUDGED, len(labels))
    found = torch.zeros(2, dtype=torch.float64)
    share = test[slice(rank, None, size)]
    for some in range(0, len(share), EVAL_BATCH):
        part = share[slice(some, some + EVAL_BATCH)]
        found[0] += (model(part.normalised()).argmax(1) == part.labels).sum() / len(test)
    for some in range(rank * EVAL_BATCH, judged, size * EVAL_BATCH):
        end = min(some + EVAL_BATCH, judged)
        found[1] += cross_entropy(model(pixels[some:end]), labels[some:end], reduction="sum") / judged
    dist.all_reduce(found)
    return found[0].item(), found[1].item() if found[1].isfinite() else None


def slowest(values: Iterable[float]) -> list[float]:
    found = torch.tensor([*values], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def keep(results: Path, row: dict[str, Any]) -> None:
    if fleet.is_first_worker():
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        last = row["moments"][-1]
        print(f"{row['title']:40} {last['seconds']:6.1f} s, rate {row['learning_rate']}, "
              f"{last['accuracy']:.2%}, loss {last['loss']}, {row['sent'] / 1e6:.3f} MB per step",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
