"""The slow network on one machine, and `fleetrun --ips` between hosts that share nothing but a cable."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.frame import CannotRunError
from benchmarks.netlab import Lab, LabError, allowed, counters, exchange, link, namespaces
from benchmarks.netlab.__main__ import main
from benchmarks.netlab.transfer import transfer

ROOT = Path(__file__).parents[2]

ANOTHER = """
import time
from benchmarks.netlab import Lab
with Lab(hosts=2, rate="1gbit") as lab:
    print(lab.popen(1, ["sleep", "600"]).pid, flush=True)
    time.sleep(60)
"""

WORLD = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(10 ** dist.get_rank())
dist.all_reduce(total)
told = {name: value for name, value in os.environ.items() if name.startswith(
    ("RANK", "WORLD", "LOCAL_", "GROUP_", "MASTER_", "PADDLE_", "GLOO_", "NETLAB_"))}
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, {"sum": int(total), **told})
print(json.dumps(everyone), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads abort an orderly exit now and then
"""


@pytest.fixture(scope="module")
def permitted():
    if reason := allowed():
        pytest.skip(f"no lab can be made here: {reason}")


@pytest.fixture(scope="module")
def lab(permitted):
    with Lab(hosts=2, rate="100mbit") as made:
        yield made


def ours(process: int | None = None) -> list[str]:
    return [name for name in namespaces.every() if name.startswith(f"fleetx-{process or os.getpid()}-")]


def lives(process: int) -> bool:
    return namespaces.born(process) is not None


# ---------------------------------------------------------------------- made and removed


