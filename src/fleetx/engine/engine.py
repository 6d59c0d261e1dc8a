"""The engine arms a model and an optimizer with a plan. It alone touches torch's hooks, and knows no part by name.

    model(x)          before: enter the FORWARD contexts
                      after:  leave them; tap the outputs
    loss.backward()   at a tapped output: decide whether to communicate; put withheld gradients back; LOSS
                      bucket by bucket, while backward runs: REDUCE -> network
    optimizer.step()  before: gate shut: take p.grad away. Gate open: GRADIENT; an overflow withholds the update
                      after:  PARAMETER
    state_dict()      adds {"fleetx": {version, round, merged, withheld, weights, parts}}; parameters by name

An update is skipped by withholding the gradient (p.grad = None), never by skipping a call: PyTorch's optimizers change
neither a parameter without a gradient nor its state. So the user's optimizer stays the user's.
"""

from __future__ import annotations

import math
import sys
import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import plain_name
from fleetx.base.trees import LossFn, loss_by, loss_of, map_tensors
from fleetx.base.wrapping import unwrap
from fleetx.comm.paths import Network
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.engine import layout, state
from fleetx.engine.checks import refuse
from fleetx.engine.context import Bucket, Context
from fleetx.engine.dtensors import ANOTHER_WAY, renamed
from fleetx.engine.gradients import Gradients
from fleetx.engine.hooks import Hook, OuterStep, run_closure
from fleetx.engine.loss_weights import LossWeights
from fleetx.engine.reducer import Reducer
from fleetx.engine.taps import PENALTY, reaches, tap
from fleetx.errors import StrategyError, UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Stage


