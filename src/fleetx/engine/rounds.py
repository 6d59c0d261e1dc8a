"""What the engine does outside its hooks: when a step updates, how a bucket is reduced, and how a merge window ends
without a backward of its own, as in a flush."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.trees import LossFn, loss_by, samples_in
from fleetx.base.user_line import user_line
from fleetx.comm.session import Undone
from fleetx.comm.world import World
from fleetx.engine import taps
from fleetx.engine.context import Bucket, Outgoing, SetupContext, StepContext
from fleetx.engine.dtensors import WholeReader
from fleetx.engine.late_reducer import LateReducer
from fleetx.engine.numbers import Checks, check_finite, compare
from fleetx.engine.reducer import Reducer
from fleetx.engine.run import Run, key_of
from fleetx.errors import UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Act, Fact, Stage


class Rounds(Run):
    """The part of the engine that the contexts of acts call, and that finishes what earlier steps have begun."""

    reducer: Reducer | None
    backward: Callable[[Tensor], None]
    checks: Checks
    _calls: dict[Stage, list[tuple[Any, Any]]]  # the acts of each stage, with their contexts

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, world: World):
        super().__init__(plan, model, optimizer, world)
        self._line = user_line()
        self.restore: Callable[[str], None] | None = None  # set by `fleet.checkpoints`; takes the reason
        self.updates_together = not plan.makes(Fact.LOCAL)  # do all ranks see the same gradient?

    def wrap_acts(self, around: Callable[[Act, Any], Any] | None) -> None:
        """Have every act called through what `around` returns for it; None: directly."""
        self._calls = {stage: [] for stage in Stage}
        for act in self.plan.acts:
            if act.call is not None:
                kind = SetupContext if act.stage in (Stage.MODEL, Stage.UPDATE) else StepContext
                ctx = kind(self, key_of(act.part), self.plan.facts_at(act))
                self._calls[act.stage].append((act.call if around is None else around(act, act.call), ctx))

    def context_of(self, part: Part) -> StepContext:
        """The context for what a part does outside a step."""
        return StepContext(self, key_of(part))

    def unfinished(self) -> list[Undone]:
        """What a script that ends now leaves undone."""
        if self.clock == self.saved_at:  # a checkpoint has it
            return []
        found = [text for part in self.plan.parts for text in part.unfinished(self.context_of(part))]
        if self.merged:
            steps = "1 step is" if self.merged == 1 else f"{self.merged} steps are"
            found.append(f"inside a merge window: {steps} not applied")
        return [(text, self._line) for text in found]

    def forward_context(self, *, first: bool = False) -> AbstractContextManager[Any]:
        """Enter the FORWARD contexts for a part that reruns a piece of the forward, or (`first`) runs it alone."""
        self._check_not_released()
        stack = ExitStack()
        for act, (call, ctx) in zip(self.plan.at(Stage.FORWARD), self._calls[Stage.FORWARD], strict=True):
            if act.claim.replay or first:
                stack.enter_context(call(ctx))
        return stack

    def opens(self) -> bool:
        """Does this step update? The gate is asked once per step."""
        if self.step.opens is None:
            self.step.opens = all(call(self.merged + 1, ctx) for call, ctx in self._calls[Stage.GATE])
        return self.step.opens

    def window(self) -> int:
        """Steps per round."""
        return next(n for n in itertools.count(1) if all(call(n, ctx) for call, ctx in self._calls[Stage.GATE]))

    def _count(self, inputs: Any, *, trains: bool) -> None:
        """Count and check the samples of a batch that enters the model."""
        self.feed = samples_in(inputs)
        if trains and torch.is_grad_enabled() and self.check_feed is not None:
            self.check_feed(self.feed)

    def loss_scale(self) -> float:
        return math.prod(call(ctx) for call, ctx in self._calls[Stage.LOSS])

    def _measure_step(self, grads: list[Tensor]) -> None:
        if self.step_norm.due(self.round) and not self.weights.used:
            self.step_norm.add(grads, self.loss_scale())

    def reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        if self.merged == 0 and not self.step.collected and self.step_norm.backwards == 1:
            self._measure_step([bucket.buffer])
        for call, ctx in self._calls[Stage.REDUCE]:
            return call(bucket, ctx)
        factor = self.loss_scale() * self.weights.divisor(self.step.collected or self.merged + 1)
        return self.mean(Outgoing(**vars(bucket), network=self.network, factor=factor, undoable=True))

    def mean(self, bucket: Outgoing) -> torch.futures.Future[Tensor]:
        for call, ctx in self._calls[Stage.WIRE] if bucket.network.world.size > 1 else ():
            return call(bucket, ctx)
        return bucket.network.mean(bucket.buffer, bucket.index)

    def forward_backward(self, inputs: Any, target: Any, loss_fn: LossFn | None) -> Tensor:
        """Run forward and backward in the form that works under every strategy."""
        loss = loss_by(self.model, inputs, target, loss_fn)
        self.backward(loss)
        return loss.detach()

    def close(self) -> None:
        """Drop what holds the process group."""
        self.reducer = None
        self.network.close()

    def multiple(self) -> float:
        """The factor by which p.grad is larger than the true gradient: until the step, it is still scaled and a sum."""
        if not self.step.tapped:
            return 1.0
        return self.loss_scale() * (self.merged + 1 if self.plan.makes(Fact.SUMMED) else 1)

    @property
    def flushes(self) -> bool:
        """Do the ranks communicate in `flush`?"""
        waits = any(type(part).drain is not Part.drain for part in self.plan.parts)
        return waits or any(act.stage is Stage.GATE for act in self.plan.acts)

    def flush(self) -> bool:
        """Apply a partial window, divided by its true number of steps. Every rank must call it."""
        self.check_stepped("it before fleet.flush()")
        flushed = self.merged > 0
        if flushed:
            self._collect(self.merged)
            self.step.flushing = self.step.opens = self.step.tapped = True
            try:
                self.optimizer.step()
            finally:
                self.step.flushing = False
            self.gradients.take_away(keep=False)  # the loop has called zero_grad() already
        self.drain(last=True)
        return flushed and self.updated

    def check_stepped(self, todo: str) -> None:
        """Raise an error if a backward waits for its step, unless the loop has erased its gradients."""
        if not self.step.tapped or (not self.merged and not any(grad.any() for grad in self.gradients.present())):
            return
        instead = (
            "If another model trains through this one, as in a GAN, call requires_grad_(False) on this one for that "
            "backward"
            if self.merged
            else "If its gradients are not wanted, such as those that another model's backward leaves in this one in a "
            "GAN, call zero_grad() of this optimizer instead"
        )
        raise UsageError(f"optimizer.step() is missing after the last backward(): call {todo}. {instead}")

    @contextmanager
    def lend(self, to: str) -> Iterator[None]:
        """Inside, parameters have other values, so nothing may train, save or load. Buffers are restored on exit."""
        self.check_not_lent()
        self.lent = to
        torch.clear_autocast_cache()  # it holds copies of weights
        try:
            with self.buffers.restored():
                yield
        finally:
            self.lent = ""
            torch.clear_autocast_cache()

    def check_not_lent(self) -> None:
        if self.lent:
            raise UsageError(
                f"inside {self.lent} the model holds averaged parameters, so only evaluation and fleet.export are "
                "allowed: train, save and load outside it"
            )

    def drain(self, *, last: bool) -> None:
        """Let the parts finish what is running in the background."""
        self.check_not_lent()
        params: list[Tensor] = [*self.gradients.params()]
        with torch.no_grad():
            for part in self.plan.parts:
                part.drain(params, self.context_of(part), last=last)

    def _catch_up(self) -> None:
        """The last step of a window had no backward here: reduce what waits, as other ranks did in their backward."""
        waiting, join = self.gradients.withheld(), isinstance(self.reducer, Reducer)
        if waiting or join:
            self._collect(self.merged, join=join)
        alone = not self.updates_together and self.layout.island is None
        if join and not waiting and (alone or not any(g.any() for g in self.gradients.present())):
            self.gradients.take_away(keep=False)  # this rank, or every rank, had no batch in this window

    def _collect(self, steps: int, *, join: bool = False) -> None:
        """Put the withheld gradients of this many steps back, and reduce them. join: other ranks are in a backward."""
        self.gradients.put_back()
        self.weights.collect()
        late = self.reducer or self._shard_reducer()
        if late is not None:
            self.step.collected = steps
            params = [p for p in self.gradients.params() if p.requires_grad]
            late.join_backward(params) if join else late.reduce_now(params, self.reduce)
            self.step.collected = 0
        self.step.tapped = True

    def _shard_reducer(self) -> Any:
        """A reducer for gradients that FSDP has reduced only within its group."""
        layout, settings = self.layout, self.reducer_settings
        if not layout.reduced or layout.replicas.size == 1 or settings is None:
            return None
        # The ranks of a group have used the same parameters already.
        return LateReducer(self.names, layout.island or layout.replicas, settings["bucket_cap_mb"])

    def _meets_in_backward(self) -> World | None:
        """The ranks that wait for each other in a backward: without shared updates, a rank may leave out a batch."""
        return self.layout.replica_group if self.updates_together else self.layout.island

    def _reader(self, p: nn.Parameter) -> WholeReader:
        replicas = self.layout.replicas if self.updates_together else None
        return WholeReader(p, replicas, momentum=self.plan.makes(Fact.MOMENTUM))

    def _check_not_released(self) -> None:
        if self.released:
            raise UsageError(taps.RELEASED)

    def _look_at_parameters(self, params: list[nn.Parameter]) -> None:
        if self.checks.looks:
            check_finite(self.names, params, round=self.round)
        if self.alike is not None and self.alike.size > 1:
            compare(self.names, params, self.alike, round=self.round, loaded=self.loaded)
        self.loaded = False

    @property
    def alike(self) -> World | None:
        """The ranks whose parameters must equal this rank's; None: they may all differ."""
        layout = self.layout
        if not self.updates_together or layout.island is not None:
            return None if layout.reduced else layout.island  # under sharding, an island is a group of shards
        return layout.replicas if layout.reduced else layout.replica_group

    @property
    def alike_ranks(self) -> frozenset[int]:
        if self.alike is None:
            return frozenset({self.world.rank})
        return frozenset(range(self.world.size) if self.alike.numbers is None else self.alike.numbers)
