"""When a segment is gathered, and which parameters its modules have at what time.

    in a forward or backward   its modules have full parameters
    between the two            stage 1, 2: its modules have this rank's shards, and the full ones wait for backward
                               stage 3: they are freed
    otherwise                  its modules have this rank's shards

With `fully_shard(reshard_after_forward=False)` alone, the modules keep the full parameters until the next backward:
what the script does to `model.parameters()` before then is lost, and a forward after an update runs with old values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fleetx.base import seams
from fleetx.base.seams import FSDPParamGroup, FSDPState, TrainingState
from fleetx.base.trees import map_tensors
from fleetx.comm.world import World, listed
from fleetx.engine.context import Bucket, SetupContext
from fleetx.engine.dtensors import local
from fleetx.engine.taps import tap
from fleetx.errors import UsageError
from fleetx.parts.sharding.coded import CodedReduceScatter


class ShardedSegment(FSDPParamGroup):
    """The parameters that FSDP gathers together."""

    _state: FSDPState
    _world: World | None = None  # of the ranks that must use the same parameters; None: not checked
    _finds_unused = False
    _ctx: SetupContext | None = None  # if other groups of ranks hold replicas of the shards
    _number = 0  # of the segment
    _compared = False
    _kept = False  # full parameters wait for backward, while the modules show the shards

    def settle(self) -> None:
        """Called at the end of the outermost forward. The modules show the shards from here on."""
        if not self.is_unsharded or _in_backward():
            return
        if not torch.is_grad_enabled():
            self._to_sharded()  # no backward will come
            return
        for p in self.fsdp_params:
            seams.set_on_modules(p, p.sharded_param)
        self._kept = True

    def unshard(self, async_op: bool = False) -> None:
        if self._kept and _in_backward():
            self._kept = False
            for p in self.fsdp_params:
                seams.set_on_modules(p, seams.unsharded(p))
        elif self._kept:
            self._to_sharded()  # a new forward: the shards may have changed
        with _ordinary_tensors():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        with _ordinary_tensors():
            super().wait_for_unshard()

    def _to_sharded(self) -> None:
        self._kept = False
        super()._to_sharded()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return super().pre_forward(module, *map_tensors(_whole, (args, kwargs)))

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        output = super().post_forward(module, input, output)
        if seams.state_context(self._state).iter_forward_root is self._state:  # its module was called alone
            self.settle()
        return map_tensors(_own, output)

    def post_backward(self, *unused: Any) -> None:
        if self._world is not None and (self._finds_unused or not self._compared):
            self._compare(self._world)
        self._with_gradient = [p for p in self.fsdp_params if _has_gradient(p)]
        super().post_backward(*unused)

    def exchange(self, summed: Tensor) -> None:
        """Called when FSDP has summed the gradients of a backward over the group, before it hands them over.

        The replicas of the shards exchange them once per round, with what earlier backwards of the round accumulated.
        """
        ctx = self._ctx
        assert ctx is not None  # the hook is set only then
        if summed.device.type != "cpu":  # allocated on the stream of the reduce-scatter, and used on this one
            summed.record_stream(torch.cuda.current_stream(summed.device))
        summed.div_(self._group_size)
        if not ctx.opens:
            return
        offset, views = 0, []
        for p in self._with_gradient:
            views.append(summed[offset : offset + p.sharded_size.numel()].view(p.sharded_size))
            offset += p.padded_sharded_param_size.numel()
            if (earlier := p.sharded_param.grad) is not None:
                views[-1].add_(local(earlier).to(summed.device))
                p.sharded_param.grad = None
        if any(v.numel() for v in views):  # the last ranks hold nothing of small parameters
            names = [ctx.names[p.sharded_param] for p in self._with_gradient]
            ctx.reduce(Bucket(summed, views, names, self._number))

    def _compare(self, world: World) -> None:
        """Compare which gradients the ranks have: FSDP reduces those of each rank, and fails if they differ."""
        mine = [_has_gradient(p) for p in self.fsdp_params]
        own = torch.tensor(mine, dtype=torch.int32, device=world.device)
        counts = own.clone()
        world.sum(counts)  # the flags of every rank, which take more bytes, are gathered only for the error
        others = (counts - world.size * own).tolist()  # 0: every rank agrees with this one
        self._compared = any(mine) or any(others)  # a backward to the inputs alone does not count
        for p, has, number in zip(self.fsdp_params, mine, others, strict=True):
            if not number:
                continue
            if not self._finds_unused:
                answers = world.gather(torch.tensor(has, device=world.device).to(torch.uint8)).tolist()
                ranks = [rank for rank, yes in enumerate(answers) if yes]
                raise UsageError(
                    f"{seams.param_name(p)!r} got a gradient only on {listed(ranks)}, but sharding reduces it on all "
                    "ranks together: set strategy.find_unused_parameters = True"
                )
            if not has:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)


class Segments:
    """All segments of a model that `fully_shard` has divided, the root first."""

    def __init__(
        self,
        model: nn.Module,
        world: World | None = None,
        *,
        finds_unused: bool = False,
        ctx: SetupContext | None = None,
        degree: int = 1,
    ):
        """ctx: if given, the groups of `degree` ranks that share a copy exchange gradients with each other."""
        self._model: Any = model
        divided = {m: seams.fsdp_state(m) for m in model.modules() if isinstance(m, FSDPModule)}
        self._groups: list[tuple[Any, Any]] = [  # with the module of each
            (module, group) for module, state in divided.items() for group in seams.param_groups(state)
        ]
        for number, (module, group) in enumerate(self._groups):
            group.__class__, group._state, group._world = ShardedSegment, divided[module], world
            group._finds_unused, group._ctx, group._number, group._group_size = finds_unused, ctx, number, degree
            if ctx is not None:
                # For some dtypes, FSDP would divide for its own mean partly after the hook.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.set_all_reduce_hook(group.exchange)

    def code(self, bits: int, block: int, ctx: SetupContext) -> None:
        """Reduce-scatter gradients in few bits from now on."""
        for number, (module, _) in enumerate(self._groups):
            module.set_custom_reduce_scatter(CodedReduceScatter(bits, block, ctx, number))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around each forward of the whole model."""
        yield
        _explain(sys.exception())
        if seams.training_state(seams.fsdp_state(self._model)) == TrainingState.FORWARD:  # the forward raised
            self._model.reset_iter_state()
        for _, group in self._groups:
            group.settle()

    def leaves(self) -> Iterator[Tensor]:
        """The full parameters, in which backward accumulates. They exist once they have been gathered."""
        params = (p for _, group in self._groups for p in group.fsdp_params)
        return (seams.unsharded(p) for p in params if hasattr(p, seams.UNSHARDED))


def _has_gradient(p: Any) -> bool:
    if not hasattr(p, seams.UNSHARDED):
        return False
    return p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None


def _own(t: Tensor) -> Tensor:
    """Make an output not a view: writing into a view would bypass the hook that FSDP gathers with in backward."""
    return tap(t, lambda grad: grad) if seams.base(t) is not None else t


def _whole(t: Any) -> Tensor:
    """Gather an input that was made from a shard, such as a hidden state from `weight.new_zeros(...)`."""
    if not hasattr(t, "device_mesh") or t.requires_grad:
        return cast("Tensor", t)
    return cast("Tensor", t.full_tensor())


def _explain(error: BaseException | None) -> None:
    """Add a hint to the error of a forward that raised: its hooks run while the error is being handled."""
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            "fleetx: under sharding, this module uses a parameter of another segment without calling that segment: put "
            "both into one segment, by naming a module that contains them in segment_anchors"
        )


def _in_backward() -> bool:
    return seams.graph_task_id() != -1


def _ordinary_tensors() -> ExitStack:
    """Leave inference mode, because what is gathered in it is used again in training."""
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
    return stack
