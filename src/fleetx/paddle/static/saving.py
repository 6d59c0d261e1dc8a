"""fluid.io: parameters and buffers in one safetensors file, under Paddle's names and in its shapes.

Paddle's own format is a program and one file per variable, which only Paddle can read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.applications import Application, Program, Variable
from fleetx.base.files import atomic
from fleetx.base.module_names import plain_name
from fleetx.comm.notices import say_once
from fleetx.errors import UsageError
from fleetx.optim import parameter_names
from fleetx.paddle.static import training
from fleetx.paddle.static.programs import bound, default_main_program

FILE = "params.safetensors"


def save_persistables(
    executor: Any, dirname: str | Path, main_program: Program | None = None, filename: str | None = None
) -> None:
    """Write the parameters and buffers of a program into a folder."""
    _write(_application(main_program), Path(dirname) / (filename or FILE), {})


def save_inference_model(
    dirname: str | Path,
    feeded_var_names: Sequence[str],
    target_vars: Sequence[Variable],
    executor: Any,
    main_program: Program | None = None,
    model_filename: str | None = None,
    params_filename: str | None = None,
    export_for_deployment: bool = True,
    program_only: bool = False,
) -> list[str]:
    """Write the parameters, and the names of inputs and targets into the file's metadata. Returns the targets' names.

    There is no program to write: create the same application to load it.
    """
    application = _application(main_program)
    program = application.main_prog
    known = [variable.name for variable in program.inputs]
    if unknown := [name for name in feeded_var_names if name not in known]:
        raise UsageError(f"feeded_var_names: there is no input {unknown[0]!r}: the inputs are {', '.join(known)}")
    targets = [one for group in target_vars for one in (group if isinstance(group, dict) else [group])]
    names = [one if isinstance(one, str) else one.name for one in targets]
    program.variables(names)
    metadata = {"feeds": json.dumps(list(feeded_var_names)), "targets": json.dumps(names)}
    if not program_only:
        _write(application, Path(dirname) / (params_filename or FILE), metadata)
    return names


def load_persistables(
    executor: Any, dirname: str | Path, main_program: Program | None = None, filename: str | None = None
) -> None:
    """Read what save_persistables or save_inference_model wrote, before or after the startup program."""
    from safetensors.torch import load_file

    application, path = _application(main_program), Path(dirname) / (filename or FILE)
    if not path.is_file():
        raise UsageError(f"{path} does not exist: pass the folder that was passed to save_persistables")
    saved, own = load_file(path), _tensors(application)
    for name, tensor in own.items():
        if name not in saved or saved[name].shape != tensor.shape:
            found = "no such tensor" if name not in saved else f"shape {tuple(saved[name].shape)}"
            raise UsageError(f"{path}: {name!r} of shape {tuple(tensor.shape)} is expected, but it has {found}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


save_params, load_params = save_persistables, load_persistables


def _application(program: Any) -> Application:
    program = bound(default_main_program() if program is None else program)
    if not isinstance(program, Program):
        raise UsageError(f"main_program must be a program, such as model.main_prog, not {program!r}")
    return program.application


def _tensors(application: Application) -> dict[str, Tensor]:
    """Views of parameters and buffers by their Paddle names; weights of Linear layers are (in, out)."""
    application._check_complete("save")
    names = parameter_names.names(application)
    found: dict[str, Tensor] = {plain_name(name): buffer for name, buffer in application.named_buffers()}
    for name, parameter in application.named_parameters():
        alias = names.get(plain_name(name), [plain_name(name)])[-1]
        found[alias] = parameter.detach().t() if training.parameter(application, alias)[1] else parameter.detach()
    return found


def _write(application: Application, path: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in _tensors(application).items()}
    with atomic(path) as temporary:  # every worker may write it
        Path(temporary).write_bytes(save(tensors, metadata | {"format": "pt", "names": "paddle"}))
    say_once(f"{path} is in safetensors format with Paddle's names; Paddle itself does not read it")
