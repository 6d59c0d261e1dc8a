"""What the documentation shows runs, its links lead somewhere, and its figures are those of docs/results."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks.frame.pages import CannotWriteError, filled
from benchmarks.pictures.__main__ import drawn
from torch import nn
from torch.utils.data import TensorDataset

import fleetx
import forked_python
from fleetx import cli, fleet
from fleetx.launch.options import _command as fleetrun
from page_blocks import ROOT, blocks

PAGES = [
    "README.md",
    "README.zh.md",
    *sorted(
        str(p.relative_to(ROOT))
        for folder in ("docs", "docs/parts", "docs/design")
        for p in (ROOT / folder).glob("*.md")
    ),
]  # fmt: skip  the commands of docs/results take minutes to hours: their pages are what they wrote
EVERY = [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md", *sorted(
    str(p.relative_to(ROOT)) for p in (ROOT / "docs/results").glob("*.md"))]  # fmt: skip
BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [b for b in BLOCKS if b.kind == "python" and not b.not_run and not b.file]
SHELL = [b for b in BLOCKS if b.kind == "shell"]
ELSEWHERE = {"docs/integrations.md", "docs/coming_from_lightning.md"}  # tests/integrations runs their scripts
SHORTER = {"steps=10_000": "steps=4", "every=100": "every=2"}
TRAINING = """
model, optimizer = fleet.distribute(model, optimizer, strategy)
for x, y in [batch for _ in range(64) for batch in loader]:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""  # what a line of three dots stands for


# --- Python ----------------------------------------------------------------------------------------
class Layered(nn.Module):
    """Has the names that the pages about named modules use."""

    def __init__(self):
        super().__init__()
        self.bert = nn.Module()
        self.bert.encoder = nn.Module()
        self.bert.encoder.layer = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.bert.encoder.layer:
            x = torch.tanh(layer(x))
        return self.head(x)


def given(page):
    """What a page expects its reader to have."""
    torch.manual_seed(0)
    layered = page == "docs/parts/pipeline.md"
    model = (
        Layered()
        if layered
        else nn.Sequential(OrderedDict(fc=nn.Linear(4, 8), norm=nn.LayerNorm(8), out=nn.Linear(8, 2)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    x, y = data.tensors[0][:16], data.tensors[1][:16]
    loader = [(x, y)] * 4 if layered else fleet.loader(data, 8)
    out = torch.randn(16, 2, requires_grad=True)
    return {
        "torch": torch, "nn": nn, "itertools": itertools, "fleet": fleet, "fleetx": fleetx, "model": model,
        "optimizer": optimizer, "data": data, "loader": loader, "x": x, "y": y, "loss_fn": nn.functional.mse_loss,
        "strategy": fleet.DistributedStrategy(), "out": out, "loss": nn.functional.mse_loss(out, y),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "evaluate": lambda model: 0.5,
        "MyModel": lambda: nn.Linear(4, 2),
    }  # fmt: skip


def as_written(page, text, folder):
    os.chdir(folder)
    try:
        fleet.init()
        space = given(page)
        if "metrics.sum" in text:
            space["y"] = torch.zeros(16, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a page leaves out, such as to flush, may warn
            exec(compile(text, page, "exec"), space)
    except fleetx.FleetxError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(ROOT)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in PYTHON if b.page not in ELSEWHERE], ids=str)
def test_python_runs_as_it_is_written_on_two_ranks(ranks, tmp_path, block):
    text = block.text.replace("\n...\n", TRAINING)
    if "fleet.checkpoints(" in text and "fleet.distribute(" not in text:  # a page shows the line once
        text = "model, optimizer = fleet.distribute(model, optimizer, strategy)\n" + text
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    fleet.DistributedStrategy(amp=True).save(tmp_path / "strategy.yaml")
    for raised in ranks.run(as_written, block.page, text, str(tmp_path)):
        assert raised == block.error


# --- commands --------------------------------------------------------------------------------------
def commands(block):
    return re.findall(r"^(?:\$ )?((?:fleetrun|fleetx) .*)", block.text, re.M)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind in ("", "shell") and commands(b)], ids=str)
