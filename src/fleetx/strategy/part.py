"""A part is one technique: a frozen dataclass whose fields are its settings and whose marked methods are its acts.

A part's file is its switch: `parts/gradient_merge.py` is turned on by `strategy.gradient_merge`, and its fields are
the keys of `strategy.gradient_merge_configs`. There is no list to keep beside the folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.stage import Act, Claim

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fleetx.comm.world import World
    from fleetx.engine.context import Context

# A tuple of names is as good as a list; a bare string is not, because its letters would be taken for names.
Names = Annotated[list[str], BeforeValidator(lambda v: list(v) if isinstance(v, tuple) else v)]


@dataclass_transform(frozen_default=True)
def settings(cls: type) -> Any:
    """Make a part of a class: frozen, its fields checked against their types and bounds, unknown keys refused."""
    return pydantic_dataclass(cls, frozen=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


class Part:
    """The base of all parts. Every method here has a neutral default; a part overrides what it needs."""

    # The attribute of DistributedStrategy that turns the part on, where it is not the name of the file.
    switch: ClassVar[str] = ""
    # Attributes of DistributedStrategy that are fields of this part, where there is no `<switch>_configs`.
    flat: ClassVar[Mapping[str, str]] = {}
    # A part that is always there, because what it declares is not a strategy but a setting of all of them.
    always: ClassVar[bool] = False
    # Keys that a Paddle script may set and that mean nothing on this engine; `explain` says so.
    no_meaning: ClassVar[Mapping[str, str]] = {}
    # Settings at which training on one rank is plain PyTorch's, bit for bit; None where there are none.
    neutral: ClassVar[Mapping[str, Any] | None] = None
    # Does its state belong to its rank, so that another rank cannot go on with it?
    per_rank_state: ClassVar[bool] = False
    # Does it act on the forward of its own rank alone, so that its memory is seen where the step is run without others?
    changes_forward: ClassVar[bool] = False
    # Does it cut the forward into segments that are run again?
    segments: ClassVar[bool] = False
    # Does it divide the model between ranks, so that a state_dict() is only what one of them holds?
    divides: ClassVar[bool] = False
    # Does it stand for others, which are found when there is a model?
    is_meta: ClassVar[bool] = False
    # What the part costs, in one line, for `explain`.
    costs: ClassVar[str] = ""

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings taken together, a sentence each."""
        return iter(())

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        """Why this part cannot serve this model and optimizer, a sentence each. Nothing may be changed here."""
        return iter(())

    def span(self, model: nn.Module, world: World) -> int:
        """How many neighbouring ranks hold one copy of the model together."""
        return 1

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """The state that this part carries across steps: the engine makes, saves, loads and hands it back."""
        return {}

    def keeps(self, params: Iterable[Tensor], *, scaled: bool) -> int:
        """Bytes that it keeps from step to step, besides gradients and what the optimizer gathers.

        scaled: is there a loss scale, so that an update may have to be undone?
        """
        return 0

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        """Settings that `auto` may try in the user's place."""
        return iter(())

    def cost(self, terms: CostTerms) -> None:
        """Tell the planner what this part adds to an update. What changes the forward itself is measured instead."""

    def drain(self, params: list[Tensor], ctx: Context, *, last: bool) -> None:
        """Finish what is under way: a checkpoint is taken, or (`last`) the training ends. Ranks call it together."""

    def remarks(self, ctx: Context | None) -> Iterator[str]:
        """What `explain` should add about how this part runs here; `ctx` is None before there is a model."""
        return iter(())

    def acts(self) -> list[Act]:
        found = [(name, claim) for name, claim in claims(type(self)).items() if claim.when(self)]
        return [Act(self, getattr(self, name), claim) for name, claim in found]


def claims(part: type[Part]) -> dict[str, Claim]:
    """The marked methods of a part. A part that has none is declared but not built yet."""
    methods = {name: getattr(part, name) for name in dir(part) if not name.startswith("__")}
    return {name: method.claim for name, method in methods.items() if hasattr(method, "claim")}


def name_of(part: type[Part]) -> str:
    """The name of the part's file: its switch unless it says otherwise, and its card."""
    return part.__module__.rpartition(".")[2]


def switch_of(part: type[Part]) -> str:
    return part.switch or name_of(part)


def defaults_of(part: type[Part]) -> dict[str, Any]:
    """A fresh copy of every setting's default."""
    blank = part()
    return {f.name: getattr(blank, f.name) for f in dataclasses.fields(part)}  # type: ignore[arg-type]


PARTS = "fleetx.parts"  # the one folder that is searched, not imported by name: a new part needs no list


@cache
def every() -> dict[str, type[Part]]:
    """Every part in the folder, by the name of its switch."""
    folder = importlib.import_module(PARTS)
    found = {}
    for info in pkgutil.iter_modules(folder.__path__):
        if info.name.startswith("_"):  # what several parts share
            continue
        module = importlib.import_module(f"{PARTS}.{info.name}")
        mine = [
            c for c in vars(module).values()
            if isinstance(c, type) and issubclass(c, Part) and c.__module__ == module.__name__
        ]  # fmt: skip
        if len(mine) != 1:
            raise TypeError(f"fleetx/parts/{info.name}.py must define exactly one part, not {len(mine)}")
        found[switch_of(mine[0])] = mine[0]
    return found
