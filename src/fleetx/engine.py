"""The engine arms a model and an optimizer with a plan. It alone touches torch's hooks, and knows no part by name.

    model(x)          before: enter the FORWARD contexts; tell the reducer whether this backward communicates
                      after:  leave them; tap the outputs
    loss.backward()   at a tapped output: put withheld gradients back; LOSS
                      bucket by bucket, while backward runs: REDUCE -> network
    optimizer.step()  before: gate shut: take p.grad away. Gate open: GRADIENT; an overflow withholds the update
                      after:  PARAMETER
    state_dict()      adds {"fleetx": {version, round, merged, withheld, parts}}; parameters by name

An update is skipped by withholding the gradient (p.grad = None), never by skipping a call: PyTorch's optimizers change
neither a parameter without a gradient nor its state. So the user's optimizer stays the user's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.compose import Plan
from fleetx.errors import StrategyError, UsageError
from fleetx.moment import Bucket, Moment
from fleetx.reducer import Reducer
from fleetx.stage import Stage
from fleetx.structure import map_tensors
from fleetx.world import World

VERSION = 1  # of what state_dict() adds


class Engine:
    """One model, one optimizer, one plan."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, world: World):
        self.plan, self.model, self.optimizer, self.world = plan, model, optimizer, world
        self.names = {p: _plain_name(n) for n, p in model.named_parameters()}
        _refuse(plan, model, optimizer, world, self.names)
        self.device = next((p.device for p in self.names), world.device)
        self.state = {_key(p): p.init({n: p for p, n in self.names.items()}) for p in plan.parts}
        self.round = 0  # the clock: rounds that ended, applied or not
        self.merged = 0  # steps since the last round ended, this one included
        self.updated = False  # did the last step apply an update?
        self.reducer_settings: dict[str, Any] | None = None
        self._calls = {s: [(a.call, Moment(self, _key(a.part), plan.facts_at(a))) for a in plan.at(s)] for s in Stage}
        self._withheld: dict[nn.Parameter, Tensor] = {}
        self._forwards: list[tuple[ExitStack, list[Any]]] = []  # that are running, innermost last
        self._tapped = False  # did a backward enter through the model's output since the last step?
        self._unfinished = bool(self._calls[Stage.LOSS] or self._calls[Stage.GATE])  # is p.grad ours until the update?
        self._seen: list[tuple[nn.Parameter, Tensor, int]] = []  # what the last backward left, with its version
        self._scaled_at_loss = False
        self._flushing = self._opened = False
        self._arm()

    def _arm(self) -> None:
        for call, moment in self._calls[Stage.MODEL]:
            self.model = call(self.model, moment)
        if {p: _plain_name(n) for n, p in self.model.named_parameters()} != self.names:
            raise StrategyError("a MODEL act changed the parameters or their names")
        for call, moment in self._calls[Stage.UPDATE]:
            self.optimizer = call(self.optimizer, moment)
        self._reducer = self._make_reducer()
        _forget_compiled()
        self.model.register_forward_pre_hook(_Hook(self._before_forward), with_kwargs=True)
        self.model.register_forward_hook(_Hook(self._after_forward), always_call=True)
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)
        self.optimizer.register_state_dict_post_hook(self._save)
        self.optimizer.register_load_state_dict_pre_hook(self._load)

    def _make_reducer(self) -> Reducer | None:
        if self.world.size == 1 or self.reducer_settings is None or not any(p.requires_grad for p in self.names):
            return None
        hook = self._reduce if self._calls[Stage.REDUCE] else None
        return Reducer(self.model, self.names, self.world, hook, **self.reducer_settings)

    # --- model(x) ---------------------------------------------------------------------------------
    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if model is not self.model:
            return None
        stack = ExitStack()
        finish: list[Any] = []
        self._forwards.append((stack, finish))  # first, because _after_forward is called even if this raises
        for call, moment in self._calls[Stage.FORWARD]:
            finish.append(stack.enter_context(call(moment)))
        if self._reducer is not None and torch.is_grad_enabled():
            stack.enter_context(self._reducer.active())
            return self._reducer.before_forward(args, kwargs, communicate=self._opens(self.merged + 1))
        return None

    def _after_forward(self, model: nn.Module, args: Any, out: Any) -> Any:
        if model is not self.model:
            return None
        stack, finish = self._forwards.pop()
        for function in finish:
            if callable(function) and out is not None:  # None: the forward raised
                out = map_tensors(function, out)
        stack.close()
        if out is None or not torch.is_grad_enabled():
            return out
        if self._reducer is not None:
            out = self._reducer.after_forward(out)
        return map_tensors(self._tap, out)

    def forward_context(self) -> AbstractContextManager[Any]:
        """The FORWARD contexts once more, for a part that runs a piece of the forward again."""
        stack = ExitStack()
        for call, moment in self._calls[Stage.FORWARD]:
            stack.enter_context(call(moment))
        return stack

    # --- loss.backward() --------------------------------------------------------------------------
    def _tap(self, out: Tensor) -> Tensor:
        if not out.requires_grad or out.is_leaf:
            return out
        # An alias, so that the hook sees only what comes from outside: a model that returns its loss and its logits
        # would otherwise pass the logits' hook on the way from the loss, and be scaled twice.
        out = out.view_as(out)
        out.register_hook(self._enter_backward)
        return out

    def _enter_backward(self, grad: Tensor) -> Tensor:
        if self._unfinished:
            # A callback that queues another runs after the one by which DDP ends its reduction.
            _at_end_of_backward(lambda: _at_end_of_backward(self._look))
        self._tapped = True
        self._put_back()
        if not self._scaled_at_loss:
            for call, moment in self._calls[Stage.LOSS]:
                grad = call(grad, moment)
        return grad

    def _look(self) -> None:
        self._seen = [(p, p.grad, p.grad._version) for p in self._params() if p.grad is not None]

    def backward(self, loss: Tensor) -> None:
        """LOSS at the loss itself, for a loss that reads parameters past the model's output."""
        self._tapped = True
        self._put_back()
        for call, moment in self._calls[Stage.LOSS]:
            loss = call(loss, moment)
        self._scaled_at_loss = True
        try:
            loss.backward()
        finally:
            self._scaled_at_loss = False

    def _reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        for call, moment in self._calls[Stage.REDUCE]:
            return call(bucket, moment)
        return self.world.mean(bucket.buffer)

    # --- optimizer.step() -------------------------------------------------------------------------
    def _opens(self, steps: int) -> bool:
        return all(call(steps, moment) for call, moment in self._calls[Stage.GATE])

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = self._run_closure(args, kwargs)
        self._check_origin()
        if not self._flushing:
            self.merged += 1
        self._opened = self._flushing or self._opens(self.merged)
        self.updated = self._opened and self._finish_gradient()
        if not self.updated:
            self._take_away(keep=not self._opened)
        return changed

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._opened:
            self.round += 1
            params = list(self._params())
            for call, moment in self._calls[Stage.PARAMETER]:
                call(params, moment)
            self.merged = 0
        self._tapped = False

    def _check_origin(self) -> None:
        """Gradients that bypassed the hooks would be used unscaled, unreduced, or in the place of withheld ones."""
        strict = self._reducer is not None or self._calls[Stage.LOSS] or self._calls[Stage.GATE]
        if strict and not self._tapped and any(p.grad is not None for p in self._params()):
            raise UsageError(
                "these gradients did not come through the model's output, so the strategy could not act on them: call "
                "the model itself, not one of its modules, and let it return tensors, tuples, dicts or dataclasses; "
                "for a loss that reads parameters past the output use fleet.backward(loss)"
            )
        if any(p.grad is grad and grad._version != version for p, grad, version in self._seen):
            raise UsageError(
                "a gradient was changed between backward() and step(), where it is still scaled or summed: "
                "let the strategy clip it (strategy.clip = True), or do it where amp and gradient_merge are off"
            )
        self._seen = []
        if self._reducer is not None:
            for p in self._params():
                if p.grad is not None and p not in self._reducer.known:
                    raise UsageError(
                        f"parameter {self.names.get(p, tuple(p.shape))!r} began to need a gradient after "
                        "fleet.distribute, which did not arrange for its reduction: set requires_grad before"
                    )

    def _finish_gradient(self) -> bool:
        """Run GRADIENT over the gradients of this round; False withholds the update."""
        if self._reducer is not None and not self._flushing:
            self._reducer.check_finished()
        grads = [p.grad for p in self._params() if p.grad is not None]
        return bool(grads) and all(call(grads, moment) is not False for call, moment in self._calls[Stage.GRADIENT])

    def _run_closure(self, args: Any, kwargs: Any) -> Any:
        """step(closure) computes gradients inside of the step: run it first, and hand its loss to the optimizer."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        return (args[0], lambda: loss, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def flush(self) -> bool:
        """Apply a window that is not full, with its true number of steps. Every rank must call it."""
        if self.merged == 0:
            return False
        self._put_back()
        if self._reducer is not None:
            self._reducer.reduce_now([p for p in self._params() if p.requires_grad], self._reduce)
        self._flushing = self._tapped = True
        try:
            self.optimizer.step()
        finally:
            self._flushing = False
        self._take_away(keep=False)  # the loop's own zero_grad has been called already
        return self.updated

    # --- withholding ------------------------------------------------------------------------------
    def _params(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _take_away(self, *, keep: bool) -> None:
        for p in self._params():
            if p.grad is not None:
                if keep:
                    self._withheld[p] = p.grad
                p.grad = None

    def _put_back(self) -> None:
        while self._withheld:
            p, grad = self._withheld.popitem()
            p.grad = grad if p.grad is None else p.grad.add_(grad)

    # --- state_dict() -----------------------------------------------------------------------------
    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        withheld = {self.names[p]: g for p, g in self._withheld.items()}
        clock = {"version": VERSION, "round": self.round, "merged": self.merged}
        state_dict["fleetx"] = clock | {"withheld": withheld, "parts": {k: s for k, s in self.state.items() if s}}

    def _load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = dict(state_dict)
        mine = state_dict.pop("fleetx", None) or {"round": 0, "merged": 0, "withheld": {}, "parts": {}}
        if mine.get("version", VERSION) > VERSION:
            raise UsageError(f"this checkpoint was written by a newer fleetx (format {mine['version']})")
        params = {n: p for p, n in self.names.items()}
        unknown = sorted(set(mine["withheld"]) - set(params))
        if unknown:
            raise UsageError(f"the checkpoint holds gradients of parameters that the model has not: {unknown[:5]}")
        lost = sorted(set(mine["parts"]) - {k for k, s in self.state.items() if s})
        if lost:
            warnings.warn(f"the checkpoint holds the state of {', '.join(lost)}, which is off now", stacklevel=3)
        self.round, self.merged = mine["round"], mine["merged"]
        # Copies: the checkpoint stays the caller's, and accumulating into it would change it behind his back.
        self._withheld = {params[n]: g.to(params[n].device, copy=True) for n, g in mine["withheld"].items()}
        for key, state in mine["parts"].items():
            if key in self.state:
                self.state[key] = map_tensors(lambda t: t.to(self.device, copy=True), state)
        return state_dict


class _Hook:
    """A hook that stays with its model: a copy or a pickle of the model carries one that does nothing instead."""

    def __init__(self, call: Any):
        self.call = call

    @torch._disable_dynamo  # a model compiled after `distribute` must run it as it is
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _nothing_at_all, ()


def _nothing(*args: Any) -> None:
    """What a copy of the model has in the place of the engine's hooks."""


def _nothing_at_all() -> Any:
    return _nothing


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _forget_compiled() -> None:
    """torch.compile does not guard on hooks: what it compiled for this class before would run without ours."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _key(part: Any) -> str:
    return type(part).__name__


def _plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts before it."""
    return name.replace("_orig_mod.", "")


def _refuse(plan: Plan, model: nn.Module, optimizer: Optimizer, world: World, names: dict[nn.Parameter, str]) -> None:
    """Everything that keeps this plan from this model and optimizer, in one error, before anything is touched."""
    problems = [p for part in plan.parts for p in part.misfits(model, optimizer, world)]
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS changes parameters that have no gradient, so its update cannot be withheld: use another")
    strangers = [p for g in optimizer.param_groups for p in g["params"] if p not in names]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        problems.append(
            f"the optimizer holds {len(strangers)} parameters that the model has not (shapes {shapes}): they would be "
            "neither reduced nor unscaled. Put them into one nn.Module with the model"
        )
    if problems:
        raise StrategyError(problems)
