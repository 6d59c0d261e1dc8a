"""Turns what the engine reports about a run into facts.

The session passes on what the engine marks. The other ranks are never asked, and on CUDA nothing waits for the device.
`Session.recorder` is None unless something is recorded, so a run without a record pays nothing.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from fleetx.base import seams
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.record.schema import EVENTS, TIMES
from fleetx.record.tally import Ended, Losses, Mark, Span, Stopwatch, Tally, is_traced, state_bytes, trace
from fleetx.record.usage import RoundBytes
from fleetx.strategy.stage import Act, Stage

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine
    from fleetx.record.stream import Stream

Describe = Callable[["Engine"], dict[str, Any]]  # facts about a training
# What a rank marks itself as doing -> what its time counts as.
_KINDS = {
    "": "data",
    "forward": "forward_backward",
    "backward": "forward_backward",
    "forward and backward": "forward_backward",
    "optimizer.step": "update",
}
_NAMES = {"": "data", "the code after forward": "loss", "optimizer.step": "update"}  # in a trace
_RANGES = {"forward": "fleetx forward", "optimizer.step": "fleetx update"}
_SHARE = 1000  # the norm of all gradients is computed again after this many times what it takes
FLUSH = 1.0  # seconds between two writes
_EACH = 0.02  # seconds more per rank, because rank 0 collects their lines


@dataclass(slots=True)
class _Model:
    """What is known about one model."""

    number: int
    scaled: bool  # whether its loss is scaled
    tally: Tally = field(default_factory=Tally)  # since its last round
    seen: Tensor | None = None  # the last loss that its engine knew
    plan: Describe | None = None  # describes it; None after its first round
    predict: Describe | None = None  # makes facts that need a batch; None once there is a batch
    predicted: dict[str, Any] = field(default_factory=dict)  # what `predict` returned


class Recorder:
    def __init__(self, world: World, stream: Stream | None = None, *, predicts: bool | None = False):
        self.world, self.stream, self.predicts = world, stream, predicts
        self.latest: dict[str, Any] = {}  # the last round that is known
        self.counts: Counter[str] = Counter()  # of events
        self._watch, self._thread = Stopwatch(world.device), threading.get_ident()
        self._losses = Losses()
        self._doing, self._kind, self._since = "", "data", self._watch.mark()
        self._spans: list[Span] = []
        self._range: Any = None
        self._models: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()  # by engine
        self._numbers = itertools.count()  # of models; some may be gone
        self._ended: list[Ended] = []  # rounds whose numbers are on the device
        self._lines: list[dict[str, Any]] = []  # to be written
        self._totals: dict[str, Any] = {"rounds": 0, "seconds": 0.0, "time": dict.fromkeys(TIMES, 0.0), "samples": 0}
        self._predicted: int | None = None  # peak bytes of a step of the last model
        self._norm_at = 0.0  # when the norm may be computed again
        self._bytes = RoundBytes(stream.usage) if stream is not None else None
        self._tracing = False
        self._pause = FLUSH + _EACH * world.size
        self._flush_at = time.monotonic() + self._pause
        self.closed = False

    # --- what the engine reports ------------------------------------------------------------------
    def mark(self, doing: str, run: Engine | None = None) -> None:
        """This rank begins `doing`. run: the engine whose batch enters the model, or whose step is done."""
        self._end_span()
        if run is not None and not doing:
            self._stepped(run)
        elif run is not None and torch.is_grad_enabled():
            model = self._model(run)
            model.tally.feed(run.step.inputs)
            if model.predict is not None:
                predict, model.predict = model.predict, None
                self.foretell(run, predict(run))
        if doing == "backward" and self.world.size > 1:
            self._watch_reduction()
        if doing == "forward" and not torch.is_grad_enabled():
            self._kind = "other"  # an evaluation
        elif doing != "the code after forward":  # which keeps the kind of its forward
            self._kind = _KINDS.get(doing, "other")
        self._doing = doing
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if doing in _RANGES and seams.profiler_enabled():
            self._range = record_function(_RANGES[doing])
            self._range.__enter__()

    def now(self) -> Mark:
        return self._watch.mark()

    def waited(self, start: Mark, name: str) -> None:
        """This rank has waited for others since `start`. Other threads do not count: they do not delay the training."""
        if threading.get_ident() == self._thread:
            self._spans.append(Span("communication", start, self._watch.mark(), self._kind, name))

    def ran(self, start: Mark, actions: list[tuple[str, Mark, Mark]]) -> None:
        """The schedule of a pipeline has run since `start`: whatever is not one of its actions was waiting."""
        self._spans.append(Span("communication", start, self._watch.mark(), self._kind))
        for name, begin, end in actions:
            self._spans.append(Span("forward_backward", begin, end, "communication", name, "stage"))

    def _watch_reduction(self) -> None:
        """Count the time from the end of a backward's own work to the end of the reduction as waiting. The callbacks
        of a backward run in the order in which they are queued, and the reducer queues its own last."""
        queue = seams.backward_engine.queue_callback

        def computed() -> None:
            start, within = self._watch.mark(), self._kind

            def reduced() -> None:
                self._spans.append(Span("communication", start, self._watch.mark(), within, "reduction"))

            queue(reduced)

        queue(computed)

    def gradient(self, run: Engine) -> None:
        """The gradients of a round are final."""
        norm = run.step.norm
        if norm is None and run.layout.shard_group is None and time.perf_counter() > self._norm_at:
            start, grads = time.perf_counter(), run.gradients.present()
            if grads and not any(g.is_sparse for g in grads):
                norm = get_total_norm(grads)
            end = time.perf_counter()
            self._norm_at = end + _SHARE * (end - start)
        self._model(run).tally.norm = norm

    def _stepped(self, run: Engine) -> None:
        """optimizer.step() is done, and the round with it if the gate was open."""
        model, step = self._model(run), run.step
        tally = model.tally
        tally.spans += self._spans
        self._spans = []
        given, known = self._losses.take(), step.loss
        if known is not None and known is not model.seen:  # the engine has seen it in this step
            given = model.seen = known
        if not step.flushing:
            tally.steps += 1
            if given is not None:
                tally.losses.append(given)
        if step.opens:
            self._end_round(run, model)
        if time.monotonic() > self._flush_at:
            self.flush()

    def note(self, what: str, text: str = "", **facts: Any) -> None:
        """Add a line about an event. Any thread may call this."""
        self.counts[what] += 1
        self.say("event", what=what, round=self.latest.get("round", 0), **({"text": text} if text else {}), **facts)

    def say(self, kind: str, **facts: Any) -> None:
        """Add a line."""
        if self.stream is not None:
            self._lines.append({**line_of(kind, self.world.rank, time.time()), **facts})

    # --- what the script asks ---------------------------------------------------------------------
    def log(self, values: dict[str, float]) -> None:
        self.say("value", round=self.latest.get("round", 0), values=values)

    def metrics(self) -> dict[str, Any]:
        self._settle(wait=False)
        usage = self.stream.usage if self.stream is not None else None
        used = {} if usage is None else {"peak": usage.peak(), "sent_in_all": usage.sent()}
        predicted = {} if self._predicted is None else {"predicted": self._predicted}
        return {**self.latest, **used, **predicted, "events": {what: self.counts[what] for what in EVENTS}}

    @property
    def rounds(self) -> int:
        return int(self._totals["rounds"])

    @property
    def samples(self) -> int:
        return int(self._totals["samples"])

    # --- beginning and end ------------------------------------------------------------------------
    def foretell(self, run: Engine, facts: dict[str, Any]) -> None:
        """Keep the prediction for this training. facts: `predicted`, or `unpredicted`."""
        self._model(run).predicted = facts
        self._totals |= {key: value for key, value in facts.items() if key == "predicted"}
        self._totals["before"] = self._held()  # including what the prediction imported
        self._since = self._watch.mark()  # the prediction is not part of a round

    def attach(self, run: Engine, plan: Describe) -> None:
        """A model was distributed. plan: describes how."""
        run.wrap_acts(self._around)
        model = self._model(run)
        self._spans, self._since = [], self._watch.mark()  # what came before is not part of a round
        if self.stream is not None:
            model.plan = plan
            self._totals.setdefault("before", self._held())
            self.say("plan", model=model.number, **plan(run))

    def ask(self, run: Engine, predict: Describe) -> None:
        """Have `predict` called with the first batch of this training, for more facts about it."""
        self._model(run).predict = predict

    def flush(self) -> None:
        """Hand the known lines to the writing thread."""
        self._settle(wait=False)
        lines, self._lines = self._lines, []
        if self.stream is not None:
            self.stream.put(lines, {**self._totals, "time": dict(self._totals["time"])})
        self._flush_at = time.monotonic() + self._pause

    def close(self) -> None:
        """The training ends."""
        if self.closed:
            return
        self.closed = True
        error = getattr(sys, "last_value", None)
        if error is not None and not self.counts["fault"]:
            self.note("fault", f"{type(error).__name__}: {error}".splitlines()[0][:500])
        if not self.counts["fault"]:
            self.note("end")
        self._settle(wait=not self.counts["fault"])
        self.flush()
        self._losses.close()
        for run in list(self._models):
            run.wrap_acts(None)
        if current().recorder is self:
            current().recorder = None
        if self.stream is not None:
            self.stream.close(everyone=not self.counts["fault"])

    # ----------------------------------------------------------------------------------------------
    def _end_span(self) -> None:
        now, start = self._watch.mark(), self._since
        last = self._spans[-1] if self._spans else None
        if last is not None and self._kind == last.kind == "other" and last.end is start:  # merge: they may be many
            start = self._spans.pop().start
        self._spans.append(Span(self._kind, start, now, name=_NAMES.get(self._doing, self._doing)))
        self._since = now

    def _held(self) -> int:
        assert self.stream is not None
        return self.stream.usage.held()

    def _model(self, run: Engine) -> _Model:
        found = self._models.get(run)
        if found is None:
            found = self._models[run] = _Model(next(self._numbers), bool(run.plan.at(Stage.LOSS)))
        return found

    def _end_round(self, run: Engine, model: _Model) -> None:
        tally, model.tally = model.tally, Tally()
        line = {
            "kind": "round", "t": round(time.time(), 4), "rank": self.world.rank, "model": model.number,
            "round": run.round, "updated": run.updated, "steps": tally.steps, "samples": tally.samples,
        }  # fmt: skip
        rate = run.optimizer.param_groups[0]["lr"]
        if not isinstance(rate, Tensor) or rate.device.type == "cpu":  # else the host would wait for it
            line["rate"] = float(rate)
        if tally.tokens:
            line["tokens"] = tally.tokens
        if model.scaled:
            line["scale"] = run.loss_scale()
        for state in run.state.values():
            if "k" in state:
                line["k"] = state["k"]
        if not run.step.finite:
            what = "overflow" if run.step.overflowed else "skipped"
            self.counts[what] += 1
            self.say("event", what=what, round=run.round)
        if model.plan is not None:  # some strategies decide in the first step
            described = model.predicted | model.plan(run)  # a strategy's own facts win
            if "predicted" in described:
                described.pop("unpredicted", None)
            self._predicted = described.get("predicted")
            self.say("plan", model=model.number, **described)
            self._totals["optimizer"] = state_bytes(run.optimizer)
            model.plan = None
        line |= {} if self._bytes is None else self._bytes.of_round()
        ended = Ended(line, tally, self._tracing)
        self._tracing = self.stream is not None and is_traced(run.round + 1)
        if self.world.device.type == "cuda":
            ended.ask()
        self._ended.append(ended)
        self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        totals = self._totals
        while self._ended and (wait or self._ended[0].known()):
            ended = self._ended.pop(0)
            line = self.latest = ended.settle()
            if not totals["rounds"]:
                totals["first"] = line["time"]
            totals["rounds"] += 1
            totals["samples"] += line["samples"]
            totals["seconds"] += line["seconds"]
            times = totals["time"]
            for kind, seconds in line["time"].items():
                times[kind] += seconds
            if self.stream is None:
                continue
            self._lines.append(line)
            if ended.trace:
                begun = line["t"] - line["seconds"]
                self._lines.append({**line_of("trace", self.world.rank, begun), "model": line["model"],
                                    "round": line["round"], "spans": trace(ended.tally.spans)})  # fmt: skip

    def _around(self, act: Act, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an act to give it a range in the profile and a span in the trace."""
        name = f"{act.stage.name} {act.name}"

        def named(*args: Any) -> Any:
            if not self._tracing and not seams.profiler_enabled():
                return call(*args)
            start = self._watch.mark()
            with record_function(f"fleetx {name}"):
                result = call(*args)
            if act.stage in _DRAWN:
                self._spans.append(Span("", start, self._watch.mark(), name=name, lane="act"))
            return result

        return named


_DRAWN = (Stage.GRADIENT, Stage.PARAMETER)  # acts of other stages lie in spans that are drawn already


def line_of(kind: str, rank: int, t: float) -> dict[str, Any]:
    return {"kind": kind, "t": round(t, 4), "rank": rank}
