"""`fleetx batch`: branches of different batches from one checkpoint, and what follows from their losses."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fleetx import UsageError, fleet
from fleetx.cli import main
from fleetx.comm.session import current, reset
from fleetx.planner import branches, critical_batch
from fleetx.planner.critical_batch import BranchResult

GIVEN = {
    "merges": "1,2,4", "rates": "1", "rule": "linear", "steps": 40, "limit": 2.0, "minutes": None, "plot": None,
    "nproc_per_node": None, "device": None,
}  # fmt: skip


# --- from losses to a recommendation --------------------------------------------------------------
def made(batch, steps_to_target, *, length=4000):
    """The loss falls to 1 in the step named, and stays there."""
    losses = [2.0] * (steps_to_target - 1) + [1.0] * (length - steps_to_target + 1)
    return BranchResult(batch // 16, 1.0, losses, feed=16, replicas=1, merged=batch // 16, lr=0.1)


def test_the_fit_finds_the_critical_batch_of_the_formula():
    critical, least = 256, 50
    rows = [made(b, round(least * (1 + critical / b)) * (b // 16)) for b in (16, 32, 64, 128, 256, 512, 1024)]
    found = critical_batch.study(rows, steps=900, window=1)
    assert found.target == 1.0
    assert found.critical == pytest.approx(critical, rel=0.02)
    assert found.least_updates == pytest.approx(least, rel=0.02)
    assert critical_batch.recommended(found).branch.batch == 256
    assert "recommended: batch 256: k_steps = 16 of gradient_merge, lr = 0.1" in critical_batch.text(found)


def test_where_larger_batches_save_nothing_the_smallest_samples_decide():
    rows = [made(b, 100 * (b // 16)) for b in (16, 32, 64)]  # the same number of updates
    found = critical_batch.study(rows, steps=900, window=1)
    assert found.critical is None
    assert critical_batch.recommended(found).branch.batch == 32  # at most twice the samples
    assert "no critical batch" in critical_batch.text(found)


def test_a_batch_that_does_not_reach_the_loss_is_said_to():
    rows = [made(16, 100), made(32, 120), made(64, 160), made(128, 5000, length=4000)]
    rows[-1].losses[:] = [2.0] * 4000
    text = critical_batch.text(critical_batch.study(rows, steps=900, window=1))
    assert "not reached" in text


def test_of_several_rates_the_best_counts():
    slow, fast = made(32, 300), BranchResult(2, 2.0, made(32, 120).losses, 16, 1, 2, 0.1)
    found = critical_batch.study([made(16, 100), slow, fast], steps=900, window=1)
    assert found.rows[1].branch is fast
    assert found.rows[1].updates == 60
    assert found.rows[1].samples == 120 * 16


def test_losses_are_averaged_over_a_window():
    assert critical_batch.trailing([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


# --- branches -------------------------------------------------------------------------------------
class Script:
    """A training script, run in this process."""

    def __init__(self, root, *, sees_loss=True, ends=None):
        self.root, self.sees_loss, self.ends = root, sees_loss, ends
        self.runs = []

    def __call__(self, arguments):
        reset()
        fleet.init()
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
        checkpoints = fleet.checkpoints(self.root, every=1000)
        begin = checkpoints.step
        try:
            for step in checkpoints:
                if self.ends is not None and step - begin >= self.ends:
                    checkpoints.close()
                    return 0
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(4, 8, generator=generator)
                y = x.sum(1, keepdim=True) + torch.randn(4, 1, generator=generator)
                loss = (model(x) - y).square().mean()
                fleet.backward(loss) if self.sees_loss else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except SystemExit as end:
            self.runs.append(
                (begin, current().find(model).window(), {k: v.clone() for k, v in model.state_dict().items()})
            )
            return int(end.code or 0)
        return 0


def measured(script, tmp_path, **changes):
    said = []
    given = GIVEN | {"output": tmp_path / "batch.json"} | changes
    return branches.measure("train.py", (), given, script, said.append), said


def test_branches_train_with_more_merged_steps_and_keep_only_their_losses(tmp_path):
    script = Script(tmp_path / "run")
    text, said = measured(script, tmp_path)
    assert [(begin, window) for begin, window, _ in script.runs] == [(0, 2), (0, 4), (0, 8)]
    assert len(said) == 3
    assert "recommended: batch" in text
    assert not (tmp_path / "run").exists()
    kept = json.loads((tmp_path / "batch.json").read_text())
    assert [len(b["losses"]) for b in kept["branches"]] == [40, 80, 80]
    assert [b["rate"] for b in kept["branches"]] == [1, 2, 4]
    assert {b["feed"] for b in kept["branches"]} == {4}


def test_branches_begin_at_the_newest_checkpoint(tmp_path):
    reset()
    fleet.init()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    fleet.save(tmp_path / "run" / "step-0000000006", step=6)
    script = Script(tmp_path / "run")
    measured(script, tmp_path, merges="1,2")
    assert [begin for begin, *_ in script.runs] == [6, 6]


def test_a_branch_trains_with_its_batch_and_its_rate(tmp_path):
    script = Script(tmp_path / "run")
    measured(script, tmp_path, merges="1,2", steps=8, limit=1.0)
    reset()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * 2)
    for first in (0, 4):
        for step in range(first, first + 4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 8, generator=generator)
            y = x.sum(1, keepdim=True) + torch.randn(4, 1, generator=generator)
            ((model(x) - y).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(script.runs[1][2], model.state_dict())


def test_the_same_command_continues_where_it_ended(tmp_path):
    script = Script(tmp_path / "run")
    measured(script, tmp_path, merges="1,2")
    text, said = measured(script, tmp_path, merges="1,2,4")
    assert len(script.runs) == 3
    assert len(said) == 1
    assert measured(script, tmp_path, merges="1,2,4") == (text, [])
    with pytest.raises(UsageError, match="was measured with a different --rule"):
        measured(script, tmp_path, rule="sqrt")


def test_a_time_limit_ends_between_branches(tmp_path):
    script = Script(tmp_path / "run")
    measured(script, tmp_path, merges="1,2")
    _, said = measured(script, tmp_path, minutes=0)
    assert len(script.runs) == 2
    assert "1 branch left: repeat the command" in said[-1]


def test_a_picture_can_be_made(tmp_path):
    pytest.importorskip("matplotlib")
    measured(Script(tmp_path / "run"), tmp_path, plot=tmp_path / "batch.png")
    assert (tmp_path / "batch.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ({"sees_loss": False}, {}, "fleetx batch needs the loss"),
        ({"ends": 5}, {}, "ended before 40 steps"),
        ({}, {"merges": "2,4"}, "must include 1"),
        ({}, {"merges": "1,x"}, "numbers above 0"),
    ],
)
def test_what_cannot_work_is_an_error(script, changes, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        measured(Script(tmp_path / "run", **script), tmp_path, **changes)


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "batch.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a file of"):
        measured(Script(tmp_path / "run"), tmp_path)
    assert (tmp_path / "batch.json").read_text() == "[]"


def test_help_says_what_it_does():
    result = CliRunner().invoke(main, ["batch", "--help"])
    assert result.exit_code == 0
    assert "how large the batch of SCRIPT should be" in " ".join(result.output.split())
