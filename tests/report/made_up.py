"""A record of a run that never was: every number is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

EVIL = "<script>alert(1)</script>\"'&"
T0 = 1_790_000_000.0


def lines(*, rounds: int = 600, slow: float = 1.0, ranks: int = 2, pipeline: bool = False, ends: bool = True) -> list:
    """slow: how many times as long the work of the last rank takes."""
    strategy = {"clip": True, "clip_configs": {"clip_norm": 1.0}}
    out = [
        {"kind": "start", "t": T0, "rank": r, "schema": 1, "ranks": ranks, "device": "cpu", "restart": 0,
         "host": f"node{r}", "machine": "Linux", "threads": 1, "folder": "/home/me",
         "versions": {"fleetx": "0.1.0", "torch": "2.13.0"}, "command": ["python", f"train.py {EVIL}"],
         "environment": {"OMP_NUM_THREADS": "1"}}
        for r in range(ranks)
    ]  # fmt: skip
    out.append(
        {"kind": "plan", "t": T0 + 1, "rank": 0, "model": 0, "name": f"Net{EVIL}", "replicas": ranks, "window": 1,
         "strategy": strategy, "explain": f"requested: clip\n{EVIL}", "parameters": 1234,
         "acts": [["GRADIENT", "clip", f"limit the norm {EVIL}"]], "predicted": 3 << 20,
         "bytes": {"parameters": 1 << 20, "gradients": 1 << 20, "kept": 0}}
    )  # fmt: skip
    time = {"data": 0.01, "forward_backward": 0.05, "communication": 0.02, "update": 0.01, "other": 0.0}
    for n in range(1, rounds + 1):
        loss = "nan" if n == 7 else 3 * math.exp(-n / 100) + 0.1 * math.sin(n)
        out.append(
            {"kind": "round", "t": T0 + 1 + 0.09 * n, "rank": 0, "model": 0, "round": n, "updated": n != 7, "steps": 1,
             "samples": 32, "rate": 0.1 * min(n / 50, 1), "loss": loss, "norm": 1 / n, "scale": 1024.0,
             "k": 1 + n // 200, "sent": 1000, "seconds": 0.09, "time": time}
        )  # fmt: skip
    for rank in range(ranks):
        share = slow if rank == ranks - 1 else 1.0
        used = {k: s * rounds * (share if k in ("data", "forward_backward") else 1.0) for k, s in time.items()}
        out.append(
            {"kind": "rank", "t": T0 + 60, "rank": rank, "rounds": rounds, "seconds": sum(used.values()), "time": used,
             "samples": 32 * rounds, "sent": 1000 * rounds, "peak": 300 << 20, "before": 250 << 20,
             "optimizer": 2 << 20, "host": f"node{rank}", "first": time}
        )  # fmt: skip
        spans = [
            ["compute", "data", 0.0, 0.01], ["compute", "forward", 0.01, 0.02], ["compute", "backward", 0.03, 0.05],
            ["wait", "reduction", 0.06, 0.02], ["compute", "update", 0.08, 0.01],
            ["act", "GRADIENT clip.shrink", 0.081, 0.004],
        ]  # fmt: skip
        if pipeline:
            spans[1:4] = [["compute", "forward and backward", 0.01, 0.07]]
            spans += [["stage", f"F{i}/{rank}", 0.01 + 0.01 * i + 0.005 * rank, 0.005] for i in range(3)]
            spans += [["stage", f"B{i}/{rank}", 0.05 + 0.01 * i, 0.008] for i in range(3)]
        out.append({"kind": "trace", "t": T0 + 50, "rank": rank, "model": 0, "round": 300, "spans": spans})
    out.append({"kind": "event", "t": T0 + 5, "rank": 0, "what": "skipped", "round": 7})
    out.append(
        {"kind": "event", "t": T0 + 30, "rank": 0, "what": "checkpoint", "round": 300, "text": f"step300 {EVIL}"}
    )
    out.append({"kind": "value", "t": T0 + 40, "rank": 0, "round": 400, "values": {f"accuracy {EVIL}": 0.5}})
    out.append({"kind": "value", "t": T0 + 50, "rank": 0, "round": 500, "values": {f"accuracy {EVIL}": 0.75}})
    if ends:
        out.append({"kind": "event", "t": T0 + 60, "rank": 0, "what": "end", "round": rounds})
    return out


def write(folder: Path, **options: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines(**options))  # type: ignore[arg-type]
    (folder / "rank0.jsonl").write_text(text)
    return folder
