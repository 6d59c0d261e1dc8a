"""docs/integrations.md: its scripts run, before and after, and what it prints is true."""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from guests import SAME, as_launched, whole

from fleetx import fleet
from fleetx.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
DIFFS = dict(re.findall(r"^## ([^\n]*)\n\n```diff\n(.*?)^```", PAGE, re.M | re.S))
NEEDS = {"transformers' Trainer": "accelerate", "Lightning Fabric": "lightning"}


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.S)[1]


def side(diff, sign):
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", ""))


def run(source, folder):
    """Run a script in float64, with task.py beside it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        torch.set_default_dtype(torch.float64)
        try:
            task = types.ModuleType("task")
            exec(block("python"), task.__dict__)
            patch.setitem(sys.modules, "task", task)
            space = {"__name__": "__main__"}
            exec(compile(source, "script.py", "exec"), space)
        finally:
            torch.set_default_dtype(torch.float32)
    return whole(getattr(space["model"], "module", space["model"]))


def after(source, folder):
    found = run(source, folder)
    return found, fleet.worker_num()


def test_the_page_has_three_scripts():
    assert list(DIFFS) == ["A plain loop", "transformers' Trainer", "Lightning Fabric"]


@pytest.mark.parametrize("name", DIFFS)
def test_a_script_is_changed_in_five_lines_and_trains_the_same(ranks, tmp_path, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    diff = DIFFS[name]
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 5
    before = side(diff, "-").replace('devices=2, strategy="ddp"', "devices=1")
    merged = 1 if "gradient_accumulation_steps" in diff else 2  # one process feeds what two ranks and two steps did
    before = before.replace("batch_size=8", f"batch_size={8 * 2 * merged}")
    expected = run(before, tmp_path)
    for found, workers in ranks.run(as_launched, after, side(diff, "+"), str(tmp_path)):
        assert workers == 2
        torch.testing.assert_close(found, expected, **SAME)


def test_the_import_on_the_page_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(block("json"))
    done = CliRunner().invoke(main, ["import", "ds_config.json"])
    shown = re.search(r"\$ fleetx import ds_config.json\n(.*?)```", PAGE, re.S)[1]
    assert done.output == shown
