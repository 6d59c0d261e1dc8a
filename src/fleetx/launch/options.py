"""The command line of fleetrun: turn it into a Job, or raise a one-line error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fleetx import __version__
from fleetx.base.suggest import did_you_mean, printable
from fleetx.errors import LaunchError
from fleetx.launch import devices, environment, nodes, schedulers
from fleetx.launch.help import EPILOG, SUMMARY, UNSUPPORTED
from fleetx.launch.job import Job
from fleetx.launch.secret import read_secret

_MOST = 4096  # workers of one node
_SECONDS = {"join_timeout": 600, "regrow_after": 60, "restart_delay": 1}  # defaults
_positive, _not_negative = click.IntRange(1, 1_000_000), click.IntRange(0, 1_000_000)

# Also accepted: dashes instead of underscores, and these older names.
ALIASES = {"selected_gpus": "gpus", "devices": "gpus", "max_restart": "max_restarts", "cluster_node_ips": "ips"}

OPTIONS = {
    "Workers": [
        click.Option(["--gpus"], metavar="0,1,2,3", help=(
            "Run one worker on each of these GPUs. With --device cpu, run the same number of workers on the CPU. "
            "[default: all]")),
        click.Option(["--nproc_per_node"], type=click.IntRange(1, _MOST), metavar="N", help=(
            "Number of workers on this node. [default: one per GPU, or 1 on the CPU]")),
        click.Option(["--device"], type=click.Choice([devices.CPU, devices.CUDA]), help=(
            "Device to train on. [default: $FLEETX_DEVICE if set, else cuda if there are GPUs, else cpu]")),
        click.Option(["-m", "--module"], is_flag=True, help="SCRIPT is the name of a module, as in `python -m`."),
        click.Option(["--paddle-api"], type=click.Choice(["fleetx", "paddle"]), envvar="FLEETX_PADDLE_API", help=(
            "What `import paddle` in SCRIPT loads: fleetx.static, or Paddle itself. "
            "[default: Paddle if it is installed]")),
    ],
    "Multiple nodes": [
        click.Option(["--ips"], metavar="a,b", help=(
            "Addresses of all nodes, in the same order on every node. The first is node 0.")),
        click.Option(["--nnodes"], type=_positive, metavar="N", help=(
            "Number of nodes, without --ips. Requires --master and --rank.")),
        click.Option(["--master"], metavar="HOST:PORT", help=(
            "Address of node 0, where the nodes rendezvous. [default with --ips: the first of them, port 6069]")),
        click.Option(["--rank"], type=_not_negative, metavar="R", help=(
            "Rank of this node, from 0. [default with --ips: the position of its address]")),
        click.Option(["--secret_file"], metavar="FILE", help=(
            "File, readable only by you, with the secret that authenticates the nodes. [default: $FLEETX_JOB_SECRET]")),
        click.Option(["--node_ip"], metavar="a", help="Address of this node, one of --ips. [default: detected]"),
        click.Option(["--started_port"], type=click.IntRange(1025, 65535), metavar="P", help=(
            "First port in PADDLE_TRAINER_ENDPOINTS, like $FLAGS_START_PORT.")),
        click.Option(["--run_mode"], type=click.Choice(["collective"]), help=(
            "For compatibility with Paddle; it has only one value.")),
        click.Option(["--join_timeout"], type=_positive, metavar="S", help=(
            f"Seconds to wait for the other nodes. [default: {_SECONDS['join_timeout']}]")),
    ],
    "Logs": [
        click.Option(["--log_dir"], default="log", show_default=True, metavar="DIR", help=(
            "Directory for workerlog.N, N = 0, 1, ... on each node. Logs of an earlier run are deleted.")),
    ],
    "Failures": [
        click.Option(["--max_restarts"], type=_not_negative, default=0, show_default=True, metavar="N", help=(
            "How many times to restart all workers after a failure.")),
        click.Option(["--elastic"], metavar="MIN:MAX", help=(
            "Continue without lost workers (on one node) or nodes (on several), as long as MIN remain, and take them "
            "back when they return. WORLD_SIZE changes, and all workers restart.")),
        click.Option(["--regrow_after"], type=_not_negative, metavar="S", help=(
            "With --elastic on one node: seconds until the workers that were left out come back. "
            f"[default: {_SECONDS['regrow_after']}]")),
        click.Option(["--restart_delay"], type=click.IntRange(0, 60), metavar="S", help=(
            "Seconds to wait after two attempts in a row that failed within 10 s; doubles after each further one up to "
            f"60. 0: always restart at once. [default: {_SECONDS['restart_delay']}]")),
        click.Option(["--cold"], is_flag=True, help=(
            "Start the workers of a restart from scratch, instead of as forks of a process that has imported torch.")),
        click.Option(["--preload"], metavar="a,b", help=(
            "Modules, such as transformers, to import besides torch before workers are forked. Not with --cold.")),
        click.Option(["--grace_period"], type=_not_negative, default=25, show_default=True, metavar="S", help=(
            "Seconds that a worker has to save its state and exit after fleetrun receives SIGTERM or before the number "
            "of workers changes.")),
        click.Option(["--stop_timeout"], type=_not_negative, default=5, show_default=True, metavar="S", help=(
            "Seconds that a worker has to exit after it failed or was asked to stop, before it is killed.")),
    ],
}  # fmt: skip


class _Command(click.Command):
    """A click command whose help lists the options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in OPTIONS.items():
            with formatter.section(title):
                formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


