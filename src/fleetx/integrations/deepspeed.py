"""Convert DeepSpeed's JSON settings to a strategy."""

from __future__ import annotations

from typing import Any

from fleetx.integrations.imported import Imported, Taken

# Sections and keys that fleetx has no equivalent for, or does not need. Any other key that is not read below is unknown
# to DeepSpeed too, which silently ignores it.
_LOGS = "it only measures or prints: use torch.profiler or your own logs"
_PERFORMANCE = "it changes speed and memory only"
_NOT_BUILT = "not supported yet"
KNOWN = {
    **dict.fromkeys(
        ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger",
         "tensorboard", "wandb", "comet", "csv_monitor", "log_level", "monitor_config"), _LOGS),
    **dict.fromkeys(
        ("disable_allgather", "use_multi_rank_bucket_allreduce", "graph_harvesting", "aio", "sparse_gradients",
         "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "vocabulary_size", "gradient_predivide_factor",
         "prescale_gradients", "timers", "nebula", "managed_gradient_accumulation"), _PERFORMANCE),
    **dict.fromkeys(
        ("sparse_attention", "eigenvalue", "progressive_layer_drop", "quantize_training", "compression_training",
         "data_efficiency", "curriculum_learning", "hybrid_engine", "tensor_parallel", "expert_parallel",
         "sequence_parallel_size", "seq_parallel_communication_data_type", "use_data_before_expert_parallelism",
         "weight_quantization", "zenflow"), _NOT_BUILT),
    "autotuning": "use strategy.auto or `fleetx plan`",
    "elasticity": "use `fleetrun --elastic MIN:MAX` and fleet.keep_batch",
    "checkpoint": "fleet.save and fleet.checkpoints need no such settings",
    "compile": "call torch.compile(model) before fleet.distribute",
    "data_types": "gradients are summed in their own type",
    "pipeline": "declare strategy.pipeline: DeepSpeed cuts a PipelineModule by other rules",
    "dataloader_drop_last": "set drop_last in your DataLoader",
}  # fmt: skip
_ZERO = {
    **dict.fromkeys(
        ("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
         "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "sub_group_size",
         "elastic_checkpoint", "round_robin_gradients", "memory_efficient_linear", "override_module_apply",
         "pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
         "save_muon_momentum_buffer_in_memory", "cpu_offload_use_pin_memory"), _PERFORMANCE),
    **dict.fromkeys(
        ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
         "zero_quantized_gradients", "zeropp_loco_param", "mics_hierarchical_params_gather", "zenflow"), _NOT_BUILT),
    "ignore_unused_parameters": "FSDP accepts parameters that are not used",
}  # fmt: skip
_STAGE3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
    "gather_16bit_weights_on_model_save",
)  # fmt: skip
_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def read(settings: dict[str, Any], ranks: int | None = None) -> Imported:
    """ranks: number of workers, to compute the merged steps from train_batch_size."""
    found = Imported("DeepSpeed")
    given = Taken(_without_auto(settings, found))
    _batch(given, found, ranks)
    _precision(given, found)
    _zero(given.section("zero_optimization"), found)
    _clipping(given, found)
    _optimizer(given, found)
    _others(given, found)
    return found


def _without_auto(settings: Any, found: Imported, where: str = "") -> Any:
    """Remove and report values that are "auto".

    transformers' Trainer fills them in; in a section, DeepSpeed itself drops them and uses its defaults.
    """
    if not isinstance(settings, dict):
        return settings
    kept = {}
    for key, value in settings.items():
        if value == "auto":
            found.script.append(f'{where}{key} is "auto", which the Trainer fills in: FleetTrainer does that itself')
        else:
            kept[key] = _without_auto(value, found, f"{where}{key}.")
    return kept


