"""The command `fleetx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleetx import __version__
from fleetx.errors import FleetxError

_positive = click.IntRange(min=1)
_input_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_output_file = click.Path(dir_okay=False, path_type=Path)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FleetxError as error:
            raise click.ClickException(str(error)) from None


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),  # accept --global-batch for --global_batch
    },
)
@click.version_option(__version__)
def main() -> None:
    """Compose training strategies for very large batches on PyTorch. To start a script, use fleetrun."""


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
def explain(path: str) -> None:
    """Explain what the strategy in a YAML file does, in which order and at what cost, or what is wrong with it."""
    from fleetx.strategy import DistributedStrategy
    from fleetx.strategy.explain import Explanation

    strategy = DistributedStrategy.load(path)
    click.echo(str(Explanation(strategy, strategy.plan())))


@main.command("import")
@click.argument("path", metavar="FILE", type=_input_file)
@click.option(
    "--output", "-o", type=_output_file, default="strategy.yaml", show_default=True, help="Where to write the strategy."
)
@click.option(
    "--ranks", type=_positive, help="Number of workers, to compute merged steps from DeepSpeed's batch sizes."
)
def import_(path: Path, output: Path, ranks: int | None) -> None:
    """Convert the settings of another system to a strategy.

    FILE is a DeepSpeed JSON, an Accelerate YAML or a Paddle prototxt. Settings that have no equivalent, or that the
    other system itself ignores, are listed.
    """
    from fleetx.integrations import settings_files

    try:
        found = settings_files.read(path, ranks)
        found.strategy.save(output)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{output}: {', '.join(found.strategy.declared()) or 'nothing'}")
    if text := str(found):
        click.echo("\n" + text, nl=False)


def _speed(ctx: click.Context, option: click.Parameter, text: str | None) -> float | None:
    from fleetx.planner.whatif import speed

    try:
        return None if text is None else speed(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _size(ctx: click.Context, option: click.Parameter, text: str | None) -> str | None:
    from fleetx.base.sizes import parse_bytes

    try:
        return text if text is None or parse_bytes(text) else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@main.command(context_settings={"allow_interspersed_args": True})
@click.option("--nproc_per_node", type=_positive, help="Number of workers to measure with.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Device to measure on.")
@click.option("--global_batch", type=_positive, help="Samples per optimizer step, over all ranks.")
@click.option("--objective", type=click.Choice(["throughput", "memory"]), help="What to optimize.")
@click.option("--allow", type=click.Choice(["exact", "bf16", "lossy"]), help="Which strategies may be chosen.")
@click.option("--memory", metavar="SIZE", callback=_size, help="Memory per rank, such as 80GiB.")
@click.option("--trials", type=click.IntRange(min=0), help="Number of plans to test by running them.")
@click.option(
    "--output", type=_output_file, default="strategy.yaml", show_default=True, help="Where to write the strategy."
)
@click.option("--nodes", type=_positive, help="Prediction: number of machines.")
@click.option("--gpus_per_node", type=_positive, default=1, show_default=True, help="Prediction: ranks per machine.")
@click.option(
    "--link", metavar="SPEED", callback=_speed,
    help="Prediction: bandwidth between machines, such as 25GB/s or 100Mbit/s.",
)  # fmt: skip
@click.option(
    "--inner_link", metavar="SPEED", callback=_speed,
    help="Prediction: bandwidth inside a machine. [default: same as --link]",
)  # fmt: skip
@click.option("--latency", type=float, default=2e-5, show_default=True, help="Prediction: seconds per message.")
@click.option(
    "--speed",
    type=float,
    default=1.0,
    show_default=True,
    help="Prediction: compute speed relative to the measured machine.",
)
@click.option(
    "--profile", "--probe", type=_input_file, help="Prediction: file with earlier measurements. [default: the latest]"
)
@click.option(
    "--plot", type=_output_file, help="Prediction: plot throughput against machines and bandwidth to this PNG file."
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(script: str | None, arguments: tuple[str, ...], **options: Any) -> None:
    """Find the best strategy for SCRIPT without training, explain it, and write it to --output.

    Runs SCRIPT up to its fleet.distribute(..., sample=...), measures, predicts, and tests the best plans. Put the
    script's own options after `--`. With --nodes, also predicts the throughput on other machines, from the measurements
    of SCRIPT, or from the latest ones if no SCRIPT is given.
    """
    from fleetx.launch.options import main as fleetrun
    from fleetx.planner import command

    if script is None and options["nodes"] is None:
        raise click.UsageError("give a SCRIPT, or for a prediction --nodes N --link SPEED --memory SIZE")
    if options["nodes"] is not None:
        command.check_question(options)
    elif unused := [f"--{name}" for name in ("link", "inner_link", "profile", "plot") if options[name] is not None]:
        only, them = ("only matters", "it") if len(unused) == 1 else ("only matter", "them")
        raise click.UsageError(f"{' and '.join(unused)} {only} to a prediction: add --nodes N, or remove {them}")
    try:
        if script is not None and (code := command.plan(script, arguments, options, fleetrun)):
            raise SystemExit(code)
        if options["nodes"] is not None:
            click.echo(command.what_if(options))
    except ValueError as error:
        raise click.ClickException(str(error)) from None


@main.command(context_settings={"allow_interspersed_args": True})
@click.option("--nproc_per_node", type=_positive, help="Number of workers.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Device to train on.")
@click.option(
    "--merges", default="1,2,4,8", show_default=True, help="Batches to try, as multiples of the script's own."
)
@click.option(
    "--rates",
    default="1",
    show_default=True,
    help="Learning rates per batch, as multiples of what --rule gives.",
)
@click.option(
    "--rule",
    type=click.Choice(["none", "linear", "sqrt"]),
    default="sqrt",
    show_default=True,
    help="How to scale the learning rate with the batch.",
)
@click.option("--steps", type=_positive, default=200, show_default=True, help="Steps with the script's own batch.")
@click.option(
    "--limit",
    type=click.FloatRange(min=1),
    default=3.0,
    show_default=True,
    help="How many times --steps a larger batch may take.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    help="Start no new runs after this many minutes. Repeat the command to continue.",
)
@click.option("--output", type=_output_file, default="batch.json", show_default=True, help="Where to keep the losses.")
@click.option("--plot", type=_output_file, help="Plot updates and samples against the batch to this PNG file.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def batch(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Measure how large the batch of SCRIPT should be, and recommend a batch, merged steps and a learning rate.

    Runs SCRIPT several times for a few steps, each time from the newest checkpoint of its fleet.checkpoints, with more
    and more merged steps. The target is the loss that the script's own batch reaches after --steps. Only the losses are
    saved, in --output; run the same command again to continue. Put the script's own options after `--`.
    """
    import subprocess
    import sys

    from fleetx.planner import branches

    def fleetrun(given: list[str]) -> int:
        """Run in a separate process, because fleetrun keeps its log folder until its process ends."""
        return subprocess.run([sys.executable, "-m", "fleetx.launch", *given]).returncode

    click.echo(branches.measure(script, arguments, options, fleetrun, click.echo))


