"""Where backward enters and leaves a model: an identity in the graph, on its outputs and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], Tensor]


class _Tap(torch.autograd.Function):
    """A node of its own, not a hook on the tensor: a model that returns its loss and its logits would otherwise pass
    the logits' hook on the way from the loss, and be scaled twice. Not a view either: writing to an output in place
    would lead the gradient around the hook."""

    generate_vmap_rule = True  # with `setup_context`: torch.func works on the model

    @staticmethod
    def forward(x: Tensor, call: Call) -> Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.call(grad), None


def tap(x: Tensor, call: Call) -> Tensor:
    """The same tensor; `call` sees, and may change, the gradient that comes back to it."""
    return _Tap.apply(x, call) if x.requires_grad else x


def reaches(params: list[nn.Parameter]) -> bool:
    """Not so in torch.autograd.grad with respect to inputs, or in torch.func: these are no training backwards."""
    if torch._C._are_functorch_transforms_active():
        return False
    edges = (torch.autograd.graph.get_gradient_edge(p) for p in params if p.requires_grad)
    return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)


PENALTY = (
    "this loss contains a gradient that was made with create_graph=True, and would be scaled in part only: call "
    "fleet.backward(loss) instead of loss.backward()"
)