def _batch(given: Taken, found: Imported, ranks: int | None) -> None:
    total, micro = given.whole("train_batch_size"), given.whole("train_micro_batch_size_per_gpu")
    steps = given.whole("gradient_accumulation_steps")
    if steps is None and total is not None and micro is not None:
        if ranks is None:
            found.missing.append(
                "gradient_accumulation_steps follows from train_batch_size and the number of workers: give that with "
                "--ranks"
            )
        else:
            steps = max(1, total // (micro * ranks))
    if steps is not None and steps > 1:
        found.strategy.gradient_merge = {"k_steps": steps}
        found.script.append(
            f"call optimizer.step() after every batch: gradient_merge updates once per {steps} batches. Do not divide "
            f"the loss by {steps}"
        )
    if micro is None and total is not None and ranks is not None:
        micro = max(1, total // ((steps or 1) * ranks))
    if micro is not None:
        found.script.append(f"train_micro_batch_size_per_gpu: batch_size={micro} in your DataLoader")
    if total is not None and micro is None:
        found.script.append(f"train_batch_size={total}: divide it between your workers' DataLoaders")
    elif total is not None and micro is not None and (steps or ranks):
        replicas, rest = divmod(total, micro * (steps or 1))
        if rest or ranks not in (None, replicas):
            product = f"{micro} x {steps or 1} x {ranks} workers" if ranks else f"a multiple of {micro} x {steps}"
            found.missing.append(f"train_batch_size {total} is not {product}: DeepSpeed would stop")
        else:
            found.strategy.batch = {"feed": micro, "merged": steps or 1, "replicas": replicas}
            found.script.append(
                f"train_batch_size: {total} = {micro} x {steps or 1} merged x {replicas} workers; it is checked"
            )


def _precision(given: Taken, found: Imported) -> None:
    half, brain = given.section("fp16"), given.section("bf16" if "bf16" in given.values else "bfloat16")
    apex, auto = given.section("amp"), given.section("torch_autocast")
    if half.flag("enabled"):
        found.strategy.amp = _scaling(half, found)
        found.differs.append(_KEPT.format("fp16", "float16"))
    elif half.values:
        found.ignored += [f"{name}: fp16.enabled is not true" for name in half.rest()]
        half.values.clear()
    if brain.flag("enabled"):
        if found.strategy.amp:
            found.missing.append("fp16 and bf16 are both enabled: DeepSpeed would stop. The strategy has bfloat16")
        found.strategy.amp = {"dtype": "bfloat16"}
        found.differs.append(_KEPT.format("bf16", "bfloat16"))
    if auto.flag("enabled"):
        name = str(auto.take("dtype", "bfloat16")).removeprefix("torch.")
        found.strategy.amp = {"dtype": "float16" if name in ("float16", "fp16", "half") else "bfloat16"}
    if apex.flag("enabled"):
        found.strategy.amp = True
        found.differs.append(f"amp is apex with opt_level {apex.take('opt_level', 'O1')}: amp here is torch.autocast")
    for section in (half, brain, apex, auto):
        found.missing += [f"{name}: {_NOT_BUILT}" for name in section.rest()]
    kind = given.take("communication_data_type")
    if kind in ("fp16", "bf16", "bfp16"):
        found.strategy.fp16_allreduce = {"dtype": "float16" if kind == "fp16" else "bfloat16"}
    elif kind not in (None, "fp32"):
        found.missing.append(f"communication_data_type {kind}: {_NOT_BUILT}")


_KEPT = (
    "{0} of DeepSpeed keeps the parameters in {1}, and copies of them in float32: amp keeps them in float32 and runs "
    "the model under torch.autocast"
)


def _scaling(half: Taken, found: Imported) -> dict[str, Any]:
    fixed = float(half.take("loss_scale", 0))
    dynamic = {key: half.take(key) for key in _DYNAMIC if key in half.values}
    if fixed:
        found.ignored += [f"{half.name(key)}: loss_scale is fixed" for key in dynamic]
        return {"dtype": "float16", "use_dynamic_loss_scaling": False, "init_loss_scaling": fixed}
    if dynamic.get("hysteresis", 2) > 1 and not dynamic.get("consecutive_hysteresis"):
        found.differs.append(
            "fp16.hysteresis: DeepSpeed counts all overflows until the scale grows, decr_every_n_nan_or_inf only those "
            "in a row"
        )
    if dynamic.get("min_loss_scale", 1) != 1:
        found.missing.append("fp16.min_loss_scale: the smallest scale is 1")
    return {
        "dtype": "float16",
        "init_loss_scaling": 2.0 ** dynamic.get("initial_scale_power", 16),
        "incr_every_n_steps": int(dynamic.get("loss_scale_window", 1000)),
        "decr_every_n_nan_or_inf": int(dynamic.get("hysteresis", 2)),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
    }


def _zero(zero: Taken, found: Imported) -> None:
    stage = int(zero.take("stage", 0))
    params, optimizer = zero.section("offload_param"), zero.section("offload_optimizer")
    old = {"offload_param.": zero.take("cpu_offload_params"), "offload_optimizer.": zero.take("cpu_offload")}
    for key in [k for k in zero.values if k.removeprefix("stage3_") in _STAGE3]:
        zero.take(key)
        if stage == 3:
            found.missing.append(f"{zero.name(key)}: {_PERFORMANCE}")
        else:
            found.ignored.append(f"{zero.name(key)}: it only acts in stage 3")
    if not stage:
        found.ignored += [f"{name}: stage is 0" for name in zero.rest()]
        return
    settings: dict[str, Any] = {"stage": stage}
    if (size := zero.take("mics_shard_size", -1)) > 0:
        settings |= {"sharding_degree": size, "hybrid_dp": True}
    devices = {s.where.split(".")[-2]: s.take("device", "none") for s in (params, optimizer)}
    devices |= {name.rstrip("."): "cpu" for name, value in old.items() if value}
    if devices["offload_param"] != "none" and stage < 3:
        found.missing.append("zero_optimization.offload_param: DeepSpeed offers it for stage 3 only")
        devices["offload_param"] = "none"
    if "nvme" in devices.values():
        found.missing.append("zero_optimization: offloading to NVMe: not supported yet")
    elif "cpu" in devices.values():
        settings["offload"] = True
        if devices["offload_param"] == "none":
            found.differs.append(
                "zero_optimization.offload_optimizer: offload keeps the parameters in host memory, too"
            )
    found.strategy.sharding = settings
    if stage < 3:
        found.differs.append(
            f"zero_optimization.stage {stage}: FSDP2 divides gradients and parameters between steps as well"
        )
    for section in (params, optimizer):
        found.missing += [f"{name}: {_PERFORMANCE}" for name in section.rest()]
    for key in zero.values:
        if key in _ZERO:
            found.missing.append(f"{zero.name(key)}: {_ZERO[key]}")
        else:
            found.missing.append(f"{zero.name(key)}: not a setting of DeepSpeed that fleetx knows")


def _clipping(given: Taken, found: Imported) -> None:
    norm = given.take("gradient_clipping")
    if norm:
        found.strategy.clip = {"clip_norm": float(norm)}
    elif norm is None and not any(line.startswith("gradient_clipping is") for line in found.script):
        found.differs.append(
            "gradient_clipping is not set: newer versions of DeepSpeed clip at 1.0 then, older ones do not. Set clip "
            "if you want it"
        )
    if given.take("gradient_allreduce_op", "mean") != "mean":
        found.missing.append("gradient_allreduce_op: gradients are averaged over the ranks")


def _optimizer(given: Taken, found: Imported) -> None:
    section = given.section("optimizer")
    kind, params = section.take("type"), section.section("params")
    name = str(kind).lower()
    arguments = {
        key: params.take(key) for key in ("lr", "betas", "eps", "weight_decay", "momentum") if key in params.values
    }
    shown = ", ".join(["model.parameters()", *(f"{key}={value!r}" for key, value in arguments.items())])
    if kind is None:
        pass
    elif name in ("adam", "adamw", "sgd", "adagrad"):
        decoupled = name == "adamw" or (name == "adam" and params.take("adam_w_mode", True))
        made = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}[name]
        found.script.append(f"optimizer: torch.optim.{made}({shown})")
        if name == "adam" and decoupled:
            found.differs.append("optimizer Adam is AdamW in DeepSpeed, unless adam_w_mode is false")
    elif name in ("lamb", "fusedlamb"):
        found.strategy.lamb = True
        found.script.append(f"optimizer: torch.optim.Adam({shown}), which the switch lamb turns into LAMB")
    elif name == "muon":
        found.strategy.muon = True
        found.script.append(f"optimizer: torch.optim.AdamW({shown}), which the switch muon turns into Muon")
    else:
        found.missing.append(f"optimizer {kind}: create one in your script; dgc and localsgd send less, too")
    if params.take("max_grad_norm", 0):
        if found.strategy.amp:
            found.missing.append("optimizer.params.max_grad_norm: DeepSpeed would stop. Use gradient_clipping")
        else:
            found.ignored.append("optimizer.params.max_grad_norm: without fp16, DeepSpeed sets it to 0")
    for key in params.values:
        if key not in ("torch_adam", "fused", "bias_correction", "adam_w_mode", "freeze_step", "cuda_aware"):
            found.missing.append(f"optimizer.params.{key}: give it to the optimizer in your script, if it has it")
    found.missing += [f"{n}: {_PERFORMANCE}" for n in section.rest()]
    scheduler = given.section("scheduler")
    if scheduler.values:
        values = scheduler.section("params").values
        listed = ", ".join(f"{k}={v!r}" for k, v in values.items())
        found.script.append(f"scheduler {scheduler.take('type')}({listed}): fleetx.schedule")


def _others(given: Taken, found: Imported) -> None:
    activations = given.section("activation_checkpointing")
    if activations.values:
        found.ignored += [
            f"{name}: it acts only where the model calls deepspeed.checkpointing.checkpoint"
            for name in activations.rest()
        ]
        found.missing.append("activation_checkpointing: name the modules in strategy.recompute, or set memory_budget")
    for key in given.values:
        if key in KNOWN:
            found.missing.append(f"{key}: {KNOWN[key]}")
        else:
            found.ignored.append(f"{key}: DeepSpeed has no such setting")
