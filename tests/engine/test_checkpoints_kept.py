"""`fleet.checkpoints` never loses the last good checkpoint, and says what it cannot use."""

from __future__ import annotations

import shutil
import threading

from fleetx import fleet
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
                self.checkpoints._saver._thread.join()
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
