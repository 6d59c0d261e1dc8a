"""What a run used: memory, as predicted and as measured, and the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fleetx.record.read import Record, RecordLine
from fleetx.report import facts, svg
from fleetx.report.sections import MOST_RANKS, table

PIECES = ("parameters", "gradients", "optimizer", "kept")  # of the state, in the order drawn
LEGEND = ("parameters", "gradients", "optimizer", "strategies, predicted", "before the first step", "since then")
_WHOLE = "<p>The measurements cover the whole process, including Python and torch.</p>"
_TENSORS = (
    "<p>The prediction covers tensors alone. What training adds to a process includes libraries that are loaded on "
    "first use, evaluations, and what the allocator keeps: often 100 MiB.</p>"
)
NO_BYTES = '<p class="none">Bytes are counted on TCP connections only, so not on CUDA.</p>'
NO_PEAK = '<p class="none">Not measured yet.</p>'


def measured(record: Record) -> tuple[RecordLine, dict[int, RecordLine]] | None:
    """The plan of the first model, and the last line of each rank; None if nothing is recorded yet."""
    plan, lines = record.plans.get(0), {rank: lines[-1] for rank, lines in sorted(record.ranks.items())}
    return (plan, lines) if plan and lines else None


def on_gpu(record: Record) -> bool:
    return bool(record.starts[-1]["device"] == "cuda")


def state_of(plan: RecordLine, lines: dict[int, RecordLine]) -> dict[str, int]:
    """Bytes on rank 0, by purpose."""
    return {**plan["bytes"], "optimizer": lines.get(0, {}).get("optimizer", 0)}


def predictions(plan: RecordLine, lines: dict[int, RecordLine]) -> dict[int, int]:
    """Peaks by rank. Ranks with other stages of a pipeline predict their own; otherwise rank 0 predicts for all."""
    own = {rank: line["predicted"] for rank, line in lines.items() if "predicted" in line}
    if "predicted" in plan:
        own[0] = plan["predicted"]
    if 0 in own and len(own) == 1:
        return dict.fromkeys(lines, own[0])
    return own


def why_not(plan: RecordLine) -> str:
    """Why a peak was not predicted."""
    return str(plan.get("unpredicted", "this record does not say why"))


def memory(record: Record) -> str:
    found = measured(record)
    if found is None:
        return NO_PEAK
    plan, lines = found
    state, foreseen = state_of(plan, lines), predictions(plan, lines)
    rows = [("state", [float(state[piece]) for piece in PIECES])]
    told = [["state of rank 0: parameters, gradients, optimizer, strategies", facts.size(sum(state.values()))]]
    alike = len(set(foreseen.values())) == 1
    if alike:
        rows.append(("predicted", [0, 0, 0, foreseen[0]]))
        told.append(["peak of a step, as predicted", facts.size(foreseen[0])])
    for rank, line in list(lines.items())[:MOST_RANKS]:
        if rank in foreseen and not alike:
            rows.append((f"predicted {rank}", [0, 0, 0, foreseen[rank]]))
            told.append([f"rank {rank}: peak of a step, as predicted", facts.size(foreseen[rank])])
        if "peak" in line:
            before = line.get("before", 0)
            rows.append((f"rank {rank}", [0, 0, 0, 0, before, max(line["peak"] - before, 0)]))
            told.append([f"rank {rank}: peak", facts.size(line["peak"])])
            told.append([f"rank {rank}: of that, before its first step", facts.size(before)])
            if rank in foreseen:
                added = facts.size(facts.of_step(line, plan, on_gpu(record)))
                told.append([f"rank {rank}: what training added, with the parameters", added])
    picture = svg.bars("bytes", rows, facts.size)
    note = notes([record])
    return f'{note}<figure data-plot="memory">{picture}{svg.legend(LEGEND)}</figure>{table(["", "bytes"], told)}'


def notes(records: Sequence[Record]) -> str:
    """How to read the numbers."""
    found = [(record, *told) for record in records if (told := measured(record)) is not None]
    on_cpu = [(plan, lines) for record, plan, lines in found if not on_gpu(record)]
    said = [_WHOLE] if on_cpu else []
    if any(predictions(plan, lines) for plan, lines in on_cpu):
        said.append(_TENSORS)
    for record, plan, lines in found:
        if not predictions(plan, lines):
            whose = f" of {escape(record.name)}" if len(records) > 1 else ""
            said.append(f"<p>The peak of a step{whose} was not predicted: {escape(why_not(plan))}.</p>")
    return "".join(said)


def network(record: Record) -> str:
    found = [s for s in facts.shares(record) if s.sent is not None][:MOST_RANKS]
    if not found:
        return NO_BYTES
    rows = [(f"rank {s.rank}", [s.sent or 0.0]) for s in found]
    told = [[f"rank {s.rank}", facts.size(s.sent or 0.0), f"{record.ranks[s.rank][-1]['sent']:,}"] for s in found]
    picture = svg.bars("bytes sent per update", rows, facts.size)
    return f'<figure data-plot="network">{picture}</figure>' + table(["", "per update", "bytes in total"], told)
