from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from fleetx.base.module_names import plain_name
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.optim import Muon, adamw_names, parameter_names
from fleetx.optim.adopt import adopt, adoption_problems
from fleetx.optim.muon import is_matrix
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.effect import Effect, differs
from fleetx.strategy.part import NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class MuonPart(Part):
    """Orthogonalized momentum: Muon for the hidden matrices, AdamW for everything else.

    Neutral: all parameters stay with AdamW.
    """

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the momentum of the matrices, which is a moving average of the gradients."""
    nesterov: bool = True
    """Use Nesterov momentum, which looks ahead by one step."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations that orthogonalize the momentum."""
    rms: Annotated[float, Field(gt=0)] | None = 0.2
    """Root mean square of a step divided by the learning rate, like that of AdamW; None: Muon's original scale."""
    bf16: bool = False
    """Orthogonalize in bfloat16, which is faster on GPUs."""
    adamw: NameList = Field(default_factory=list)
    """Substrings of parameter names. Matching matrices stay with AdamW too."""
    muon: NameList = Field(default_factory=list)
    """Substrings of parameter names. Matching matrices get Muon, even if they look like an embedding or an output."""
    divide: bool = True
    """Let each rank orthogonalize only some of the matrices and send them to the others, instead of all of them."""

    neutral: ClassVar[dict[str, Any]] = {"adamw": ["weight", "bias"]}
    effect: ClassVar[Effect] = differs("distance", "updates differ in length")
    amplifies: ClassVar[float] = 5.0  # small singular values become as large as the others, and their errors grow too
    costs: ClassVar[str] = (
        "time: about 20 * min(rows, columns) operations per element and update, divided over ranks, and one all-gather "
        "of the matrices; memory: 4 bytes per element less than AdamW"
    )

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        wanted = "torch.optim.AdamW"
        yield from adoption_problems("muon", optimizer, (Adam, AdamW), wanted, Muon, self._own_options, decays=False)
        if type(optimizer) is Adam and any(group["weight_decay"] for group in optimizer.param_groups):
            yield "muon decays weights as AdamW does, not as Adam: pass torch.optim.AdamW"
        for key in ("adamw", "muon"):
            yield from parameter_names.problems("muon", model, optimizer, getattr(self, key), f"muon_configs['{key}']")

    @at(
        Stage.UPDATE,
        bars={Fact.SCALED, Fact.SUMMED, Fact.MOMENTUM},
        because="its formula takes the momentum of the gradient itself",
    )
    def orthogonalize(self, optimizer: Optimizer, ctx: SetupContext) -> Optimizer:
        """p - lr * decay * p - lr * scale * U V^T for each hidden matrix, where U S V^T is its momentum"""
        chosen = self._adamw_names(ctx.model)
        names = {id(p): name for p, name in ctx.names.items()}
        adopted: Any = adopt(optimizer, Muon, partial(self._decide, names, chosen))
        if self.divide and not ctx.per_rank and ctx.replica_group.size > 1 and not ctx.reduced:
            adopted.replicas = ctx.replica_group.group()
        ctx.notes["matrices"] = sum(len(g["params"]) - len(g["excluded"]) for g in adopted.param_groups)
        ctx.notes["adamw"] = sorted(chosen)
        ctx.on_release(partial(_forget, adopted))
        return adopted

    def _adamw_names(self, model: nn.Module) -> set[str]:
        """The names of the matrices that stay with AdamW."""
        named = dict(model.named_parameters())
        params = list(named.values())
        matching = {key: set(parameter_names.positions(model, getattr(self, key), params)) for key in ("adamw", "muon")}
        found = set(adamw_names(model))
        kept = {i for i, name in enumerate(named) if plain_name(name) in found} - matching["muon"]
        return {plain_name(name) for i, name in enumerate(named) if i in kept | matching["adamw"]}

    def _decide(self, names: dict[int, str], chosen: set[str], group: dict[str, Any]) -> dict[str, Any]:
        params = group["params"]
        excluded = [i for i, p in enumerate(params) if not is_matrix(p.shape) or names.get(id(p)) in chosen]
        return self._own_options(group, excluded)

    def _own_options(self, group: dict[str, Any], excluded: list[int]) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("momentum", "nesterov", "ns_steps", "rms", "bf16")}
        return own | {"excluded": excluded}

    def cost(self, terms: CostTerms) -> None:
        if self.divide:
            terms.divides_update = True
            terms.gathered += terms.parameters * (2 if terms.shards > 1 else 1)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None:
            names = ctx.notes["adamw"]
            shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
            number = ctx.notes["matrices"]
            matrices = f"{number} matri{'ces' if number != 1 else 'x'}"
            rest = f", including these matrices: {shown}" if names else ""
            yield f"Muon updates {matrices}; AdamW updates everything else{rest}"


def _forget(optimizer: Optimizer) -> None:
    """Clear Muon's state, because AdamW would take the momentum for its own, incomplete state."""
    for state in optimizer.state.values():
        if "momentum_buffer" in state:
            state.clear()
