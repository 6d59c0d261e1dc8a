"""SIGTERM while `fleet.checkpoints` runs, and what is forked then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fleetx.engine.checkpoint import term


@pytest.fixture
def noticing():
    made = term.Term()
    yield made
    made.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def sleep(up):
    up.set()
    time.sleep(60)


def handle(up, got):
    def ends(*_):
        got.set()
        os._exit(3)

    signal.signal(signal.SIGTERM, ends)
    sleep(up)


def from_elsewhere(pid):
    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, 15)"], check=True)


def started(target, *more):
    context = get_context("fork")
    up, more = context.Event(), [kind(context) for kind in more]
    child = context.Process(target=target, args=(up, *more))
    child.start()
    assert up.wait(30)
    return child, *more


def test_a_forked_child_is_like_any_other(noticing):
    child, *_ = started(sleep)
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM
    assert not noticing.asked


def test_a_child_with_a_handler_of_its_own_gets_the_signal_there(noticing):
    child, got = started(handle, lambda context: context.Event())
    child.terminate()
    assert got.wait(30)
    child.join(30)
    assert child.exitcode == 3


def batches(**options):
    return iter(
        DataLoader(TensorDataset(torch.arange(100.0)), num_workers=2, multiprocessing_context="fork", **options)
    )


def test_workers_of_a_loader_obey_their_parent_only(noticing):
    found = batches()
    next(found)
    for worker in found._workers:
        from_elsewhere(worker.pid)
    assert len(list(found)) == 99
    again = batches(persistent_workers=True)
    next(again)
    again._workers[0].terminate()
    again._workers[0].join(30)
    assert again._workers[0].exitcode == 0


def test_without_checkpoints_a_child_is_like_any_other():
    child, *_ = started(sleep)
    from_elsewhere(child.pid)
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


def test_only_a_later_signal_is_a_second_one(noticing, monkeypatch):
    ended = []
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert noticing.asked
    monkeypatch.setattr(term, "_AGAIN", -1.0)
    monkeypatch.setattr(term.os, "kill", lambda *args: ended.append(args))
    noticing._notice(signal.SIGTERM, None)
    assert ended == [(os.getpid(), signal.SIGTERM)]
