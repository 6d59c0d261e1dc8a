"""Several processes of a node, one of which may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from file_server import tar

from fleetx import UsageError, fleet
from fleetx.errors import DownloadError
from fleetx.paddle.download import node
from fleetx.paddle.download.downloader import Downloader
from fleetx.paddle.download.node import with_all_workers

BIG = tar({"x.bin": os.urandom(3 << 20)})
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs that a shell starts with `&`
from fleetx.errors import DownloadError
from fleetx.paddle.download.downloader import Downloader
from fleetx.paddle.download.fetch import Patience
try:
    print(Downloader(patience=Patience(attempts=2, pause=0.01, timeout=99)).download_from_bos(sys.argv[1], sys.argv[2]))
except DownloadError as error:
    print("DownloadError:", error)
    sys.exit(3)
"""


@pytest.fixture
def start(tmp_path):
    """start(address, rank, variables): a process that downloads from it into tmp_path/data."""
    started = []

    def one(address, rank=0, variables=None):
        config = tmp_path / "set.yaml"
        config.write_text(f"bos_path: {address}\n")
        env = {**os.environ, "LOCAL_RANK": str(rank), **(variables or {})}
        command = [sys.executable, "-c", PROGRAM, str(config), str(tmp_path / "data")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, **pipes))
        return started[-1]

    yield one
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def end(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for_lock(tmp_path, *processes):
    """Wait until each process has opened the lock: from then on it counts as one that waits."""
    lock = str(tmp_path / "data/.fleetx-download/lock")
    for process in processes:
        for _ in range(1200):
            assert process.poll() is None
            if lock in {os.path.realpath(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}:
                break
            time.sleep(0.05)
        else:
            pytest.fail("a process did not ask for the lock within a minute")


def wait_for_part(tmp_path):
    parts = tmp_path / "data/.fleetx-download/parts/a.tar"
    for _ in range(1200):
        if any(part.stat().st_size for part in parts.glob("*")):
            return
        time.sleep(0.05)
    pytest.fail("no byte was written within a minute")


def test_four_workers_download_once(server, start, tmp_path):
    address = server.publish({"a.tar": BIG, "b.tar": tar({"y": b"1"})})
    server.faults["/set/a.tar"] = [("hold", 1000)]
    workers = [start(address, rank) for rank in range(4)]
    assert server.held.wait(60)
    wait_for_lock(tmp_path, *workers)
    server.release.set()
    assert [end(w)[:2] for w in workers] == [(0, f"{tmp_path}/data\n")] * 4
    # the held connection ended early and was continued by its own worker; nobody else asked
    assert server.got("set/a.tar") == [None, 1000]
    assert server.got("set/b.tar") == [None]
    assert (tmp_path / "data/x.bin").stat().st_size == 3 << 20


def test_those_who_wait_see_the_error_of_the_one_who_works(server, start, tmp_path):
    address = server.publish({"a.tar": BIG, "b.tar": BIG})
    del server.files["/set/b.tar"]
    server.faults["/set/a.tar"] = [("hold", 1000)]  # not all of it: the worker would be done with it
    workers = [start(address, rank) for rank in range(2)]
    assert server.held.wait(60)
    wait_for_lock(tmp_path, *workers)
    server.release.set()
    ends = [end(w) for w in workers]
    assert [code for code, _, _ in ends] == [3, 3]
    assert all("set/b.tar: the server answered 404" in out for _, out, _ in ends)
    # either may work: on a busy machine the second can come first
    assert sum("which downloads for this node" in out for _, out, _ in ends) == 1
    assert server.got("set/a.tar") == [None, 1000]


def test_a_waiting_worker_takes_over_from_one_that_is_killed(server, start, tmp_path):
    address = server.publish({"a.tar": BIG})
    server.faults["/set/a.tar"] = [("hold", 1 << 20)]
    first = start(address, 0)
    assert server.held.wait(60)
    second = start(address, 1)
    wait_for_lock(tmp_path, second)
    wait_for_part(tmp_path)
    first.kill()
    assert end(second)[0] == 0
    assert (tmp_path / "data/a.tar").read_bytes() == BIG
    begun = server.got("set/a.tar")
    assert begun[0] is None
    assert len(begun) == 2
    assert 0 < begun[1] <= 1 << 20  # continued by a range, not begun again


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_new_run_continues_after_the_old_one_was_ended(server, start, tmp_path, how):
    address = server.publish({"a.tar": BIG})
    server.faults["/set/a.tar"] = [("hold", 1 << 20)]
    first = start(address)
    assert server.held.wait(60)
    wait_for_part(tmp_path)
    began = time.monotonic()
    first.send_signal(how)
    code, _, err = end(first)
    assert code in (-how, 130, 1)
    assert time.monotonic() - began < 40  # Ctrl-C does not wait for the timeout of 99 s
    if how == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")
    data = tmp_path / "data"
    assert sorted(p.name for p in data.iterdir()) == [".fleetx-download", "filelist.txt", "meta.txt", "train.txt"]
    assert (data / ".fleetx-download/parts/a.tar").is_dir()
    assert end(start(address))[0] == 0
    begun = server.got("set/a.tar")
    assert begun[0] is None
    assert len(begun) == 2
    assert 0 < begun[1] <= 1 << 20
    assert (data / "a.tar").read_bytes() == BIG


def test_one_who_waits_says_for_what(server, bring, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(node, "_SILENT", 0.2)
    address = server.publish({"a.tar": BIG})
    bring(address)
    lock = (tmp_path / "data/.fleetx-download/lock").open("r+")
    lock.write("4711")
    lock.truncate()
    lock.flush()
    node.fcntl.flock(lock, node.fcntl.LOCK_EX)

    def sleep(seconds, slept=[]):  # noqa: B006
        slept.append(seconds)
        if len(slept) > 10:
            lock.close()
        real(seconds)

    real = time.sleep
    monkeypatch.setattr(node.time, "sleep", sleep)
    capsys.readouterr()
    bring(address)
    said = capsys.readouterr().err
    assert said.count(f"waiting for process 4711, which is downloading {tmp_path}/set.yaml into {tmp_path}/data") == 1


def test_an_old_failure_is_not_held_against_a_new_run(server, bring):
    address = server.publish({"a.tar": BIG})
    server.faults["/set/a.tar"] = [("status", 403)]
    with pytest.raises(DownloadError, match="403"):
        bring(address)
    assert (bring(address) / "x.bin").exists()


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0"}, True),
        ({"PADDLE_RANK_IN_NODE": "2"}, False),
        (
            {
                "PADDLE_TRAINER_ID": "3",
                "PADDLE_TRAINERS_NUM": "4",
                "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.1:2,10.0.0.2:1,10.0.0.2:2",
            },
            False,
        ),
        (
            {
                "PADDLE_TRAINER_ID": "2",
                "PADDLE_TRAINERS_NUM": "4",
                "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.1:2,10.0.0.2:1,10.0.0.2:2",
            },
            True,
        ),
    ],
)
def test_the_first_worker_of_a_node_is_known_from_any_launcher(monkeypatch, variables, first):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert node.is_first_worker() is first


def download_around_init(config, where):
    before = Downloader().download_from_bos(config, f"{where}/before")
    fleet.init()
    after = Downloader().download_from_bos(config, f"{where}/after")
    return before, after, fleet.worker_num()


def test_ranks_download_once_before_and_once_after_init(ranks, server, tmp_path):
    (tmp_path / "x.yaml").write_text(f"bos_path: {server.publish({'a.tar': BIG})}\n")
    results = ranks.run(download_around_init, str(tmp_path / "x.yaml"), str(tmp_path))
    assert results == [(f"{tmp_path}/before", f"{tmp_path}/after", 2)] * 2
    assert server.got("set/a.tar") == [None, None]  # one for each folder
    assert (tmp_path / "before/x.bin").read_bytes() == (tmp_path / "after/x.bin").read_bytes()


def download_my_shard(config, where):
    fleet.init()
    shards = {"shard_num": fleet.worker_num(), "shard_id": fleet.worker_index()}
    if fleet.worker_index() == 1:
        time.sleep(0.5)  # not for the result: without a wait, worker 0 would look first
    try:
        path = Downloader().download_from_bos(config, where, **shards)
    except DownloadError as error:
        return str(error)
    return sorted(p.name for p in Path(path).glob("*.txt"))


def test_every_worker_of_a_sharded_download_finds_the_shards_of_all(ranks, server, tmp_path):
    tars = {f"{i}.tar": tar({f"part-{i}.txt": b"1"}) for i in range(4)}
    (tmp_path / "x.yaml").write_text(f"bos_path: {server.publish(tars)}\n")
    first, second = ranks.run(download_my_shard, str(tmp_path / "x.yaml"), str(tmp_path / "data"))
    assert {f"part-{i}.txt" for i in range(4)} <= set(first)
    assert first == second


def test_a_shard_that_fails_fails_for_all_workers(ranks, server, tmp_path):
    (tmp_path / "x.yaml").write_text(f"bos_path: {server.publish({'0.tar': BIG, '1.tar': BIG})}\n")
    del server.files["/set/1.tar"]
    first, second = ranks.run(download_my_shard, str(tmp_path / "x.yaml"), str(tmp_path / "data"))
    assert first.startswith("the shard of worker 1 failed: ")
    assert "1.tar: the server answered 404" in first
    assert "1.tar: the server answered 404" in second


def test_a_sharded_download_of_several_workers_needs_fleet_init(server, bring, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"waits for the shards of all 2 workers: call fleet\.init\(\) before it"):
        bring(server.publish({"a.tar": BIG}), shard_num=1, shard_id=0)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "x.yaml").write_text("bos_path: memory://x\n")
    with pytest.raises(DownloadError, match=r"cannot be written: .*Not a directory"):
        Downloader().download_from_bos(tmp_path / "x.yaml", str(tmp_path / "file/data"))


