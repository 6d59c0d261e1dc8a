"""How fleetrun explains itself: the page of --help, and why some options of its relatives are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

EXAMPLES = """\
  fleetrun train.py                                   one worker on each GPU, or one on the CPU
  fleetrun --gpus 0,1,2,3 --log_dir log train.py      four workers
  fleetrun --device cpu --gpus 0,1 train.py --lr 0.1  the same with two workers on the CPU
  fleetrun --ips 10.0.0.1,10.0.0.2 train.py           on both machines
  fleetrun --nnodes 2 --master 10.0.0.1:6069 --rank 0 train.py    on the first; --rank 1 on the second
"""

VARIABLES = """\
  RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_*   as torchrun does
  PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT PADDLE_RANK_IN_NODE
  CUDA_VISIBLE_DEVICES FLAGS_selected_gpus    on GPUs: the chosen ones, and the index of this worker's own
  FLEETX_DEVICE                               cpu or cuda
  FLEETX_PADDLE_API                           fleetx or paddle, where --paddle-api says so
  OMP_NUM_THREADS                             cores of this machine / its workers, unless set
  GLOO_SOCKET_IFNAME                          the interface of this node's address, lo on one node; unless set
"""

READ = """\
  FLEETX_DEVICE           the default of --device
  FLEETX_PADDLE_API       the default of --paddle-api
  FLAGS_START_PORT        first port of PADDLE_TRAINER_ENDPOINTS [free ports on one node, 6070 on many]
  CUDA_VISIBLE_DEVICES    the GPUs that may be chosen from
"""

_PARAMETER_SERVER = "fleetx has no parameter servers, every worker trains; leave it out"
_ELASTIC = "the number of nodes is fixed for a run; use --ips or --nnodes, and --max_restarts for failures"
_MEETING = "the nodes meet at --master HOST:PORT, and --rank tells which one this is"
_STREAMS = "both streams of worker N go to workerlog.N in --log_dir, and worker 0 is echoed"

# Without dashes, with underscores. Paddle's launchers (2.0 to 2.4) and torchrun have these.
REFUSED = {
    **dict.fromkeys(
        ("servers", "workers", "heter_workers", "server_num", "worker_num", "heter_worker_num", "http_port"),
        _PARAMETER_SERVER,
    ),
    **dict.fromkeys(
        ("elastic_server", "elastic_level", "elastic_timeout", "np", "scale", "force", "host", "job_id"), _ELASTIC
    ),
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank"), _MEETING
    ),
    **dict.fromkeys(("tee", "redirects", "local_ranks_filter"), _STREAMS),
    "run_mode": "there is only the collective mode; leave it out",
    "standalone": "one node is the default; leave it out",
    "xpus": "there are no XPUs here; use --gpus or --device cpu",
    "selected_xpus": "there are no XPUs here; use --gpus or --device cpu",
    "backend": "the backend follows from the device: gloo on cpu, nccl on cuda",
    "start_port": "set FLAGS_START_PORT instead",
    "log_level": "fleetrun says only what matters; for torchelastic's own words set LOGLEVEL=INFO",
    "legacy": "there is only one launcher; leave it out",
    "no_python": "SCRIPT is run by Python; start other programs from within a script",
    "nproc": "did you mean --nproc_per_node?",
    "monitor_interval": "the end of a worker is noticed at once; leave it out",
    "start_method": "every worker is a process of its own; leave it out",
}


class Option(click.Option):
    """An option that belongs to a group, and whose older spellings stay out of the help."""

    def __init__(self, names: Sequence[str], *, group: str, **settings: Any):
        super().__init__(names, **settings)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        shown = self.opts if self.is_flag else self.opts[:1]
        value = "" if self.is_flag else f" {self.make_metavar(ctx)}"
        return ", ".join(shown) + value, self.help or ""


class Command(click.Command):
    """A click command whose options come in groups, with examples before them and variables after."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\nExamples:\n{EXAMPLES}")
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.params:
            if isinstance(parameter, Option):
                groups.setdefault(parameter.group, []).append(parameter.get_help_record(ctx))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        formatter.write(f"\nEvery worker finds in its environment:\n{VARIABLES}")
        formatter.write(f"\nfleetrun itself reads:\n{READ}")
        formatter.write("\nExit code: 0; 1 if a worker failed; 2 for a mistake on the command line; 128 + signal.\n")
