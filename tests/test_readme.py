"""What the README and the guide show is what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fleetx import DistributedStrategy, StrategyError, fleet

ROOT = Path(__file__).parent.parent
README, GUIDE = (ROOT / "README.md").read_text(), (ROOT / "docs/guide.md").read_text()


def test_the_explanation_is_what_explain_prints(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    strategy = DistributedStrategy(amp={"dtype": "bfloat16"}, gradient_merge={"k_steps": 4}, clip=True)
    shown = re.search(r"```\n(requested: .*?)```", GUIDE, re.S).group(1)
    printed = str(fleet.explain(strategy)).rstrip()
    assert shown.rstrip() == printed, "copy what fleet.explain now prints to docs/guide.md"


def test_the_explanation_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(fleet.explain(DistributedStrategy(clip=True))).splitlines())) <= 80


def test_the_readme_is_short():
    assert len(README.splitlines()) < 200, "shorten README.md to less than 200 lines"


@pytest.mark.parametrize(
    ("page", "declare"),
    [
        (README, lambda: DistributedStrategy(ampp=True, gradient_merge={"k_steps": 0})),
        (GUIDE, lambda: DistributedStrategy(
            recompute_configs={"checkpoints": ["a"]}, dgc=True, fp16_allreduce=True).plan()),
    ],
    ids=["README", "guide"],
)  # fmt: skip
def test_the_errors_are_those_of_the_strategy(page, declare):
    with pytest.raises(StrategyError) as caught:
        declare()
    shown = re.search(r"^StrategyError: (.*?)\n```", page, re.M | re.S).group(1)
    assert shown == str(caught.value), "copy the error as it is now to the page"


def test_the_loop_runs_as_it_is_written():
    code = re.search(r"```python\n(from fleetx.*?)```", README, re.S).group(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    loader = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(4)]
    exec(code, {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": nn.functional.mse_loss})
    assert fleet.updated
    assert not torch.equal(model.weight, before)