_command = click.version_option(__version__)(
    _Command(
        "fleetrun",
        help=SUMMARY,
        epilog=EPILOG,
        params=[
            *(option for options in OPTIONS.values() for option in options),
            click.Argument(["script"]),
            click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
        ],
        callback=lambda **options: options,
        context_settings={
            "max_content_width": 110,
            "allow_interspersed_args": False,
            "token_normalize_func": _canonical,
        },
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    code = _main(sys.argv[1:] if arguments is None else list(arguments))
    if arguments is None and "torch" in sys.modules:
        # This is our own process: skip Python's shutdown, which takes 0.4 s once torch is loaded.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _main(arguments: list[str]) -> int:
    code_of_error = 2
    try:
        job = parse(arguments, environ=os.environ)
        if job is None:
            return 0
        from fleetx.launch.logs import Logs
        from fleetx.launch.start import run

        logs = Logs(job)
        code_of_error = 1
        return run(job, logs=logs)
    except LaunchError as error:
        print(f"fleetrun: {error}", file=sys.stderr)
        return code_of_error


def parse(arguments: list[str], *, environ: Mapping[str, str]) -> Job | None:
    """Parse and check the command line. Returns None after printing the help or the version."""
    try:
        options = _command.main(arguments, prog_name="fleetrun", standalone_mode=False)
        return _job(environ=environ, **options) if isinstance(options, dict) else None
    except click.NoSuchOption as error:
        message = _unknown(error.option_name)
    except click.ClickException as error:
        message = f"{error.format_message().rstrip('.')}; see fleetrun --help"
    except LaunchError as error:
        message = str(error)
    raise LaunchError(printable(message)) from None  # it quotes what was typed


def _unknown(name: str) -> str:
    if reason := UNSUPPORTED.get(name.removeprefix("--")):
        return f"{name}: {reason}"
    known = [option.opts[-1] for options in OPTIONS.values() for option in options]
    hint = did_you_mean(name, known, otherwise="see fleetrun --help", quote=False)
    return f"unknown option {name}; {hint}"


def _job(*, environ: Mapping[str, str], script: str, arguments: tuple[str, ...], module: bool, **options: Any) -> Job:
    if not module:
        _check_script(script)
    if options["started_port"] is not None:
        os.environ["FLAGS_START_PORT"] = str(options["started_port"])
    environment.first_port()  # report a bad $FLAGS_START_PORT before anything starts
    options = _with_scheduler(options, environ)
    gpus = None if options["gpus"] is None else _gpu_names(options["gpus"])
    nproc: int | None = options["nproc_per_node"]
    if gpus is not None and nproc is not None and nproc != len(gpus):
        raise LaunchError(
            f"--nproc_per_node {nproc} does not match --gpus {','.join(gpus)}, which lists {len(gpus)}; "
            f"give only one of the two"
        )
    elastic = None if options["elastic"] is None else _elastic(options["elastic"])
    node_count, rank, address, master = _node_layout(options, elastic=elastic)
    if elastic and node_count == 1:
        nproc = _elastic_workers(elastic, nproc=nproc, gpus=gpus, max_restarts=options["max_restarts"])
    secret = read_secret(options["secret_file"], environ=environ)
    if elastic and node_count > 1 and not secret:
        raise LaunchError("--elastic on several nodes requires a job secret: set FLEETX_JOB_SECRET or --secret_file")
    restarts = options["max_restarts"] > 0 or elastic is not None
    for name in ("restart_delay", "cold", "preload"):
        given = options[name] if name == "cold" else options[name] is not None
        if given and not restarts:
            raise LaunchError(f"--{name} is for restarts and requires --max_restarts or --elastic")
    if options["regrow_after"] is not None and not (elastic and node_count == 1):
        raise LaunchError("--regrow_after is for --elastic on one node; lost nodes come back when they are started")
    preload = _split_list("--preload", options["preload"]) if options["preload"] is not None else []
    if preload and options["cold"]:
        raise LaunchError("--preload and --cold contradict each other; give only one of the two")

    visible = devices.visible_gpus(installed=devices.installed_gpus(), environ=environ)
    device = devices.device_of(options["device"], gpus=gpus, visible=visible, environ=environ)
    if device == devices.CUDA:
        selected = devices.gpus_of(gpus, nproc=nproc, visible=visible, environ=environ)
        workers = len(selected)
    else:
        selected = []
        workers = len(gpus) if gpus is not None else (nproc or 1)
    return Job(
        target=script,
        module=module,
        arguments=arguments,
        device=device,
        gpus=tuple(selected),
        workers=workers,
        threads=None if environ.get("OMP_NUM_THREADS") else environment.threads_per_worker(workers),
        nodes=node_count,
        rank=rank,
        address=address,
        master=master,
        paddle_api=options["paddle_api"],
        log_dir=Path(options["log_dir"]),
        max_restarts=options["max_restarts"],
        warm=restarts and not options["cold"],
        preload=tuple(preload),
        elastic=elastic[0] if elastic else None,
        grace_period=options["grace_period"],
        stop_timeout=options["stop_timeout"],
        secret=secret,
        **{name: default if options[name] is None else options[name] for name, default in _SECONDS.items()},
    )


def _with_scheduler(options: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Fill in options that the command line leaves open from a scheduler's variables."""
    found = schedulers.options_of(environ)
    if any(options[name] is not None for name in ("ips", "nnodes", "master", "rank", "elastic")):
        found = {name: value for name, value in found.items() if name == "nproc_per_node"}
    if options["gpus"] is not None:
        found.pop("nproc_per_node", None)
    return options | {name: value for name, value in found.items() if options[name] is None}


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise LaunchError(f"{script} is a directory; give a script, or a module with -m")
    if not path.exists():
        hint = f"; to run a module: fleetrun -m {script}" if "/" not in script and not script.endswith(".py") else ""
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*.py")))
        hint = hint or (f": {near}" if near else "")
        raise LaunchError(f"script {script} does not exist in {Path.cwd()}{hint}")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"script {script} cannot be read: permission denied")


def _split_list(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        example = {"--gpus": "0,1", "--ips": "10.0.0.1,10.0.0.2"}.get(option, "transformers,torchvision")
        raise LaunchError(f"{option} {text!r}: must be a comma-separated list such as {example}")
    duplicates = sorted({item for item in items if items.count(item) > 1})
    if duplicates:
        raise LaunchError(f"{option} {text}: {', '.join(duplicates)} is listed more than once")
    return items


def _gpu_names(text: str) -> list[str]:
    gpus = _split_list("--gpus", text)
    for gpu in gpus:
        if not gpu.isdigit() and not gpu.startswith(("GPU-", "MIG-")):  # NVIDIA's UUIDs
            raise LaunchError(f"--gpus {text}: {gpu} is not a GPU index such as 0")
    return gpus


def _elastic(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and least.isascii() and most.isascii() and len(text) < 20):
        raise LaunchError(f"--elastic {text}: must be MIN:MAX, such as 2:4")
    if not 1 <= int(least) < int(most) <= _MOST:
        raise LaunchError(f"--elastic {text}: MIN must be at least 1 and less than MAX, and MAX at most {_MOST}")
    return int(least), int(most)


def _elastic_workers(
    elastic: tuple[int, int], *, nproc: int | None, gpus: Sequence[str] | None, max_restarts: int
) -> int:
    """The number of workers to start with, on a single node."""
    given = len(gpus) if gpus is not None else nproc
    if given is not None and given != elastic[1]:
        raise LaunchError(f"--elastic {elastic[0]}:{elastic[1]} does not match {given} workers; MAX must be the same")
    if not max_restarts:
        raise LaunchError("--elastic on one node requires --max_restarts, because a lost worker counts as a failure")
    return elastic[1]


def _node_layout(
    options: Mapping[str, Any], *, elastic: tuple[int, int] | None
) -> tuple[int, int, str | None, tuple[str, int] | None]:
    """(number of nodes, rank of this node, its address, rendezvous address)"""
    nnodes, rank = options["nnodes"], options["rank"]
    master = None if options["master"] is None else _host_and_port(options["master"])
    ips = None if options["ips"] is None else _split_list("--ips", options["ips"])
    if elastic and ips is None and nnodes is None and (rank is not None or master is not None):
        nnodes = elastic[1]
    if ips is not None:
        if nnodes is not None and nnodes != len(ips):
            raise LaunchError(
                f"--nnodes {nnodes} does not match --ips {','.join(ips)}, which lists {len(ips)}; "
                f"give only one of the two"
            )
        nnodes = len(ips)
    elif nnodes is None:
        for option in ("rank", "master", "node_ip", "secret_file", "join_timeout"):
            if options[option] is not None:
                raise LaunchError(f"--{option} is for several nodes and requires --nnodes or --ips")
        nnodes = 1
    if elastic and nnodes > 1 and nnodes != elastic[1]:
        raise LaunchError(f"--elastic {elastic[0]}:{elastic[1]} does not match {nnodes} nodes; MAX must be the same")
    if rank is not None and rank >= nnodes:
        raise LaunchError(f"--rank {rank}: must be less than the number of nodes, {nnodes}")
    if ips is None:
        missing = [f"--{option}" for option in ("master", "rank") if options[option] is None]
        if nnodes > 1 and missing:
            raise LaunchError(f"--nnodes {nnodes} requires {' and '.join(missing)} (or list all nodes with --ips)")
        return nnodes, rank or 0, None, master if nnodes > 1 else None
    if options["node_ip"] is not None and options["node_ip"] not in ips:
        raise LaunchError(f"--node_ip {options['node_ip']} is not one of --ips {','.join(ips)}")
    if rank is None:
        rank = nodes.rank_in(ips) if options["node_ip"] is None else ips.index(options["node_ip"])
    default_port = (environment.first_port() or environment.FIRST_PORT) - 1
    return nnodes, rank, ips[rank], (master or (ips[0], default_port)) if nnodes > 1 else None


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise LaunchError(f"--master {text}: must be HOST:PORT, with a port from 1 to 65535")
    try:
        host.encode("idna")
    except UnicodeError:
        raise LaunchError(f"--master {text!r}: {host!r} cannot be the name of a host") from None
    return host, int(port)
