"""Convert the YAML settings that `accelerate config` writes to a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetx.errors import StrategyError
from fleetx.integrations import GRAD_SCALER, deepspeed
from fleetx.integrations.imported import Imported, Taken, read_json

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_LAUNCH = ("machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
_NOTHING = (
    "compute_environment", "rdzv_backend", "same_network", "main_training_function", "debug", "enable_cpu_affinity",
    "downcast_bf16", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_name", "tpu_zone", "command_file", "commands",
    "tpu_vm",
)  # fmt: skip
_FSDP1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "sharding_strategy")


def read(settings: dict[str, Any], folder: Path) -> Imported:
    """folder: what a relative path in `deepspeed_config_file` is relative to."""
    given = Taken(settings)
    if given.values.get("num_processes") == -1:  # accelerate's value for "not given"
        given.take("num_processes")
    kind = str(given.take("distributed_type", "NO")).upper()
    processes, machines = (given.whole(name) for name in ("num_processes", "num_machines"))
    plugin = given.section("deepspeed_config")
    if kind == "DEEPSPEED":
        found = _deepspeed(plugin, folder, processes)
    else:
        found = Imported("Accelerate")
        found.ignored += [f"{name}: distributed_type is {kind}" for name in plugin.rest()]
    found.system = "Accelerate"
    fsdp = given.section("fsdp_config")
    if kind == "FSDP":
        _fsdp(fsdp, found, processes, machines or 1)
    else:
        found.ignored += [f"{name}: distributed_type is {kind}" for name in fsdp.rest()]
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"):
        found.missing.append(f"distributed_type {kind}: not supported yet")
    _precision(given, found)
    _loop(given, found)
    _launch(given, found, processes, machines or 1)
    _rest(given, found)
    return found


def _deepspeed(plugin: Taken, folder: Path, processes: int | None) -> Imported:
    file = plugin.take("deepspeed_config_file")
    if file is not None:
        found = deepspeed.read(read_json(folder / str(file)), processes)
        found.missing += [f"{name}: deepspeed_config_file has it" for name in plugin.rest()]
        return found
    # These names are accelerate's; the others are DeepSpeed's own.
    zero: dict[str, Any] = {"stage": plugin.take("zero_stage", 2)}
    for name in ("offload_param", "offload_optimizer"):
        if (device := plugin.take(f"{name}_device", "none")) != "none":
            zero[name] = {"device": device}
    if plugin.take("zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    names = ("gradient_accumulation_steps", "gradient_clipping")
    found = deepspeed.read({"zero_optimization": zero} | {k: plugin.take(k) for k in names if k in plugin.values})
    found.missing += [f"{name}: it configures DeepSpeed's own start-up" for name in plugin.rest()]
    return found


def _fsdp(fsdp: Taken, found: Imported, processes: int | None, machines: int) -> None:
    def take(name: str, default: Any = None) -> Any:
        return fsdp.take(f"fsdp_{name}", fsdp.take(name, default))

    def flag(name: str) -> bool:
        return fsdp.flag(f"fsdp_{name}") | fsdp.flag(name)

    version = int(take("version", 1))
    after = take("reshard_after_forward")
    if version == 2:
        stage = 3 if after in (None, True, "true", "True") else 2
        for name in _FSDP1:
            if take(name) is not None:
                found.ignored.append(f"{fsdp.name('fsdp_' + name)}: FSDP2 does not have it")
        hybrid = False
    else:
        name = str(take("sharding_strategy") or after or "FULL_SHARD")
        name = dict(zip("12345", _STAGES, strict=True)).get(name, name)
        if name not in _STAGES:
            raise StrategyError(f"fsdp_sharding_strategy {name}: must be one of {', '.join(_STAGES)}")
        stage, hybrid = _STAGES[name], name.startswith("HYBRID")
    if stage:
        settings: dict[str, Any] = {"stage": stage}
        if hybrid and processes is None:
            found.missing.append("HYBRID_SHARD: num_processes is not set: set sharding_degree to the GPUs per machine")
        elif hybrid:
            settings |= {"sharding_degree": _each(processes, machines), "hybrid_dp": True}
        if flag("offload_params"):
            settings["offload"] = True
        found.strategy.sharding = settings
    if flag("activation_checkpointing"):
        found.missing.append("fsdp_activation_checkpointing: name the layers in strategy.recompute (`model.layers.*`)")
    if layers := take("transformer_layer_cls_to_wrap"):
        found.differs.append(
            f"fsdp_transformer_layer_cls_to_wrap {layers}: segments are chosen by size. To choose them by name, set "
            "sharding_segment_strategy and segment_anchors"
        )
    for name in ("auto_wrap_policy", "min_num_params"):
        if take(name) is not None:
            found.missing.append(f"{fsdp.name('fsdp_' + name)}: segments are chosen by size (segment_broadcast_MB)")
    for name in ("state_dict_type", "cpu_ram_efficient_loading"):
        if take(name) is not None:
            found.missing.append(f"{fsdp.name('fsdp_' + name)}: fleet.save and fleet.export need no such setting")
    for name in _FSDP1:
        if take(name) is not None:
            found.missing.append(f"{fsdp.name('fsdp_' + name)}: an option of FSDP1; fleetx uses FSDP2")
    found.missing += [f"{name}: not supported yet" for name in fsdp.rest()]


def _precision(given: Taken, found: Imported) -> None:
    kind = str(given.take("mixed_precision", "no"))
    wanted = {"fp16": GRAD_SCALER, "bf16": {"dtype": "bfloat16"}}.get(kind)
    if wanted is not None:
        found.strategy.amp = wanted
    elif kind not in ("no", "False"):
        found.missing.append(f"mixed_precision {kind}: not supported yet")


def _loop(given: Taken, found: Imported) -> None:
    steps = given.whole("gradient_accumulation_steps")
    if steps is not None and steps > 1:
        found.strategy.gradient_merge = {"k_steps": steps}
        found.script.append("call optimizer.step() after every batch, without accelerator.accumulate")


def _launch(given: Taken, found: Imported, processes: int | None, machines: int) -> None:
    launch = {name: given.take(name) for name in _LAUNCH}
    device = "--device cpu " if given.flag("use_cpu") else ""
    if processes is None:
        return
    ips = f"--ips {launch['main_process_ip'] or 'HOST0'},... " if machines > 1 else ""
    gpus = launch["gpu_ids"]
    workers = f"--gpus {gpus} " if gpus not in (None, "all") else f"--nproc_per_node {_each(processes, machines)} "
    found.script.append(f"start it with: fleetrun {device}{ips}{workers}script.py")


def _each(processes: int | None, machines: int) -> int:
    each, rest = divmod(processes or machines, machines)
    if rest or not each:
        raise StrategyError(f"num_processes {processes} cannot be divided between num_machines {machines}")
    return each


def _rest(given: Taken, found: Imported) -> None:
    for name in _NOTHING:
        given.take(name)  # these configure accelerate's own launcher
    if dynamo := given.section("dynamo_config").values:
        found.script.append(f"dynamo_config {dynamo}: call torch.compile(model) before fleet.distribute")
    for name in ("megatron_lm_config", "parallelism_config", "fp8_config", "mpirun_config"):
        if given.take(name):
            found.missing.append(f"{name}: not supported yet")
    found.missing += [f"{name}: accelerate has no such setting, and would raise an error" for name in given.rest()]
