"""Bits that flip, and files that are cut off, missing, or belong to another checkpoint.

One process checks them with `fleet.load`, as a resume does. A damaged checkpoint must raise CheckpointError and leave
the training as it was; a checkpoint that loads must have exactly the values that were saved.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.training import reference

KINDS = ("cut off", "emptied", "longer", "missing", "ranks swapped", "of another step", "all but one of another step",
         "manifest of another step", "names swapped", "zeros")  # fmt: skip


class Target:
    """A training in this process, and checkpoints of two ranks to load into it."""

    def __init__(self, folder: Path):
        import torch
        from torch import nn

        from fleetx import fleet

        self._root = folder / "made"
        made = reference(self._root, kind="merge", steps=20, every=10, width=32)
        assert len(made) == 2
        self.checkpoints = sorted((self._root / "run").glob("step-*"))
        self.work = folder / "work"
        torch.manual_seed(1)
        fleet.init()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32),
                                   nn.Tanh(), nn.Linear(32, 4))  # fmt: skip
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        strategy = fleet.DistributedStrategy(gradient_merge={"k_steps": 2}, clip={"clip_norm": 1.0})
        self.model, self.optimizer = fleet.distribute(self.model, optimizer, strategy)
        self._fresh = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.good = {}
        for checkpoint in self.checkpoints:
            assert self.load(checkpoint) is None
            self.good[checkpoint.name] = self.digest()
        assert len(set(self.good.values())) == 2, "the two checkpoints must differ"

    def load(self, folder: Path) -> str | None:
        """None, or the error in one line."""
        from fleetx import fleet
        from fleetx.errors import CheckpointError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the scheduler and the loader, which are not compared
                fleet.load(folder)
        except CheckpointError as error:
            return str(error)
        return None

    def digest(self) -> str:
        import torch

        sha = hashlib.sha256()
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        for t in [*self.model.state_dict().values(), *states]:
            sha.update(t.detach().numpy().tobytes())
        return sha.hexdigest()

    def restore(self) -> Path:
        """A fresh copy of the newer checkpoint."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.checkpoints[1], self.work)
        return self.work

    def close(self) -> None:
        from fleetx import fleet

        fleet.release(self.model)


def flips(target: Target, *, first: int, count: int) -> Iterator[tuple[str, str]]:
    """(file, outcome) of flip number `first` and following; each flips one bit of one byte."""
    work = target.restore()
    files = sorted(p for p in work.iterdir() if p.is_file())
    weights = [p.stat().st_size ** 0.5 for p in files]  # small files in their share
    for number in range(first, first + count):
        chance = random.Random(f"flip {number}")
        (path,) = chance.choices(files, weights)
        place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        _flip(path, place, bit)
        outcome = _outcome(target, work, path.name)
        _flip(path, place, bit)
        yield path.name, outcome
    assert target.load(work) is None, "the last flip was not undone"


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ bit]))


def damages(target: Target, *, first: int, count: int) -> Iterator[tuple[str, str]]:
    """(kind, outcome) of damage number `first` and following."""
    for number in range(first, first + count):
        chance = random.Random(f"damage {number}")
        kind = KINDS[number % len(KINDS)]
        work = target.restore()
        _damage(kind, work, target.checkpoints[0], chance)
        yield kind, _outcome(target, work, "")


def _damage(kind: str, work: Path, other: Path, chance: random.Random) -> None:
    files = sorted(p for p in work.iterdir() if p.is_file())
    path = chance.choice(files)
    size = path.stat().st_size
    if kind in ("cut off", "emptied"):
        with path.open("r+b") as file:
            file.truncate(0 if kind == "emptied" else chance.choice([size - 1, chance.randrange(size)]))
    elif kind == "longer":
        with path.open("ab") as file:
            file.write(chance.randbytes(chance.randrange(1, 100)))
    elif kind == "zeros":  # what a power cut leaves of a file that was not on disk
        path.write_bytes(bytes(size))
    elif kind == "missing":
        path.unlink()
    elif kind == "ranks swapped":
        suffix = chance.choice(["json", "safetensors"])
        _swap(*(work / f"rank-0000{rank}.{suffix}" for rank in (0, 1)))
    elif kind == "names swapped":
        _swap(path, chance.choice([p for p in files if p.name != path.name]))
    elif kind == "of another step":
        path = chance.choice([p for p in files if p.read_bytes() != (other / p.name).read_bytes()])
        shutil.copy(other / path.name, path)
    elif kind == "all but one of another step":
        keep = chance.choice([p for p in files if p.read_bytes() != (other / p.name).read_bytes()])
        for p in files:
            if p.name != keep.name:
                shutil.copy(other / p.name, p)
    elif kind == "manifest of another step":
        for name in ("manifest.json", "manifest.sha256"):
            shutil.copy(other / name, work / name)


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _outcome(target: Target, work: Path, name: str) -> str:
    before = target.digest()
    error = target.load(work)
    if error is None:
        return "harmless" if target.digest() in target.good.values() else "loaded"
    if target.digest() != before:
        return "changed the training"
    return "refused" if name in error and "\n" not in error else "refused without naming the file"


def fallbacks(target: Target, *, first: int, count: int) -> Iterator[str]:
    """Damage the newest of two checkpoints: does `fleet.latest` return the older one?"""
    from fleetx import fleet

    root = target.work.parent / "root"
    for number in range(first, first + count):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for checkpoint in target.checkpoints:
            shutil.copytree(checkpoint, root / checkpoint.name)
        chance = random.Random(f"fallback {number}")
        kind = KINDS[number % len(KINDS)]
        _damage(kind, root / target.checkpoints[1].name, target.checkpoints[0], chance)
        found = fleet.latest(root)
        yield "older" if found == root / target.checkpoints[0].name else f"{kind}: {found}"


def tally(outcomes: Iterator[tuple[str, str]], table: dict[str, dict[str, int]], tell: Callable[[int], None]) -> None:
    """Count outcomes by kind into `table`."""
    for number, (kind, outcome) in enumerate(outcomes, 1):
        row: Any = Counter(table.get(kind, {}))
        row[outcome] += 1
        table[kind] = dict(row)
        tell(number)
