"""Taps: identity nodes in the autograd graph that see backward enter a model at its outputs and leave at its inputs."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.engine import graph
from fleetx.errors import UsageError

TensorFn = Callable[[Tensor], Tensor]


class _Tap(torch.autograd.Function):
    """A separate node, not a tensor hook: in a model that returns loss and logits, the gradient of the loss would pass
    the hook of the logits and be scaled twice. Not a view either: an in-place write to the output would bypass it."""

    generate_vmap_rule = True  # together with `setup_context`, lets torch.func work on the model

    @staticmethod
    def forward(x: Tensor, call: TensorFn) -> Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.call(grad), None


# `apply` asks for the signature in every call. If `inspect` finds it here, it does not compute it: 0.2 ms per tap.
_Tap.forward.__signature__ = inspect.signature(_Tap.forward)  # type: ignore[attr-defined]


def tap(x: Tensor, call: TensorFn) -> Tensor:
    """The same tensor; in backward, `call` receives its gradient and returns the one to pass on."""
    return _Tap.apply(x, call) if x.requires_grad else x


class Inputs:
    """The taps at the inputs of a model."""

    def __init__(self) -> None:
        self._nodes = weakref.WeakSet[Any]()  # they live as long as their graphs

    def tap(self, x: Tensor, call: TensorFn) -> Tensor:
        out = tap(x, call)
        if out is not x and not seams.in_functorch():
            self._nodes.add(out.grad_fn)
        return out

    def undo(self) -> bool:
        """Does the running backward leave the model at its inputs, where gradients are made plain again?

        False for torch.autograd.grad if it also asks for something inside the model, such as an activation.
        """
        if seams.in_functorch():
            return False
        reached = [node for node in self._nodes if seams.will_execute(node)]
        call = graph.running() if reached else None
        if call is None or not call.wanted:
            return bool(reached)
        return graph.all_before((following for node in reached for following, _ in node.next_functions), call.wanted)


def check_beside(taps: TensorFn, names: Mapping[nn.Parameter, str], *, scaled: bool, round: int) -> None:
    """Raise an error if the running backward reaches a parameter on a path that bypasses these taps.

    Few nodes are between a loss and the model's output, unless another model is. So most rounds look at only 64 nodes,
    and rounds that look at all of them become rare.

    scaled: do the taps scale, or only weight?
    """
    call = graph.running()
    nodes = graph.before(call.roots, lambda node: getattr(node, "call", None) == taps) if call is not None else iter(())
    if round & (round - 1):
        nodes = itertools.islice(nodes, 64)
    leaves = (node.variable for node in nodes if hasattr(node, "variable"))
    if (name := next((names[leaf] for leaf in leaves if leaf in names), None)) is not None:
        raise UsageError(
            f"this loss also reads parameter {name!r} directly, not only through the model's output, so that part of "
            f"its gradient would not be {'scaled' if scaled else 'weighted'}: call fleet.backward(loss) instead of "
            "loss.backward()"
        )


def reaches(params: Iterable[Tensor]) -> bool | None:
    """Does the running backward reach any parameter? Not in torch.func, nor in torch.autograd.grad for inputs.

    None: it is torch.autograd.grad for parameters, which returns their gradients and leaves p.grad alone.
    """
    if seams.in_functorch():
        return False
    edges = (torch.autograd.graph.get_gradient_edge(p) for p in params if p.requires_grad)
    try:
        return any(seams.will_execute(edge.node) for edge in edges)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return None


NOT_CALLED = (
    "these gradients did not come from model(x), which was never called, so the strategy did not act on the forward: "
    "call the model itself, not model.forward(x) or one of its modules"
)

NOT_REACHED = (
    "optimizer.step() found no gradient, although the model was called. Under sharding, backward(inputs=...), "
    "torch.autograd.grad, and tensors that the model returned inside an object other than tuples, dicts and "
    "dataclasses do not reach parameters: call loss.backward(), and requires_grad_(False) on what must not be trained"
)

PENALTY = (
    "this loss contains a gradient made with create_graph=True, so only part of it would be scaled: call "
    "fleet.backward(loss) instead of loss.backward()"
)

DOUBLE_BACKWARD = (
    "torch.autograd.grad(..., create_graph=True) through a sharded model is not supported, because full weights are "
    "freed after each backward: turn sharding off"
)

PAST_THE_MODEL = (
    "this loss does not depend on the model's output, so its gradients are not reduced between ranks: compute it from "
    "what model(x) returns"
)

RELEASED = (
    "this loss was computed before fleet.release: call backward() before fleet.release, or compute the loss again"
)

OF_SHARDS = (
    "this loss was computed from shards of parameters, which autograd cannot combine with the model's output: use "
    "p.full_tensor() instead of p in the loss"
)