def test_a_lab_is_removed_with_everything_that_runs_in_it_also_after_an_exception(permitted):
    before = ours()
    sleepers = []

    def use():
        with Lab(hosts=3, rate=None) as lab:
            assert len(ours()) == len(before) + 4  # and the switch
            assert lab.addresses == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
            # a process that left the group of the one that started it
            child = lab.popen(2, ["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
            with child.stdout:
                sleepers.append(int(child.stdout.readline()))
            assert lives(sleepers[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert ours() == before
    assert not lives(sleepers[0])


def test_the_machines_own_network_is_not_touched(lab):
    mine = os.listdir("/sys/class/net")
    with Lab(hosts=2):
        assert os.listdir("/sys/class/net") == mine
    assert lab.run(0, ["cat", "/proc/net/route"]).stdout.count("\n") == 2  # a head, and the way to the other hosts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_lab_that_is_ended_by_a_signal_leaves_nothing_or_the_next_removes_it(permitted, number):
    child = subprocess.Popen(
        [sys.executable, "-c", ANOTHER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with child.stdout:
        sleeper = int(child.stdout.readline())
    assert len(ours(child.pid)) == 3
    child.send_signal(number)
    child.wait(timeout=20)
    if number == signal.SIGKILL:
        assert len(ours(child.pid)) == 3
        with Lab(hosts=1):
            pass
    assert ours(child.pid) == []
    assert not lives(sleeper)


def test_what_the_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(namespaces, "PATH", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CannotRunError, match="ip and tc not found: apt-get install iproute2"), Lab():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRunError, match="need root"), Lab():
        pass


# ---------------------------------------------------------------------- the link


def test_a_transfer_takes_as_long_as_the_rate_says_and_is_counted(lab):
    size = 16_000_000
    before = [lab.bytes(host) for host in (0, 1)]
    measured = transfer(lab, size=size)
    sent, received = (lab.bytes(host) - then for host, then in zip((0, 1), before, strict=True))
    assert measured.rate == pytest.approx(100e6, rel=0.15)
    assert measured.counted == sent.sent
    for count in (sent.sent, received.received):
        assert size < count < 1.05 * size
    for count in (sent.received, received.sent):  # acknowledgements
        assert count < 0.05 * size


def test_a_small_message_feels_the_link_too(lab):
    # 12.5 kB may pass at once, so the rest takes 3 ms; with the burst that is usual for tbf it would take none
    assert transfer(lab, size=50_000).seconds > 0.0025


def test_workers_of_one_host_do_not_use_the_link(lab):
    measured = transfer(lab, size=16_000_000, sender=1, receiver=1)
    assert measured.rate > 200e6
    assert measured.counted < 10_000


def test_a_process_reads_the_counters_of_its_own_host(lab):
    script = "from benchmarks.netlab import counters; print(counters.here().sent)"
    before = lab.bytes(1).sent
    here = int(lab.run(1, [sys.executable, "-c", script]).stdout)
    assert before <= here <= lab.bytes(1).sent
    assert (counters.Counters(5, 7) - counters.Counters(2, 3)) == counters.Counters(3, 4)


@pytest.mark.parametrize("rate", ["100", "fast", "0mbit", "-1gbit", "100 mbit"])
def test_a_rate_that_means_nothing_is_refused(rate):
    with pytest.raises(ValueError, match=rf"{re.escape(rate)}.*such as 100mbit or 1gbit"):
        Lab(rate=rate)


def test_the_bucket_holds_a_millisecond():
    assert [link.bits(rate) for rate in ("500kbit", "2.5mbit", "1gbit")] == [5e5, 2.5e6, 1e9]
    assert link.shaper("1gbit") == ["tbf", "rate", "1000000000bit", "burst", "125000", "latency", "100ms"]
    assert link.shaper("100mbit")[4] == "12500"
    assert link.shaper("1mbit")[4] == "3200"


# ---------------------------------------------------------------------- commands


def test_a_command_that_fails_or_hangs_is_an_error_with_its_last_words(lab):
    with pytest.raises(LabError, match=r"(?s)on host 1, .* ended with 3:.*good bye"):
        lab.run(1, ["sh", "-c", "echo good bye; exit 3"])
    began = time.monotonic()
    with pytest.raises(LabError, match=r"(?s)on host 0, .* took longer than 0.3 s:.*asleep"):
        lab.everywhere(["sh", "-c", "echo asleep; sleep 60"], timeout=0.3)
    assert time.monotonic() - began < 10
    assert [done.returncode for done in lab.everywhere(["sh", "-c", "exit $NETLAB_HOST"], check=False)] == [0, 1]


def test_the_command_line_runs_a_command_on_every_host(permitted):
    words = [sys.executable, "-m", "benchmarks.netlab", "--hosts", "3", "--rate", "1gbit", "--"]
    told = ["sh", "-c", "echo $NETLAB_HOST of $NETLAB_IPS; exit $NETLAB_HOST"]
    done = subprocess.run([*words, *told], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == [f"{host} of 10.77.0.1,10.77.0.2,10.77.0.3" for host in range(3)]
    assert (done.returncode, done.stderr) == (1, "")


def test_the_command_line_refuses_what_cannot_be():
    assert "such as 100mbit or 1gbit" in CliRunner().invoke(main, ["--rate", "quick"]).output
    assert "needs --hosts 2" in CliRunner().invoke(main, ["--hosts", "1"]).output


# ---------------------------------------------------------------------- fleetrun --ips


@pytest.mark.parametrize("workers", [1, 2])
def test_fleetrun_makes_one_world_of_two_hosts(lab, tmp_path, workers):
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    runs = lab.fleetrun(script, nproc_per_node=workers)
    told = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    assert told[0] == told[1]
    size = 2 * workers
    endpoints = [f"{address}:{6070 + worker}" for address in lab.addresses for worker in range(workers)]
    for rank, env in enumerate(told[0]):
        host, worker = divmod(rank, workers)
        assert env["sum"] == int("1" * size)
        assert env["NETLAB_HOST"] == env["GROUP_RANK"] == str(host)
        assert env["RANK"] == env["PADDLE_TRAINER_ID"] == str(rank)
        assert env["LOCAL_RANK"] == env["PADDLE_RANK_IN_NODE"] == str(worker)
        assert env["WORLD_SIZE"] == env["PADDLE_TRAINERS_NUM"] == str(size)
        assert (env["LOCAL_WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == (str(workers), "2")
        assert env["MASTER_ADDR"] == lab.addresses[0]
        assert env["PADDLE_TRAINER_ENDPOINTS"].split(",") == endpoints
        assert env["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank]
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert len({env["MASTER_PORT"] for env in told[0]}) == 1


def test_a_worker_that_is_killed_on_one_host_stops_both_and_both_say_so(lab, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '3':\n"
        "    print('last words', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(100)\n"  # none of the others would notice by itself
    )
    runs = lab.fleetrun(script, nproc_per_node=2, check=False, timeout=60)
    for run in runs:
        assert run.returncode == 1
        assert "fleetrun: rank 3 on node 1 failed first: killed by SIGKILL\n" in run.stderr
        assert "    last words\n" in run.stderr
    assert [namespaces.processes(lab.name(host)) for host in (0, 1)] == [[], []]


RESTARTS = """
import os, pathlib, signal, torch, torch.distributed as dist
attempt, host = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["NETLAB_HOST"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("attempt", attempt, "sum", int(total), flush=True)
if attempt in "01" and host == attempt and os.environ["LOCAL_RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
dist.destroy_process_group()
"""


def test_a_job_on_two_hosts_is_restarted_whichever_host_loses_a_worker(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEETX_JOB_SECRET", "0123456789abcdef")
    (tmp_path / "restarts.py").write_text(RESTARTS)
    runs = lab.fleetrun(tmp_path / "restarts.py", nproc_per_node=2, options=["--max_restarts", "2"])
    for run in runs:
        assert [line for line in run.stdout.splitlines() if "sum" in line] == [f"attempt {n} sum 4" for n in range(3)]


ENDLESS = """
import os, pathlib, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
folder = pathlib.Path(sys.argv[1])
(folder / f"{dist.get_world_size()}.{os.environ['NETLAB_HOST']}").touch()
while not (folder / "finish").exists():
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_an_elastic_job_goes_on_without_a_host_whose_cable_is_cut(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEETX_JOB_SECRET", "0123456789abcdef")
    (tmp_path / "endless.py").write_text(ENDLESS)
    words = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--ips", ",".join(lab.addresses)]
    words += ["--elastic", "1:2", "--log_dir", str(tmp_path / "log"), str(tmp_path / "endless.py"), str(tmp_path)]
    nodes = [lab.popen(host, words, stdin=subprocess.DEVNULL) for host in (0, 1)]
    try:
        wait_for(lambda: (tmp_path / "2.0").exists() and (tmp_path / "2.1").exists())
        lab.run(1, ["ip", "link", "set", "eth0", "down"])
        wait_for((tmp_path / "1.0").exists)
        assert nodes[1].wait(100) == 1  # it has lost node 0
        lab.run(1, ["ip", "link", "set", "eth0", "up"])
        nodes[1] = lab.popen(1, words, stdin=subprocess.DEVNULL)
        (tmp_path / "2.0").unlink()
        wait_for((tmp_path / "2.0").exists)
        (tmp_path / "finish").touch()
        assert [node.wait(100) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.terminate()
            node.wait(100)


def wait_for(condition):
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---------------------------------------------------------------------- restarts

RESUMES = """
import os, pathlib, signal, sys
import torch
from torch import nn
from fleetx import fleet

fleet.init()
torch.manual_seed(0)
model = nn.Linear(4, 1)
model, optimizer = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01))
torch.manual_seed(fleet.worker_index())
root, breaks = pathlib.Path(sys.argv[1]), sys.argv[2] == "breaks"
for step in fleet.checkpoints(root, every=3, steps=10):
    killed = root.parent / f"killed-{step}"
    if breaks and step in (4, 8) and fleet.worker_index() == step // 8 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # first on host 0, then on host 1
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(model.weight.tolist(), flush=True)
"""


def test_a_job_on_two_hosts_restarts_and_resumes_by_itself_whichever_host_loses_a_worker(lab, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RESUMES)
    said = {}
    for kind in ("unbroken", "breaks"):
        options = ["--max_restarts", "3", "--restart_delay", "0"]
        arguments = [str(tmp_path / kind), kind]
        finished = lab.fleetrun(script, arguments, options=options, cwd=tmp_path, timeout=600)
        said[kind] = finished[0].stdout.splitlines()[-1]
        if kind == "breaks":
            assert [path.name for path in sorted(tmp_path.glob("killed-*"))] == ["killed-4", "killed-8"]
            assert all("restart 2 of 3" in host.stderr for host in finished), finished[0].stderr
    assert said["breaks"] == said["unbroken"]


def test_an_exchange_is_timed_for_every_method():
    with Lab(hosts=2, rate="1gbit") as lab:
        found = exchange.exchanged(lab, size=10_000, rounds=2)
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(exchange.METHODS, 2)
