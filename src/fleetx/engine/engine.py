"""The engine applies a plan to a model and an optimizer. Only it touches torch's hooks, and it knows no part by name.

    model(x)          before: enter the FORWARD contexts
                      after:  leave them; tap the outputs
    loss.backward()   at a tapped output: put withheld gradients back; LOSS
                      per bucket, while backward runs: REDUCE -> network, if the gate will open
    optimizer.step()  before: gate closed: take p.grad away. Gate open: GRADIENT; an overflow withholds the update
                      after:  PARAMETER; the next step begins
    state_dict()      adds {"fleetx": ...}, whose keys `state.py` lists; parameters by name

An update is skipped by withholding the gradient (p.grad = None), never by skipping a call: PyTorch's optimizers change
neither a parameter without a gradient nor its state. So the user's optimizer keeps working as the user wrote it.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.trees import loss_of, map_tensors
from fleetx.base.user_line import warn
from fleetx.comm import peers
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.engine import dcp, state, taps
from fleetx.engine.checks import check
from fleetx.engine.dtensors import local, renamed
from fleetx.engine.gradients import Gradients
from fleetx.engine.guests import (
    Measuring,
    ParameterSlots,
    Scaler,
    Wrappers,
    check_known,
    check_not_wrapped,
    inner_optimizers,
)
from fleetx.engine.hooks import Hook, OuterStep, run_closure
from fleetx.engine.numbers import Checks, Numbers
from fleetx.engine.plain import PlainOptimizer, forget_compiled, take_off
from fleetx.engine.reducer import Reducer
from fleetx.engine.rounds import Rounds
from fleetx.engine.taps import Inputs, check_beside, reaches, tap
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage


class Engine(Rounds):
    """One model, one optimizer, one plan."""

    taps = True  # does it watch backward enter through the model's output?

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, world: World):
        check(plan, model, optimizer, world)
        state.check_not_loaded(optimizer)
        super().__init__(plan, model, optimizer, world)
        self.wrap_acts(None)
        self._inputs, self._forwards = Inputs(), list[tuple[ExitStack, list[Any]]]()  # running forwards, innermost last
        self._mixes = bool(plan.at(Stage.LOSS) or plan.at(Stage.GATE) or plan.makes(Fact.MOMENTUM))
        self._owns_grad = self._mixes  # is p.grad ours until the update?
        self._session = current()
        self.checks = self._session.checks or Checks()
        self._numbers = Numbers(self.checks, world=self.world, shared=self.updates_together)
        self.handles, self._called = list[Any](), False  # of hooks, to remove them; has model(x) ever been called?
        try:
            self._arm()
        except Exception:
            take_off(self)
            raise

    # --- set-up -----------------------------------------------------------------------------------
    def _arm(self) -> None:
        for call, ctx in self._calls[Stage.MODEL]:
            self.model = call(self.model, ctx)
            self.names = renamed(self.names, self.model, self.optimizer)
        self.network.open()
        plain = PlainOptimizer(self.optimizer)
        self.undo.append(plain.restore)
        try:
            for call, ctx in self._calls[Stage.UPDATE]:
                self.optimizer = call(self.optimizer, ctx)
            self._scaler = Scaler(self.plan, self.optimizer)
        finally:
            plain.changed()
        made = [a.claim.makes for a in self.plan.acts if a.stage in (Stage.LOSS, Stage.GATE)]
        self.gradients = Gradients(self.optimizer, self.names, self.world, facts=frozenset().union(*made))
        self.reducer = self._make_reducer()
        # If the engine has nothing to do in a backward or a step, it leaves both alone.
        self._watching = self.reducer is not None or self._owns_grad
        self._tapping = self.taps and (self._watching or self.layout.reduced)
        self._active = self._watching or self._tapping or bool(self._calls[Stage.GRADIENT])
        self._slots = ParameterSlots(
            self.model, every=bool((self.reducer_settings or {}).get("find_unused_parameters"))
        )
        if self._watching or self.layout.reduced:
            self.handles.append(Wrappers(self.names))
        if self._owns_grad:
            self.handles.append(Measuring(self.gradients, self.multiple))
        forget_compiled()
        named = peers.naming()
        steps, saving = OuterStep(named(self._before_step), named(self._after_step)), state.Hooks(self)
        self.handles += [
            self.model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            self.model.register_forward_hook(Hook(self._after_forward), always_call=True),
            *saving.registered(self.optimizer),
            self.model.register_load_state_dict_post_hook(Hook(saving.after_model)),
        ]
        for optimizer in (self.optimizer, *inner_optimizers(self.optimizer)):  # the outermost step() counts
            hooks = optimizer.register_step_pre_hook(steps.enter), optimizer.register_step_post_hook(steps.leave)
            self.handles += hooks
        self.handles.append(self.model.register_state_dict_post_hook(Hook(saving.guard)))
        if self.layout.reduced:
            before = Hook(self._before_gathering)
            self.handles.append(self.model.register_forward_pre_hook(before, prepend=True))  # before FSDP's own
            readers = [(p, self._reader(p)) for p in self.names]
            self.handles += [reader for _, reader in readers]
            # Not p.register_hook, which the reader has replaced with a function that raises an error.
            self.handles += [Tensor.register_hook(p, reader.check) for p, reader in readers if p.requires_grad]

    def _make_reducer(self) -> Reducer | None:
        group = self.layout.replica_group
        if self.layout.reduced or group.size == 1 or self.reducer_settings is None or not self.names:
            return None
        ours = self._calls[Stage.REDUCE] or self._calls[Stage.WIRE] or not self.network.plain
        hook = self.reduce if ours or self.step_norm.every else None
        self.buffers.send(group, strict=self.shares_buffers)
        within = self._meets_in_backward()
        return Reducer(self.model, self.names, group, hook, self.gradients, **self.reducer_settings, within=within)

    def __del__(self) -> None:
        if hasattr(self, "handles"):  # else it was never armed
            self._session.unfinished += self.unfinished()

    # --- model(x) ---------------------------------------------------------------------------------
    def _before_gathering(self, model: nn.Module, args: Any) -> None:
        """FSDP gathers in every forward: a rank that runs one alone would wait, or join another forward's gather."""
        if model is not self.model or self._forwards:
            return
        self._slots.check()
        if self.round & (self.round - 1) == 0:  # less and less often, because it takes time for every parameter
            self._slots.check(every=True)
            check_known(model, self.names)
        if not model.training or not torch.is_grad_enabled():
            self.layout.meet_to_evaluate()
        else:
            self._session.mark("forward", inside=True)

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if model is not self.model:
            return None
        check_not_wrapped(self.model, self.reducer)
        outermost = not self._forwards  # a model may call itself
        stack, finish = ExitStack(), list[Any]()
        self._forwards.append((stack, finish))  # first, because _after_forward is called even if this raises
        self.step.inputs, self._called = (args, kwargs), True
        if self.counts_feed and outermost and self.taps:
            self._count((args, kwargs), trains=model.training)
        self._session.mark("forward", run=self if outermost and self.taps else None)
        for call, ctx in self._calls[Stage.FORWARD]:
            finish.append(stack.enter_context(call(ctx)))
        if not torch.is_grad_enabled() or not outermost or not self.taps:
            return None
        if self._calls[Stage.LOSS] or (self._tapping and self.weights.used is not False):  # None: not known yet
            args, kwargs = map_tensors(lambda x: self._inputs.tap(x, self._leave_backward), (args, kwargs))
        if self.reducer is not None:
            stack.enter_context(self.reducer.active())
        return args, kwargs

    def _after_forward(self, model: nn.Module, args: Any, out: Any) -> Any:
        if model is not self.model or not self._forwards:  # another hook raised before ours
            return None
        stack, finish = self._forwards.pop()
        self._session.mark("the code after forward")
        self.step.inputs = None
        with stack:  # leaves the contexts
            for function in finish:
                if callable(function) and out is not None:  # None: the forward raised
                    out = map_tensors(function, out)
        if (loss := loss_of(out)) is not None and torch.is_grad_enabled():
            self.step.loss = loss.detach()
        if out is None or not self._tapping or not torch.is_grad_enabled() or self._forwards:
            return out
        self.step.called = True
        if self.reducer is not None:
            out = self.reducer.after_forward(out, communicate=self.opens())
        return map_tensors(lambda x: tap(x, self._enter_backward), out, strict=self._scales or self.layout.reduced)

    # --- loss.backward() --------------------------------------------------------------------------
    def _enter_backward(self, grad: Tensor) -> Tensor:
        self._check_not_released()
        step = self.step
        if step.backward != (number := seams.graph_task_id()):
            step.backward = number
            if self.layout.reduced and torch.is_grad_enabled():
                raise UsageError(taps.DOUBLE_BACKWARD)
            reach = reaches(self.layout.leaves() if self.layout.leaves is not None else self.gradients.params())
            step.reads = not reach and (reach is None or not self._inputs.undo())
            if reach:
                if self._scales and step.create_graph and not step.scaled_at_loss:  # on one path the scale cancels out
                    raise UsageError(taps.PENALTY)
                if self._scales and not step.scaled_at_loss:
                    check_beside(
                        self._enter_backward, self.names, scaled=bool(self._calls[Stage.LOSS]), round=self.round
                    )
                self._begin_backward()
            step.create_graph = step.create_graph or torch.is_grad_enabled()
        if step.reads:
            return grad
        if self.weights.empty:
            return torch.zeros_like(grad)
        return grad if step.scaled_at_loss or not self._scales else grad * self._factor

    def _leave_backward(self, grad: Tensor) -> Tensor:
        """What comes before the model gets the gradient that a plain model would give it."""
        plain = self.step.scaled_at_loss or not self._scales or self.weights.empty or self.step.reads
        return grad if plain else grad / self._factor

    @property
    def _scales(self) -> bool:
        return bool(self._calls[Stage.LOSS] or self.weights.used)

    @property
    def _factor(self) -> float:
        return self.loss_scale() * self.weights.factor

    def _begin_backward(self) -> None:
        """Called once per backward that enters through the output and reaches parameters."""
        self.check_not_lent()
        if self.merged == 0:
            self.step_norm.begin_backward()
        self.step.tapped = True
        if self.reducer is not None and self.opens():
            self.reducer.agree()
        self._session.mark("backward", inside=self.opens() or self.layout.reduced)
        self.weights.begin(opens=self.opens())
        self.gradients.check_before_backward()
        self.gradients.put_back()
        if self._owns_grad:
            self.gradients.watch()
        if self.reducer is not None and self.opens():
            self.reducer.begin_backward()

    def backward(self, loss: Tensor) -> None:
        """Apply LOSS at the loss itself, for a loss that reads parameters other than through the model's output."""
        if local(loss) is not loss:
            raise UsageError(taps.OF_SHARDS)
        before, self.step.scaled_at_loss = self.step.backward, True
        self.step.loss = loss.detach()
        try:
            self.weights.begin(opens=self.opens())
            (loss * self._factor if self._scales else loss).backward()
        finally:
            self.step.scaled_at_loss = self.step.create_graph = False
        if self.step.backward == before:  # it did not touch the model's output at all
            if self.reducer is not None:
                raise UsageError(taps.PAST_THE_MODEL)
            self.step.tapped = True
            self.gradients.put_back()

    # --- optimizer.step() -------------------------------------------------------------------------
    def _before_step(self, args: Any, kwargs: Any) -> Any:
        self.check_not_lent()
        self.rates.restore()  # in case the previous step raised an error
        if dcp.makes_state(self):
            return None
        self._begin_step()
        changed = run_closure(self.optimizer, args, kwargs, after=None if self._active else self._look_at_gradient)
        self._check_backward()
        opens = self.opens()  # before this step counts
        self.merged += not self.step.flushing
        if opens:
            self._finish_reduction()
            if self.rates.factor != 1:
                self.rates.scale(self.rates.factor)
        elif self.merged == 1:
            self._measure_step(self.gradients.present())
        self.updated = opens and self._finish_gradient()
        if (self._owns_grad or not self.step.finite) and not self.updated:
            self.gradients.take_away(keep=not opens)
            self.gradients.begin_idle_step()
        return changed

    def _begin_step(self) -> None:
        self._session.stepped = weakref.ref(self)
        self._session.begin_step()
        self._scaler.check(self.optimizer)
        if self._watching and self.taps and not self.layout.reduced:  # else there are no hooks on parameters
            self._slots.check()

    def _check_backward(self) -> None:
        """Raise an error if a backward did what the strategy could not act on."""
        step = self.step
        if self._watching or (self.weights.used and self._tapping):
            self.gradients.check_before_step(tapped=step.tapped)
        if self._calls[Stage.FORWARD] and not self._called and self.gradients.any:
            raise UsageError(taps.NOT_CALLED)
        if self.layout.reduced and step.called and step.backward == -1 and not self.gradients.any:
            warn(taps.NOT_REACHED)

    def _finish_reduction(self) -> None:
        """Reduce what waits if no backward did it here, and check that a backward that did was complete."""
        if not self.step.tapped and self._calls[Stage.GATE]:
            self._catch_up()
        if self.reducer is not None and self.step.tapped and not self.step.flushing:
            self.reducer.check_finished(self._slots)

    def _look_at_gradient(self) -> None:
        """Called inside step(closure), if no strategy is active."""
        self.updated = self._finish_gradient()
        if not self.updated:
            self.gradients.take_away(keep=False)

    def _after_step(self) -> None:
        self.rates.restore()
        if dcp.made_state(self):
            return
        self.gradients.end_step(leaves=self.updated and self._mixes)
        self.weights.end_step(opened=self.opens(), steps=self.merged)
        if self.opens():
            self.round += 1
            params = self.gradients.params()
            for call, ctx in self._calls[Stage.PARAMETER]:
                call(params, ctx)
            self.merged = 0
            self.step_norm.end_round()
            if self.checks.compares(self.round, loaded=self.loaded):
                self._look_at_parameters(params)
        self._session.mark("", run=self)
        self.step = self.step.next()

    def _finish_gradient(self) -> bool:
        """Run GRADIENT on the gradients of this round. Returns whether the update may be applied."""
        self.gradients.check_none_left()
        divided, skips = self.layout.shard_group is not None, not self.gradients.any
        if skips and self.updates_together and not divided:  # else other ranks may wait in an act, or for the answer
            return False
        for call, ctx in self._calls[Stage.GRADIENT]:
            call(self.gradients.present(), ctx)  # looked up each time: an act may add gradients that another rank has
        self._session.gradient(self)
        self.step.finite = self._numbers.fine(self, divided)
        return self.step.finite and (divided or not skips)
