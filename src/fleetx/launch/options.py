"""The command line of fleetrun: from words to a Job, or to one line that says what is wrong with them."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fleetx.errors import LaunchError
from fleetx.launch import devices, environment, nodes
from fleetx.launch.help import REFUSED, Command, Option
from fleetx.launch.job import Job

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    code = _main(sys.argv[1:] if arguments is None else list(arguments))
    if arguments is None and "torch" in sys.modules:
        # We are a process of our own, and Python would take 0.4 s to take torch apart.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _main(arguments: list[str]) -> int:
    try:
        job = parse(arguments, given=os.environ)
        if job is None:
            return 0
        from fleetx.launch.logs import Logs

        logs = Logs(job)
    except LaunchError as error:
        print(f"fleetrun: {error}", file=sys.stderr)
        return BAD_INPUT
    from fleetx.launch.start import run

    try:
        return run(job, logs=logs)
    except LaunchError as error:
        print(f"fleetrun: {error}", file=sys.stderr)
        return 1


def parse(arguments: list[str], *, given: Mapping[str, str]) -> Job | None:
    """None: only help was asked for, and given."""
    try:
        words = command.main(arguments, prog_name="fleetrun", standalone_mode=False)
    except click.NoSuchOption as error:
        raise LaunchError(_unknown(error.option_name)) from None
    except click.ClickException as error:
        raise LaunchError(f"{error.format_message().rstrip('.')}; see fleetrun --help") from None
    return None if words == 0 or words is None else _job(given=given, **words)


def _unknown(name: str) -> str:
    plain = name.replace("-", "_").removeprefix("__")
    if plain in REFUSED:
        return f"{name}: {REFUSED[plain]}"
    known = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    near = difflib.get_close_matches(name, known, n=1)
    return f"no option {name}{f'; did you mean {near[0]}?' if near else '; see fleetrun --help'}"


def _option(*names: str, group: str, help: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=Option, group=group, help=help, **settings)


def _both(name: str) -> tuple[str, str]:
    return f"--{name}", f"--{name.replace('_', '-')}"


@click.command(cls=Command, context_settings={"max_content_width": 110, "allow_interspersed_args": False})
@_option(
    "--gpus",
    "--selected_gpus",
    "--devices",
    "gpus",
    metavar="0,1,2,3",
    group="Workers",
    help="One worker on each of these GPUs. With --device cpu, as many workers on the CPU. [default: all]",
)
@_option(
    *_both("nproc_per_node"),
    type=click.IntRange(min=1),
    metavar="N",
    group="Workers",
    help="Number of workers on this node. [default: one a GPU, or 1 on the CPU]",
)
@_option(
    "--device",
    type=click.Choice([devices.CPU, devices.CUDA]),
    group="Workers",
    help="Where to compute. [default: $FLEETX_DEVICE, else cuda if there are GPUs, else cpu]",
)
@_option("-m", "--module", is_flag=True, group="Workers", help="SCRIPT is the name of a module, as in `python -m`.")
@_option(
    "--paddle-api",
    "--paddle_api",
    type=click.Choice(["fleetx", "paddle"]),
    envvar="FLEETX_PADDLE_API",
    group="Workers",
    help="What `import paddle` gives SCRIPT: fleetx.static, or Paddle itself. [default: Paddle if it is installed]",
)
@_option(
    "--ips", metavar="a,b", group="Many nodes", help="Addresses of all nodes, the same on each; they meet at the first."
)
@_option(
    "--nnodes",
    type=click.IntRange(min=1),
    metavar="N",
    group="Many nodes",
    help="Number of nodes, if --ips does not tell; needs --master and --rank.",
)
@_option(
    "--master",
    metavar="HOST:PORT",
    group="Many nodes",
    help="Where the nodes meet; on node 0. [default with --ips: the first, at port 6069]",
)
@_option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="R",
    group="Many nodes",
    help="Which node this is, from 0. [default with --ips: found by its address]",
)
@_option(
    *_both("join_timeout"),
    type=click.IntRange(min=1),
    default=600,
    metavar="S",
    group="Many nodes",
    help="Seconds to wait for the other nodes. [default: 600]",
)
@_option(
    *_both("log_dir"),
    default="log",
    metavar="DIR",
    group="Logs and failures",
    help="Where workerlog.N goes, N = 0, 1 ... on each node; fresh for each run. [default: log]",
)
@_option(
    *_both("max_restarts"),
    "--max_restart",
    "max_restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    group="Logs and failures",
    help="How often all workers are started again after a failure. [default: 0]",
)
@_option(
    *_both("stop_timeout"),
    type=click.IntRange(min=0),
    default=5,
    metavar="S",
    group="Logs and failures",
    help="Seconds a worker has to end after it failed or was asked to stop. [default: 5]",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(**words: Any) -> dict[str, Any]:
    """Start SCRIPT on every worker, echo worker 0, and say what failed first."""
    return words


def _job(*, given: Mapping[str, str], script: str, arguments: tuple[str, ...], module: bool, **words: Any) -> Job:
    if not module:
        _check_script(script)
    environment.first_port()  # a wrong $FLAGS_START_PORT is better heard of now
    gpus = None if words["gpus"] is None else _gpu_names(words["gpus"])
    nproc: int | None = words["nproc_per_node"]
    if gpus is not None and nproc is not None and nproc != len(gpus):
        raise LaunchError(
            f"--nproc_per_node {nproc} does not match the {len(gpus)} of --gpus {','.join(gpus)}; give one"
        )
    count, rank, address, master = _place(words)

    visible = devices.visible_gpus(installed=devices.installed_gpus(), given=given)
    device = devices.device_of(words["device"], gpus=gpus, visible=visible, given=given)
    if device == devices.CUDA:
        used = devices.gpus_of(gpus, nproc=nproc, visible=visible, given=given)
        workers = len(used)
    else:
        used = []
        workers = len(gpus) if gpus is not None else (nproc or 1)
    return Job(
        target=script,
        module=module,
        arguments=arguments,
        device=device,
        gpus=tuple(used),
        workers=workers,
        threads=None if given.get("OMP_NUM_THREADS") else environment.threads_of_a_worker(workers),
        nodes=count,
        rank=rank,
        address=address,
        master=master,
        paddle_api=words["paddle_api"],
        log_dir=Path(words["log_dir"]),
        max_restarts=words["max_restarts"],
        stop_timeout=words["stop_timeout"],
        join_timeout=words["join_timeout"],
    )


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise LaunchError(f"{script} is a directory; name a script, or a module with -m")
    if not path.exists():
        hint = f" (for a module: fleetrun -m {script})" if "/" not in script and not script.endswith(".py") else ""
        raise LaunchError(f"no script {script} in {Path.cwd()}{hint}")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"{script} cannot be read")


def _listed(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise LaunchError(f"{option} {text!r}: expected a list such as {'0,1' if option == '--gpus' else 'a,b'}")
    twice = sorted({part for part in parts if parts.count(part) > 1})
    if twice:
        raise LaunchError(f"{option} {text}: {', '.join(twice)} is there twice")
    return parts


def _gpu_names(text: str) -> list[str]:
    gpus = _listed("--gpus", text)
    for gpu in gpus:
        if not gpu.isdigit() and not gpu.startswith(("GPU-", "MIG-")):  # those are NVIDIA's UUIDs
            raise LaunchError(f"--gpus {text}: {gpu} is not the number of a GPU")
    return gpus


def _place(words: Mapping[str, Any]) -> tuple[int, int, str | None, tuple[str, int] | None]:
    """(number of nodes, rank of this one, its address, where they meet)"""
    nnodes, rank = words["nnodes"], words["rank"]
    master = None if words["master"] is None else _host_and_port(words["master"])
    ips = None if words["ips"] is None else _listed("--ips", words["ips"])
    if ips is not None:
        if nnodes is not None and nnodes != len(ips):
            raise LaunchError(f"--nnodes {nnodes} does not match the {len(ips)} of --ips {','.join(ips)}; give one")
        nnodes = len(ips)
    elif nnodes is None:
        for option in ("rank", "master"):
            if words[option] is not None:
                raise LaunchError(f"--{option} needs --nnodes (or --ips): it is for a run on many nodes")
        nnodes = 1
    if rank is not None and rank >= nnodes:
        raise LaunchError(f"--rank {rank}: there are {nnodes} nodes, so the last has rank {nnodes - 1}")
    if ips is None:
        missing = [f"--{option}" for option in ("master", "rank") if words[option] is None]
        if nnodes > 1 and missing:
            raise LaunchError(f"--nnodes {nnodes} needs {' and '.join(missing)} (or name all nodes with --ips)")
        return nnodes, rank or 0, None, master if nnodes > 1 else None
    if rank is None:
        rank = nodes.rank_among(ips)
    meeting_port = (environment.first_port() or environment.FIRST_PORT) - 1
    return nnodes, rank, ips[rank], (master or (ips[0], meeting_port)) if nnodes > 1 else None


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"--master {text}: expected HOST:PORT, with a port from 1 to 65535")
    return host, int(port)
