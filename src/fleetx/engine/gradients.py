"""The gradients of an optimizer: withheld, put back, and guarded until they are final."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.comm.world import World
from fleetx.engine.dtensors import local, shard_of
from fleetx.engine.graph import after_backward
from fleetx.errors import UsageError
from fleetx.strategy.stage import Fact


class Gradients:
    """Withholds `p.grad` without losing it. Withheld gradients belong to this rank until they are reduced."""

    def __init__(
        self, optimizer: Optimizer, names: Mapping[nn.Parameter, str], world: World, *, facts: frozenset[Fact]
    ):
        self._optimizer, self._names, self._world = optimizer, names, world
        self._facts = sorted(f.name for f in facts)  # that hold for a withheld gradient
        self._withheld: list[tuple[nn.Parameter, Tensor]] = []
        self._loaded = False  # was a checkpoint loaded while there were gradients?
        self._restored: list[nn.Parameter] = []  # parameters whose gradients were put back for this backward
        self._seen: _SeenGradients | None = None  # the gradients after the last backward
        self._left: tuple[nn.Parameter, int, int] | None = None  # a gradient of the last update that is still there
        self._checked, self._late = 0, list[nn.Parameter]()  # number of parameters, and those added too late
        self._groups: list[tuple[list[nn.Parameter], int]] = []  # the optimizer's groups, and their lengths
        self._params: list[nn.Parameter] = []  # of these groups
        self._versions: list[int] = []  # of the parameters, at the start of a step that must not change them

    def params(self) -> list[nn.Parameter]:
        """All parameters of all groups, including groups added later, except those that only other ranks hold.

        Called several times per step, so the list is kept while the groups hold the same lists of the same length.
        """
        groups = [group["params"] for group in self._optimizer.param_groups]
        if len(groups) != len(self._groups) or any(
            now is not then or len(now) != length for now, (then, length) in zip(groups, self._groups, strict=True)
        ):
            self._groups = [(params, len(params)) for params in groups]
            self._params = [p for params in groups for p in params if not p.is_meta]
        return self._params

    def forget(self) -> None:
        """Build the list of parameters again: this rank holds other parameters now."""
        self._groups = []

    @property
    def any(self) -> bool:
        return any(p.grad is not None for p in self.params())

    def present(self) -> list[Tensor]:
        """This rank's part of each gradient, to be changed in place."""
        return [local(p.grad) for p in self.params() if p.grad is not None]

    def take_away(self, *, keep: bool) -> None:
        for p in self.params():
            if p.grad is not None:
                if keep:
                    self._withheld.append((p, p.grad))
                p.grad = None
        self._restored = []

    def put_back(self) -> None:
        """Called when a backward enters the model, so that it adds to the withheld gradients."""
        waiting, self._withheld = self._withheld, []
        for p, grad in waiting:
            if p.requires_grad:
                self._add(p, grad)
                self._restored.append(p)
            else:  # frozen during this backward
                self._withheld.append((p, grad))

    def _add(self, p: nn.Parameter, grad: Tensor) -> None:
        try:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        except RuntimeError as error:
            if grad.dtype is p.dtype and grad.device == p.device:
                raise
            raise UsageError(
                f"parameter {self._names[p]!r} was converted to {p.dtype} on {p.device} after fleet.distribute, inside "
                "a merge window: convert the model before fleet.distribute"
            ) from error

    def check_restored(self) -> None:
        # Only if all are gone: a single one may have been cleared on purpose, to freeze a layer for this step.
        if self._restored and all(p.grad is None for p in self._restored):
            raise UsageError(
                "zero_grad() after backward() erased gradients that earlier steps of this merge window had collected: "
                "call step() before zero_grad(). To skip a batch, skip it before its backward(). If another model "
                "trains through this one, as in a GAN, call requires_grad_(False) on this one for that backward"
            )

    def check_none_left(self) -> None:
        """At an update: a gradient that was not put back would end up in a later update."""
        if self._withheld:
            name = self._names[self._withheld[0][0]]
            raise UsageError(
                f"{name!r} was frozen inside a merge window in which it already has gradients: freeze it between "
                "windows, or call fleet.flush() first"
            )

    def withheld(self) -> list[nn.Parameter]:
        return [p for p, _ in self._withheld]

    # --- a step that must change nothing ----------------------------------------------------------
    def begin_idle_step(self) -> None:
        self._versions = [seams.version(p) for p in self.params()]

    def end_step(self, *, leaves: bool) -> None:
        """leaves: was this an update with gradients that were ours, so that they must be erased before the next one?"""
        self._restored = []
        self._left = next(filter(None, map(_marked, self.params())), None) if leaves else None
        if self._versions and self._versions != [seams.version(p) for p in self.params()]:
            raise UsageError(
                f"{type(self._optimizer).__name__} changes parameters that have no gradient, so its updates cannot be "
                "skipped: use another optimizer, or turn gradient_merge and fp16 amp off"
            )
        self._versions = []

    # --- between backward and step ----------------------------------------------------------------
    def watch(self) -> None:
        """Called inside a backward: remember the gradients that it leaves."""
        after_backward(self.look)

    def look(self) -> None:
        self._seen = _SeenGradients(self.params())
        if self._left is not None:  # the backward has added to it
            self._left = _marked(self._left[0])

    def _check_erased(self, *, raises: bool) -> None:
        """Is a gradient of the last update still there? New gradients, still scaled or summed, must not be added to it.

        Only a step can tell: in a GAN, the generator's backward reaches the discriminator before its zero_grad().
        """
        if self._left is None:
            return
        if _marked(self._left[0]) != self._left:
            self._left = None
        elif raises:
            raise UsageError(
                "the gradients of the last update were not cleared before the next backward, which added gradients "
                "that are still scaled or summed, or contain momentum (dgc): call optimizer.zero_grad() after each "
                "step()"
            )

    def look_again(self) -> None:
        """Accept the gradients as they are now: fleetx or torch has moved or rewritten them, with the same values."""
        if self._seen is not None:
            self.look()

    def touched(self) -> list[Tensor]:
        return self._seen.changed() if self._seen is not None else []

    def check_before_step(self, *, tapped: bool) -> None:
        """Reject gradients that bypassed the hooks: they would be used unscaled, unreduced or instead of withheld ones.

        tapped: did a backward come through the model's output?
        """
        self.check_restored()
        grads = [] if tapped else self.present()
        nothing = not any(g.any() for g in grads)  # zeros from zero_grad(set_to_none=False): a skipped batch
        if not nothing and self._loaded:
            raise UsageError(
                "optimizer.load_state_dict() was called between backward() and step(), so these gradients belong to "
                "the training before it: call zero_grad() after load_state_dict(), and backward() again"
            )
        if not nothing:
            raise UsageError(
                "these gradients did not come through the model's output, so the strategy could not act on them: call "
                "the model itself, not one of its modules, and have it return tensors, tuples, dicts or dataclasses. "
                "For a loss that reads parameters directly, use fleet.backward(loss)"
            )
        self._check_erased(raises=tapped)
        if self.touched():
            raise UsageError(
                "a gradient was changed between backward() and step(), while it is still scaled or summed, or contains "
                "momentum (dgc): clip with strategy.clip = True instead. To read the norm, call clip_grad_norm_ with "
                "math.inf"
            )
        self._seen = None
        self.check_known()
        self._loaded = False

    def check_before_backward(self) -> None:
        """Before another backward: gradients may have been erased, unless they contained earlier steps."""
        self.check_restored()
        self._check_erased(raises=False)
        touched = self.touched()
        if touched and (self._restored or any(g.any() for g in touched)):
            raise UsageError(
                "a gradient was changed between two backwards, while it is still scaled or summed with earlier steps: "
                "call step() before zero_grad(), and clip with strategy.clip = True"
            )
        self._seen = None

    def check_known(self) -> None:
        """Parameters of the model may be added to the optimizer later, but no others."""
        params = self.params()
        if len(params) != self._checked:
            self._checked, self._late = len(params), [p for p in params if p not in self._names]
        for p in self._late:
            if p.grad is not None:
                raise UsageError(
                    f"parameter {tuple(p.shape)} became trainable after fleet.distribute and is not in the model, so "
                    "its gradient is not reduced: put it into the model before fleet.distribute"
                )

    def detach(self) -> None:
        """Give p.grad its own memory: it may be a view into one of the reducer's buckets."""
        for p in self.params():
            if p.grad is not None:
                p.grad = p.grad.clone()

    # --- checkpoints ------------------------------------------------------------------------------
    def saved(self) -> dict[str, Any]:
        if self._restored:
            raise UsageError("saving between backward() and step() would lose a merge window: save after step()")
        withheld = {self._names[p]: local(g) for p, g in self._withheld}
        return {"withheld": withheld, "facts": self._facts, "rank": self._world.rank, "ranks": self._world.size}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise an error if the withheld gradients of a checkpoint cannot be used here."""
        params = {n: p for p, n in self._names.items()}
        withheld = saved["withheld"]
        for name, grad in withheld.items():
            if name not in params or grad.shape != local(params[name]).shape:
                raise UsageError(
                    f"the checkpoint has a gradient of {name!r} {tuple(grad.shape)}, which does not match the model: "
                    "build the model as in the saved run"
                )
        inside = "this checkpoint was saved inside a merge window"
        remedy = "call fleet.flush() before saving"
        if withheld and saved["facts"] != self._facts:
            then, now = (" and ".join(f).lower() or "plain" for f in (saved["facts"], self._facts))
            raise UsageError(
                f"{inside} whose gradients are {then}; with this strategy they would be {now}: {remedy}, or load it "
                "under the strategy that saved it"
            )
        if withheld and (saved["rank"], saved["ranks"]) != (self._world.rank, self._world.size):
            raise UsageError(
                f"{inside} by rank {saved['rank']} of {saved['ranks']}, whose gradients only that rank can use, but "
                f"this is rank {self._world.rank} of {self._world.size}. Save one checkpoint per rank, or {remedy}"
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        params = {n: p for p, n in self._names.items()}
        # Copies, because accumulating would change the caller's checkpoint.
        copies = {n: g.to(params[n].device, copy=True) for n, g in saved["withheld"].items()}
        self._withheld = [(params[n], shard_of(params[n], g)) for n, g in copies.items()]
        self._restored, self._seen, self._loaded = [], None, self.any


class _SeenGradients:
    """Gradients and their versions at one moment, cheap to record and to compare."""

    def __init__(self, params: list[nn.Parameter]):
        self._params = params
        self._grads = list(map(_grad, params))
        self._versions = _versions(self._grads)

    def changed(self) -> list[Tensor]:
        """The gradients that were since replaced or changed in place; not those that were erased."""
        grads = list(map(_grad, self._params))
        versions = _versions(grads)
        if versions == self._versions and all(map(operator.is_, grads, self._grads)):
            return []
        rows = zip(grads, self._grads, versions, self._versions, strict=True)
        pairs = ((g, g is not old or now != then) for g, old, now, then in rows if g is not None and old is not None)
        return [g for g, other in pairs if other]


_grad = operator.attrgetter("grad")


def _versions(grads: list[Tensor | None]) -> list[int | None]:
    return [None if g is None else seams.version(g) for g in grads]


def _marked(p: nn.Parameter) -> tuple[nn.Parameter, int, int] | None:
    """Identity and version of a gradient."""
    return None if p.grad is None else (p, id(p.grad), seams.version(p.grad))
