"""Two nodes: two fleetruns on this machine."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import free_port, start

from fleetx.errors import LaunchError
from fleetx.launch import multi_node
from fleetx.launch.options import parse


@pytest.fixture
def nodes(tmp_path):
    """nodes(script, ...): both nodes, finished; `each` has the options in which they differ."""
    started = []

    def run(script, *, options="", each=("", ""), after=lambda: None):
        master = f"--nnodes 2 --master 127.0.0.1:{free_port()}"
        for rank in (0, 1):
            words = f"{master} --rank {rank} {options} {each[rank]}"
            started.append(start(tmp_path / f"node{rank}", script, options=words))
        after()
        return [run.finish() for run in started]

    yield run
    for each in started:
        each.destroy()


def test_two_nodes_form_one_world_and_the_cause_is_known_on_both(nodes):
    runs = nodes(
        """
        import json, os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        print(json.dumps({"sum": int(total), **os.environ}), flush=True)
        if dist.get_rank() == 1:
            raise ValueError("the cause, not the consequence")
        dist.all_reduce(total)
        """
    )
    envs = [json.loads(run.out.splitlines()[0]) for run in runs]
    assert [env["sum"] for env in envs] == [1, 1]
    assert [env["RANK"] for env in envs] == [env["PADDLE_TRAINER_ID"] for env in envs] == ["0", "1"]
    assert [env["WORLD_SIZE"] for env in envs] == [env["PADDLE_TRAINERS_NUM"] for env in envs] == ["2", "2"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "0"]
    assert [env["PADDLE_CURRENT_ENDPOINT"] for env in envs] == ["127.0.0.1:6070", "127.0.0.1:6071"]
    assert envs[0]["PADDLE_TRAINER_ENDPOINTS"] == envs[1]["PADDLE_TRAINER_ENDPOINTS"]
    assert envs[0]["MASTER_PORT"] == envs[1]["MASTER_PORT"]
    for run in runs:
        assert run.code == 1
        assert (
            "the first cause on node 1 is rank 1: ValueError: the cause, not the consequence (exit code 1)" in run.err
        )


def test_a_failure_on_one_node_restarts_both_then_stops_both_and_both_name_it(nodes):
    began = time.monotonic()
    runs = nodes(
        """
        import os, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, flush=True)
        if os.environ["RANK"] == "3":
            raise ValueError("in attempt " + attempt)
        time.sleep(60)
        """,
        options="--nproc_per_node 2 --max_restarts 1",
    )
    assert time.monotonic() - began < 50
    assert "fleetrun: another node asks for restart 1 of 1\n" in runs[0].err
    for run in runs:
        assert run.code == 1
        assert run.out.split("attempt ")[1][0] == "0"
        assert "first cause on node 1 in attempt 1 of 2 is rank 3: ValueError: in attempt 0 (exit code 1)" in run.err
        assert run.err.endswith("  attempt 2: rank 3: ValueError: in attempt 1 (exit code 1)\n")
        assert run.survivors() == []


def test_nodes_that_were_started_differently_are_refused(nodes):
    runs = nodes("print('never')", each=("--nproc_per_node 2", "--nproc_per_node 3"))
    assert [run.code for run in runs] == [1, 1]
    assert all("was started with" in run.err for run in runs)
    assert "node 1 was started with 3 workers, node 0 with 2" in runs[0].err
    assert [run.out for run in runs] == ["", ""]


def test_a_node_does_not_wait_for_ever(tmp_path):
    run = start(tmp_path, "", options=f"--nnodes 2 --master 127.0.0.1:{free_port()} --rank 0 --join_timeout 1").finish()
    assert run.code == 1
    assert "in vain for node 1 to join" in run.err


def test_node_0_notices_a_node_that_is_gone_and_no_other(monkeypatch):
    monkeypatch.setattr(multi_node, "BEAT", 0.05)
    monkeypatch.setattr(multi_node, "SILENCE", 2.0)
    words = f"--device cpu --nnodes 3 --master 127.0.0.1:{free_port()} --stop_timeout 0 -m some".split()
    nodes = [multi_node.Meeting(parse(["--rank", str(rank), *words], given={}), say=print) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda node: node.next_rendezvous(), nodes))

    def look(seconds, living):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert [node.num_nodes_waiting() for node in living] == [0] * len(living)
            time.sleep(0.05)

    look(3, nodes)  # longer than the silence of a lost one
    with pytest.raises(LaunchError, match="lost node 2: its fleetrun or its machine has been silent for 2 s"):
        look(20, nodes[:2])


def test_a_fleetrun_that_was_killed_cannot_tell_its_cause_and_the_others_say_so(fleetrun, tmp_path):
    master = f"--nnodes 2 --master 127.0.0.1:{free_port()} --stop_timeout 1"
    script = f"""
    import os, pathlib, time
    rank = os.environ["RANK"]
    pathlib.Path("up").write_text("up\\n")
    while rank != "0" or not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.02)
    raise ValueError("a consequence")
    """
    first, second = (
        fleetrun(script, where=tmp_path / f"node{rank}", options=f"{master} --rank {rank}") for rank in (0, 1)
    )
    first.wait_for("up"), second.wait_for("up")
    second.signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    first.finish()
    assert first.code == 1
    assert "fleetrun: node 1 does not answer: the first cause may be there\n" in first.err
    assert "the first cause on node 0 is rank 0: ValueError: a consequence" in first.err


def test_ips_name_the_nodes(tmp_path):
    words = "--ips 127.0.0.1,127.0.0.2 --join_timeout 60"
    script = "import os; print(os.environ['MASTER_ADDR'], os.environ['PADDLE_TRAINER_ENDPOINTS'])"
    port = str(free_port())
    runs = [start(tmp_path, script, options=f"{words} --rank {rank}", FLAGS_START_PORT=port) for rank in (0, 1)]
    for rank, run in enumerate(run.finish() for run in runs):
        assert run.code == 0, run.err
        assert run.out == f"127.0.0.1 127.0.0.1:{port},127.0.0.2:{port}\n", rank
    # they share a directory, as on a common file system: each has its own logs all the same
    assert sorted(path.name for path in (tmp_path / "log").iterdir())[-1] == "workerlog.0"
    assert len(list((tmp_path / "log").rglob("workerlog.0"))) == 2
