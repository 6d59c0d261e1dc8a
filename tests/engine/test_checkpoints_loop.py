"""`fleet.checkpoints`: resumes by itself, saves on schedule and on SIGTERM, and leaves nothing behind."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import sys
import threading
import warnings
from functools import partial, wraps
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import CheckpointError, NumbersError, UsageError, fleet
from fleetx.comm.session import current
from fleetx.data.arrays import ArraySource
from fleetx.data.loader import Loader
from fleetx.data.sharding_plan import MaxSamples
from fleetx.engine.checkpoint import folders
from fleetx.engine.checkpoint.background import NICE
from fleetx.engine.dtensors import local
from forking import forks
from training import net

STEPS = 12


def build(declared):
    fleet.init()
    current().entries.clear()
    model = nn.Sequential(net(), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))


def train(root, declared, *, until=None, term_at=None, log=None, **options):
    """Random in every way: dropout, and batches by torch, numpy and python. `until`: stop there as if killed."""
    model, optimizer = build(declared)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    seed = fleet.worker_index()
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    losses = []
    options = {"every": 4, "steps": STEPS, "scheduler": scheduler} | options
    for step in fleet.checkpoints(root, **options):
        if step == until:
            break
        if step == term_at and fleet.worker_index() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        x = torch.randn(4, 6) + np.random.randn() + random.random()
        loss = mse_loss(model(x), torch.zeros(4, 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if log is not None:
            log.append(step)
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


def names(root):
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_broken_run_goes_on_bit_for_bit_and_keeps_the_newest(tmp_path, asynchronous):
    want_losses, want = train(tmp_path / "unbroken", {}, asynchronous=asynchronous)
    first, _ = train(tmp_path / "broken", {}, until=6, asynchronous=asynchronous)
    log = []
    rest, found = train(tmp_path / "broken", {}, keep=2, log=log, asynchronous=asynchronous)
    assert log == list(range(4, STEPS))
    assert [*first[:4], *rest] == want_losses
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert names(tmp_path / "broken") == ["step-0000000008", "step-0000000012"]


def test_a_finished_run_has_nothing_to_do(tmp_path):
    train(tmp_path, {})
    assert train(tmp_path, {})[0] == []


def stopped(root, declared):
    log = []
    try:
        train(root, declared, log=log, term_at=2, every=1000)
    except SystemExit as error:
        return error.code, log, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return "went on"


def test_sigterm_on_one_rank_saves_on_all_and_exits_with_143(ranks, tmp_path):
    want = ranks.run(train, tmp_path / "unbroken", {})
    (code, log, restored), other = ranks.run(stopped, tmp_path / "term", {})
    assert (code, log, restored) == other
    assert (code, restored) == (143, True)
    stop = len(log)
    assert 2 < stop < STEPS
    assert names(tmp_path / "term") == [f"step-{stop:010d}"]
    for (losses, found), (all_losses, whole) in zip(ranks.run(train, tmp_path / "term", {}), want, strict=True):
        assert losses == all_losses[stop:]
        torch.testing.assert_close(found, whole, rtol=0, atol=0)


def twice(root):
    """As where a scheduler signals every process, and fleetrun passes it on."""
    model, optimizer = build({})
    with fleet.checkpoints(root, every=1000) as checkpoints:
        for step in range(STEPS):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            mse_loss(model(torch.ones(4, 6)), torch.zeros(4, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.stepped()


def test_sigterm_twice_at_the_same_time_is_one(ranks, tmp_path):
    ranks.run(leaves, tmp_path)
    assert len(names(tmp_path)) == 1


def leaves(root):
    with pytest.raises(SystemExit, match="143"):
        twice(root)


def test_with_saves_the_last_step_and_gives_sigterm_back(tmp_path):
    build({})
    with fleet.checkpoints(tmp_path, every=1000, asynchronous=True) as checkpoints:
        checkpoints.stepped()
        checkpoints.stepped()
    assert names(tmp_path) == ["step-0000000002"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_with_saves_nothing_after_an_error_and_leaves_the_error_alone(tmp_path):
    def fails():
        with fleet.checkpoints(tmp_path, every=1000) as checkpoints:
            checkpoints.stepped()
            raise KeyError("mine")

    build({})
    with pytest.raises(KeyError, match="mine"):
        fails()
    assert names(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def hold(root, ready, done):
    build({})
    with fleet.checkpoints(root, every=1):
        ready.set()
        done.wait(60)


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    context = get_context(forks())
    ready, done = context.Event(), context.Event()
    first = context.Process(target=hold, args=(tmp_path, ready, done))
    first.start()
    assert ready.wait(60)
    monkeypatch.setattr(folders, "PATIENCE", 0.2)
    build({})
    with pytest.raises(UsageError, match="another run is using the checkpoints in"):
        fleet.checkpoints(tmp_path, every=1)
    assert names(tmp_path) == []
    monkeypatch.setattr(folders, "PATIENCE", 60)
    os.kill(first.pid, signal.SIGKILL)  # the kernel gives the folder back
    with fleet.checkpoints(tmp_path, every=1) as checkpoints:
        again = fleet.checkpoints(tmp_path, every=1)  # one process may have it twice
        again.close()
        checkpoints.stepped()
    first.join()
    assert names(tmp_path) == ["step-0000000001"]


def test_what_a_killed_run_left_is_removed(tmp_path):
    (tmp_path / ".step-0000000004.0123abcd.saving").mkdir()
    train(tmp_path, {}, until=2)
    assert names(tmp_path) == []


def test_a_damaged_checkpoint_is_skipped_with_a_message_and_replaced(tmp_path, caplog):
    want, _ = train(tmp_path, {})
    damaged = tmp_path / "step-0000000012" / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert fleet.latest(tmp_path).name == "step-0000000008"
    assert "step-0000000012 cannot be used" in caplog.text
    assert "rank-00000.safetensors: does not have the hash" in caplog.text
    assert train(tmp_path, {})[0] == want[8:]
    assert fleet.latest(tmp_path).name == "step-0000000012"


def test_without_checkpoints_there_is_no_latest(tmp_path):
    assert fleet.latest(tmp_path / "nowhere") is None
    assert fleet.latest(tmp_path) is None


def test_extra_and_a_position_come_back(tmp_path):
    build({})
    extra = {"best": 1.5}
    for step in fleet.checkpoints(tmp_path, every=1, steps=2, extra=extra):
        extra["best"] -= step
    build({})
    again = {"other": 1}
    checkpoints = fleet.checkpoints(tmp_path, every=1, extra=again)
    assert (checkpoints.step, again) == (2, {"best": 0.5})
    assert checkpoints.resumed == tmp_path / "step-0000000002"
    checkpoints.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, "every = 0"), ({"every": 1, "keep": -1}, "keep = -1"), ({"every": 1, "extra": 3}, "extra must be"),
     ({"every": 1, "when_busy": "panic"}, "when_busy"), ({"every": 1, "loader": [1]}, "has no state_dict")],
)  # fmt: skip
def test_what_is_meant_is_asked(tmp_path, options, message):
    build({})
    with pytest.raises(UsageError, match=message):
        fleet.checkpoints(tmp_path, **options)


def test_what_json_cannot_hold_is_said(tmp_path):
    build({})
    checkpoints = fleet.checkpoints(tmp_path, every=1, extra={"a": (1, 2)})
    with pytest.raises(UsageError, match="lists instead of tuples"):
        checkpoints.stepped()
    checkpoints.close()


def test_inside_a_merge_window_a_regular_save_waits_for_its_end(tmp_path):
    train(tmp_path, {"gradient_merge": {"k_steps": 3}}, keep=0)
    assert names(tmp_path) == ["step-0000000006", "step-0000000009", "step-0000000012"]


def test_a_failure_in_the_background_is_raised_in_a_later_step(tmp_path):
    build({})
    root = tmp_path / "root"
    checkpoints = fleet.checkpoints(root, every=1, asynchronous=True)
    root.rmdir()
    root.write_text("a file where the folder should be")
    checkpoints.stepped()
    with pytest.raises(CheckpointError, match="root"):
        checkpoints.close()
    checkpoints.close()


def test_a_save_is_left_out_while_another_is_written(tmp_path, monkeypatch):
    build({})
    checkpoints = fleet.checkpoints(tmp_path, every=1, keep=0, asynchronous=True, when_busy="skip")
    disk, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: disk.wait(60) and real(file))
    checkpoints.stepped()  # its save waits for the disk
    checkpoints.stepped()
    disk.set()
    checkpoints._saver.wait()
    checkpoints.stepped()
    checkpoints.close()
    assert names(tmp_path) == ["step-0000000001", "step-0000000003"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_a_save_in_the_background_yields_to_the_training(tmp_path, monkeypatch):
    build({})
    checkpoints = fleet.checkpoints(tmp_path, every=1, asynchronous=True)
    found, real = set(), os.fsync

    def fsync(file):
        found.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(file)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints.stepped()
    checkpoints.close()
    assert found == {max(NICE, before)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def samples(root, until, *, k_steps=1, term_inside=None):
    """Train on numbered samples, and return those that each update saw."""
    fleet.init()
    current().entries.clear()
    strategy = fleet.keep_batch(fleet.DistributedStrategy(gradient_merge={"k_steps": k_steps}), root)
    model = net()
    _, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    source = ArraySource(np.arange(48, dtype=np.float32)[:, None], np.arange(48), 0.0, 1.0)
    loader = Loader(source, MaxSamples(2), shuffle=True)
    checkpoints = fleet.checkpoints(root, every=10**6 if term_inside else 1, keep=0, loader=loader)
    seen = []
    for batch in loader:
        model(batch["image"].expand(-1, 6)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((current().find().round, sorted(batch["label"].flatten().tolist())))
        checkpoints.stepped()
        if len(seen) == until:
            if term_inside:
                checkpoints.save()
            break
    checkpoints.close()
    return seen, checkpoints.step


@pytest.mark.parametrize("inside", [False, True])
def test_with_fewer_ranks_the_merge_keeps_the_batch_and_no_sample_is_lost_or_repeated(ranks, tmp_path, inside):
    steps = 5 if inside else 4  # inside a window of two, which the others begin again
    before = ranks.run(partial(samples, k_steps=2, term_inside=inside), tmp_path, steps)
    after, last = samples(tmp_path, None, k_steps=2)
    counted = [n for rank, _ in before for _, batch in rank[:4] for n in batch]
    assert sorted(counted + [n for _, batch in after for n in batch]) == list(range(48))
    assert last == 24  # the same samples took twice as many steps
    assert len(after) % 4 == 0


def test_the_newest_has_most_updates_even_if_its_steps_are_fewer(tmp_path):
    """With shorter merge windows the same updates take fewer steps."""
    train(tmp_path, {"gradient_merge": {"k_steps": 4}}, steps=8)
    log = []
    train(tmp_path, {"gradient_merge": {"k_steps": 2}}, steps=6, every=2, keep=1, log=log)
    assert log == [4, 5]  # after two updates, which would have been four steps
    assert names(tmp_path) == ["step-0000000006"]
    assert fleet.latest(tmp_path).name == "step-0000000006"


# --- numbers that go wrong ------------------------------------------------------------------------
def quietly(job):
    @wraps(job)
    def run(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return job(*args, **kwargs)

    return run


@quietly
def poisoned(root, declared, bad, *, by_hand=False):
    """12 steps that save every 4; the samples of some steps are not numbers on rank 0. `by_hand`: what must happen."""
    fleet.init(checks=fleet.Checks(on_nonfinite="restore", in_a_row=2))
    current().entries.clear()
    current().checks = fleet.Checks(on_nonfinite="restore", in_a_row=2)
    model = nn.Sequential(net(), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))
    torch.manual_seed(fleet.worker_index())
    checkpoints = fleet.checkpoints(root, every=4, steps=STEPS, scheduler=scheduler)
    for step in checkpoints:
        x = torch.randn(4, 6)
        if step in bad and fleet.worker_index() == 0:
            x = x * math.nan
        loss = mse_loss(model(x), torch.zeros(4, 3))
        if step not in bad or not by_hand:
            loss.backward()
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        if by_hand and step == bad[-1]:
            random = torch.get_rng_state()
            fleet.load(root / "step-0000000004", scheduler=scheduler)
            torch.set_rng_state(random)
    assert by_hand or checkpoints.restored is not None
    return {k: local(v).clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("declared", [{}, {"sharding": True}], ids=["plain", "sharding"])
def test_after_numbers_that_went_wrong_the_last_checkpoint_is_restored_and_the_samples_go_on(ranks, tmp_path, declared):
    found = ranks.run(poisoned, tmp_path / "a", declared, [5, 6])
    wanted = ranks.run(partial(poisoned, by_hand=True), tmp_path / "b", declared, [5, 6])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_where_ranks_update_on_their_own_all_of_them_go_back(ranks, tmp_path):
    first, second = ranks.run(poisoned, tmp_path, {"localsgd": {"k_steps": 1}}, [5, 6])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(value.isfinite().all() for value in first.values())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1, 2], "there is no checkpoint to restore yet"),
        ([4, 5, 6, 7], "step-0000000004 was restored, but training fails again from there"),
        ([5, 6, 7, 8], "step-0000000004 was restored, but training fails again from there"),  # although 8 is saved
    ],
)
def test_what_cannot_be_restored_stops_the_training(tmp_path, bad, message):
    with pytest.raises(NumbersError, match=message):
        poisoned(tmp_path, {}, bad)
