"""Into which blocks a model is taken apart, and where segments begin and end."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from fleetx.base.module_names import has_forward, matches, named, named_modules, plain_name
from fleetx.errors import UsageError

log = logging.getLogger(__name__)


# --- by name --------------------------------------------------------------------------------------
def incompatibilities(model: nn.Module, patterns: Iterable[str]) -> Iterator[str]:
    modules = dict(named_modules(model))
    where = "recompute_configs['checkpoints']"
    for pattern in patterns:
        found = matches(pattern, modules)
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4)
            hint = f": did you mean {', '.join(near)}?" if near else f". The first are {', '.join(list(modules)[:5])}"
            yield f"{where}: the model has no module {pattern!r}{hint}"
        elif bare := [n for n in found if not has_forward(modules[n])]:
            yield (f"{where}: {bare[0]!r} has no forward of its own, so it has no output to keep: write '{bare[0]}.*'")
    chosen = named(model, patterns)
    for inner in chosen:
        if outer := next((n for n in chosen if inner.startswith(f"{n}.")), None):
            yield f"{where}: {inner!r} lies inside of {outer!r}: name one of them"


def around(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that a forward is made of, taken apart only where one of these names lies deeper."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def look(module: nn.Module, prefix: str) -> None:
        for key, child in module.named_children():
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            if any(n.startswith(f"{name}.") for n in names) or not has_forward(child) or name == prefix:
                look(child, name)
            elif id(child) not in seen:
                seen.add(id(child))
                found[name] = child

    look(model, "")
    return found


class Named:
    """A segment ends with each named module, and the next one begins behind it. None begins behind the last."""

    def __init__(self, names: Sequence[str], *, elsewhere: bool = False):
        """elsewhere: may other ranks run some of these modules?"""
        self._names, self._elsewhere = frozenset(names), elsewhere
        self._expected = len(self._names)  # calls of named modules in a forward; what the forward before had
        self._calls = 0
        self._inside = False
        self.missed: frozenset[str] = frozenset()  # not called in the last forward
        self._called: set[str] = set()

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
        if not self._elsewhere and self._names - self._called != self.missed:
            self.missed = self._names - self._called
            if self.missed:
                log.warning("recompute: %s took no part in this forward", ", ".join(sorted(self.missed)))


# --- by plan --------------------------------------------------------------------------------------
Tree = list[Any]  # numbers of calls that are kept, and lists, which are segments; in order, a list inside of a list too


class Planned:
    """Segments by the number of the call, in a model that takes the same way in every forward."""

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
            expected = self._calls[number] if number < len(self._calls) else "nothing more"
            raise UsageError(
                f"recompute with a memory_budget needs a model that calls its modules in the same order every time: "
                f"call {number} was to {name!r}, and {expected!r} was expected. Name checkpoints instead"
            )
        return self._begin[number], self._end[number]

    def end(self) -> None:
        pass
