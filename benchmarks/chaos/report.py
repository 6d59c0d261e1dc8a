"""The results as a page: docs/results/chaos.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.chaos.kills import VICTIMS
from benchmarks.chaos.marks import PHASES

GOODPUT = 0.97
_FINE = {"refused"}  # not even a change that happens to do no harm may go unnoticed


def page(results: dict[str, Any]) -> str:
    kills = [record for run in results["kills"] for record in run["kills"]]
    sections = [_HEAD.format(command=results["command"]), _goals(results, kills), _kills(kills, results["kills"])]
    sections += [_damage(results), _disk(results), _stalls(results), _goodput(results["goodput"]), _end(results)]
    return "\n\n".join(sections) + "\n"


_HEAD = """# Chaos

We subject a real training run to everything that can break it: two ranks under `fleetrun` with `fleet.checkpoints`,
in turn with `gradient_merge` and `clip`, with `localsgd`, and with checkpoints written in the background. Every step of
every rank is logged with its loss and a digest of parameters, optimizer and random numbers, and compared with an
uninterrupted run.
This page is generated: `{command}`."""


def summary(results: dict[str, Any]) -> dict[str, int]:
    """The figures that must be 0."""
    runs, stalls = results["kills"], [s for s in results["stalls"] if "skipped" not in s]
    disk = results["disk"].get("full", {})
    damaged = [row for table in ("flips", "damages") for row in results[table].values()]
    return {
        "committed steps lost": sum(run["lost"] for run in runs),
        "corrupt or mixed checkpoints loaded": sum(len(run["corrupt"]) for run in runs)
        + sum(n for row in damaged for outcome, n in row.items() if outcome not in _FINE),
        "resumed runs that differ from the uninterrupted one": sum(bool(r["different"]) for r in [*runs, *stalls])
        + bool(disk.get("different")) + bool(results["goodput"].get("different")),
        "failed restarts": sum(len(run["failed"]) + run.get("extra_restarts", 0) for run in runs)
        + (not disk.get("finished", True)),
        "full disks that were not handled": _full_disk_faults(disk),
        "hangs": sum(len(run["hangs"]) for run in [*runs, *stalls]),
        "orphans": sum(run["orphans"] for run in [*runs, *stalls]) + disk.get("orphans", 0),
        "false alarms": sum(len(run["false_alarms"]) for run in stalls),
        "fallbacks to an older checkpoint that failed": sum(
            n for outcome, n in results["fallbacks"].items() if outcome != "older"
        ),
        "saves that left no good checkpoint when a call failed": sum(
            n for row in results["disk"].get("calls", {}).get("table", {}).values()
            for outcome, n in row.items()
            if ("left" in outcome and "replaced" not in outcome) or "other" in outcome or "raised" in outcome
        ),
    }  # fmt: skip


def _full_disk_faults(disk: dict[str, Any]) -> int:
    """A full disk stops the training with a message that names it, and leaves the last checkpoint and nothing else."""
    if not disk or "skipped" in disk:
        return 0
    return sum(not disk.get(name) for name in ("stopped", "names the disk", "kept")) + len(disk.get("leftovers", ()))


def _goals(results: dict[str, Any], kills: list[dict[str, Any]]) -> str:
    rows = [["", "goal", "found"]]
    rows.append(["`kill -9`", "1000", len(kills)])
    rows.append(["bit flips", "10000", _count(results["flips"])])
    rows.append(["files cut off, missing or swapped", "1000", _count(results["damages"])])
    rows += [[name, "0", found] for name, found in summary(results).items()]
    warm = [k for k in kills if k["victim"] not in ("fleetrun", "node")]
    rows.append(["seconds from kill to message, median", "1", _median(k["to_message"] for k in warm)])
    rows.append(["seconds from kill to next step, median", "1", _median(k["to_step"] for k in warm)])
    if results["goodput"]:
        rows.append(["goodput, a kill every 60 s", f"{GOODPUT:.0%}", f"{results['goodput']['goodput']:.1%}"])
    return _table(rows)


def _kills(kills: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    found = Counter((k["victim"], k["phase"]) for k in kills)
    rows: list[list[Any]] = [["killed, by phase", *PHASES, "to message", "to next step", "the slowest"]]
    for victim in VICTIMS:
        mine = [k for k in kills if k["victim"] == victim]
        steps = [k["to_step"] for k in mine if k["to_step"] is not None]
        rows.append([victim, *(found[victim, phase] for phase in PHASES), _median(k["to_message"] for k in mine),
                     _median(steps), f"{max(steps):.2f} s" if steps else "-"])  # fmt: skip
    text = f"{len(runs)} training runs, {sum(run['resumed'] for run in runs)} resumes, "
    text += f"{sum(run['lines'] for run in runs)} logged lines compared. A node is fleetrun with all its ranks. "
    text += "Nodes and fleetrun are restarted from outside, without a warm process. Times are medians; the time "
    text += "to the next step is missing if another kill comes first."
    return f"## Kills\n\n{_table(rows)}\n\n{text}"


def _damage(results: dict[str, Any]) -> str:
    rows: list[list[Any]] = [["damage", "tried", "outcome"]]
    for table in ("flips", "damages"):
        for name, row in sorted(results[table].items()):
            what = f"a bit in {name}" if table == "flips" else name
            rows.append([what, sum(row.values()), _outcomes(row)])
    older = results["fallbacks"]
    rows.append(["the newest of two, for `fleet.latest`", sum(older.values()), _outcomes(older)])
    return f"## Damaged checkpoints\n\n{_table(rows)}"


def _disk(results: dict[str, Any]) -> str:
    disk = results["disk"]
    text = ["## Disks"]
    if "table" in disk.get("calls", {}):
        rows: list[list[Any]] = [["the n-th call of a save fails, for every n", "tried", "outcome"]]
        rows += [[name, sum(row.values()), _outcomes(row)] for name, row in disk["calls"]["table"].items()]
        text.append(_table(rows))
        text.append("Calls: create, write, fsync, rename, mkdir. After each, the old or the new checkpoint loads.")
    for name, found in disk.items():
        if name == "full" and "finished" in found:
            text.append(f"A full disk: `{found['message']}`. After space was freed, the training resumed and finished.")
        elif "skipped" in found or "broken" in found:
            text.append(f"{name}: not run: {found.get('skipped') or found['broken'][-500:]}")
    return "\n\n".join(text)


def _stalls(results: dict[str, Any]) -> str:
    rows: list[list[Any]] = [["stall", "tried", "to message", "to next step", "shorter ones survived"]]
    notes = []
    for found in results["stalls"]:
        if "skipped" in found:
            notes.append(f"{found['kind']}: not run: {found['skipped']}")
            continue
        each = found["stalls"]
        name = {"stopped": "a rank stopped (SIGSTOP)", "cut": "the link cut"}[found["kind"]]
        times = [_median(s[key] for s in each) for key in ("to_message", "to_step")]
        rows.append([name, len(each), *times, found["borne"]])
        notes += [f"    {each[0]['message']}"] if each else []
    text = "Shorter: a rank stopped for 4 s, a link cut for 1 s. "
    text += "The time to the next step is counted from when the link is restored."
    return "\n\n".join(["## Stalls", _table(rows), text, *notes])


def _goodput(found: dict[str, Any]) -> str:
    if not found:
        return "## Goodput\n\nNot measured."
    return (
        f"## Goodput\n\n{found['goodput']:.1%} over {found['wall']:.0f} s with {found['kills']} kills, one every "
        f"{found['between']:.0f} s; time lost per kill, including repeated steps: "
        f"{', '.join(f'{x:.2f} s' for x in found['lost'])}. A step takes {1000 * found['step_seconds']:.0f} ms."
    )


def _end(results: dict[str, Any]) -> str:
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in results["seconds"].items())
    machine = results["machine"]
    text = f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, torch {machine['torch']}, load "
    text += f"before {machine['load_before'][0]}, commit {machine['commit']}, {results['date']}. Time taken: {seconds}."
    return f"## Where\n\n{text}"


def _count(table: dict[str, dict[str, int]]) -> int:
    return sum(sum(row.values()) for row in table.values())


def _outcomes(row: dict[str, int]) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(row.items(), key=lambda item: -item[1]))


def _median(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{median(found):.2f} s" if found else "-"


def _table(rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
