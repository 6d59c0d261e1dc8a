"""The measurements on a slow link, with tiny sizes. Their results are in docs/results and not tested."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks.large_batch.data import FILES, Images, Split
from benchmarks.netlab import Lab, allowed
from benchmarks.slow_network import __main__ as command
from benchmarks.slow_network import goals, shaping, simulated, study
from benchmarks.slow_network.methods import STEPS, H
from benchmarks.slow_network.model import Noise, Sized, longest, shapes_of
from benchmarks.slow_network.summary import cells, reached

RATE = "100mbit"


@pytest.fixture(scope="module")
def permitted():
    if reason := allowed():
        pytest.skip(f"no lab can be made here: {reason}")


def test_a_model_of_given_shapes_gets_another_gradient_in_every_step():
    sizes = shapes_of("tiny")
    model = Sized(sizes, Noise(longest(sizes), seed=0))
    seen = []
    for _ in range(2):
        model(torch.ones((), requires_grad=True)).backward()
        seen.append([p.grad for p in model.layers])
        model.zero_grad()
    assert [g.shape for g in seen[0]] == [torch.Size(shape) for shape in sizes]
    assert not any(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert model.bytes == 4 * sum(g.numel() for g in seen[0])


@pytest.mark.parametrize(("model", "millions"), [("resnet", 25.6), ("bert", 110.1)])
def test_the_sizes_are_those_of_the_models(model, millions):
    assert sum(int(np.prod(shape)) for shape in shapes_of(model)) == pytest.approx(1e6 * millions, rel=0.005)


def test_both_ends_of_every_cable_are_shaped(permitted):
    with Lab(hosts=2, rate=None) as lab:
        found = shaping.ends(lab)
        assert [interface for _, interface in found] == ["eth0", "port0", "eth0", "port1"]
        for namespace, interface in found:
            lab.run(0, ["ip", "-n", namespace, "link", "show", interface])  # it is there, also seen from a host


def test_steps_of_every_method_with_their_bytes(permitted):
    chosen = [method.name for method in STEPS if method.name not in ("hierarchical", "power1", "dgc32")]
    plan = {"blocks": {"tiny": 1}, "rates": [RATE, None], "few": 2, "methods": chosen}
    rows = study.run("steps", plan, quiet=True)
    found = cells(rows, "tiny")
    assert {*found} == {(method, rate) for method in chosen for rate in (RATE, None)}
    whole = found["ddp", RATE]
    assert whole.bytes < whole.sent < 1.2 * whole.bytes
    for method, share in {"fp16": 0.5, "fp16_hook": 0.5, "local": 1 / H, "overlap": 1 / H, "adaptive": 1 / H}.items():
        assert found[method, RATE].sent == pytest.approx(share * whole.sent, rel=0.15), method
    assert found["dgc16", RATE].sent < 0.1 * whole.sent
    assert found["alone", RATE].sent < 0.1 * whole.sent
    assert whole.step > whole.bytes * 8 / 100e6  # the link is slow while it is measured ...
    assert found["ddp", None].floor == 0.0  # ... and then no more


def test_two_hosts_of_two_workers_send_less_in_a_hierarchy(permitted):
    rows = study.run(
        "steps", {"blocks": {"tiny": 1}, "rates": [RATE], "methods": ["dense", "hierarchical"]}, workers=2, quiet=True
    )
    found = cells(rows, "tiny")
    assert found["hierarchical", RATE].sent < 0.8 * found["dense", RATE].sent


def test_the_timeline_of_a_step(permitted):
    rows = study.run("timeline", {"model": "tiny", "method": "dgc16", "rate": RATE, "steps": 2}, quiet=True)
    assert len(rows) == 2
    for row in rows:
        names = [call[0] for call in row["calls"]]
        assert names.count("encode") == 2  # of the four tensors, two are large
        assert {"exchange", "all_gather", "add", "step"} <= {*names}
        assert 0 < row["cpu"] < row["all"]
        for _, _, begin, end, _ in row["calls"]:
            assert 0 <= begin <= end <= row["seconds"]


def test_the_task_without_a_network():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (160, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images = Images(pixels, torch.randint(0, 10, (160,), generator=generator))
    split = Split(images[slice(128)], None, images[slice(128, None)])
    data = split, split.train.normalised().flatten(1)
    task = simulated.Task(steps=33, batch=4, width=8)

    def trained(name):
        return simulated.trained(simulated.rules()[name], task, 0.01, 0, data)

    assert trained("ddp")["distances"] == [0.0, 0.0]
    for name, averages in {"local8": 5, "local16": 3, "overlap8": 5}.items():
        found = trained(name)
        assert found["averages"] == averages  # of the first step, and of every period after it
        assert min(found["distances"]) > 0  # just before an average
    periods = trained("adaptive8")["periods"]
    assert periods[0][0] == 9  # one period after the first step
    assert all(b[0] - a[0] == a[1] for a, b in itertools.pairwise(periods))


def test_a_training_on_made_up_images(permitted, tmp_path):
    generator = np.random.default_rng(0)
    for (pixels, labels), n in zip(FILES.values(), (512, 100), strict=True):
        y = generator.integers(0, 10, n).astype(np.uint8)
        x = generator.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        x[np.arange(n), 2 * y + 4] = 255
        (tmp_path / pixels).write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, n, 28, 28) + x.tobytes()))
        (tmp_path / labels).write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, n) + y.tobytes()))
    plan = {"steps": 40, "batch": 16, "width": 32, "learning_rates": [0.05, 0.01], "hold_out": 100}
    plan |= {"rate": RATE, "data": str(tmp_path)}
    rows = study.run("task", plan | {"methods": ["ddp", "dgc16", "local8_overlap", "adaptive16"]}, quiet=True)
    assert [row["way"] for row in rows] == ["ddp", "local8_overlap", "adaptive16", "dgc16"]
    for row in rows:
        assert row["tried"][str(row["learning_rate"])] == max(row["tried"].values())
        assert [m["step"] for m in row["moments"]] == [1, 33, 40]
        assert row["moments"][-1]["accuracy"] > 0.5, row["title"]
        assert row["moments"][-1]["loss"] < row["moments"][0]["loss"]


def training(method: str, *accuracies: float) -> dict[str, object]:
    """One look a second; the loss falls as the accuracy rises."""
    moments = [{"step": i, "seconds": float(i), "accuracy": a, "loss": 1 - a} for i, a in enumerate(accuracies)]
    return {
        "way": method,
        "title": method,
        "rate": RATE,
        "learning_rate": 0.1,
        "moments": moments,
        "sent": 1e6,
        "bytes": 4_000_000,
    }


def test_when_a_training_reached_its_target():
    row = training("ddp", 0.1, 0.5, 0.9)
    assert reached(row, "accuracy", 0.7) == pytest.approx(1.5)
    assert reached(row, "loss", 0.3) == pytest.approx(1.5)
    assert reached(row, "accuracy", 0.05) == 0.0
    assert reached(row, "accuracy", 0.95) is None


def measured(method: str, seconds: float, sent: float) -> dict[str, object]:
    return {
        "model": "tiny",
        "block": 0,
        "way": method,
        "rate": RATE,
        "seconds": [seconds],
        "sent": sent,
        "bytes": 10**8,
    }


STEPPED = [measured("alone", 0.1, 0), measured("ddp", 9.0, 1e8), measured("fp16_hook", 4.5, 5e7),
           measured("dgc16", 0.2, 1e6), measured("local", 1.1, 1.25e7), measured("overlap", 1.03, 1.25e7)]  # fmt: skip


def test_the_goals_are_ratios_to_the_floor_and_to_the_peers():
    found = {goal.what.partition(": ")[2]: goal for goal in goals.of_steps(STEPPED)}
    dgc = found["DGC (fp16 values), step / (compute + its bytes / bandwidth)"]
    assert dgc.value == pytest.approx(0.2 / (0.1 + 0.08))
    assert dgc.met
    assert found["DGC (fp16 values), times faster than fp32 DDP"].value == pytest.approx(45)
    assert found["DGC (fp16 values), times faster than the fp16 hook"].met
    bound = "step / max(compute, bytes / (H bandwidth))"
    assert found[f"LocalSGD with overlap, {bound}"].met
    assert found[f"LocalSGD, blocking, {bound}"].value == pytest.approx(1.1)
    task = [
        training("ddp", 0.1, 0.5, 0.9),
        training("power1", 0.1, 0.2),
        training("dgc16", 0.9),
        training("local8", 0.8),
    ]
    words = {goal.what: goal for goal in goals.of_task(task)}
    assert words["task: dgc16, time to 20.00% / the better PowerSGD's"].met
    assert not words["task: local8, points behind dense"].met


def test_the_report_of_what_was_measured(tmp_path):
    results = {"steps": STEPPED, "task": [training("ddp", 0.1, 0.5), training("dgc16", 0.2, 0.5)], "notes": {}}
    (tmp_path / "slow_network.json").write_text(json.dumps(results))
    done = CliRunner().invoke(command.main, ["--report", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "tables.md").read_text()
    assert "45.0 x" in page
    assert "Fashion-MNIST" in page
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "slow_network.png").exists()


def test_an_unknown_measurement():
    done = CliRunner().invoke(command.main, ["--only", "steps,tusk"])
    assert done.exit_code == 2
    assert "unknown measurement 'tusk'" in done.output
