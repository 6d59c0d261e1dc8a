"""What a strategy does, as text for the user."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fleetx.strategy.compose import why_first
from fleetx.strategy.part import Part, every, switch_of
from fleetx.strategy.settings import changed
from fleetx.strategy.stage import Act, Fact, Stage

if TYPE_CHECKING:
    from fleetx.comm.world import World
    from fleetx.engine.engine import Engine
    from fleetx.strategy import DistributedStrategy
    from fleetx.strategy.compose import Plan

_WIDTH = 118


@dataclass(frozen=True)
class Explanation:
    """What a strategy does: print it, or read `requested` and `applied` in a program."""

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
        """The acts in the order they run, such as `amp.unscale`."""
        return [a.name for a in self.plan.acts]

    def __str__(self) -> str:
        lines = [f"requested: {', '.join(self.requested) or 'nothing'}", f"world: {self._world()}"]
        lines += [render(_step(self.plan)), render(_costs(self.plan))]
        lines += [f"{switch}: {remark}" for switch, remark in self._remarks()]
        lines += [f"no effect: {name} ({reason})" for name, reason in self.strategy.without_meaning()]
        lines += [self.search] if self.search else []
        chooses = "chooses the other switches when a model is distributed"
        lines += [f"{switch}: {chooses}" for switch in self.requested if every()[switch].is_meta]
        return "\n".join(lines)

    def _remarks(self) -> Iterator[tuple[str, str]]:
        for part in self.plan.parts:
            ctx = self.engine.context_of(part) if self.engine is not None else None
            for remark in part.remarks(ctx):
                yield switch_of(type(part)), remark

    def _world(self) -> str:
        if self.world is None:
            return "not known yet"
        if self.world.size == 1:
            return f"one rank on {self.world.device.type}, no communication"
        return f"{self.world.size} ranks on {self.world.device.type}"


def strategy_table(strategy: DistributedStrategy) -> str:
    """The strategy as a table: the settings of every switch that is on, and the names of those that are off."""
    table = _table("DistributedStrategy", "switch", "setting", "value")
    off = []
    for switch, part in every().items():
        if part.always or getattr(strategy, switch):
            for i, (key, value) in enumerate(_settings(strategy, part).items() or [("", "")]):
                table.add_row(("always on" if part.always else switch) if i == 0 else "", key, str(value))
            table.add_section()
        else:
            off.append(switch)
    for name, _ in strategy.without_meaning():
        table.add_row("no effect", name, str(getattr(strategy, name, "")))
    return f"{render(table)}\noff: {', '.join(off) or 'nothing'}"


def _settings(strategy: DistributedStrategy, part: type[Part]) -> dict[str, Any]:
    if part.flat:
        return {name: getattr(strategy, name) for name in part.flat}
    settings = getattr(strategy, f"{switch_of(part)}_configs")
    return {k: v for k, v in settings.items() if k not in part.no_meaning}


def _step(plan: Plan) -> Table:
    table = _table("one step, in order", "stage", "switch", "what it does")
    for stage, switch, told in in_order(plan):
        table.add_row(stage.name, switch, told)
    return table


def in_order(plan: Plan, replicas: int | None = None) -> Iterator[tuple[Stage, str, str]]:
    """Each act of a step: its stage, its switch, what it does, and why it runs there. replicas: None if not known."""
    for stage in Stage:
        for act in plan.at(stage):
            yield stage, act.switch, "; ".join(filter(None, [act.meaning, _reason(plan, act)]))
        if stage is Stage.REDUCE and not plan.at(stage) and replicas != 1:
            yield stage, "data_parallel", "average each bucket over the ranks while backward still runs"


def _reason(plan: Plan, act: Act) -> str:
    """Why an act does not run earlier in its stage; derived, like the order itself."""
    here = plan.at(act.stage)
    facts = plan.facts_at(here[0])
    before: dict[str, tuple[list[str], set[Fact]]] = {}
    for b in here:
        for rule, found in why_first(b, act, facts).items():
            switches, because = before.setdefault(rule, ([], set()))
            switches += [] if b.switch in switches else [b.switch]
            because |= found
    reasons = [
        f"after {' and '.join(switches)}, {rule} {' or '.join(f.what for f in Fact if f in because)}"
        for rule, (switches, because) in before.items()
    ]
    return f"runs {'; '.join(reasons)}" if reasons else ""


def _costs(plan: Plan) -> Table:
    table = _table("settings and costs", "switch", "settings", "costs")
    for part in plan.parts:
        table.add_row(switch_of(type(part)), changed(part) or "defaults", part.costs)
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def render(table: Table, width: int | None = None) -> str:
    """width: by default, the terminal's."""
    out = io.StringIO()
    width = width or min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)  # the terminal would wrap wider lines
    Console(file=out, width=width, force_terminal=False, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
