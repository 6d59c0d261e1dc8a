"""python -m benchmarks.netlab: test the link, or run a command on every host."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table

from benchmarks.frame import CannotRunError, machine
from benchmarks.netlab import link
from benchmarks.netlab.lab import MOST_HOSTS, Lab, LabError
from benchmarks.netlab.measured import Measured
from benchmarks.netlab.reduce import reduce
from benchmarks.netlab.transfer import transfer

SECONDS = 2.0  # of traffic in each test: slow start and what passes at once are then a percent
FAST = 2e9  # bits a second, for the sizes of the tests on a link that is not shaped

EXAMPLES = """\b
Examples:
  python -m benchmarks.netlab                             test two hosts at 100 Mbit/s
  python -m benchmarks.netlab --hosts 4 --rate 1gbit
  python -m benchmarks.netlab -- ip address               a command on every host
  python -m benchmarks.netlab -- fleetrun --device cpu --ips 10.77.0.1,10.77.0.2 train.py
  python -m benchmarks.netlab -- sh -c 'echo I am host $NETLAB_HOST of $NETLAB_IPS'
"""


def checked(context: click.Context, option: click.Parameter, value: str) -> str | None:
    if value == "none":
        return None
    try:
        link.bits(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXAMPLES)
@click.option("--hosts", type=click.IntRange(1, MOST_HOSTS), default=2, show_default=True)
@click.option("--rate", callback=checked, default="100mbit", show_default=True,
              help="Bits a second of every host, each way, such as 1gbit; none: as fast as the machine.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds for the command.  [default: no limit]")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def main(hosts: int, rate: str | None, timeout: float | None, command: tuple[str, ...]) -> None:
    """A slow network on this machine: hosts in network namespaces with 10.77.0.1, 10.77.0.2 ... on their eth0.

    Without a command the link is tested: plain sockets, and an all-reduce of gloo through `fleetrun --ips`. With one,
    it runs on every host, and the exit code is the first that is not 0. Everything is removed at the end. Needs root,
    and Debian's iproute2. Bandwidth only: there is no delay and no loss.
    """
    if hosts < 2 and not command:
        raise click.UsageError("a test of the link needs --hosts 2 or more")
    try:
        with Lab(hosts=hosts, rate=rate) as lab:
            if command:
                done = lab.everywhere(command, timeout=timeout, check=False, capture=False)
                sys.exit(next((one.returncode for one in done if one.returncode), 0))
            show(lab, tested(lab))
    except (CannotRunError, LabError) as error:
        raise click.ClickException(str(error)) from None


def tested(lab: Lab) -> list[Measured]:
    size = int((lab.bits or FAST) / 8 * SECONDS)
    return [transfer(lab, size=size), transfer(lab, size=size, sender=1, receiver=0), reduce(lab, size=size)]


def show(lab: Lab, results: list[Measured]) -> None:
    table = Table("test", title=f"{lab.hosts} hosts, {lab.rate or 'not shaped'}", title_justify="left")
    for name in ("seconds", "Mbit/s", "of rate", "MB sent", "counted", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        share = f"{one.rate / lab.bits:.1%}" if lab.bits else ""
        figures = (f"{one.payload / 1e6:.2f}", f"{one.counted / 1e6:.2f}", f"{one.counted / one.payload:.4f}")
        table.add_row(one.what, f"{one.seconds:.2f}", f"{one.rate / 1e6:.1f}", share, *figures)
    console = Console()
    console.print(table)
    if lab.bits:
        most = f"{link.PAYLOAD:.1%} of the rate is the most that a program can see: headers are part of it"
        console.print(most, highlight=False)
    console.print(f"load {machine.load()[0]:.2f} on {machine.machine()['usable_cores']} cores", highlight=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.netlab")
