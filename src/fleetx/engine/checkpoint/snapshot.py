"""What one rank has to save: the pieces of the model and the optimizer that it holds, and what belongs to it alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import __version__
from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.engine import state as engine_state
from fleetx.engine.checkpoint import random_states, tree
from fleetx.engine.dtensors import local, shard_of
from fleetx.engine.engine import Engine
from fleetx.engine.run import key_of
from fleetx.errors import UsageError
from fleetx.strategy.part import switch_of
from fleetx.strategy.stage import Stage

NUMBER, NONE = "#number", "#none"  # suffixes of keys in the optimizer's state whose values are not tensors
Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and shape


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor."""

    tensor: Tensor  # real, not a DTensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]  # the shape of the whole tensor
    is_complex: bool = False

    @property
    def region(self) -> Region:
        return self.offsets, tuple(self.tensor.shape)


@dataclass
class Extras:
    """What the loop saves and restores besides the model and the optimizer."""

    step: int = 0
    scheduler: Any = None
    loader: Any = None
    extra: Any = None
    loaded: Any = None  # the extra of the checkpoint that was loaded last
    whole: bool = True  # is it a mistake to load without a scheduler or loader that was saved?

    def __post_init__(self) -> None:
        for name in ("scheduler", "loader"):
            given = getattr(self, name)
            if given is not None and not (hasattr(given, "state_dict") and hasattr(given, "load_state_dict")):
                raise UsageError(
                    f"{name} is a {type(given).__name__}, which has no state_dict and load_state_dict, so it cannot "
                    "resume where it was: use a loader of fleetx.data, or give it these two methods"
                )


@dataclass
class Snapshot:
    rank: int
    pieces: dict[str, Piece]
    trained: frozenset[str] = frozenset()  # the pieces that are parameters of the optimizer
    own: dict[str, Tensor] = field(default_factory=dict)  # tensors of `document`
    kept: dict[str, str] = field(default_factory=dict)  # those of `own` that a part keeps for a parameter, described
    document: dict[str, Any] = field(default_factory=dict)  # rank-<n>.json
    training: dict[str, Any] = field(default_factory=dict)  # training.json


def first_not_finite(trained: Mapping[str, Tensor]) -> str:
    """The name of a trained parameter that is not finite, or "". Other tensors need not be: a mask can hold -inf."""
    for name, t in trained.items():
        if t.is_floating_point() and t.numel():
            t = t.float() if t.itemsize == 1 else t  # torch computes little in float8
            # Needs no memory, and returns nan if any value is. vector_norm(t, inf) takes eight times as long.
            least, most = torch.aminmax(t)
            if not (least.isfinite() and most.isfinite()):
                return name.removeprefix("model.")
    return ""


def take(
    engine: Engine, extras: Extras, strategy: Mapping[str, Any], boundary: Mapping[str, Any] | None = None
) -> Snapshot:
    """References, not copies: valid until the next step. boundary: step and loader at the start of a merge window."""
    engine.drain(last=False)
    engine.drop_blank_state()
    made = Snapshot(engine.world.rank, pieces(engine), frozenset(f"model.{name}" for name in params(engine)))
    saved = engine_state.save(engine)
    for part, key in per_parameter(engine).values():  # they are among the pieces
        saved["parts"][part].pop(key)
    document = {
        "rank": engine.world.rank,
        "fleetx": saved,
        "scheduler": None if extras.scheduler is None else extras.scheduler.state_dict(),
        "loader": None if extras.loader is None else extras.loader.state_dict(),
        "extra": _json(extras.extra),
        "boundary": None if boundary is None else dict(boundary),
        "random": random_states.states(engine.device),
        "modules": {name: value for name, (_, value) in extra_states(engine).items()},
    }
    made.document = {key: tree.encode(value, made.own, key) for key, value in document.items()}
    made.kept = _kept(engine, made.document["fleetx"]["parts"])
    made.training = {
        "step": extras.step, "round": engine.round, "ranks": engine.world.size,
        "replicas": engine.layout.replica_group.size, "window": engine.window(), "layout": layout(engine),
        "strategy": dict(strategy), "groups": _groups(engine),
        "optimizer": type(engine.optimizer).__name__, "built": built(engine),
        "fleetx": __version__, "torch": torch.__version__,
    }  # fmt: skip
    return made


def _kept(engine: Engine, parts: Mapping[str, Any]) -> dict[str, str]:
    """What parts keep for each parameter on this rank, such as residuals: {name of the tensor: what it is}."""
    found = [
        (part, parts.get(key_of(part), {}).get(key, {})) for part in engine.plan.parts for key in part.own_per_parameter
    ]
    return {
        at["$tensor"]: f"what `{switch_of(type(part))}` keeps for parameter {name!r}"
        for part, values in found for name, at in values.items()
    }  # fmt: skip


