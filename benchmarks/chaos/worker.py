"""The training that is killed. Run by fleetrun: worker.py FOLDER KIND STEPS EVERY WIDTH

Every step of every rank is a line in FOLDER/log-RANK: what happened, the step, the loss, a digest of parameters,
optimizer and random numbers, and the time. A resumed run must write the same lines as an unbroken one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.chaos.marks import Marks, now

folder, kind = Path(sys.argv[1]), sys.argv[2]
steps, every, width = map(int, sys.argv[3:6])
rank = int(os.environ["RANK"])
marks = Marks(folder, rank)
marks.begin()

import hashlib  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from fleetx import fleet  # noqa: E402
from fleetx.data.arrays import ArraySource  # noqa: E402
from fleetx.data.loader import Loader  # noqa: E402
from fleetx.data.sharding_plan import MaxSamples  # noqa: E402
from fleetx.engine.checkpoint import background, loop  # noqa: E402

KINDS = {
    "merge": {"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 1.0}},
    "localsgd": {"localsgd": {"k_steps": 3}},
    "background": {},  # data parallel, saved by another thread
}
background.write = marks.during("save", background.write)  # type: ignore[attr-defined]
writing: Any = sys.modules["fleetx.engine.checkpoint.write"]  # the package has a function of that name
writing._commit = marks.during("commit", writing._commit)
loop.load = marks.during("load", loop.load)  # type: ignore[attr-defined]


def digest() -> str:
    sha = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    tensors = [*model.state_dict().values()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for t in tensors:
        sha.update(t.detach().numpy().tobytes())
    sha.update(repr((scheduler.last_epoch, optimizer.param_groups[0]["lr"], extra)).encode())
    return sha.hexdigest()[:16]


def log(what: str, step: int, loss: str) -> None:
    os.write(handle, f"{what} {step} {loss} {digest()} {now():.6f}\n".encode())


def batches():
    while True:
        yield from loader


torch.set_num_threads(1)
torch.manual_seed(0)
fleet.init()
random = np.random.default_rng(0)
images, labels = random.normal(size=(200, 1, 4, 4)).astype(np.float32), random.integers(0, 4, 200)
loader = Loader(ArraySource(images, labels, 0.0, 1.0), MaxSamples(4), shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width),
                      nn.Tanh(), nn.Linear(width, 4))  # fmt: skip
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if kind == "localsgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**KINDS[kind]))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
extra = {"samples": 0}
marks.set("load")
checkpoints = fleet.checkpoints(
    folder / "run", every=every, keep=2, steps=steps, loader=loader, scheduler=scheduler, extra=extra,
    asynchronous=kind == "background",
)  # fmt: skip
handle = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
log("resumed", checkpoints.step, "-")
marks.set("step")
source = batches()
for step in checkpoints:
    batch = next(source)
    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"][:, 0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    extra["samples"] += len(batch["label"])
    log("step", step + 1, float(loss).hex())
    marks.done(step + 1)
log("end", checkpoints.step, "-")
os.close(handle)
