"""Read nodes and workers from the environment that a scheduler sets, as options of fleetrun.

    Kubeflow's TrainJob     PET_*, the variables that torchrun reads
    SkyPilot                SKYPILOT_*
    SageMaker               SM_*

Options on the command line take precedence. Slurm and MPI start the workers themselves: see comm/roles.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetx.errors import LaunchError

_PORT = 29500  # torchrun's


def options_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """The options that a scheduler sets; empty without a scheduler."""
    for read in (_kubeflow, _skypilot, _sagemaker):
        if found := {key: value for key, value in read(environ).items() if value is not None}:
            return found
    return {}


def _kubeflow(environ: Mapping[str, str]) -> dict[str, Any]:
    nodes = _number(environ, "PET_NNODES")
    workers = environ.get("PET_NPROC_PER_NODE", "")
    # For auto, gpu and cpu, use our own default.
    found: dict[str, Any] = {"nproc_per_node": int(workers) if workers.isdecimal() else None}
    if nodes is None or nodes == 1:
        return found | {"nnodes": nodes}
    host, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", str(_PORT))
    master = f"{host}:{port}" if host else environ.get("PET_RDZV_ENDPOINT")
    return found | {"nnodes": nodes, "rank": _number(environ, "PET_NODE_RANK"), "master": master}


def _skypilot(environ: Mapping[str, str]) -> dict[str, Any]:
    ips = environ.get("SKYPILOT_NODE_IPS", "").split()
    if len(ips) < 2:
        return {"nnodes": 1 if ips else None}
    return {"ips": ",".join(ips), "rank": _number(environ, "SKYPILOT_NODE_RANK")}


def _sagemaker(environ: Mapping[str, str]) -> dict[str, Any]:
    if "SM_HOSTS" not in environ:
        return {}
    try:
        hosts = sorted(map(str, json.loads(environ["SM_HOSTS"])))
    except (ValueError, TypeError):
        raise LaunchError(f"SM_HOSTS={environ['SM_HOSTS'][:200]}: must be a list of hosts as JSON") from None
    here = environ.get("SM_CURRENT_HOST", "")
    if len(hosts) < 2:
        return {"nnodes": 1}
    if here not in hosts:
        raise LaunchError(f"SM_CURRENT_HOST={here}: must be one of SM_HOSTS, {', '.join(hosts)}")
    return {"nnodes": len(hosts), "rank": hosts.index(here), "master": f"{hosts[0]}:{_PORT}"}


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise LaunchError(f"{name}={text[:50]}: must be a whole number")
    return int(text)