# --- what counts as an outcome ------------------------------------------------------------------------
def test_nobody_works_without_the_lock_when_an_outcome_cannot_be_read(tmp_path, monkeypatch):
    node.write_record(tmp_path / "outcomes/k.json", {"id": "old", "pid": 1, "error": "", "failed": []})
    reads, works = [], []

    def unreadable_once(path, read=node.read_record):
        reads.append(path)
        return {} if len(reads) == 3 else read(path)

    monkeypatch.setattr(node, "read_record", unreadable_once)
    holder = (tmp_path / "lock").open("a+")
    node.fcntl.flock(holder, node.fcntl.LOCK_EX)
    threading.Timer(0.5, holder.close).start()
    node.once_per_node(lambda: works.append(holder.closed), tmp_path, key="k", task="works", first=True)
    assert works == [True]
    assert len(reads) > 3


@pytest.fixture
def worker(bring, monkeypatch):
    """worker(address, variables): download like a new process with these variables."""

    def call(address, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(node, "_calls", Counter())
        return bring(address)

    return call


def test_a_worker_that_comes_late_takes_the_outcome_of_its_run(server, worker):
    address = server.publish({"a.tar": BIG})
    run = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0"}
    worker(address, run | {"LOCAL_RANK": "0"})
    asked = len(server.asked)
    worker(address, run | {"LOCAL_RANK": "1"})
    assert len(server.asked) == asked
    for other in ({"TORCHELASTIC_RUN_ID": "two"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "none"}):
        before = len(server.asked)
        worker(address, run | {"LOCAL_RANK": "0"} | other)
        assert len(server.asked) > before  # another run checks for itself


def test_a_late_worker_takes_the_failure_of_its_run_too(server, worker):
    address = server.publish({"a.tar": BIG})
    server.faults["/set/a.tar"] = [("status", 403)]
    run = {"TORCHELASTIC_RUN_ID": "one"}
    with pytest.raises(DownloadError, match="403"):
        worker(address, run | {"LOCAL_RANK": "0"})
    with pytest.raises(DownloadError, match=r"403.* \(in process \d+, which downloads for this node\)"):
        worker(address, run | {"LOCAL_RANK": "1"})


def test_each_call_of_a_run_has_an_outcome_of_its_own(tmp_path, monkeypatch):
    """Of two workers in one process: their counts are as far as each has come."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    worked, counts = [], {"first": Counter(), "second": Counter()}

    def call(worker):
        monkeypatch.setattr(node, "_calls", counts[worker])
        node.once_per_node(lambda: worked.append(worker), tmp_path, key="k", task="works", first=True)

    for worker in ("first", "second", "first", "first", "second", "second", "second"):
        call(worker)
    assert worked == ["first", "first", "first", "second"]


def fails_on_one_worker():
    fleet.init()

    def work():
        if fleet.worker_index() == 0:
            raise OSError("the disk is full")

    try:
        with_all_workers(work)
    except (DownloadError, OSError) as error:
        return type(error).__name__, str(error)
    return None


def test_whatever_fails_on_one_worker_reaches_the_others(ranks):
    assert ranks.run(fails_on_one_worker) == [
        ("OSError", "the disk is full"),
        ("DownloadError", "the shard of worker 0 failed: the disk is full"),
    ]