class Engine:
    """One model, one optimizer, one plan."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, world: World):
        self.plan, self.model, self.optimizer, self.world = plan, model, optimizer, world
        self.names = {p: plain_name(n) for n, p in model.named_parameters()}
        refuse(plan, model, optimizer, world, self.names)
        self.layout = layout.of(plan.parts, model, world)
        self.device = next((p.device for p in self.names), world.device)
        self.state = self.initial_state()
        self.notes: dict[str, dict[str, Any]] = {_key(p): {} for p in plan.parts}
        self.round = 0  # the clock: rounds that ended, applied or not
        self.merged = 0  # steps since the last round ended, this one included
        self.loss: Tensor | None = None  # of the last step, where it could be seen
        self.updated = False  # did the last step apply an update?
        self.inputs: Any = None  # of the forward that is running
        self.reducer_settings: dict[str, Any] | None = None
        self.weights = LossWeights(plan, self.layout.replica_group)
        self.network = Network(self.layout.replica_group)
        weakref.finalize(self, self.network.close).atexit = False  # at the end fleet leaves the world in its own order
        self._calls = {s: [(a.call, Context(self, _key(a.part), plan.facts_at(a))) for a in plan.at(s)] for s in Stage}
        self._forwards: list[tuple[ExitStack, list[Any]]] = []  # that are running, innermost last
        self._differentiable = False  # was a backward itself made differentiable since the last step?
        self._backward = -1  # torch's number of the backward that was last seen to enter
        self._tapped = False  # did a backward enter through the model's output since the last step?
        self._scaled_at_loss = False
        self._unfinished = bool(plan.at(Stage.LOSS) or plan.at(Stage.GATE))  # is p.grad ours until the update?
        self._flushing = self._opened = False
        self._collected = 0  # steps in what is being reduced outside of a backward
        try:
            self._arm()
        except BaseException:
            unwrap(self.model)
            raise

    def initial_state(self) -> dict[str, dict[str, Any]]:
        return {_key(part): part.init({name: p for p, name in self.names.items()}) for part in self.plan.parts}

    def _arm(self) -> None:
        for call, ctx in self._calls[Stage.MODEL]:
            self.model = call(self.model, ctx)
        self.names = renamed(self.names, self.model, self.optimizer)
        if self.layout.reduced and not self.network.plain:
            raise StrategyError(ANOTHER_WAY)
        self.network.open()
        for call, ctx in self._calls[Stage.UPDATE]:
            self.optimizer = call(self.optimizer, ctx)
        made = [a.claim.makes for a in self.plan.acts if a.stage in (Stage.LOSS, Stage.GATE)]
        self.gradients = Gradients(self.optimizer, self.names, self.world, facts=frozenset().union(*made))
        self._reducer = self._make_reducer()
        # With nothing to do to a backward or to a step, the engine leaves it alone altogether.
        self._watching = self._reducer is not None or self._unfinished
        self._active = self._watching or bool(self._calls[Stage.GRADIENT])
        _forget_compiled()
        self.model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)
        self.model.register_forward_hook(Hook(self._after_forward), always_call=True)
        steps = OuterStep(self._before_step, self._after_step)
        self.optimizer.register_step_pre_hook(steps.enter)
        self.optimizer.register_step_post_hook(steps.leave)
        self.optimizer.register_state_dict_post_hook(self._save)
        self.optimizer.register_load_state_dict_pre_hook(self._check_load)
        self.optimizer.register_load_state_dict_post_hook(self._load)

    def _make_reducer(self) -> Reducer | None:
        alone = self.layout.reduced or self.layout.replica_group.size == 1
        if alone or self.reducer_settings is None or not any(p.requires_grad for p in self.names):
            return None
        hook = self._reduce if self._calls[Stage.REDUCE] or not self.network.plain else None
        moved = self.gradients.look_again
        return Reducer(self.model, self.names, self.layout.replica_group, hook, moved=moved, **self.reducer_settings)

    def context_of(self, part: Part) -> Context:
        """For what a part says about itself outside of a step."""
        return Context(self, _key(part), frozenset())

    def close(self) -> None:
        """Drop what holds the process group: the process ends."""
        self._reducer = None
        self.network.close()

    # --- model(x) ---------------------------------------------------------------------------------
    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if model is not self.model:
            return None
        outermost = not self._forwards  # a model may call itself
        stack = ExitStack()
        finish: list[Any] = []
        self._forwards.append((stack, finish))  # first, because _after_forward is called even if this raises
        self.inputs = args, kwargs
        for call, ctx in self._calls[Stage.FORWARD]:
            finish.append(stack.enter_context(call(ctx)))
        if not torch.is_grad_enabled() or not outermost:
            return None
        if self._calls[Stage.LOSS] or (self._watching and self.weights.used is not False):  # None: it may come yet
            args, kwargs = map_tensors(lambda x: tap(x, self._leave_backward), (args, kwargs))
        if self._reducer is not None:
            stack.enter_context(self._reducer.active())
        return args, kwargs

    def _after_forward(self, model: nn.Module, args: Any, out: Any) -> Any:
        if model is not self.model or not self._forwards:  # none: another hook raised before ours
            return None
        stack, finish = self._forwards.pop()
        self.inputs = None
        with stack:  # leaves the contexts
            for function in finish:
                if callable(function) and out is not None:  # None: the forward raised
                    out = map_tensors(function, out)
        if (loss := loss_of(out)) is not None and torch.is_grad_enabled():
            self.loss = loss.detach()
        if out is None or not self._watching or not torch.is_grad_enabled() or self._forwards:
            return out
        if self._reducer is not None:
            out = self._reducer.after_forward(out, communicate=self._opens(self.merged + 1))
        return map_tensors(lambda x: tap(x, self._enter_backward), out, strict=self._scales)

    def forward_context(self, *, first: bool = False) -> AbstractContextManager[Any]:
        """The FORWARD contexts once more, for a part that runs a piece of the forward again, or (`first`) alone."""
        stack = ExitStack()
        for act, (call, ctx) in zip(self.plan.at(Stage.FORWARD), self._calls[Stage.FORWARD], strict=True):
            if act.claim.replay or first:
                stack.enter_context(call(ctx))
        return stack

    # --- loss.backward() --------------------------------------------------------------------------
    def _enter_backward(self, grad: Tensor) -> Tensor:
        if self._backward != (number := torch._C._current_graph_task_id()):
            self._backward = number
            if self.layout.reduced or reaches(self.gradients.params()):  # FSDP's leaves are others
                self._check_penalty()
                self._begin_backward()
            self._differentiable = self._differentiable or torch.is_grad_enabled()  # as with create_graph=True
        if self.weights.empty:
            return torch.zeros_like(grad)
        return grad if self._scaled_at_loss or not self._scales else grad * self._factor

    def _leave_backward(self, grad: Tensor) -> Tensor:
        """What is before the model gets its gradient as if the model were plain."""
        plain = self._scaled_at_loss or not self._scales or self.weights.empty
        return grad if plain else grad / self._factor

    @property
    def _scales(self) -> bool:
        return bool(self._calls[Stage.LOSS] or self.weights.used)

    @property
    def _factor(self) -> float:
        return self._loss_scale * self.weights.factor

    @property
    def _loss_scale(self) -> float:
        return math.prod(call(ctx) for call, ctx in self._calls[Stage.LOSS])

    def _check_penalty(self) -> None:
        """A loss on gradients of the model reaches its parameters by a way on which the scale cancels out."""
        if self._scales and self._differentiable and not self._scaled_at_loss:
            raise UsageError(PENALTY)

    def _begin_backward(self) -> None:
        """Once for each backward that enters through the output and reaches parameters."""
        self._tapped = True
        opens = self._opens(self.merged + 1)
        self.weights.begin(opens=opens)
        self.gradients.check_before_backward()
        self.gradients.put_back()
        if self._unfinished:
            self.gradients.watch()
        if self._reducer is not None and opens:
            self._reducer.begin_backward()

    def forward_backward(self, inputs: Any, target: Any, loss_fn: LossFn | None) -> Tensor:
        """Both at once, in the form that works under every strategy."""
        loss = loss_by(self.model, inputs, target, loss_fn)
        self.backward(loss)
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """LOSS at the loss itself, for a loss that reads parameters past the model's output."""
        before, self._scaled_at_loss = self._backward, True
        self.loss = loss.detach()
        try:
            self.weights.begin(opens=self._opens(self.merged + 1))
            (loss * self._factor if self._scales else loss).backward()
        finally:
            self._scaled_at_loss = self._differentiable = False
        if self._backward == before:  # it did not touch the model's output at all
            if self._reducer is not None:
                raise UsageError("this loss does not depend on the model's output, so its gradients were not reduced")
            self._tapped = True
            self.gradients.put_back()

    def _reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        for call, ctx in self._calls[Stage.REDUCE]:
            return call(bucket, ctx)
        return self.network.mean(bucket.buffer, bucket.index)

    def gradient_factor(self) -> float:
        """Of the gradient that is being reduced."""
        return self._loss_scale * self.weights.divisor(self._collected or self.merged + 1)

    # --- optimizer.step() -------------------------------------------------------------------------
    def _opens(self, steps: int) -> bool:
        return all(call(steps, ctx) for call, ctx in self._calls[Stage.GATE])

    def _before_step(self, args: Any, kwargs: Any) -> Any:
        current().stepped = weakref.ref(self)
        changed = run_closure(self.optimizer, args, kwargs) if self._active else None
        self._opened = self.updated = False
        known = self.names if self._reducer is None else self._reducer.known
        if self._watching and not self.gradients.check_before_step(known, tapped=self._tapped):
            return changed
        steps = self.merged if self._flushing else self.merged + 1
        opens = self._flushing or self._opens(steps)
        if opens and not self._tapped and self.gradients.waiting:
            self._collect(steps)  # the last step of the window had no backward of its own
        if opens and self._reducer is not None and self._tapped and not self._flushing:
            self._reducer.check_finished()
        self.merged, self._opened = steps, opens
        self.updated = opens and self._finish_gradient()
        if self._unfinished and not self.updated:
            self.gradients.take_away(keep=not self._opened)
            self.gradients.begin_idle_step()
        return changed

    def _after_step(self) -> None:
        self.gradients.end_step()
        self.weights.end_step(opened=self._opened, steps=self.merged)
        self._differentiable = False
        if self._opened:
            self.round += 1
            params = self.gradients.params()
            for call, ctx in self._calls[Stage.PARAMETER]:
                call(params, ctx)
            self.merged = 0
        self._tapped = False

    def _finish_gradient(self) -> bool:
        """Run GRADIENT over the gradients of this round; False withholds the update."""
        self.gradients.check_none_left()
        grads = self.gradients.present  # anew for each: an act may bring one that another rank has
        # Of a divided model other ranks wait for this one, whatever it has.
        there = bool(grads()) or self.layout.shard_group is not None
        return there and all(call(grads(), ctx) is not False for call, ctx in self._calls[Stage.GRADIENT])

    def flush(self) -> bool:
        """Apply a window that is not full, with its true number of steps. Every rank must call it."""
        if self._tapped:
            raise UsageError("a backward() was not followed by optimizer.step(): call that before fleet.flush()")
        flushed = self.merged > 0
        if flushed:
            self._collect(self.merged)
            self._flushing = self._tapped = True
            try:
                self.optimizer.step()
            finally:
                self._flushing = False
            self.gradients.take_away(keep=False)  # the loop's own zero_grad has been called already
        self.drain(last=True)
        return flushed and self.updated

    def drain(self, *, last: bool) -> None:
        """Let the parts finish what is under way."""
        params: list[Tensor] = [*self.gradients.params()]
        with torch.no_grad():
            for part in self.plan.parts:
                part.drain(params, self.context_of(part), last=last)

    def _collect(self, steps: int) -> None:
        """Put the withheld gradients of so many steps back and reduce them, where no backward does."""
        self.gradients.put_back()
        self.weights.collect()
        if self._reducer is not None:
            self._collected = steps
            self._reducer.reduce_now([p for p in self.gradients.params() if p.requires_grad], self._reduce)
            self._collected = 0
        self._tapped = True

    # --- state_dict() -----------------------------------------------------------------------------
    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.drain(last=False)
        state_dict["fleetx"] = state.save(self)

    def _check_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before torch looks at the rest: nothing may be changed yet."""
        state_dict = dict(state_dict)
        self._loading = state.checked(self, state_dict.pop("fleetx", None))
        return state_dict

    def _load(self, optimizer: Optimizer) -> None:
        state.load(self, self._loading)


def _forget_compiled() -> None:
    """torch.compile does not guard on hooks: what it compiled for this class before would run without ours."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _key(part: Any) -> str:
    return type(part).__name__
