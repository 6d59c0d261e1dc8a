"""What a strategy does, for a person to read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fleetx.strategy.compose import first
from fleetx.strategy.part import Part, every, switch_of
from fleetx.strategy.settings import Settings
from fleetx.strategy.stage import Act, Stage

if TYPE_CHECKING:
    from fleetx.comm.world import World
    from fleetx.engine.engine import Engine
    from fleetx.strategy import DistributedStrategy
    from fleetx.strategy.compose import Plan

_WIDTH = 118


@dataclass(frozen=True)
class Explanation:
    """Print it. `requested` and `applied` are for programs."""

    strategy: DistributedStrategy
    plan: Plan
    world: World | None = None
    engine: Engine | None = None
    search: str = ""  # what `auto` considered

    @property
    def requested(self) -> list[str]:
        """The switches that are on."""
        return [s for s, p in every().items() if not p.always and getattr(self.strategy, s)]

    @property
    def applied(self) -> list[str]:
        """The acts in the order in which they run."""
        return [a.name for a in self.plan.acts]

    def __str__(self) -> str:
        lines = [f"requested: {', '.join(self.requested) or 'nothing'}", f"world: {self._world()}"]
        lines.append(_render(_order(self.plan)))
        lines.append(_render(_parts(self.plan)))
        lines += [f"{name}: {remark}" for name, remark in self._remarks()]
        idle = list(self.strategy.without_meaning())
        lines += [f"no meaning here: {name} ({reason})" for name, reason in idle]
        lines += [self.search] if self.search else []
        lines += [f"{name}: the others are found when a model is distributed" for name in self._choosing]
        return "\n".join(lines)

    @property
    def _choosing(self) -> list[str]:
        return [switch for switch, part in every().items() if part.is_meta and getattr(self.strategy, switch)]

    def _remarks(self) -> Iterator[tuple[str, str]]:
        for part in self.plan.parts:
            ctx = self.engine.context_of(part) if self.engine is not None else None
            for remark in part.remarks(ctx):
                yield type(part).__name__, remark

    def _world(self) -> str:
        if self.world is None:
            return "not known yet"
        if self.world.size == 1:
            return f"one rank on {self.world.device.type}, so nothing is communicated"
        return f"{self.world.size} ranks on {self.world.device.type}"


def strategy_table(strategy: DistributedStrategy) -> str:
    """The strategy as a table: what is on with its settings, what is off, what differs elsewhere."""
    table = _table("DistributedStrategy", "switch", "setting", "value")
    off = []
    for switch, part in every().items():
        if part.always or getattr(strategy, switch):
            _rows(table, "always" if part.always else switch, _settings(strategy, part))
        else:
            off.append(switch)
    changed = dict(strategy.without_meaning())
    for name in changed:
        table.add_row("no meaning here", name, str(getattr(strategy, name, "")))
    return f"{_render(table)}\noff: {', '.join(off) or 'nothing'}"


def _settings(strategy: DistributedStrategy, part: type[Part]) -> dict[str, Any]:
    if part.flat:
        return {name: getattr(strategy, name) for name in part.flat}
    settings: Settings = getattr(strategy, f"{switch_of(part)}_configs")
    return {k: v for k, v in settings.items() if k not in part.no_meaning}


def _rows(table: Table, switch: str, settings: dict[str, Any]) -> None:
    for i, (key, value) in enumerate(settings.items() or [("", "")]):
        table.add_row(switch if i == 0 else "", key, str(value))
    table.add_section()


def _order(plan: Plan) -> Table:
    table = _table("one step, in order", "stage", "act", "what it does")
    for stage in Stage:
        for act in plan.at(stage):
            table.add_row(stage.name, act.name, "; ".join(filter(None, [act.meaning, _reason(plan, act)])))
        if stage is Stage.REDUCE and not plan.at(stage):
            table.add_row(stage.name, "(dense)", "mean of each bucket over the ranks, while backward still runs")
    return table


def _reason(plan: Plan, act: Act) -> str:
    """Why an act does not run earlier within its stage: derived, like the order itself."""
    here = plan.at(act.stage)
    facts = plan.facts_at(here[0])
    before = [b for b in here if first(b, act, facts)]
    barred = sorted(f.value for f in act.claim.bars & facts)
    reasons = [f"after {' and '.join(b.name for b in before)}"] if before else []
    reasons += [f"because it cannot take a gradient {' or '.join(barred)}"] if barred else []
    return ", ".join(reasons)


def _parts(plan: Plan) -> Table:
    table = _table("parts", "part", "settings", "costs")
    for part in plan.parts:
        kind = type(part)
        changed = {k: v for k, v in vars(part).items() if not k.startswith("_") and v != getattr(kind(), k)}
        table.add_row(kind.__name__, _pairs(changed.items()) or "defaults", kind.costs)
    return table


def _pairs(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{k}={v}" for k, v in items)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _render(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=_WIDTH, force_terminal=False, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
