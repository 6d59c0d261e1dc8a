"""A script that ends while the ranks still exchange something ends without an error."""

from __future__ import annotations

SCRIPT = """
import time
import torch
from fleetx import fleet

fleet.init()
model = torch.nn.Linear(6, 3)
strategy = fleet.DistributedStrategy(localsgd={"k_steps": 1, "overlap": True})
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
for step in range(3):
    if fleet.worker_index() == 1 and step == 2:
        time.sleep(1.0)  # so that rank 0 is at its end while the average is under way
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done", flush=True)
"""


def test_an_average_under_way_at_the_end_of_the_script(fleetrun):
    run = fleetrun(SCRIPT, options="--device cpu --nproc_per_node 2").finish()
    assert run.code == 0, run.err
    assert "fleet.flush()" in (run.where / "log" / "workerlog.0").read_text()
