"""A benchmark is a marked function in a file of the folder; `overhead.py` with `plain` in it is `overhead.plain`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.frame.interleave import Run, Sides

Function = Callable[[Run], Sides]


class CannotRunError(Exception):
    """This machine or this tree lacks what the benchmark needs; the message says what."""


class UnknownBenchmarkError(LookupError):
    """A name that no benchmark has; the message names the nearest."""


@dataclass(frozen=True)
class Benchmark:
    """What a function declares about itself, and the function."""

    function: Function
    ours: str
    theirs: str
    goal: float | None
    budget: float | None
    ranks: int
    rounds: int
    starts: int
    seconds: float
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    @property
    def meaning(self) -> str:
        return (self.function.__doc__ or "").strip().split("\n")[0]


def benchmark(
    *,
    ours: str,
    theirs: str,
    goal: float | None = None,
    budget: float | None = None,
    ranks: int = 1,
    rounds: int = 40,
    starts: int = 4,
    seconds: float = 600,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Declare a function to be a benchmark: it measures both sides and returns `Sides`; the ratio is ours / theirs.

    `goal` is the most that the ratio may be, or `budget` the most seconds that a step of ours may take longer; without
    either the ratio is only reported. The function is called in `ranks` fresh
    processes of `threads` threads each, in one gloo group if there are several, and killed after `seconds`. They
    inherit the environment; `environment` is put on top of it, for what is read when a process begins. The rounds are
    divided among several `starts` of these processes: where things lie in memory differs from start to start, and
    favours one side by a percent or so for as long as its process lives.
    """

    def mark(function: Function) -> Function:
        function.benchmark = Benchmark(  # type: ignore[attr-defined]
            function, ours=ours, theirs=theirs, goal=goal, budget=budget, ranks=ranks, rounds=rounds, starts=starts,
            seconds=seconds, threads=threads, environment=dict(environment or {}),
        )  # fmt: skip
        return function

    return mark


def every(package: str = "benchmarks") -> dict[str, Benchmark]:
    """Every benchmark in the files of the folder, by name."""
    folder = importlib.import_module(package)
    found = []
    for info in pkgutil.iter_modules(folder.__path__):
        if info.ispkg or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        marked = [v.benchmark for v in vars(module).values() if callable(v) and hasattr(v, "benchmark")]
        mine = [b for b in marked if b.function.__module__ == module.__name__]
        if not mine:
            raise TypeError(f"{package}/{info.name}.py defines no benchmark: mark a function with @benchmark(...)")
        found += mine
    return {b.name: b for b in found}


def chosen(names: Iterable[str], known: dict[str, Benchmark]) -> list[Benchmark]:
    """The benchmarks that are meant: `overhead` is all of a file, `overhead.plain` one of them, nothing is all."""
    names = list(names)
    out: dict[str, Benchmark] = {} if names else known
    for name in names:
        meant = {n: b for n, b in known.items() if n == name or n.partition(".")[0] == name}
        if not meant:
            files = {n.partition(".")[0] for n in known}
            near = difflib.get_close_matches(name, sorted({*known, *files}), n=1, cutoff=0.5)
            hint = f": did you mean {near[0]!r}?" if near else f". There are: {', '.join(known)}"
            raise UnknownBenchmarkError(f"no benchmark is called {name!r}{hint}")
        out |= meant
    return list(out.values())
