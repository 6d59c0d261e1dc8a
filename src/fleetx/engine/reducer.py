"""DistributedDataParallel without its wrapper: it reduces for the user's own module, whose names stay the same.

torch's composable `replicate` works the same way: it calls DDP's private methods from hooks.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fleetx.base import seams
from fleetx.base.seams import find_tensors
from fleetx.base.trees import as_real
from fleetx.comm import peers
from fleetx.comm.world import World, listed
from fleetx.engine.context import Bucket
from fleetx.engine.gradients import Gradients
from fleetx.engine.graph import after_backward
from fleetx.engine.guests import ParameterSlots, Wrappers, check_known
from fleetx.engine.late_reducer import LateReducer, ReduceBucket
from fleetx.errors import UsageError

_FROZEN_ALIKE = "set requires_grad of the same parameters on every rank, in the same step"


_trains = attrgetter("requires_grad")  # read from all parameters for every reduction, so not in a Python loop


class Reducer(LateReducer):
    """Reduces gradients while backward runs, or on request."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[nn.Parameter, str],
        world: World,
        reduce: ReduceBucket | None,
        gradients: Gradients,
        *,
        bucket_cap_mb: float,
        find_unused_parameters: bool,
        within: World | None,
    ):
        """within: the ranks that need each other in a backward; None: each runs it alone."""
        super().__init__(names, world, bucket_cap_mb)
        self._model, self._gradients, self._finds_unused = weakref.ref(model), gradients, find_unused_parameters
        self._on_bucket = self._hook(reduce) if reduce is not None else None
        self._within = within if within is not None and within.size > 1 else None
        own = world.alone() if self._within is None else self._within.members
        self._own = own if self._within is not world else None  # the group of the backward, if it is not that of all
        self._changed = False  # were parameters frozen or unfrozen since the ranks last agreed?
        with _one_trained(names):  # a model that is all frozen may be unfrozen later
            self._make_buckets(first=True)

    def _make_buckets(self, *, first: bool) -> None:
        """Make buckets for the parameters that are trained now. With `first`, every rank copies the model of rank 0."""
        model = self._model()
        assert model is not None  # it is calling
        self._trained = [p for p in self._names if p.requires_grad]
        self._frozen = [p for p in self._names if not p.requires_grad]
        self._prepared, self._rebuilt = False, False
        self._noted = False  # does DDP know which parameters earlier steps of the window have used?
        self.order = None
        self._restores: tuple[list[str] | None] | None = None  # an order to restore before the next reduction
        device = self._trained[0].device
        make = partial(
            DistributedDataParallel,
            model,
            device_ids=None if device.type == "cpu" else [device],
            forward_sync_buffers=False,  # sent once per round, so evaluation does not communicate
            bucket_cap_mb=self._cap / 2**20,
            find_unused_parameters=self._finds_unused,
            gradient_as_bucket_view=True,  # no second copy of the gradients
        )
        with _without_buffers(model), Wrappers.ours():
            if first and self._own is not None:
                make(init_sync=True)  # only to copy the model, from rank 0 of all
            # Without init_sync nothing is communicated.
            self.ddp = make(init_sync=first and self._own is None, process_group=self._own)
        self.ddp.require_backward_grad_sync = False  # decided in `after_forward` and `begin_backward`
        if self._on_bucket is not None:
            self.ddp.register_comm_hook(None, self._on_bucket)

    def _follow(self) -> None:
        """Make new buckets if parameters were frozen or unfrozen.

        One rank alone may call a forward, so this does not communicate; `agree` does, in the next backward.
        """
        if all(map(_trains, self._trained)) and not any(map(_trains, self._frozen)):
            return
        check_known(self._model(), self._names)
        if any(p.requires_grad for p in self._names):  # else no backward reaches any, as in a generator's step
            self._make_buckets(first=False)
            self._changed = True

    def agree(self) -> None:
        """Check that ranks have frozen and unfrozen the same parameters. A collective only after a change."""
        changed, self._changed = self._changed, False
        if not changed or self._within is None:
            return
        mine, world = [self._names[p] for p in self._trained], self._within
        why = "a backward with parameters newly frozen or unfrozen"
        peers.meet(why, otherwise=_FROZEN_ALIKE, ranks=world.numbers)
        code = int.from_bytes(hashlib.sha256("\n".join(mine).encode()).digest()[:7])
        if len(set(world.gather(torch.tensor(code, device=world.device)).tolist())) > 1:
            others = world.gather_json(mine)
            name = next(n for n in self._names.values() if len({n in names for names in others}) > 1)
            ranks = [world.number(rank) for rank, names in enumerate(others) if name in names]
            raise UsageError(f"{name!r} is trained only on {listed(ranks)}: {_FROZEN_ALIKE}")

    def active(self) -> AbstractContextManager[Any]:
        """While the forward runs, have torch.compile split its graph at the buckets, to keep the overlap."""
        return seams.inside_ddp_forward(self.ddp)

    def after_forward(self, out: Any, *, communicate: bool) -> Any:
        """Prepare here, as DDP does: backward may reach parameters before it reaches the model's output."""
        if communicate and self._restores is None:
            self._prepare(list(find_tensors(out)))
        return seams.post_forward(self.ddp, out) if self._finds_unused else out

    def begin_backward(self) -> None:
        """Begin a backward that communicates. The forward prepared for the first; a second one is prepared here."""
        self._reorder()
        if not self._prepared:
            if self._finds_unused:
                raise UsageError(
                    "with find_unused_parameters, a forward can have only one backward, right after it: call "
                    "backward() after each forward, or turn find_unused_parameters off"
                )
            self._prepare([])
            self.agree()
        self._prepared = False
        if not self._rebuilt and not self._finds_unused:  # with it, DDP never rebuilds
            after_backward(self._rebuild)

    def _rebuild(self) -> None:
        """Once, after the first backward, have DDP reorder its buckets and move the gradients into them.

        The ranks communicate for this. DDP itself does it in the next forward, which one rank alone may call.
        """
        try:
            seams.check_reducer_finalized(self.ddp)
        except RuntimeError:
            return  # `check_finished` reports it
        if seams.rebuild_buckets(self.ddp.reducer):
            self._rebuilt = True
            if not any(seams.build_params(self.ddp)[1]):  # torch does not reveal the buckets of sparse gradients
                buckets = seams.zero_buckets(self.ddp.reducer)
                params: list[Any] = [p for bucket in buckets for p in bucket.parameters()]
                self.order = [self._names[p] for p in params]
            self._gradients.look_again()

    def restore_order(self, order: list[str] | None) -> None:
        """Have the next reduction use the buckets of another run. A value's position in its bucket decides the order in
        which the ranks' values are added, so with three or more ranks, another position rounds differently."""
        self._forget_used()  # of the window that is abandoned
        self._follow()
        fits = order is None or sorted(order) == sorted(self._names[p] for p in self._trained)
        if fits and order != self.order and not self._finds_unused:
            self._restores = (order,)

    def _reorder(self) -> None:
        """Restore the buckets: DDP fills them in the order of the parameters it is given. The ranks communicate."""
        if self._restores is None:
            return
        (self.order,), self._restores = self._restores, None
        params, sparse = seams.build_params(self.ddp)
        grads = [p.grad for p in params]
        for p in params:
            p.grad = None  # or a new bucket would replace gradients that wait in a merge window
        given = params
        if self.order is not None:
            place = {name: i for i, name in enumerate(self.order)}
            pairs = sorted(zip(params, sparse, strict=True), key=lambda pair: place[self._names[pair[0]]])
            params, sparse = [p for p, _ in pairs], [s for _, s in pairs]
        seams.ddp_init_helper(self.ddp, params, sparse, seams.build_names(self.ddp, params), False)
        if self._on_bucket is not None:
            seams.comm_hooks(self.ddp).clear()
            self.ddp.register_comm_hook(None, self._on_bucket)
        self._prepared, self._rebuilt = False, self.order is not None
        if self._rebuilt:
            seams.push_rebuilt(self.ddp.reducer)
            seams.rebuild_buckets(self.ddp.reducer)
        for p, grad in zip(given, grads, strict=True):
            p.grad = grad

    def join_backward(self, params: list[nn.Parameter]) -> None:
        """Take part in the reduction of a backward that only other ranks run, with a backward that adds zeros."""
        self._reorder()
        if self._finds_unused:
            params = [p for p in params if p.grad is not None]
        with torch.enable_grad():
            nothing = [p.reshape(-1)[:0].sum() for p in params]
        if nothing:
            self._prepare(nothing)
            self.agree()
            self._prepared = False
            torch.autograd.backward(nothing, [torch.zeros_like(t) for t in nothing])
            if not self._rebuilt and not self._finds_unused:
                self._rebuild()  # as the others do at the end of their backward

    def _prepare(self, outputs: list[Tensor]) -> None:
        self._follow()
        try:
            seams.check_reducer_finalized(self.ddp)
            if self._finds_unused and not self._noted:
                self._note_used()
            self.ddp.reducer.prepare_for_forward()
            self.ddp.reducer.prepare_for_backward(outputs if self._finds_unused else [])
        except RuntimeError as error:
            if "finished reduction" not in str(error):  # DDP's message is about an argument of its constructor
                raise
            raise UsageError(
                "the previous backward did not finish its reduction between ranks, because it failed or because a "
                "parameter got no gradient: restart from a checkpoint"
            ) from error
        self._prepared = True

    def _note_used(self) -> None:
        """DDP records which parameters the steps of a window use, and reduces no others. After a resume, or if a
        parameter was frozen since, the record is empty: restore it with a backward that adds zeros."""
        self._noted = True
        for p in self._gradients.withheld():
            if p.requires_grad:
                grad, p.grad = p.grad, None
                torch.autograd.backward([p], [torch.zeros_like(p)])
                p.grad = grad

    def _forget_used(self) -> None:
        """DDP erases its record in a backward that communicates; otherwise, only a new DDP starts without one."""
        if self._finds_unused:
            self._follow()
            if any(p.requires_grad for p in self._names):
                self._make_buckets(first=False)

    def reduce_now(self, params: list[nn.Parameter], reduce: ReduceBucket) -> None:
        super().reduce_now(params, reduce)
        self._forget_used()

    def check_finished(self, slots: ParameterSlots) -> None:
        """Raise an error now if a bucket was not reduced. DDP notices only in the next forward, after the step."""
        try:
            seams.check_reducer_finalized(self.ddp)
        except RuntimeError as error:
            slots.check(every=True)
            unused = [name for p, name in self._names.items() if p.requires_grad and p.grad is None]
            way = "" if self._finds_unused else "set strategy.find_unused_parameters = True, or "
            raise UsageError(
                f"the reduction between ranks is incomplete, because {', '.join(unused[:5]) or 'a parameter'} got no "
                f"gradient: {way}freeze it before the forward (instead of backward(inputs=...))"
            ) from error

    def _hook(self, reduce: ReduceBucket) -> Callable[[Any, dist.GradBucket], Future[Tensor]]:
        names = self._names
        # DDP keeps its hook in C++, out of sight of the garbage collector: a strong reference would leak the engine.
        weak = weakref.WeakMethod(reduce)

        def hook(state, bucket):  # not annotated: DDP compares annotations, which are strings here
            params = bucket.parameters()
            views = _as_parameters(bucket.buffer(), params)
            alive = weak()
            assert alive is not None  # the caller of backward holds the model, which holds the engine
            return alive(Bucket(bucket.buffer(), views, [names[p] for p in params], bucket.index()))

        return hook


@contextmanager
def _one_trained(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """DDP does not accept a model without a trainable parameter, so make one trainable inside."""
    frozen = None if any(p.requires_grad for p in params) else next(iter(params)).requires_grad_(True)
    yield
    if frozen is not None:
        frozen.requires_grad_(False)


@contextmanager
def _without_buffers(model: nn.Module) -> Iterator[None]:
    """Keep DDP from sending buffers when it is made: `engine.buffers` sends them, even if elements share memory."""
    before = getattr(model, seams.UNSENT, None)
    setattr(model, seams.UNSENT, {*(before or ()), *(name for name, _ in model.named_buffers())})
    try:
        yield
    finally:
        delattr(model, seams.UNSENT) if before is None else setattr(model, seams.UNSENT, before)


def _as_parameters(buffer: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Views of a bucket in the memory layout of the parameters, as DDP fills it; DDP's own views are contiguous."""
    out, offset = [], buffer.storage_offset()
    for p in map(as_real, params):  # DDP's buckets of complex gradients are real
        piece = buffer.as_strided((p.numel(),), (1,), offset)
        dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()
        out.append(piece.as_strided(p.shape, p.stride()) if dense else piece.view(p.shape))
        offset += p.numel()
    return out
