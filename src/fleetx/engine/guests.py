"""Other code that manages the same model or optimizer: wrappers, a GradScaler, conversions, inner optimizers."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.engine.dtensors import local
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage

if TYPE_CHECKING:
    from fleetx.engine.gradients import Gradients


_TWICE = (
    "{} around a distributed model would manage its gradients a second time: remove the wrapper. In accelerate, do not "
    "prepare the model; for transformers' Trainer and Lightning Fabric, use fleetx.integrations"
)


def check_not_wrapped(model: nn.Module, reducer: Any) -> None:
    """Called in a forward: was the model wrapped in DistributedDataParallel before it was distributed?"""
    active: Any = seams.active_ddp(DistributedDataParallel)
    if active is not None and active.module is model and active is not getattr(reducer, "ddp", None):
        raise UsageError(_TWICE.format("DistributedDataParallel"))


class Wrappers:
    """Makes DistributedDataParallel and FSDP raise an error if they wrap parameters that are already distributed.

    DDP would divide their gradients by the world size again, and neither understands shards.
    """

    _watched: ClassVar[weakref.WeakSet[Wrappers]] = weakref.WeakSet()
    _plain: ClassVar[dict[type[nn.Module], Callable[..., None]]] = {}  # the __init__ of torch's classes
    _ours: ClassVar[bool] = False
    _params: frozenset[int]

    def __init__(self, names: Mapping[nn.Parameter, str]):
        for p, name in names.items():
            if p.requires_grad and any(id(p) in each._params for each in self._watched):
                raise UsageError(
                    f"parameter {name!r} is also in a model that is distributed already, and each of the two would "
                    "reduce its gradient: put both models into one nn.Module, and distribute that"
                )
        self._params = frozenset(map(id, names))  # valid: parameters live as long as the engine, which holds this
        self._watched.add(self)
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # takes a second to import
        for kind in (DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp is not None else [])):
            if kind not in self._plain:
                self._plain[kind] = kind.__init__
                kind.__init__ = _checking(kind.__init__)

    def remove(self) -> None:
        self._watched.discard(self)
        if not self._watched:
            for kind, plain in self._plain.items():
                kind.__init__ = plain  # type: ignore[method-assign]
            self._plain.clear()

    @classmethod
    @contextmanager
    def ours(cls) -> Iterator[None]:
        """Allow wrapping while the engine makes its own reducer."""
        cls._ours, before = True, cls._ours
        try:
            yield
        finally:
            cls._ours = before

    @classmethod
    def check(cls, kind: str, module: Any) -> None:
        if not cls._ours and isinstance(module, nn.Module):
            held = set(map(id, module.parameters()))
            if any(held & each._params for each in cls._watched):
                raise UsageError(_TWICE.format(kind))


def _checking(plain: Callable[..., None]) -> Callable[..., None]:
    @wraps(plain)
    def init(self: nn.Module, module: Any, *args: Any, **kwargs: Any) -> None:
        Wrappers.check(type(self).__name__, module)
        plain(self, module, *args, **kwargs)

    return init


def inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Optimizers that this one steps through, such as the base optimizer of SAM."""
    return (value for value in vars(optimizer).values() if isinstance(value, Optimizer))


class Scaler:
    """A GradScaler of the script. It works unless the strategy mixes gradients of several steps, scales or ranks."""

    _MIXED = (Fact.SCALED, Fact.SUMMED, Fact.LOCAL, Fact.MOMENTUM, Fact.RESIDUAL, Fact.STAGED)

    def __init__(self, plan: Plan, optimizer: Optimizer):
        self._mixed = next(filter(plan.makes, self._MIXED), None)
        # With True, GradScaler.step passes its scale to every optimizer.step(), where `check` can see it. With False,
        # it unscales the gradients before the step, which acts at GRADIENT need (fused optimizers set True).
        if self._mixed is not None:
            setattr(optimizer, seams.SCALES_ITSELF, True)
        elif plan.at(Stage.GRADIENT) and hasattr(optimizer, seams.SCALES_ITSELF):
            setattr(optimizer, seams.SCALES_ITSELF, False)

    def check(self, optimizer: Optimizer) -> None:
        """Called before a step."""
        if self._mixed is None or "found_inf" not in vars(optimizer):
            return
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise UsageError(
            f"the script's GradScaler does not work with {self._mixed.value}: remove the GradScaler, and set "
            "strategy.amp = True, which scales the loss in float16 (bfloat16 needs no scale)"
        )


