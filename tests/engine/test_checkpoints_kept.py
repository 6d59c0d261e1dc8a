"""`fleet.checkpoints` never loses the last good checkpoint, and says what it cannot use."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import warnings
from concurrent.futures import wait

import pytest
import torch

from fleetx import CheckpointError, fleet
from fleetx.comm.session import current
from fleetx.engine.checkpoint import background
from training import batches, net, sgd, zero_last


def build(**declared):
    fleet.init()
    current().entries.clear()
    model = net()
    return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))


def run(root, steps, **options):
    """Steps that save each time; returns those that ran."""
    model, optimizer = build()
    x, y = batches(1)[0]
    done = []
    for step in fleet.checkpoints(root, **{"every": 1, "steps": steps} | options):
        zero_last(model, optimizer, x, y)
        done.append(step)
    return done


def damage(folder):
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def names(root):
    return sorted(p.name for p in root.iterdir())


class Position:
    """A loader. While step 3 is being saved, that of step 2 goes on in the background and ends."""

    def __init__(self):
        self.go, self.checkpoints, self.asked, self.seen = threading.Event(), None, 0, []

    def state_dict(self):
        if self.checkpoints is not None and self.checkpoints.step == 3:
            self.asked += 1
            if self.asked == 2:  # first for the merge window, then for the save
                self.go.set()
                wait([self.checkpoints._saver._saving])
                self.seen = names(self.checkpoints._root)
        return {}

    def load_state_dict(self, state):
        pass


def test_a_damaged_checkpoint_does_not_push_out_a_good_one_while_it_waits_to_be_replaced(tmp_path, monkeypatch):
    run(tmp_path, 3, keep=0, loader=Position())
    damage(tmp_path / "step-0000000003")
    shutil.rmtree(tmp_path / "step-0000000002")
    position = Position()
    write = background.write

    def held_back(*args, **kwargs):
        position.go.wait()
        return write(*args, **kwargs)

    monkeypatch.setattr(background, "write", held_back)
    build()
    position.checkpoints = fleet.checkpoints(tmp_path, every=1, keep=1, asynchronous=True, loader=position)
    assert position.checkpoints.step == 1
    position.checkpoints.stepped()
    position.checkpoints.stepped()
    position.checkpoints.close()
    assert "step-0000000002" in position.seen
    assert fleet.latest(tmp_path).name == "step-0000000003"


# --- parameters that are not finite -------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_poisoned_model_is_neither_saved_nor_lets_good_checkpoints_go(tmp_path, caplog, asynchronous):
    model, _ = build()
    model.register_buffer("mask", torch.tensor([-math.inf]))  # meant
    checkpoints = fleet.checkpoints(tmp_path, every=1, keep=1, asynchronous=asynchronous)
    checkpoints.stepped()
    model[2].weight.data[1, 1] = math.nan
    with caplog.at_level(logging.WARNING):
        checkpoints.stepped()
        checkpoints.close()
    assert names(tmp_path) == ["step-0000000001"]
    assert "step-0000000002 is not saved, and older checkpoints are kept: parameter '2.weight' is not f" in caplog.text


def poisoned_on_one(root):
    model, _ = build()
    checkpoints = fleet.checkpoints(root, every=1)
    if fleet.worker_index() == 1:
        model[2].weight.data[1, 1] = math.inf
    checkpoints.stepped()
    checkpoints.close()


def test_one_poisoned_rank_is_enough(ranks, tmp_path):
    ranks.run(poisoned_on_one, tmp_path)
    assert names(tmp_path) == []


def test_fleet_save_saves_a_poisoned_model_with_a_warning(tmp_path):
    model, _ = build()
    model[0].bias.data[0] = math.inf
    with pytest.warns(UserWarning, match=r"parameter '0.bias' is not finite"):
        fleet.save(tmp_path / "c")
    assert names(tmp_path) == ["c"]


def test_a_poisoned_model_goes_back_to_a_checkpoint_that_is_finite(tmp_path):
    fleet.init(checks=fleet.Checks(on_nonfinite="restore", in_a_row=2))
    current().entries.clear()
    current().checks = fleet.Checks(on_nonfinite="restore", in_a_row=2)
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    x, y = batches(1)[0]
    checkpoints = fleet.checkpoints(tmp_path, every=4, steps=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in checkpoints:
            if step == 7:
                model[0].weight.data.fill_(math.nan)  # step 8 is due with it
            zero_last(model, optimizer, x, y)
    assert checkpoints.restored.name == "step-0000000004"
    assert all(p.isfinite().all() for p in model.parameters())


# --- what cannot be used ------------------------------------------------------------------------------
def test_if_no_checkpoint_is_good_training_does_not_start_from_the_beginning(tmp_path, caplog):
    run(tmp_path, 3, keep=0)
    damage(tmp_path / "step-0000000003")
    (tmp_path / "step-0000000002" / "manifest.json").write_text("{}")
    (tmp_path / "step-0000000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="To start from the beginning, remove this folder") as caught:
        run(tmp_path, 3)
    assert all(f"step-000000000{step}" in str(caught.value) for step in (1, 2, 3))
    assert "step-0000000003 cannot be used, and there is no older checkpoint" in caplog.text
    assert len(names(tmp_path)) == 3


def started_apart(root):
    build()
    try:
        fleet.checkpoints(root / f"node-{fleet.worker_index()}", every=1)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_root_that_the_ranks_do_not_share_is_named_at_the_start(ranks, tmp_path):
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
    for said in ranks.run(started_apart, tmp_path):
        assert "rank 1 on " in said
        assert "does not see the folder that rank 0 made" in said
    assert names(tmp_path / "node-0") == []


def test_strange_things_in_the_root_are_left_alone(tmp_path):
    build()
    with fleet.checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.stepped()
    for name in ("step-0000000009", ".x.replaced", "..replaced", ".replaced", "other"):
        (tmp_path / name).mkdir()
    for name in ("manifest.json", "manifest.sha256"):
        (tmp_path / "other" / name).mkdir()
    (tmp_path / "step-0000000008").write_text("a file")
    (tmp_path / "step-0000000006").symlink_to("/etc")
    os.mkfifo(tmp_path / "step-0000000007")
    before = sorted(os.listdir(tmp_path))
    build()
    with fleet.checkpoints(tmp_path, every=1, keep=1) as checkpoints:
        assert checkpoints.resumed.name == "step-0000000001"
        checkpoints.stepped()
    wanted = sorted({*before, "step-0000000002"} - {"step-0000000001"})
    assert sorted(os.listdir(tmp_path)) == wanted
