"""Numbers that go wrong: gradients that are not finite, and replicas whose parameters have diverged.

If a gradient is not finite, the update is withheld on every rank, and a message says on which rank and in which
parameter it arose. Under a float16 loss scale, `amp` sees it first: an overflow there is normal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fleetx.base import seams
from fleetx.base.trees import as_real
from fleetx.base.user_line import warn
from fleetx.comm.world import World, listed
from fleetx.engine.dtensors import local
from fleetx.engine.run import Doubt
from fleetx.errors import NumbersError

SMALL = 4096  # elements of a gradient that may be checked in every step
MOST = 8  # how many of them are checked, including the first one, to which non-finite values propagate


@dataclass(frozen=True)
class Checks:
    """What is checked during training. Pass it to `fleet.init(checks=...)`; the same on every rank."""

    on_nonfinite: Literal["skip", "stop", "restore", "ignore"] = "skip"
    """What to do if a gradient is not finite: "skip" the update, "stop" with an error, "ignore" it, or "restore": skip
    until `in_a_row` is reached, and then have `fleet.checkpoints` restore the last checkpoint after that step."""
    in_a_row: int = 10
    """After this many skipped updates in a row, stop with an error or, under "restore", restore the last checkpoint."""
    every_gradient: bool = False
    """Check every gradient, which takes a pass over them; by default, only up to 8 with up to 4096 elements. Under
    `clip`, the norm covers all of them."""
    same_parameters: int = 100
    """After the first update, the first one after `fleet.load`, and then once per this many updates, check that the
    parameters are finite, and equal on all replicas; 0: never."""

    def __post_init__(self) -> None:
        if self.on_nonfinite not in ("skip", "stop", "restore", "ignore"):
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: must be 'skip', 'stop', 'restore' or 'ignore'")
        if self.in_a_row < 1 or self.same_parameters < 0:
            raise ValueError("in_a_row must be at least 1, and same_parameters at least 0")

    @property
    def looks(self) -> bool:
        """Is an update withheld if a gradient is found that is not finite?"""
        return self.on_nonfinite != "ignore"

    def compares(self, round: int, *, loaded: bool) -> bool:
        """Compare after this round? Whatever makes ranks diverge in every step already does so in the first one."""
        return self.same_parameters > 0 and (round == 1 or loaded or round % self.same_parameters == 0)


class Numbers:
    """The checks of one training."""

    def __init__(self, checks: Checks, *, world: World, shared: bool):
        """shared: do the ranks decide together? Not if each updates with its own gradient."""
        self._checks, self._world, self._shared = checks, world, shared
        self._bad = 0  # updates in a row that were withheld
        self._among, self._some = list[nn.Parameter](), list[nn.Parameter]()  # the parameters, and those to check

    def fine(self, run: Any, divided: bool) -> bool:
        """May this update be applied? divided: does this rank have only a piece of the gradient?

        The host waits for the device here and nowhere else in a step: it must know whether to withhold the update.
        """
        doubts, run.step.doubts = run.step.doubts, []
        looks = self._checks.looks
        if looks and run.step.norm is not None:  # covers every gradient, on every rank that has a piece of it
            doubts.append(Doubt(_flag(run.step.norm.to(run.device)), False, lambda found: None))
        elif looks:
            grads = self._looked_at(run.gradients.params())
            chosen = _chosen([local(g) for g in grads], every=self._checks.every_gradient)
            doubts.append(Doubt(_suspect(chosen, run.device), divided, lambda found: None))
        answers = _read(doubts, self._world)
        for doubt, answer in zip(doubts, answers, strict=True):
            doubt.then(answer)
        bad = looks and answers.pop()
        if any(answers):  # an overflow under a loss scale is normal
            run.step.overflowed = True
            return False
        if bad:  # a sum can overflow although every gradient is finite
            grads = [local(p.grad) for p in run.gradients.params() if p.grad is not None]
            found = _not_finite(_chosen(grads, every=True), run.device)
            (bad,) = _read([Doubt(found, divided, lambda found: None)], self._world)
        if not bad:
            self._bad = self._bad if not run.gradients.any else 0  # a rank that leaves out a batch has seen nothing
            return True
        self._bad += 1
        self._say(run, run.gradients.params())
        return False

    def _looked_at(self, params: list[nn.Parameter]) -> list[Tensor]:
        """The gradients to check. Without `every_gradient`, only some small ones, spread over the model, so that many
        parameters cost no more: a non-finite value in one place propagates to all gradients before it."""
        if params is not self._among:
            self._among, self._some = params, params
            if params and not self._checks.every_gradient:
                small = [p for p in params if 0 < local(p).numel() <= SMALL]
                self._some = small[:: max(-(-len(small) // MOST), 1)] or [min(params, key=Tensor.numel)]
        found = [p.grad for p in self._some if p.grad is not None]
        return found or [p.grad for p in params if p.grad is not None]

    def _say(self, run: Any, params: list[nn.Parameter]) -> None:
        text = self._told(run, params)
        checks = self._checks
        if checks.on_nonfinite == "stop":
            raise NumbersError(f"{text}. Training stops here (on_nonfinite='stop')")
        if self._bad < checks.in_a_row:
            if self._world.rank == 0 or not self._shared:
                warn(f"{text}. The update is skipped ({self._bad} in a row)")
            return
        times = f", {self._bad} times in a row" if self._bad > 1 else ""
        if checks.on_nonfinite == "restore":
            again = f"{text}{times}"
            if run.restore is None:
                raise NumbersError(f"{again}, and there is no checkpoint to restore: use fleet.checkpoints")
            self._bad = 0
            run.restore(again)
            return
        raise NumbersError(
            f"{text}{times}. Lower the learning rate, look at the data of that rank, or turn on strategy.clip"
        )

    def _told(self, run: Any, params: list[nn.Parameter]) -> str:
        """Where it arose. A collective, if the ranks decide together."""
        first = next((run.names.get(p, "?") for p in params if _bad(p.grad)), None)
        loss = run.step.loss
        mine = [first, None if loss is None else not bool(torch.isfinite(loss).all())]
        every = self._world.gather_json(mine) if self._shared else [mine]
        names = [name for name, _ in every if name is not None]
        ranks = [rank for rank, (_, bad) in enumerate(every) if bad]
        if not self._shared:
            ranks = [self._world.rank]
        seen = any(bad is not None for _, bad in every)
        where = f"; the loss was not finite on {listed(ranks)}" if ranks else "; the loss was finite" if seen else ""
        return f"step {run.round + 1}: the gradient of {names[0] if names else '?'!r} is not finite{where}"


def _bad(grad: Tensor | None) -> bool:
    return grad is not None and not bool(torch.isfinite(local(grad)).all())


def _chosen(grads: list[Tensor], *, every: bool) -> list[Tensor]:
    dense = [as_real(seams.values(g) if g.is_sparse else g) for g in grads]
    dense = [g for g in dense if g.numel()]
    small = [g for g in dense if g.numel() <= SMALL]
    return dense if every or not dense else small or [min(dense, key=Tensor.numel)]


def _suspect(grads: list[Tensor], device: torch.device) -> Tensor:
    """0 only if every value is finite. A sum is nan or inf if any value is, and takes a tenth of the time of a maximum,
    but it can also overflow: then `_not_finite` decides."""
    if not grads:
        return torch.zeros(1, device=device)
    first = grads[0]
    same = all(g.dtype == first.dtype and g.device == first.device for g in grads)
    if same and sum(map(Tensor.numel, grads)) <= MOST * SMALL:  # few enough to copy: each call costs more than the sum
        flat = torch.cat([g.flatten() if g.dim() != 1 else g for g in grads])
        return _flag(flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)).to(device))
    return _flag(torch.stack([n.to(device, torch.float32) for n in seams.foreach_norm(grads, 2)]).sum())


def _not_finite(grads: list[Tensor], device: torch.device) -> Tensor:
    """0 if every value is finite. The largest absolute value cannot overflow, and is nan if any value is."""
    if not grads:
        return torch.zeros(1, device=device)
    norms = seams.foreach_norm(grads, float("inf"))
    return torch.stack([_flag(n).to(device) for n in norms]).max().view(1)


def _flag(norm: Tensor) -> Tensor:
    """0 if it is finite, else nan, which counts as nonzero."""
    return (norm - norm).to(torch.float32).view(1)


def _read(doubts: list[Doubt], world: World) -> list[bool]:
    """The answers, in one collective and one read for all of them."""
    if not doubts:
        return []
    shared = [d.found for d in doubts if d.everywhere]
    if shared:
        asked = torch.cat(shared).ne_(0)  # 0 or 1: a maximum may lose nan
        world.maximum(asked)
        shared = list(asked.split(1))
    found = [shared.pop(0) if d.everywhere else d.found for d in doubts]
    return [bool(value) for value in (torch.cat(found) if len(found) > 1 else found[0]).tolist()]


# --- parameters -----------------------------------------------------------------------------------
def check_finite(names: Mapping[nn.Parameter, str], params: Iterable[nn.Parameter], *, round: int) -> None:
    """Raise an error if a parameter is not finite. By default not every gradient is checked, so this can happen."""
    held = [(p, as_real(local(p.detach()))) for p in params]
    held = [(p, values) for p, values in held if values.numel() and values.is_floating_point()]
    if not held or not bool(_suspect([values for _, values in held], held[0][1].device)):
        return
    name = next((names.get(p, "?") for p, values in held if not bool(values.isfinite().all())), None)
    if name is None:
        return
    raise NumbersError(
        f"parameter {name!r} is not finite after {round} updates, because an unchecked gradient was not finite: "
        "load an older checkpoint, and pass fleet.init(checks=fleet.Checks(every_gradient=True)) to skip such updates"
    )


# --- replicas -------------------------------------------------------------------------------------
def compare(
    names: Mapping[nn.Parameter, str], params: Iterable[nn.Parameter], group: World, *, round: int, loaded: bool
) -> None:
    """Raise an error that names the rank whose parameters differ. A collective of eight bytes per rank.

    Only if they differ do the ranks also exchange eight bytes per parameter. loaded: is this the first update since a
    checkpoint was loaded?
    """
    kept = list(params)
    digests = [_digest(local(p)).to(group.device) for p in kept]
    mine = torch.stack(digests) if kept else torch.zeros(1, dtype=torch.int64, device=group.device)
    if len(set(group.gather(_combined(mine)).tolist())) == 1:
        return
    rows = group.gather(mine).tolist()
    usual, votes = Counter(map(tuple, rows)).most_common(1)[0]
    odd = [rank for rank, row in enumerate(rows) if tuple(row) != usual]
    if 2 * votes <= len(rows):  # no majority: nobody can say who is right
        odd = list(range(len(rows)))
    column = next(i for i in range(len(usual)) if len({row[i] for row in rows}) > 1)
    who = listed([group.number(rank) for rank in odd])
    raise NumbersError(
        f"the parameters of {who} differ from the others, first in {names.get(kept[column], '?')!r}, after {round} "
        f"update{'s' if round > 1 else ''}. {_WHY_AFTER_LOAD if loaded else _WHY}"
    )


_WHY = (
    "The script may have changed parameters or gradients on some ranks only, for example with a backward() that does "
    "not go through what model(x) returned: its gradients are not reduced, so add its loss to that of model(x). Or a "
    "bit has flipped in memory: load the last checkpoint, and test that host. If the ranks have different processors, "
    "which round differently, turn this check off with fleet.Checks(same_parameters=0)"
)
_WHY_AFTER_LOAD = (
    "This was the first update after fleet.load: if the script then changed parameters or optimizer states, it did so "
    "differently on each rank"
)


def _digest(p: Tensor) -> Tensor:
    """A hash of the bits."""
    flat = as_real(p.detach()).contiguous()
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=p.device)
    return torch.hash_tensor(flat).view(torch.int64)


def _combined(digests: Tensor) -> Tensor:
    """One number for all. Each is multiplied by its own odd number, so that equal changes in two do not cancel out."""
    odd = (torch.arange(1, len(digests) + 1, device=digests.device) * 0x1E3779B97F4A7C15) | 1
    odd = (odd ^ (odd >> 31)) * 0x14D049BB133111EB | 1  # wraps around, as does the sum
    return (digests * odd).sum()