class Measuring:
    """Lets a script measure the norm of gradients that are still scaled or summed: clip_grad_norm_(..., inf).

    That call multiplies every gradient by 1, which the guard against changes, which compares versions, cannot tell from
    clipping. The norm that it returns is that of the gradient that the update will use.
    """

    _watched: ClassVar[weakref.WeakSet[Measuring]] = weakref.WeakSet()

    def __init__(self, gradients: Gradients, multiple: Callable[[], float]):
        """multiple: returns the factor by which p.grad is currently larger than the true gradient."""
        self._gradients, self._multiple = gradients, multiple
        self._watched.add(self)
        setattr(clip_grad, seams.CLIPS, _clip_or_measure)

    def remove(self) -> None:
        self._watched.discard(self)
        if not self._watched:
            setattr(clip_grad, seams.CLIPS, _clip)

    @classmethod
    def untouched(cls) -> list[Gradients]:
        return [each._gradients for each in cls._watched if not each._gradients.touched()]

    @classmethod
    def multiple(cls, measured: Iterable[Tensor]) -> float:
        """The factor by which these gradients are larger than the true ones."""
        multiples = {id(p): each._multiple() for each in cls._watched for p in each._gradients.params()}
        found = {multiples.get(id(p), 1.0) for p in measured if p.grad is not None}
        if len(found) > 1:
            raise UsageError(
                "clip_grad_norm_ was given gradients with different loss scales or merged steps, so their norm is "
                "meaningless: call it separately for the parameters of each fleet.distribute"
            )
        return found.pop() if found else 1.0


_clip = seams.clip_grads


def _clip_or_measure(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
    """Replaces the function of torch that clip_grad_norm_ calls."""
    if max_norm != math.inf:
        return _clip(parameters, max_norm, total_norm, foreach)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    unchanged, multiple = Measuring.untouched(), Measuring.multiple(parameters)
    _clip(parameters, max_norm, total_norm, foreach)
    for gradients in unchanged:
        gradients.look_again()
    if multiple != 1:
        total_norm.div_(multiple)  # what clip_grad_norm_ returns


def check_known(model: nn.Module | None, names: Collection[nn.Parameter]) -> None:
    """Raise an error if parameters were added to the model, for example by LoRA."""
    new = [n for n, p in model.named_parameters() if p not in names] if model is not None else []
    if new:
        raise UsageError(
            f"parameter {plain_name(new[0])!r} was added after fleet.distribute, so the strategy would not act on its "
            f"gradient: {BEFORE}"
        )


BEFORE = (
    "convert, wrap, extend or parametrize the model before fleet.distribute, or between fleet.release and another "
    "fleet.distribute"
)


class ParameterSlots:
    """Where the trainable parameters are, and their types. If one is replaced or cast, torch's hooks do not follow."""

    def __init__(self, model: nn.Module, *, every: bool):
        self._all = [
            (f"{path}.{key}".lstrip("."), module, key, p, p.dtype, p.device, _wrapper(p))
            for path, module in model.named_modules()
            for key, p in seams.parameters(module).items()
            if p is not None and p.requires_grad
        ]
        self._some = self._all if every else self._all[:1] + self._all[-1:]

    def check(self, *, every: bool = False) -> None:
        """Compare only the first and the last parameter, which is cheap, unless `every` is set here or at set-up."""
        for name, module, key, p, dtype, device, wrapper in self._all if every else self._some:
            if wrapper != _wrapper(p):
                raise UsageError(
                    f"`p.data = ...` has no effect on the sharded parameter {plain_name(name)!r}: change it in place, "
                    "with p.data.copy_(...) or p.data.mul_(...)"
                )
            if p.dtype is not dtype or p.device != device:
                changed = f"was converted from {dtype} on {device} to {p.dtype} on {p.device}"
            elif seams.parameters(module).get(key) is not p:
                changed = "was replaced by another one"
            else:
                continue
            raise UsageError(
                f"parameter {plain_name(name)!r} {changed} after fleet.distribute, so the strategy would no longer act "
                f"on its gradient: {BEFORE}"
            )


def _wrapper(p: nn.Parameter) -> int:
    """The storage that `p.data = ...` replaces in a sharded parameter, which is not this rank's part; else 0."""
    return 0 if local(p) is p else seams.storage_id(p.untyped_storage())
