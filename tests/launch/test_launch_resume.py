"""A whole job: workers die, fewer go on, all come back, and every sample of the epoch is trained on exactly once."""

from __future__ import annotations

# 64 numbered samples. Each step is a line: the attempt, the updates and merged steps before it, and its samples; each
# attempt begins with where it starts and which attempt saved that. Rank 1 kills itself in
# its fourth step, twice. A worker that is alone works for three steps, and on until it is told to stop.
SCRIPT = """
import os, pathlib, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until three steps are done
import numpy as np, torch
from torch import nn
from fleetx import fleet
from fleetx.comm.session import current
from fleetx.data.arrays import ArraySource
from fleetx.data.loader import Loader
from fleetx.data.sharding_plan import MaxSamples

fleet.init()
torch.manual_seed(0)
root, attempt, rank = pathlib.Path("run"), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), fleet.worker_index()
strategy = fleet.keep_batch(fleet.DistributedStrategy(gradient_merge={"k_steps": 2}), root)
model = nn.Linear(1, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4), strategy)
source = ArraySource(np.arange(64, dtype=np.float32)[:, None], np.arange(64), 0.0, 1.0)
loader = Loader(source, MaxSamples(2), shuffle=True)
extra = {"attempt": -1}
checkpoints = fleet.checkpoints(root, every=2, loader=loader, extra=extra)
engine = current().find()
here = open(f"seen-{rank}", "a", buffering=1)
print(attempt, engine.round, engine.merged, "from", extra["attempt"], "on", fleet.worker_num(), file=here)
extra["attempt"] = attempt
killed = len(list(pathlib.Path(".").glob("killed-*")))
for number, batch in enumerate(loader):
    if rank == 1 and number == 3 and killed < 2:
        pathlib.Path(f"killed-{attempt}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    model(batch["image"]).mean().backward()
    print(attempt, engine.round, engine.merged, *batch["label"].flatten().tolist(), file=here)
    optimizer.step()
    optimizer.zero_grad()
    checkpoints.stepped()
    if number == 2:
        while fleet.worker_num() == 1 and signal.SIGTERM not in signal.sigpending():
            time.sleep(0.05)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
checkpoints.close()
print("finished with", fleet.worker_num())
"""


def test_every_sample_is_seen_once_over_kills_with_fewer_workers_and_with_all_again(fleetrun, tmp_path):
    run = fleetrun(SCRIPT, options="--elastic 1:2 --max_restarts 5 --restart_delay 0 --regrow_after 2").finish()
    assert run.code == 0, run.err
    assert len(list(tmp_path.glob("killed-*"))) == 2, run.err
    starts, seen = {}, []  # attempt -> where it starts, the attempt before it, its workers; (attempt, where, samples)
    for rank in (0, 1):
        for line in (tmp_path / f"seen-{rank}").read_text().splitlines():
            attempt, update, merged, *rest = line.split()
            where = int(update), int(merged)
            if rest[0] == "from":
                starts[int(attempt)] = where, int(rest[1]), int(rest[3])
            else:
                seen.append((int(attempt), where, list(map(int, rest))))
    assert [starts[attempt][2] for attempt in sorted(starts)] == [2, 1, 2, 1, 2], run.err
    attempt, until, kept = max(starts), (10**9, 0), []
    while attempt >= 0:  # backwards; what was done after a save is not part of the training
        kept += [(where[0], samples) for a, where, samples in seen if a == attempt and where < until]
        until, attempt, _ = starts[attempt]
    assert sorted(n for _, samples in kept for n in samples) == list(range(64))
    assert {sum(len(samples) for u, samples in kept if u == update) for update, _ in kept} == {8}  # of every update
