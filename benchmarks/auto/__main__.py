"""python -m benchmarks.auto: run the plans, print and publish how accurate the predictions were."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.auto import report
from benchmarks.auto.models import STUDIED
from benchmarks.frame import machine, pages
from benchmarks.netlab import Lab, allowed
from fleetx.planner import cache, whatif
from fleetx.planner.cost import step_cost, terms_of
from fleetx.strategy import DistributedStrategy

HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "auto"
NETWORKS = ("loopback", "1gbit", "100mbit")
PARTS = ("plans", "search", "whatif")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", default=",".join(PARTS), show_default=True, help="Which parts to run.")
@click.option("--models", default=",".join(STUDIED), show_default=True)
@click.option("--networks", default=",".join(NETWORKS), show_default=True)
@click.option("--most", default=8, show_default=True, help="Plans to run per model and network, at most.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="The folder for the results.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing; show the results in the folder.")
def main(only: str, models: str, networks: str, most: int, out: Path, only_report: bool) -> None:
    """Compare the predictions of auto with measurements: five models, three networks.

    Takes half an hour on two idle cores.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "auto.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"plans": [], "machine": {}}
    if not only_report:  # the figures of a report belong to the machine that measured them
        results["machine"] = machine.machine() | {"commit": machine.commit(), "load_before": machine.load()}
    for part in [] if only_report else only.split(","):
        if part == "plans":
            for network in networks.split(","):
                for name in models.split(","):
                    keep = [s for s in results["plans"] if (s["model"], s["network"]) != (name, network)]
                    results["plans"] = [*keep, _run(name, network, "plans", most=most) | {"network": network}]
                    file.write_text(json.dumps(results, indent=1))
        elif part == "search":
            results["search"] = _run("bert_base", "loopback", "search")
        elif part == "whatif":
            results["whatif"] = _whatif()
        else:
            raise click.BadParameter(f"--only {part}: must be one of {', '.join(PARTS)}")
        results["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        file.write_text(json.dumps(results, indent=1))
    _show(results, out)


def _run(name: str, network: str, kind: str, *, hosts: int = 2, most: int = 0) -> dict[str, Any]:
    """Two workers with one thread each, on this machine or each on its own host."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [name, str(out), kind, str(most)]
        if network == "loopback":
            command = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--nproc_per_node", str(hosts)]
            subprocess.run([*command, str(HERE / "worker.py"), *words], cwd=folder, check=True, timeout=1800)
        else:
            if why := allowed():
                raise click.ClickException(f"links cannot be created here: {why}")
            with Lab(hosts=hosts, rate=network) as lab:
                lab.fleetrun(str(HERE / "worker.py"), words, timeout=1800, cwd=folder, env={"OMP_NUM_THREADS": "1"})
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def _whatif() -> list[dict[str, Any]]:
    """Predict two and four hosts from a profile of two workers on one host.

    Four hosts share two cores here, so compute is half as fast.
    """
    rows = []
    for name in ("mlp", "bert"):
        profile = _run(name, "loopback", "profile")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"
            file.write_text(json.dumps({key: profile[key] for key in ("cluster", "model", "declared", "version")}))
            stored = cache.load_profile(file)
        assert stored is not None
        for hosts in (2, 4):
            machine = whatif.Machine(hosts, 1, 125e6 * 0.94, 125e6 * 0.94, 1 << 40, 1e-4, min(1.0, 2 / hosts))
            cluster, model = machine.cluster(hosts, stored.cluster), stored.model.faster(machine.compute)
            terms = terms_of(DistributedStrategy().plan().parts, cluster, model)
            predicted = step_cost(terms, model, model.declared, model.samples).seconds
            measured = _run(name, "1gbit", "plain", hosts=hosts)["plans"][0]["measured"]
            rows.append({"model": name, "hosts": hosts, "predicted": predicted, "measured": measured})
            print(rows[-1], flush=True)
    return rows


def _show(results: dict[str, Any], out: Path) -> None:
    tables = {title: report.as_markdown(lines) for title, lines in report.tables(results)}
    for title, table in tables.items():
        print(f"{title}\n\n{table}")
    if "search" in results:
        print(results["search"]["text"])
    try:
        print(f"wrote {pages.publish('auto', tables, out)}")
    except pages.CannotWriteError as reason:
        raise click.ClickException(f"auto.md stays as it is: {reason}") from None


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.auto")