def test_commands_have_options_that_exist(block, tmp_path, monkeypatch):
    """Also those of blocks that cannot run here."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "first.py", "ds_config.json", "default_config.yaml", "strategy.prototxt", "strategy.yaml"):
        Path(name).touch()
    Path("runs/first").mkdir(parents=True)
    for line in commands(block):
        name, *arguments = shlex.split(line, comments=True)
        command = fleetrun if name == "fleetrun" else cli.main.commands[arguments.pop(0)]
        command.make_context(name, arguments)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shell_blocks_run_as_they_are_written(tmp_path):
    """One after the other in one folder, with the files that the pages tell the reader to save."""
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.kind == "json":
            (tmp_path / "ds_config.json").write_text(block.text)
    (tmp_path / "train.py").write_text("from fleetx import fleet\nfleet.init()\n")
    for name, module in (("fleetrun", "fleetx.launch"), ("fleetx", "fleetx.cli")):
        command = tmp_path / "bin" / name  # does not import torch again
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {shlex.join(forked_python.command())} -m {module} "$@"\n')
        command.chmod(0o755)
    paths = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = [b for b in SHELL if not b.not_run]
    for block in sorted(ran, key=lambda b: b.page != "docs/start.md"):  # others look at what its script has written
        done = subprocess.run(
            ["bash", "-e", "-c", block.text], cwd=tmp_path, env=os.environ | {"PATH": paths}, text=True, timeout=280,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}: {done.stdout}"
        if block.page == "docs/start.md" and "fleetrun" in block.text:
            assert re.findall(r"epoch (\d): accuracy \d\d\.\d%", done.stdout) == list("12345")
    assert len(ran) >= 4
    assert (tmp_path / "runs/first/report.html").exists()


def test_a_block_that_no_test_runs_says_why():
    for block in BLOCKS:
        assert not block.not_run or len(block.not_run) > 10, block
        if block.kind == "diff":
            assert block.page in ELSEWHERE or block.page.startswith("docs/coming_from_"), block


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/coming_from_accelerate.md", "docs/coming_from_deepspeed.md"])
def test_a_script_after_its_change_runs(ranks, tmp_path, page):
    """The right side of the diff."""
    (diff,) = [b.text for b in blocks(page) if b.kind == "diff"]
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    fleet.DistributedStrategy(amp={"dtype": "bfloat16"}, sharding={"stage": 2}).save(tmp_path / "strategy.yaml")
    assert ranks.run(as_written, page, after, str(tmp_path)) == ["", ""]


# --- links, figures, pictures -----------------------------------------------------------------------
def anchors(path):
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", t)).strip().lower().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", EVERY)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if target.startswith("http"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page} links to {target}#{anchor}"


def test_every_page_is_in_the_contents_of_the_site():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    flat = re.findall(r"[\w./]+\.md", json.dumps(nav))
    assert len(flat) == len(set(flat)), "mkdocs.yml lists a page twice"
    sys.path.insert(0, str(ROOT / "docs"))
    import site_pages

    expected = {site_pages.place(page) for page in EVERY} | {f"api/{name}.md" for name in site_pages.API}
    assert not expected - set(flat), f"add to `nav` in mkdocs.yml: {sorted(expected - set(flat))}"
    assert not set(flat) - expected, f"write, or remove from `nav` in mkdocs.yml: {sorted(set(flat) - expected)}"


def test_the_figures_of_the_decision_table_are_those_of_the_pages_it_links_to():
    page = ROOT / "docs/which_strategy.md"
    rows = [
        line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ") and line.count("|") == 5
    ]
    checked = 0
    for row in rows[1:]:
        if len(row) < 4:
            continue
        cell = row[2] + " " + row[3]
        linked = re.findall(r"\]\((results/[^)#]+|parts/[^)#]+)", row[2])
        if not linked:
            continue
        text = (page.parent / linked[0]).read_text()
        for number in re.findall(r"\d[\d,]*\.?\d*", re.sub(r"\[[^\]]*\]\([^)]*\)", "", cell).replace("1F1B", "")):
            number = number.rstrip(",.")
            if "." in number or len(number) > 1:
                assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", text), f"{number} is not in {linked[0]}"
                checked += 1
    assert checked > 30


@pytest.mark.parametrize("study", ["recompute", "slow_network", "auto"])
def test_the_tables_of_a_study_are_those_of_its_committed_results(study):
    report = importlib.import_module(f"benchmarks.{study}.report")
    page = (ROOT / f"docs/results/{study}.md").read_text()
    data = json.loads((ROOT / f"docs/results/{study}.json").read_text())
    tables = {title: report.as_markdown(list(lines)) for title, lines in report.tables(data)}
    assert page.count("<!-- table: ") >= 6
    assert filled(page, tables) == page
    with pytest.raises(CannotWriteError, match="which these results do not have"):
        filled(page, {})


def test_the_chinese_readme_has_the_code_of_the_english_one_and_links_to_the_same_cards():
    english, chinese = ([(b.kind, b.text) for b in blocks(page)] for page in ("README.md", "README.zh.md"))
    assert chinese == english, "README.zh.md must have the same code blocks as README.md"
    cards = [
        set(re.findall(r"docs/parts/\w+\.md", (ROOT / page).read_text())) for page in ("README.md", "README.zh.md")
    ]
    assert cards[0] == cards[1], f"linked in only one of README.md and README.zh.md: {sorted(cards[0] ^ cards[1])}"


TIMED = (
    "auto chaos checkpoints large_batch loaders optimizers overhead paddle_agreement pipeline recompute slow_network"
)


@pytest.mark.parametrize("name", TIMED.split())
def test_a_page_of_figures_names_machine_command_and_date(name):
    text = (ROOT / f"docs/results/{name}.md").read_text()
    assert "torch 2." in text
    assert re.search(r"Machine: |EPYC|Xeon", text)
    assert re.search(r"python -m benchmarks|make bench", text)
    assert re.search(r"20\d\d-\d\d-\d\d", text)


def test_pictures_are_drawn_from_the_committed_figures():
    for name, content in drawn().items():
        assert (ROOT / "docs/results" / name).read_text() == content, "run python -m benchmarks.pictures"
