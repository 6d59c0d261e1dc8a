"""Where segments begin and end: at named modules, or as planned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from fleetx.base.module_names import has_forward, matches, named, named_modules, no_module, plain_name
from fleetx.errors import UsageError

log = logging.getLogger(__name__)


# --- by name --------------------------------------------------------------------------------------
def incompatibilities(model: nn.Module, patterns: Iterable[str]) -> Iterator[str]:
    modules = dict(named_modules(model))
    setting = "recompute_configs['checkpoints']"
    for pattern in patterns:
        names = matches(pattern, modules)
        if not names:
            yield f"{setting}: {no_module(pattern, modules, otherwise='turn recompute off')}"
        elif bare := [n for n in names if not has_forward(modules[n])]:
            yield f"{setting}: {bare[0]!r} has no forward of its own, so it has no output to keep: use '{bare[0]}.*'"
    chosen = named(model, patterns)
    for inner in chosen:
        if outer := next((n for n in chosen if inner.startswith(f"{n}.")), None):
            yield f"{setting}: {inner!r} is inside {outer!r}: name only one of them"


def blocks_around(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules of the model, opened up only where one of these names is inside."""
    blocks: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        for key, child in module.named_children():
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            if any(n.startswith(f"{name}.") for n in names) or not has_forward(child) or name == prefix:
                visit(child, name)
            elif id(child) not in seen:
                seen.add(id(child))
                blocks[name] = child

    visit(model, "")
    return blocks


class NamedSegments:
    """A segment ends with each named module, and the next one begins after it. None begins after the last."""

    def __init__(self, names: Sequence[str], *, staged: bool = False):
        """staged: other ranks may run some of these modules."""
        self._names, self._staged = frozenset(names), staged
        self._expected = len(self._names)  # calls of named modules per forward, as seen in the last one
        self._calls = 0
        self._inside = False
        self._called: set[str] = set()
        self.unused: frozenset[str] = frozenset()  # not called in the last forward

    def begin(self) -> None:
        self._calls, self._inside, self._called = 0, False, set()

    def step(self, name: str) -> tuple[int, int]:
        begins = not self._inside and self._calls < self._expected
        self._inside = self._inside or begins
        ends = self._inside and name in self._names
        if name in self._names:
            self._calls += 1
            self._called.add(name)
        if ends:
            self._inside = False
        return int(begins), int(ends)

    def end(self) -> None:
        self._expected = max(self._calls, 1)
        if not self._staged and self._names - self._called != self.unused:
            self.unused = self._names - self._called
            if self.unused:
                log.warning("recompute: %s was not called in this forward", ", ".join(sorted(self.unused)))


# --- by plan --------------------------------------------------------------------------------------
# The numbers of all calls in order. A number is a call that is kept; a list is a segment, which may be nested.
Tree = list[Any]


class PlannedSegments:
    """Segments by the number of the call, for a model that calls its modules in the same order every time."""

    def __init__(self, calls: Sequence[str], tree: Tree):
        self._calls = calls
        self._begin, self._end = [0] * len(calls), [0] * len(calls)
        self._mark(tree)
        self._next = 0

    def _mark(self, tree: Tree) -> tuple[int, int]:
        first = last = -1
        for item in tree:
            low, high = (item, item) if isinstance(item, int) else self._mark(item)
            if not isinstance(item, int):
                self._begin[low] += 1
                self._end[high] += 1
            first, last = (low if first < 0 else first), high
        return first, last

    def begin(self) -> None:
        self._next = 0

    def step(self, name: str) -> tuple[int, int]:
        number, self._next = self._next, self._next + 1
        if number >= len(self._calls) or self._calls[number] != name:
            expected = repr(self._calls[number]) if number < len(self._calls) else "no further call"
            raise UsageError(
                "recompute with memory_budget needs a model that calls its modules in the same order every time, but "
                f"call {number} was to {name!r} instead of {expected}: name checkpoints instead"
            )
        return self._begin[number], self._end[number]

    def end(self) -> None:
        pass
