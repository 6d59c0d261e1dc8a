"""The command `fleetx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleetx import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Training with very large batches on PyTorch, by composing strategies. To start a script, use fleetrun."""


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
def explain(path: str) -> None:
    """Say what the strategy in a YAML file does, in which order, and what it costs; or what is wrong with it."""
    from fleetx.errors import StrategyError
    from fleetx.strategy import DistributedStrategy
    from fleetx.strategy.explain import Explanation

    try:
        strategy = DistributedStrategy.load(path)
        click.echo(str(Explanation(strategy, strategy.plan())))
    except StrategyError as error:
        raise click.ClickException(str(error)) from None


@main.command(context_settings={"allow_interspersed_args": True})
@click.option(
    "--nproc_per_node",
    "--nproc-per-node",
    type=click.IntRange(min=1),
    help="Workers that measure, as fleetrun has them.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to measure.")
@click.option("--global_batch", "--global-batch", type=click.IntRange(min=1), help="Samples in an update.")
@click.option("--objective", type=click.Choice(["throughput", "memory"]), help="What is made best.")
@click.option("--allow", type=click.Choice(["exact", "bf16", "lossy"]), help="Which strategies may be chosen.")
@click.option("--memory", metavar="SIZE", help="What a rank may use, such as 80GiB.")
@click.option("--trials", type=click.IntRange(min=0), help="How many plans to run for real.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="strategy.yaml",
    show_default=True,
    help="Where to write the strategy.",
)
@click.option("--nodes", type=click.IntRange(min=1), help="What if: so many machines?")
@click.option(
    "--gpus_per_node",
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="What if: ranks on each.",
)
@click.option("--link", metavar="SPEED", help="What if: between machines, such as 25GB/s or 100Mbit/s.")
@click.option(
    "--inner-link", "--inner_link", metavar="SPEED", help="What if: inside of a machine. [default: as --link]"
)
@click.option("--latency", type=float, default=2e-5, show_default=True, help="What if: seconds of a message.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="What if: compute, relative to the profile.")
@click.option(
    "--profile",
    "--probe",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What if: a stored profile. [default: the last one]",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="What if: draw throughput against nodes to a PNG."
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(script: str | None, arguments: tuple[str, ...], **given: Any) -> None:
    """Choose a strategy for SCRIPT without training: measure, predict, try, explain, and write it to --output.

    The script runs up to its fleet.distribute(..., sample=...); its own options come after `--`. With --nodes, predict
    for another cluster from the profile of SCRIPT, or without a script from the last profile.
    """
    from fleetx.errors import FleetxError
    from fleetx.launch.options import main as fleetrun
    from fleetx.planner import command

    if script is None and given["nodes"] is None:
        raise click.UsageError("name a script to plan for, or ask what if: --nodes N --link SPEED --memory SIZE")
    try:
        if script is not None and (code := command.plan(script, arguments, given, fleetrun)):
            raise SystemExit(code)
        if given["nodes"] is not None:
            click.echo(command.what_if(given))
    except (FleetxError, ValueError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
