"""Several nodes: several fleetruns on this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading

import pytest
from launching import free_port, start

from fleetx.errors import LaunchError
from fleetx.launch import meeting_ends, multi_node
from fleetx.launch.options import parse


@pytest.fixture
def nodes(tmp_path):
    """nodes(script, ...): two finished nodes; `each` has the options in which they differ."""
    started = []

    def run(script, *, options="", each=("", "")):
        master = f"--nnodes 2 --master 127.0.0.1:{free_port()}"
        for rank in (0, 1):
            words = f"{master} --rank {rank} {options} {each[rank]}"
            started.append(start(tmp_path / f"node{rank}", script, options=words))
        return [run.finish() for run in started]

    yield run
    for each in started:
        each.destroy()


def test_two_nodes_form_one_world_and_both_report_the_cause(nodes):
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
        assert "rank 1 on node 1 failed first: ValueError: the cause, not the consequence (exit code 1)" in run.err


def test_a_failure_on_one_node_restarts_both_then_stops_both(nodes):
    runs = nodes(
        """
        import os, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, flush=True)
        if os.environ["RANK"] == "3":
            raise ValueError("in attempt " + attempt)
        time.sleep(1000)
        """,
        options="--nproc_per_node 2 --max_restarts 1 --cold",
    )
    assert "fleetrun: another node requested restart 1 of 1\n" in runs[0].err
    for run in runs:
        assert run.code == 1
        assert run.out.split("attempt ")[1][0] == "0"
        assert "rank 3 on node 1 failed first in attempt 1 of 2: ValueError: in attempt 0 (exit code 1)" in run.err
        assert run.err.endswith("  attempt 2: rank 3: ValueError: in attempt 1 (exit code 1)\n")
        assert run.survivors() == []


def test_nodes_with_different_settings_raise_an_error(nodes):
    runs = nodes("print('never')", each=("--nproc_per_node 2", "--nproc_per_node 3"))
    assert [run.code for run in runs] == [1, 1]
    assert all("was started with" in run.err for run in runs)
    assert "node 1 was started with 3 workers, node 0 with 2" in runs[0].err
    assert [run.out for run in runs] == ["", ""]


def rendezvous(*, rank, port, nodes, options=""):
    """A node without a fleetrun and without workers."""
    words = f"--device cpu --nnodes {nodes} --rank {rank} --master 127.0.0.1:{port} {options} -m some_module"
    return multi_node.MultiNodeRendezvous(parse(words.split(), environ={}), print_status=print)


def test_a_node_waits_for_the_others_until_join_timeout():
    node = rendezvous(rank=0, port=free_port(), nodes=2, options="--join_timeout 1")
    with pytest.raises(LaunchError, match=r"timed out after 1 s waiting for node 1 to join at 127.0.0.1:"):
        node.next_rendezvous()


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        node = rendezvous(rank=0, port=other.getsockname()[1], nodes=2)
        with pytest.raises(LaunchError, match=r"cannot listen on .* \(Address already in use\); .* --master"):
            node.next_rendezvous()


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100], ids=["nothing", "another"])
def test_a_port_of_another_service_is_not_node_0(monkeypatch, says):
    monkeypatch.setattr(meeting_ends, "ANSWER_TIMEOUT", 0.2)

    def serve(listener):
        with contextlib.suppress(OSError):  # closed
            while True:
                with listener.accept()[0] as peer:
                    peer.sendall(says)
                    peer.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=serve, args=(other,))
        thread.start()
        node = rendezvous(rank=1, port=other.getsockname()[1], nodes=2, options="--join_timeout 1")
        with pytest.raises(LaunchError, match=r"timed out after 1 s waiting for node 0 at 127.0.0.1:\d+"):
            node.next_rendezvous()
        other.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_the_report_mentions_a_node_whose_fleetrun_was_killed(fleetrun, tmp_path):
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
    assert "fleetrun: no answer from node 1, which may have failed first\n" in first.err
    assert "rank 0 on node 0 failed first: ValueError: a consequence" in first.err


def test_ips_lists_the_nodes(tmp_path):
    words = "--ips 127.0.0.1,127.0.0.2 --join_timeout 60"
    script = "import os; print(os.environ['MASTER_ADDR'], os.environ['PADDLE_TRAINER_ENDPOINTS'])"
    port = str(free_port())
    runs = [start(tmp_path, script, options=f"{words} --rank {rank}", FLAGS_START_PORT=port) for rank in (0, 1)]
    for rank, run in enumerate(run.finish() for run in runs):
        assert run.code == 0, run.err
        assert run.out == f"127.0.0.1 127.0.0.1:{port},127.0.0.2:{port}\n", rank
    # The nodes share a directory, as on a shared file system, and still have separate logs.
    assert sorted(path.name for path in (tmp_path / "log").iterdir())[-1] == "workerlog.0"
    assert len(list((tmp_path / "log").rglob("workerlog.0"))) == 2