def _json(extra: Any) -> Any:
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"extra cannot be written as JSON: {error}") from error
    if json.loads(text) != extra:
        raise UsageError("extra would change when written as JSON: use strings as keys, and lists instead of tuples")
    return extra


def layout(engine: Engine) -> list[str]:
    """What must be equal for a rank to resume with its own state."""
    return [str(engine.world.size), *(repr(part) for part in engine.plan.parts if part.divides)]


def held(engine: Engine) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank holds, by name."""
    model = engine.model
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = model.state_dict(keep_vars=True).keys()  # without non-persistent buffers
    return {plain_name(n): t.detach() for n, t in named if n in kept and n not in engine.layout.absent}


def extra_states(engine: Engine) -> dict[str, tuple[nn.Module, Any]]:
    """What modules keep besides tensors, by name: {name: (module, what its get_extra_state() returns)}."""
    kinds = [(name, module) for name, module in engine.model.named_modules() if _keeps_more(module)]
    return {plain_name(name): (module, module.get_extra_state()) for name, module in kinds}


def _keeps_more(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def built(engine: Engine) -> str:
    """The optimizer in the user's words: the class that the user chose, and the switch that has changed it."""
    changed = "" if type(engine.optimizer) is engine.users_kind else engine.plan.at(Stage.UPDATE)[0].switch
    return engine.users_kind.__name__ + (f" with strategy.{changed}" if changed else "")


def params(engine: Engine) -> dict[str, nn.Parameter]:
    return {engine.names[p]: p for p in engine.gradients.params() if p in engine.names}


def pieces(engine: Engine) -> dict[str, Piece]:
    found = {f"model.{name}": piece(t) for name, t in held(engine).items()}
    if other := [key for key in engine.optimizer.state if not isinstance(key, Tensor)]:
        raise UsageError(
            f"{type(engine.optimizer).__name__} keeps state under {other[0]!r}, which is not a parameter, and "
            "fleet.save cannot write that: use torch.save"
        )
    for name, p in params(engine).items():
        for key, value in engine.optimizer.state.get(p, {}).items():
            full = f"optimizer.{name}.{spelled(key)}"
            if isinstance(value, Tensor):
                found[full] = piece(value)
            elif value is None:
                found[full + NONE] = piece(torch.empty(0, dtype=torch.uint8))
            elif isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                found[full + NUMBER] = piece(torch.tensor(value, dtype=dtype))
            else:
                raise UsageError(
                    f"{type(engine.optimizer).__name__} keeps a {type(value).__name__} ({key}) per parameter, which "
                    "fleet.save cannot write: use torch.save"
                )
    for start, (part, key) in per_parameter(engine).items():
        kept = engine.state[part][key]
        found |= {start + n: piece(shard_of(p, kept[n])) for n, p in params(engine).items() if n in kept}
    return found


def spelled(key: Any) -> str:
    """A key of the state of a parameter as part of a name; most are plain words."""
    if type(key) is str and key and not set(key) & {".", "#", "$"}:
        return key
    if type(key) not in (str, int):
        raise UsageError(
            f"the optimizer keeps state under {key!r} per parameter, which fleet.save cannot write: use torch.save"
        )
    return f"${json.dumps(key).encode().hex()}"


def key_of_spelled(text: str) -> Any:
    return json.loads(bytes.fromhex(text[1:])) if text.startswith("$") else text


def per_parameter(engine: Engine) -> dict[str, tuple[str, str]]:
    """What parts keep for each parameter: {prefix of its names: (key of the part, key in its state)}."""
    found = [(key_of(part), key) for part in engine.plan.parts for key in part.per_parameter]
    return {f"part.{part}.{key}.": (part, key) for part, key in found}


def piece(t: Tensor) -> Piece:
    offsets = [0] * t.dim()
    mine = local(t.detach())
    if mine is not t and mine.shape != t.shape:
        offsets = _offsets(t)
    if mine.layout is not torch.strided or mine.is_quantized:
        raise UsageError(
            f"fleet.save cannot write a tensor of {mine.layout}: make it dense, or register it as not persistent"
        )
    if not mine.is_complex():
        return Piece(mine, tuple(offsets), tuple(t.shape))
    return Piece(torch.view_as_real(mine), (*offsets, 0), (*t.shape, 2), True)


def _offsets(t: Any) -> list[int]:
    """Where this rank's part of a DTensor begins."""
    shape, offsets = seams.offsets(t.shape, t.device_mesh, t.placements)
    if tuple(shape) != tuple(seams.local_tensor(t).shape):
        raise UsageError(f"fleet.save cannot write a tensor that is divided as {t.placements}")
    return list(offsets)


def _groups(engine: Engine) -> list[dict[str, Any]]:
    groups = []
    for number, group in enumerate(engine.optimizer.param_groups):
        given = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        options = tree.encode(given, {}, f"group {number} of the optimizer")
        groups.append({"params": [engine.names[p] for p in group["params"] if p in engine.names], "options": options})
    return groups
