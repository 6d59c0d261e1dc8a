"""The engine of a plan with a SCHEDULE: one part runs forward and backward together.

The user calls `fleet.forward_backward` and `optimizer.step()`. Everything else is as in `engine.py`, except that
gradients are reduced after backward, because hooks cannot follow the order in which its pieces run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base.trees import LossFn
from fleetx.engine.context import StepInput
from fleetx.engine.engine import Engine
from fleetx.engine.hooks import Hook
from fleetx.engine.late_reducer import LateReducer
from fleetx.errors import UsageError
from fleetx.strategy.stage import Stage


class ScheduledEngine(Engine):
    """An engine in which a part runs forward and backward."""

    _running = False
    taps = False  # `forward_backward` itself does what taps would trigger

    def forward_backward(self, inputs: Any, target: Any, loss_fn: LossFn | None) -> Tensor:
        """Run forward and backward, or only the forward under `torch.no_grad()`."""
        ((run, ctx),) = self._calls[Stage.SCHEDULE]
        if self.counts_feed:
            self._count(inputs, trains=True)
        if not torch.is_grad_enabled():
            self.layout.meet_to_evaluate()
            with self._run():
                return run(StepInput(inputs, target, loss_fn), ctx)
        self.check_not_lent()
        self.step.inputs = (inputs,), {}
        self._session.mark("forward and backward", inside=True, run=self)
        self.weights.begin(opens=self.opens())
        self.gradients.check_before_backward()
        self.gradients.put_back()
        self.step.tapped = True
        with self._run():
            factor = 0.0 if self.weights.empty else self._factor
            loss: Tensor = run(StepInput(inputs, target, loss_fn, factor, self.weights.given), ctx)
        self.step.loss = loss
        if self.opens() and self.reducer is not None:
            self.reducer.reduce_now(self._trained(), self.reduce)
        if self._owns_grad:
            self.gradients.look()
        return loss

    def backward(self, loss: Tensor) -> None:
        raise UsageError(_ONLY_FORM)

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if model is self.model and not self._running:
            raise UsageError(_ONLY_FORM)
        return super()._before_forward(model, args, kwargs)

    def _arm(self) -> None:
        self._owns_grad = True  # a rank has only part of shared weights and of norms
        super()._arm()
        self.handles.append(self.model.register_state_dict_post_hook(Hook(self._leave_out)))

    def _leave_out(self, model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Drop what only other ranks hold: it would be saved without values."""
        for name in self.layout.absent:
            state.pop(f"{prefix}{name}", None)

    def _make_reducer(self) -> Any:
        if self.layout.replica_group.size == 1 or self.reducer_settings is None:
            return None
        return LateReducer(self.names, self.layout.replica_group, self.reducer_settings["bucket_cap_mb"])

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.gradients.params() if p.requires_grad]

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Allow model(x) while it runs."""
        self._running = True
        try:
            yield
        finally:
            self._running = False


_ONLY_FORM = (
    "under pipeline this rank has only part of the model, so model(x) and loss.backward() cannot be called: call "
    "loss = fleet.forward_backward(x, y, loss_fn=...), and under torch.no_grad() to evaluate"
)
