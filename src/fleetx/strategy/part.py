"""A part is one technique: a frozen dataclass whose fields are its settings and whose marked methods are its acts.

A part's file is its switch: `parts/gradient_merge.py` is turned on by `strategy.gradient_merge`, and its fields are
the keys of `strategy.gradient_merge_configs`. There is no separate list of parts to maintain.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, dataclass_transform

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect
from fleetx.strategy.stage import Act, Claim, Stage

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fleetx.comm.world import World
    from fleetx.engine.context import StepContext
    from fleetx.strategy.compose import Plan

# A list or a tuple of names, but not a bare string, whose letters would be taken for names.
NameList = Annotated[list[str], BeforeValidator(lambda v: list(v) if isinstance(v, tuple) else v)]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def _dtype_name(value: Any) -> Any:
    """Accept short names, and dtypes such as torch.bfloat16 itself."""
    name = str(value).removeprefix("torch.")
    known = type(value).__name__ == "dtype" or value in list(_DTYPES)
    return _DTYPES.get(name, name) if known else value


Half = Annotated[Literal["float16", "bfloat16"], BeforeValidator(_dtype_name)]


@dataclass_transform(frozen_default=True)
def settings(cls: type) -> Any:
    """Turn a class into a part: frozen, its fields checked against their types and bounds, unknown keys rejected."""
    made: Any = pydantic_dataclass(
        cls, frozen=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    )
    if getattr(made, "always", False):
        made.flat = {f.name: f.name for f in dataclasses.fields(made)}
    return made


class Part:
    """The base of all parts. Everything here has a neutral default; a part overrides what it needs.

    The members are grouped by who uses them. An act is a method marked with `@at`.
    """

    # --- what the strategy asks -------------------------------------------------------------------
    # The attribute of DistributedStrategy that turns the part on, if it differs from the file's name.
    switch: ClassVar[str] = ""
    # For a part without `<switch>_configs`: the attributes of DistributedStrategy that set its fields. If the part is
    # always on, every field is such an attribute.
    flat: ClassVar[Mapping[str, str]] = {}
    # Is the part always on, because it holds settings that concern every strategy?
    always: ClassVar[bool] = False
    # Does the part stand for others, which are chosen once the model is known?
    is_meta: ClassVar[bool] = False
    # Keys that Paddle scripts may set but that have no meaning here, with the reason; `explain` lists them.
    no_meaning: ClassVar[Mapping[str, str]] = {}
    # Values that mean "not set", with what they do not do; `explain` lists them if the user gave them.
    means_unset: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    # Settings at which training on one rank equals plain PyTorch bit for bit; None if there are none.
    neutral: ClassVar[Mapping[str, Any] | None] = None
    # Stages that torch takes over because of this part, with what it does there.
    done_by_torch: ClassVar[Mapping[Stage, str]] = {}
    # What to change to get several replicas, if this part divides the only one between all ranks.
    for_replicas: ClassVar[str] = ""
    # What this part decides, if only one part can; completes "both decide ...".
    decides: ClassVar[str] = ""
    # Switches that do not work with this part, with what to do instead of turning one of them off.
    instead: ClassVar[Mapping[str, str]] = {}
    # What the part costs, in one line, for `explain`.
    costs: ClassVar[str] = ""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one sentence each."""
        return iter(())

    def adapted_to(self, parts: Iterable[Part]) -> Part:
        """This part, with any settings that depend on which other parts are on."""
        return self

    # --- what the engine asks ---------------------------------------------------------------------
    # Does the state belong to its rank, so that another rank cannot resume with it?
    per_rank_state: ClassVar[bool] = False
    # Keys of the state that map a parameter's name to a tensor for the piece of it that this rank holds. `fleet.save`
    # writes them as it writes parameters, so any number of ranks, shards or stages can resume with them.
    per_parameter: ClassVar[tuple[str, ...]] = ()
    # The same, but each rank has its own values. With another number of ranks, shards or stages, a piece gets the mean
    # over the ranks that held it: what they would have sent later has the same mean.
    own_per_parameter: ClassVar[tuple[str, ...]] = ()
    # Does the part divide the model between ranks, so that state_dict() has only what this rank holds?
    divides: ClassVar[bool] = False
    # Does the part need dense gradients?
    dense: ClassVar[bool] = False

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        """Why this part cannot work with this model and optimizer, one sentence each. Must not change anything."""
        from fleetx.base.module_names import sparse_problem  # imports torch

        switch = switch_of(type(self))
        if world.size == 1 and not getattr(self, "allow_single", True):  # a setting of parts that need other ranks
            yield (
                f"{switch}: there is only one worker, so there is nothing to communicate: start more with fleetrun, or "
                f"set strategy.{switch}_configs['allow_single'] = True for debugging"
            )
        if self.dense:
            yield from sparse_problem(switch, model)

    def span(self, model: nn.Module, world: World) -> int:
        """How many consecutive ranks hold the stages of one copy of the model."""
        return 1

    def shards(self, world: World) -> int:
        """How many consecutive ranks of `world`, whose ranks all train the same stage, share each parameter."""
        return 1

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """The state that this part carries across steps: `ctx.state`. The engine creates, saves and loads it."""
        return {}

    def belongs_to_rank(self, state: Mapping[str, Any]) -> bool:
        """Can only the rank that saved this state use it?"""
        return self.per_rank_state and bool(state)

    def for_other_ranks(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state that every rank loads if the number of ranks has changed. `states`: those saved, by rank.

        Parameters that differed between ranks are averaged. Do not modify tensors: they are views into files.
        """
        return states[0]

    def drain(self, params: list[Tensor], ctx: StepContext, *, last: bool) -> None:
        """Finish background work, for a checkpoint or (`last`) at the end of training. All ranks call it."""

    def unfinished(self, ctx: StepContext) -> Iterator[str]:
        """What a script leaves undone if it ends now without `fleet.flush()`; completes "the script ends ..."."""
        return iter(())

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        """What `explain` adds about how this part runs here; `ctx` is None before a model is distributed."""
        return iter(())

    def predicted(self, ctx: StepContext) -> int | None:
        """Peak bytes of a step, if this part has predicted them."""
        return None

    # --- what the planner asks --------------------------------------------------------------------
    # Does the part change only this rank's forward, so that a step on a single rank shows how much memory it takes?
    changes_forward: ClassVar[bool] = False
    # Does the part cut the forward into segments that are recomputed?
    segments: ClassVar[bool] = False

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        """Settings that `auto` may try."""
        return iter(())

    def cost(self, terms: CostTerms) -> None:
        """Add what this part costs per update. Changes to the forward are measured instead."""

    def keeps(self, params: Iterable[Tensor], plan: Plan) -> int:
        """Bytes kept from step to step, apart from gradients and the optimizer's state."""
        return 0

    # --- what `fleetx verify` asks ----------------------------------------------------------------
    # How the part can be observed to act.
    effect: ClassVar[Effect | None] = None
    # Settings at which verify's model (blocks.0 to blocks.3, a BatchNorm, two replicas) shows the effect.
    example: ClassVar[Mapping[str, Any]] = {}
    # Settings that add conflicts with other strategies, which verify lists.
    other_examples: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    # Settings, on top of `example`, at which the part loses nothing in verify's model; None if `example` itself loses
    # nothing, or if verify's oracle rounds as the part does.
    lossless: ClassVar[Mapping[str, Any] | None] = None
    # How far its rounding may move the result, as a fraction of the distance trained.
    rounding: ClassVar[float] = 0.0
    # By what factor its update may amplify the rounding of another part.
    amplifies: ClassVar[float] = 1.0

    # ----------------------------------------------------------------------------------------------
    def acts(self) -> list[Act]:
        mine = [(name, claim) for name, claim in claims(type(self)).items() if claim.when(self)]
        switch = switch_of(type(self))
        acts = [Act(self, switch, getattr(self, name), claim) for name, claim in mine]
        done = self.done_by_torch.items()
        return acts + [Act(self, switch, None, Claim(stage), meaning) for stage, meaning in done]


def claims(part: type[Part]) -> dict[str, Claim]:
    """The marked methods of a part. A part that has none is declared but not supported yet."""
    methods = {name: getattr(part, name) for name in dir(part) if not name.startswith("__")}
    return {name: method.claim for name, method in methods.items() if hasattr(method, "claim")}


def name_of(part: type[Part]) -> str:
    """The name of the part's file, and of its card in `docs/parts`; also its switch, unless `switch` is set."""
    return part.__module__.rpartition(".")[2]


def switch_of(part: type[Part]) -> str:
    return part.switch or name_of(part)


def defaults_of(part: type[Part]) -> dict[str, Any]:
    """A fresh copy of every setting's default."""
    return settings_of(part())


def settings_of(part: Part) -> dict[str, Any]:
    """Every setting of a part, defaults included."""
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}  # type: ignore[arg-type]


PARTS = "fleetx.parts"  # searched instead of imported by name, so that a new part needs no registration


@cache
def every() -> dict[str, type[Part]]:
    """Every part in the folder, by the name of its switch."""
    folder = importlib.import_module(PARTS)
    found = {}
    for info in pkgutil.iter_modules(folder.__path__):
        if info.name.startswith("_"):  # code that several parts share
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
