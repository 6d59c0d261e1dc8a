"""The command `fleetx`."""

from __future__ import annotations

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
    from fleetx.explain import Explanation
    from fleetx.strategy import DistributedStrategy

    try:
        strategy = DistributedStrategy.load(path)
        click.echo(str(Explanation(strategy, strategy.plan())))
    except StrategyError as error:
        raise click.ClickException(str(error)) from None
