"""What `fleetx verify` does with its options."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from fleetx.base.files import write_atomic
from fleetx.base.suggest import did_you_mean
from fleetx.errors import UsageError
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import every
from fleetx.verify import own_model as own
from fleetx.verify import report
from fleetx.verify.combinations import Switches
from fleetx.verify.combinations import combinations as every_combination
from fleetx.verify.combinations import switches as every_switch
from fleetx.verify.judge import Judge, ranks_for
from fleetx.verify.ranks import RankError


def combinations(among: tuple[str, ...], options: Mapping[str, Any]) -> bool:
    """Judge all combinations, show progress and write the reports. Returns whether nothing failed."""
    known = every_switch()
    for name in among:
        if name in every() and name not in known:
            why = "is on in every combination" if every()[name].always else "changes nothing in training itself"
            raise UsageError(f"{name} {why}, so there is nothing to verify: remove it")
        if name not in known:
            raise UsageError(f"there is no strategy {name!r}: {did_you_mean(name, known) or ', '.join(known)}")
    for option in ("strategy", "nproc_per_node"):
        if options[option] is not None:
            raise UsageError(f"--{option} needs --model: add --model, or remove it")
    for path in options["output"]:
        if path.suffix not in report.FORMATS:
            raise UsageError(f"--output {path}: the name must end in {', '.join(report.FORMATS)}")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"--output {path}: there is no folder {path.absolute().parent}: create it first")
    among = tuple(dict.fromkeys(among))
    chosen = list(every_combination(options["size"] or 2, among))
    if options["conflicts"]:
        _list_conflicts(chosen, options["output"])
        return True
    _check_device(options["device"], max(map(ranks_for, chosen)))
    judge, verdicts, start = Judge(options["device"]), [], time.monotonic()
    try:
        with click.progressbar(chosen, label="verifying", file=sys.stderr, show_pos=True) as progress:
            for number, switches in enumerate(progress):
                verdicts.append(verdict := judge.judge(switches))
                if not sys.stderr.isatty() and number % 25 == 24:
                    click.echo(f"{number + 1} of {len(chosen)} combinations", err=True)
                if not verdict.ok:
                    click.echo("\n" + "\n".join(report.details(verdict)), err=True)
    finally:
        judge.close()
    seconds = time.monotonic() - start
    for path in options["output"]:
        write_atomic(path, report.FORMATS[path.suffix](verdicts, options["device"], seconds))
    if among:
        click.echo("\n".join(line for v in verdicts for line in report.details(v)))
    click.echo(report.text(verdicts))
    return all(v.ok for v in verdicts)


def _list_conflicts(chosen: Sequence[Switches], pages: Sequence[Path]) -> None:
    """Print the conflicts of these combinations, or rewrite only their list on these pages."""
    for path in pages:
        if path.suffix != ".md" or not path.exists():
            raise UsageError(
                f"--output {path}: --conflicts rewrites the list on a page, so it must be an .md file that fleetx "
                "verify has written: pass that one, or remove --conflicts"
            )
        try:
            write_atomic(path, report.with_conflicts(path.read_text(), chosen))
        except UsageError as error:
            raise UsageError(f"--output {path}: {error}") from None
    if not pages:
        click.echo(report.conflicts(chosen), nl=False)


def own_model(where: str, switches: tuple[str, ...], options: Mapping[str, Any]) -> bool:
    """Verify the user's model and print the findings. Returns whether everything is right."""
    ranks = options["nproc_per_node"] or 2
    _check_device(options["device"], ranks)
    if switches or options["size"]:
        raise UsageError("with --model the strategy comes from --strategy: remove the switches, --quick and --all")
    for option in ("output", "conflicts"):
        if options[option]:
            raise UsageError(f"--{option} is for the matrix of all strategies: remove it, or remove --model")
    strategy = DistributedStrategy.load(options["strategy"]) if options["strategy"] else DistributedStrategy()
    try:
        right, lines = own.verify(where, strategy, ranks, options["device"])
    except own.NotComputableError as error:
        raise _UndecidedError(str(error)) from None
    except RankError as error:
        raise click.ClickException(str(error)) from None
    click.echo("\n".join(lines))
    return right


class _UndecidedError(click.ClickException):
    exit_code = 2  # neither right nor wrong


def _check_device(device: str, ranks: int) -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise UsageError(
            f"--device cuda needs {ranks} GPUs, but this machine has {torch.cuda.device_count()}: use --device cpu"
        )
