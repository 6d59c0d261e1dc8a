from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import has_forward, named_modules, plain_name, sparse_modules
from fleetx.base.seams import BatchNormBase, reparametrize_module
from fleetx.base.suggest import did_you_mean
from fleetx.base.wrapping import Layer, wrap
from fleetx.comm.world import World
from fleetx.engine.context import SetupContext, StepContext
from fleetx.errors import NOT_BUILT
from fleetx.parts.amp import op_lists
from fleetx.strategy.cost_model import Cluster, Offer
from fleetx.strategy.effect import Effect, more
from fleetx.strategy.part import Half, NameList, Part, settings
from fleetx.strategy.stage import Fact, Stage, at

_SCALING = ("init_loss_scaling", "use_dynamic_loss_scaling")
_DYNAMIC = ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")


def _has_lists(amp: AMP) -> bool:
    return bool(amp.custom_white_list or amp.custom_black_list)


def _scales(amp: AMP) -> bool:
    return amp.dtype == "float16" and (amp.use_dynamic_loss_scaling or amp.init_loss_scaling != 1.0)


@settings
class AMP(Part):
    """Run the forward in half precision under torch.autocast; in float16, scale the loss and skip overflowed updates.

    float16: the gradient that enters the model is multiplied by `scale`, and divided by it before the update. If any
    value is not finite on any rank, the update is skipped on every rank (as in PyTorch; Paddle applies a zero gradient
    instead). After decr_every_n_nan_or_inf skipped updates in a row scale = max(1, scale * decr_ratio); after
    incr_every_n_steps good ones in a row scale = scale * incr_ratio. bfloat16 needs no scale.
    Neutral: use_dynamic_loss_scaling=False, init_loss_scaling=1.0 is plain autocast. With
    decr_every_n_nan_or_inf=1 it equals torch.amp.GradScaler. Reference: Micikevicius et al. 2018, arXiv 1710.03740.
    """

    init_loss_scaling: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32768.0
    """Initial loss scale (float16 only)."""
    incr_every_n_steps: Annotated[int, Field(ge=1)] = 1000
    """Consecutive good updates before the scale grows."""
    decr_every_n_nan_or_inf: Annotated[int, Field(ge=1)] = 2
    """Consecutive overflowed updates before the scale shrinks."""
    incr_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    """Factor by which the scale grows."""
    decr_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Factor by which the scale shrinks. 0.8 is the default in Paddle's code; its manual says 0.5."""
    use_dynamic_loss_scaling: bool = True
    """Adapt the scale. Otherwise it stays at init_loss_scaling."""
    custom_white_list: NameList = Field(default_factory=list)
    """Operations or modules to run in half precision even if autocast would not: `softmax`, `encoder.norm`."""
    custom_black_list: NameList = Field(default_factory=list)
    """Operations or modules to run in float32 even if autocast would not: `linear`, `head`."""
    custom_black_varnames: NameList = Field(default_factory=list)
    """Names of intermediate variables. Not supported: PyTorch models do not have them."""
    use_pure_fp16: bool = False
    """Keep the parameters in float16. Not supported."""
    use_fp16_guard: bool = True
    """In Paddle: with use_pure_fp16, run only code inside fp16_guard in float16."""
    dtype: Half = "float16"
    """Half-precision type. Paddle uses float16."""

    no_meaning: ClassVar[dict[str, str]] = {"use_fp16_guard": "it only matters with use_pure_fp16"}
    changes_forward: ClassVar[bool] = True
    effect: ClassVar[Effect] = more("half_outputs", "modules return half precision")
    example: ClassVar[dict[str, Any]] = {"init_loss_scaling": 1024.0}
    lossless: ClassVar[dict[str, Any]] = {"custom_black_list": ["linear"]}  # what verify's model runs in half precision
    rounding: ClassVar[float] = 3e-2
    costs: ClassVar[str] = "time: casts; faster on devices with half-precision arithmetic"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        yield Offer({"dtype": "bfloat16"}, "bf16")
        yield Offer({"dtype": "float16"}, "lossy")

    # --- checks -----------------------------------------------------------------------------------
    def problems(self) -> Iterator[str]:
        default = type(self)()
        changed = [key for key in _SCALING + _DYNAMIC if getattr(self, key) != getattr(default, key)]
        for key in changed if self.dtype == "bfloat16" else ():
            yield f"{key} has no effect with dtype='bfloat16', which needs no loss scale: remove it"
        for key in changed if not self.use_dynamic_loss_scaling else ():
            if key in _DYNAMIC:
                yield f"{key} has no effect with use_dynamic_loss_scaling=False: remove one of them"
        if self.custom_black_varnames:
            yield "custom_black_varnames: PyTorch models have no variable names: put module names in custom_black_list"
        if self.use_pure_fp16:
            yield (
                f"use_pure_fp16=True {NOT_BUILT}, because float16 parameters lose small updates: "
                "leave it False; the forward runs in float16 anyway"
            )
        for name in sorted(set(self.custom_white_list) & set(self.custom_black_list)):
            yield f"{name!r} is in both custom_white_list and custom_black_list: remove it from one"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        modules = dict(named_modules(model))
        for key in ("custom_white_list", "custom_black_list"):
            for name in getattr(self, key):
                if name in modules:
                    if key == "custom_black_list" and not has_forward(modules[name]):
                        yield f"amp_configs[{key!r}]: {name!r} has no forward: list the modules inside it"
                elif reason := op_lists.unsupported(name):
                    if reason == op_lists.UNKNOWN:
                        known = [*modules, *dir(torch.ops.aten)]
                        hint = "" if name in known else did_you_mean(name, known, most=3)
                        reason += f": {hint or 'name one or the other'}"
                    else:
                        reason = f"is not a module of the model, and {reason}"
                    yield f"amp_configs[{key!r}]: {name!r} {reason}"
        operations = {*self.custom_white_list, *self.custom_black_list} - modules.keys()
        if operations and isinstance(model, seams.OptimizedModule):
            yield (
                "amp_configs: operations in the custom lists do not affect the backward of a compiled model: "
                "list modules instead"
            )
        floats = [p for p in model.parameters() if p.is_floating_point()]
        if floats and all(p.dtype is torch.float64 for p in floats):
            yield "amp has no effect on float64 parameters, which autocast skips: call model.float(), or turn amp off"
        if not _scales(self):
            return
        if any(p.dtype is torch.float16 for p in model.parameters()):
            yield "amp needs float32 parameters, but some are float16: do not call model.half()"
        for name, p in model.named_parameters():
            if seams.hooks(p):
                yield (
                    f"amp in float16 would call register_hook's function on parameter {plain_name(name)!r} with the "
                    "gradient times the loss scale: remove the hook, or use dtype='bfloat16', which needs no scale"
                )
        if any(p.is_complex() for p in model.parameters()):
            yield f"amp in float16 with complex gradients {NOT_BUILT}: use bfloat16"
        if sparse := sparse_modules(model):
            yield f"amp in float16 with the sparse gradients of {sparse} {NOT_BUILT}: set sparse=False or use bfloat16"

    # --- acts -------------------------------------------------------------------------------------
    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"scale": self.init_loss_scaling, "good": 0, "bad": 0} if _scales(self) else {}

    @property
    def _half(self) -> torch.dtype:
        return torch.float16 if self.dtype == "float16" else torch.bfloat16

    @at(Stage.MODEL, when=_has_lists)
    def wrap_listed(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """make the modules in the custom lists run in the requested precision"""
        modules = dict(named_modules(model))
        kind = ctx.device.type
        for name in self.custom_black_list:
            if name in modules:
                wrap(modules[name], Layer.PRECISION, functools.partial(_in_precision, kind, torch.float32))
        for name in self.custom_white_list:
            # Only leaves are wrapped, so that recompute's segments stay outside the casts.
            for module in modules[name].modules() if name in modules else ():
                if not list(module.children()):
                    wrap(module, Layer.PRECISION, functools.partial(_in_precision, kind, self._half))
        for key, names in (("white", self.custom_white_list), ("black", self.custom_black_list)):
            ctx.notes[key] = {operation for n in names if n not in modules for operation in op_lists.torch_names(n)}
        op_lists.override(ctx.notes["white"] | ctx.notes["black"], ctx.device)
        return model

    @at(Stage.FORWARD, replay=False)  # torch.utils.checkpoint restores autocast itself
    @contextmanager
    def cast(self, ctx: StepContext) -> Iterator[Callable[[Tensor], Tensor]]:
        """run the model under torch.autocast and return its outputs in float32"""
        with torch.autocast(ctx.device.type, dtype=self._half):
            yield _to_float32

    @at(Stage.FORWARD, when=_has_lists)
    def override_ops(self, ctx: StepContext) -> AbstractContextManager[None]:
        """make the operations in the custom lists run in the requested precision"""
        return op_lists.active(ctx.notes["white"], ctx.notes["black"], self._half)

    @at(Stage.LOSS, makes={Fact.SCALED}, when=_scales)
    def scale(self, ctx: StepContext) -> float:
        """multiply the gradient that enters the model, so that small values do not vanish in float16"""
        return ctx.state["scale"]

    @at(Stage.GRADIENT, needs={Fact.SCALED}, ends={Fact.SCALED}, when=_scales)
    def unscale(self, grads: list[Tensor], ctx: StepContext) -> None:
        """divide by the loss scale; skip the update on every rank if any value overflowed on any rank"""
        overflows = torch.zeros(1, device=ctx.device)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for g in grads:
            groups[g.device, g.dtype].append(g)
        for (device, _), group in groups.items():
            found = torch.zeros(1, device=device)
            factor = torch.full((1,), 1.0 / ctx.state["scale"], device=device)
            seams.unscale_(group, found, factor)
            overflows += found.to(overflows.device)
        ctx.withhold_if(overflows, functools.partial(self._adapt, ctx.state))

    def _adapt(self, state: dict[str, Any], overflowed: bool) -> None:
        if not self.use_dynamic_loss_scaling:
            return
        finite = not overflowed
        state["good"], state["bad"] = (state["good"] + 1, 0) if finite else (0, state["bad"] + 1)
        if state["good"] == self.incr_every_n_steps:
            grown = _float32(state["scale"] * self.incr_ratio)
            state["scale"] = grown if grown != float("inf") else state["scale"]
            state["good"] = 0
        if state["bad"] == self.decr_every_n_nan_or_inf:
            state["scale"] = max(1.0, _float32(state["scale"] * self.decr_ratio))
            state["bad"] = 0


def _float32(value: float) -> float:
    """Round like GradScaler, which keeps its scale in a float32 tensor."""
    return torch.tensor(value, dtype=torch.float32).item()


def _to_float32(out: Tensor) -> Tensor:
    return out.float() if out.dtype in (torch.float16, torch.bfloat16) else out


def _in_precision(
    device: str, dtype: torch.dtype, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The layer around a listed module, as `wrap` calls it."""
    if not torch.is_autocast_enabled(device):
        return inner(*args, **kwargs)
    args, kwargs = op_lists.to_dtype((args, kwargs), dtype)
    with torch.autocast(device, enabled=False):
        # BatchNorm accepts half-precision inputs together with float32 parameters and statistics.
        if dtype is torch.float32 or isinstance(module, BatchNormBase):
            return inner(*args, **kwargs)
        with reparametrize_module(module, {name: p.to(dtype) for name, p in module.named_parameters()}):
            return inner(*args, **kwargs)
