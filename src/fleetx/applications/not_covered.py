"""Errors for attributes of Paddle's objects that fleetx does not support; `paddle/static/imports.py` handles modules.

This file is not in `paddle/`, because `Program` and `Variable` of an application use it, and applications do not import
paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fleetx.base.suggest import did_you_mean

PAGE = "docs/coming_from_paddle.md"
# Whole messages. What matters is in the first hundred characters: launchers and terminals cut off the rest.
_SCOPE = (
    "fleetx runs Paddle scripts whose model is one of fleetx.applications, and has no {wanted}: build your model in "
    f"torch and call fleet.distribute; see {PAGE}"
)
_SERVER = f"fleetx does not support parameter servers, which {{wanted}} is for: it trains collectively; see {PAGE}"
_EAGER = (
    "fleetx runs Paddle's static scripts only, not {wanted}: for eager training use PyTorch and fleet.distribute; "
    f"see {PAGE}"
)
_LIST = ""  # no whole message: list the names that the module has
WHOLE = {
    "paddle": _SCOPE,
    **dict.fromkeys(
        (
            "paddle.distributed.fleet",
            "paddle.fluid.clip",
            "paddle.fluid.optimizer",
            "paddle.fluid.regularizer",
            "paddle.optimizer",
            "paddle.regularizer",
        ),
        _LIST,
    ),
    "paddle.fluid.initializer": _SCOPE,  # these two resemble supported names, which would be suggested
    "paddle.fluid.scope_guard": _SCOPE,
    "paddle.distributed.fleet.utils": (
        "fleetx does not support parameter servers and has no {wanted}; instead of its recompute, set "
        f"strategy.recompute; instead of its HDFSClient, use X.utils.Downloader; see {PAGE}"
    ),
    **dict.fromkeys(
        (
            "paddle.distributed.InMemoryDataset",
            "paddle.distributed.QueueDataset",
            "paddle.distributed.fleet.MultiSlotDataGenerator",
            "paddle.distributed.fleet.MultiSlotStringDataGenerator",
            "paddle.distributed.fleet.init_server",
            "paddle.distributed.fleet.init_worker",
            "paddle.distributed.fleet.is_server",
            "paddle.distributed.fleet.run_server",
            "paddle.distributed.fleet.server_num",
            "paddle.distributed.fleet.stop_worker",
            "paddle.fluid.DatasetFactory",
            "paddle.fluid.DistributeTranspiler",
            "paddle.fluid.incubate.data_generator",
            "paddle.fluid.incubate.fleet.parameter_server",
            "paddle.fluid.incubate.fleet.utils",
            "paddle.fluid.transpiler",
        ),
        _SERVER,
    ),
    **dict.fromkeys(
        (
            "paddle.DataParallel",
            "paddle.disable_static",
            "paddle.distributed.init_parallel_env",
            "paddle.fluid.dygraph",
            "paddle.jit",
            "paddle.to_tensor",
        ),
        _EAGER,
    ),
}
_SAVE = "use save_params(folder) and load_params(folder) of the model, or fleet.save(folder) and fleet.load(folder)"
_LOADER = "the loaders are methods of the model, such as model.get_train_dataloader(folder)"
_COMPILED = "there is no graph to compile: run the program itself"
_PROGRAMS = (
    "programs belong to a model of fleetx.applications: use model.main_prog and model.startup_prog, or the default "
    f"programs; build any other model in torch and call fleet.distribute; see {PAGE}"
)
_SINGLY = (
    "gradients are clipped by their global norm, with GradientClipByGlobalNorm (ClipGradByGlobalNorm); under dgc, set "
    "strategy.dgc_configs = {'clip_norm': ...} to clip each compressed tensor on each worker"
)

INSTEAD = {
    "paddle.nn.ClipGradByNorm": _SINGLY,
    "paddle.fluid.clip.GradientClipByNorm": _SINGLY,
    **{f"paddle.fluid.io.{name}": _SAVE for name in ("load", "load_vars", "save", "save_vars")},
    **{f"paddle.{name}": _SAVE for name in ("load", "save", "fluid.load", "fluid.save", "static.load", "static.save")},
    "paddle.fluid.io.load_inference_model": "create the same model and call fluid.io.load_persistables",
    "paddle.static.load_inference_model": "create the same model and call fluid.io.load_persistables",
    "paddle.fluid.CompiledProgram": _COMPILED,
    "paddle.fluid.ParallelExecutor": _COMPILED,
    "paddle.static.ParallelExecutor": _COMPILED,
    "paddle.static.CompiledProgram": _COMPILED,
    "paddle.fluid.Program": _PROGRAMS,
    "paddle.static.Program._lr_schedule_guard": "write the schedule with fluid.layers, such as linear_lr_warmup",
    "paddle.static.Program": _PROGRAMS,
    "paddle.fluid.program_guard": _PROGRAMS,
    "paddle.static.program_guard": _PROGRAMS,
    **{
        f"paddle.fluid.optimizer.{name}": f"set strategy.{part} = True and call fleet.distributed_optimizer"
        for name, part in (
            ("DGCMomentumOptimizer", "dgc"),
            ("GradientMergeOptimizer", "gradient_merge"),
            ("PipelineOptimizer", "pipeline"),
            ("RecomputeOptimizer", "recompute"),
        )
    },
}

_NO_PROGRAM = "there is no program to save or load; " + _SAVE
_PROGRAM_FILES = "models are created, not downloaded: call one of fleetx.applications"
_TRAINS_WITH_SERVERS = "it trains with parameter servers, which fleetx does not support"
# Names that some versions of FleetX had and that have no meaning here.
FLEETX = {
    "fleetx.CPUDatasetTrainer": _TRAINS_WITH_SERVERS,
    "fleetx.CPUTrainer": _TRAINS_WITH_SERVERS,
    "fleetx.applications.MultiSlotCTR": _TRAINS_WITH_SERVERS,
    "fleetx.applications.Word2vec": _TRAINS_WITH_SERVERS,
    "fleetx.applications.download_model": _PROGRAM_FILES,
    "fleetx.applications.load_program": _NO_PROGRAM,
    "fleetx.applications.save_program": _NO_PROGRAM,
    "fleetx.dataset": _LOADER,
    "fleetx.image_dataset_from_filelist": "call model.load_imagenet_from_file(filelist)",
    "fleetx.imagenet_dataset_from_filelist": "call model.load_imagenet_from_file(filelist)",
}


def of_fleetx(owner: str, name: str, known: Sequence[str]) -> str:
    """The error message for a name that a module of fleetx does not have."""
    advice = FLEETX.get(f"{owner}.{name}") or did_you_mean(name, known)
    return f"{owner} has no {name!r}{advice and ': ' + advice}"


def not_covered_by(owner: str, known: Sequence[str]) -> Callable[[Any, str], Any]:
    """Make the `__getattr__` of a class."""

    def __getattr__(self: Any, name: str) -> NoReturn:  # noqa: N807
        if name.startswith("__"):  # Python looks these up itself
            raise AttributeError(name)
        raise AttributeError(sentence(owner, name, known))

    return __getattr__


def set_once(owner: str, known: Sequence[str]) -> Callable[[Any, str, Any], None]:
    """Make the `__setattr__` of a dataclass whose fields cannot be changed."""

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if name not in self.__dataclass_fields__:
            raise AttributeError(sentence(owner, name, known))
        if name in self.__dict__:
            raise AttributeError(f"{owner}.{name} is read-only")
        self.__dict__[name] = value

    return __setattr__


def sentence(owner: str, name: str, known: Sequence[str], *, of_module: str | None = None) -> str:
    """of_module: the advice for a whole module; None for a class, whose names are listed."""
    wanted = f"{owner}.{name}"
    reason = INSTEAD.get(wanted, of_module or "")
    # A name with advice of its own is not a misspelling of another.
    hint = "" if wanted in INSTEAD else did_you_mean(name, known)
    whole = _whole(wanted) if of_module is not None else ""
    if whole and (wanted in WHOLE or not (hint or reason)):
        return whole
    listed = f"{owner} has {', '.join(known)}"
    advice = f"{hint} {listed}" if hint else reason or listed
    return f"fleetx does not support {wanted}: {advice}"


def _whole(wanted: str) -> str:
    """The message for a name, or for the nearest enclosing module that has one."""
    plain = wanted.replace("paddle.fleet.", "paddle.distributed.fleet.")
    while plain not in WHOLE:
        plain = plain.rpartition(".")[0]
    return WHOLE[plain].format(wanted=wanted)