@main.command()
@click.option(
    "--output", "-o", type=_output_file,
    help="The file to write. [default: report.html, or compared.html for several runs, in the first RUN]",
)  # fmt: skip
@click.option("--live", is_flag=True, help="Rewrite the report every few seconds until the runs have ended.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]...", type=click.Path(path_type=Path))
def report(runs: tuple[Path, ...], output: Path | None, live: bool) -> None:
    """Write the report of a run: one HTML file with its curves, times, memory, events and plan.

    RUN is the folder that the script gave to fleet.record. Several runs are shown side by side, in compared.html.
    """
    from fleetx.report import page

    output = output or runs[0] / ("report.html" if len(runs) == 1 else "compared.html")  # runs keep their own pages
    page.write(runs, output, live=live, say=click.echo)
    click.echo(f"written to {output}")


@main.command()
@click.option("--quick", "size", flag_value=2, help="Every strategy and every pair. [default]")
@click.option("--all", "size", flag_value=3, help="Every triple as well.")
@click.option("--conflicts", is_flag=True, help="Only list which pairs raise an error, without training anything.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option(
    "--output", type=_output_file, multiple=True, help="Write the results to this .html, .json or .md file. Repeatable."
)
@click.option("--model", metavar="MODULE:FUNCTION", help="Verify your model: FUNCTION returns (model, x, y, loss_fn).")
@click.option("--strategy", type=_input_file, help="With --model: the strategy, a YAML file.")
@click.option("--nproc_per_node", type=_positive, help="With --model: number of ranks. [default: 2]")
@click.argument("switches", nargs=-1)
def verify(switches: tuple[str, ...], model: str | None, **options: Any) -> None:
    """Verify that strategies do what they promise, alone and combined: all of them, or those named by SWITCHES.

    Every combination either raises an error, or trains a small model on two ranks (four for pipelines and hierarchies).
    Its result is compared with one plain float64 process, and each strategy must be observed to act. With --model,
    your own model and batch are trained under your strategy instead. The exit code is 1 if anything failed, and
    2 if verify cannot compute the expected result of your strategy.
    """
    from fleetx.verify import command

    if not (command.own_model(model, switches, options) if model else command.combinations(switches, options)):
        raise SystemExit(1)


@main.command()
@click.option("--listen", metavar="ADDRESS", help="Answer other machines on this address until Ctrl-C.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8617, show_default=True, help="Port to listen on or connect to."
)
@click.option("--folder", type=click.Path(path_type=Path), help="Also check this folder, which all machines share.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("hosts", nargs=-1)
def doctor(hosts: tuple[str, ...], listen: str | None, port: int, folder: Path | None, as_json: bool) -> None:
    """Check this machine and HOSTS before a run: names, ports, memory, files, links and versions.

    First run `fleetx doctor --listen ADDRESS` on each of HOSTS, with the address that the others should use. Reports
    what to fix. The exit code is 1 if a run could not work.
    """
    from fleetx.launch import doctor as checks

    if listen and hosts:
        raise click.UsageError("--listen only answers other machines: pass HOSTS in a separate call")
    try:
        if listen:
            with checks.serve(listen, port, folder):
                click.echo(f"answering on {listen}:{port}; stop with Ctrl-C")
                import signal

                signal.pause()
    except KeyboardInterrupt:
        return
    found = checks.examine(hosts, port, folder)
    if as_json:
        click.echo(checks.as_json(found))
    else:
        for host, findings in found.items():
            click.echo("\n".join([host, *(f"  {finding}".replace("\n", "\n  ") for finding in findings)]))
    if any(finding.fix and finding.fatal for findings in found.values() for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
