"""Add what `TrainingArguments` ask of the training loop to the strategy, or raise an error that says why not.

A value that the strategy declares replaces a default of `TrainingArguments`. Setting different values in both is an
error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from transformers import TrainingArguments

from fleetx.errors import NOT_BUILT, StrategyError
from fleetx.fleet.auto import checked
from fleetx.integrations import GRAD_SCALER
from fleetx.strategy import DistributedStrategy

_AMP: dict[str, dict[str, Any]] = {"fp16": GRAD_SCALER, "bf16": {"dtype": "bfloat16"}}
_FLAT = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "fuse_grad_size_in_MB",
    "ddp_broadcast_buffers": "broadcast_buffers",
}


def strategy_for(args: TrainingArguments, strategy: DistributedStrategy) -> DistributedStrategy:
    """Return the strategy plus what the arguments ask for. Sets args.gradient_accumulation_steps to match it."""
    made = copy.deepcopy(checked(strategy))
    declared = strategy.declared()
    problems = [*_refused(args, strategy), *_precision(args, made, declared), *_clipping(args, made, declared)]
    problems += [*_merging(args, made, declared), *_data_parallel(args, made, declared)]
    if problems:
        raise StrategyError(problems)
    try:
        made.plan()
    except StrategyError as error:
        asked = {"clip": "max_grad_norm", "amp": "fp16 or bf16", "gradient_merge": "gradient_accumulation_steps"}
        added = {switch: name for switch, name in asked.items() if switch in made.declared() and switch not in declared}
        raise StrategyError([_with_source(problem, added) for problem in error.problems]) from None
    args.gradient_accumulation_steps = made.gradient_merge_configs["k_steps"] if made.gradient_merge else 1
    return made


def _with_source(problem: str, added: dict[str, str]) -> str:
    named = [f"{switch} comes from {name}" for switch, name in added.items() if f"`{switch}`" in problem]
    return f"{problem} ({', '.join(named)} in TrainingArguments)" if named else problem


def _refused(args: TrainingArguments, strategy: DistributedStrategy) -> Iterator[str]:
    """Problems: whatever would act alongside the strategy, or be silently ignored."""
    switches = "use the strategy's own switches instead"
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name):
            yield f"{name} in TrainingArguments would manage the model a second time: {switches}, such as sharding"
    if args.ddp_static_graph:
        yield "ddp_static_graph in TrainingArguments is an option of DistributedDataParallel: remove it"
    if args.torch_compile:
        yield f"torch_compile in TrainingArguments {NOT_BUILT}: remove it"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size in TrainingArguments retries on one rank alone: use fleet.largest_batch"
    if args.mixed_precision not in ("no", *_AMP):
        yield f"mixed_precision {args.mixed_precision} {NOT_BUILT}: use fp16 or bf16"
    if args.n_gpu > 1:
        yield f"this process would use {args.n_gpu} GPUs: start one worker per GPU with `fleetrun script.py`"
    if "lomo" in str(args.optim).lower():
        yield f"optim {args.optim} updates parameters during backward, before the strategy has acted: choose another"
    config: Any = args.accelerator_config
    if (config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        yield "sync_each_batch: a strategy reduces once per update: remove it"
    if args.gradient_checkpointing and strategy.recompute:
        yield "gradient_checkpointing in TrainingArguments and recompute would both recompute: use only one of them"
    if strategy.pipeline:
        yield f"pipeline in a Trainer {NOT_BUILT}: write the loop yourself, with fleet.forward_backward"
    if strategy.auto:
        yield (
            "auto needs a sample of the data, which the Trainer cannot provide: run auto in your own loop, and load "
            "the strategy that it writes"
        )


def _precision(args: TrainingArguments, made: DistributedStrategy, declared: dict[str, Any]) -> Iterator[str]:
    wanted = _AMP.get(args.mixed_precision)
    if wanted is None:
        return
    if "amp" not in declared:
        made.amp = wanted
    elif not made.amp or made.amp_configs["dtype"] != wanted["dtype"]:
        has = f"{made.amp_configs['dtype']} in amp_configs" if made.amp else "amp is off"
        yield f"{args.mixed_precision} in TrainingArguments, but {has} in the strategy: remove one of them"


def _clipping(args: TrainingArguments, made: DistributedStrategy, declared: dict[str, Any]) -> Iterator[str]:
    norm, default = args.max_grad_norm, type(args).max_grad_norm
    if "clip" not in declared:
        if norm and norm > 0:
            made.clip = {"clip_norm": norm}
        return
    ours = made.clip_configs["clip_norm"] if made.clip else 0
    if norm not in (default, ours, 0, None):
        yield f"max_grad_norm={norm} in TrainingArguments, but the strategy clips at {ours}: remove one of them"


def _merging(args: TrainingArguments, made: DistributedStrategy, declared: dict[str, Any]) -> Iterator[str]:
    """Merge by sum: the Trainer already scales the loss of each batch for the window, by samples or by tokens."""
    steps = args.gradient_accumulation_steps
    if made.gradient_merge:
        ours = made.gradient_merge_configs["k_steps"]
        if not made.gradient_merge_configs["avg"]:
            yield (
                "gradient_merge_configs['avg'] = False: the Trainer takes the mean over accumulated batches, so leave "
                "avg at True"
            )
        if steps not in (1, ours):
            yield (
                f"gradient_accumulation_steps={steps} in TrainingArguments, but gradient_merge has k_steps={ours}: "
                "remove one of them"
            )
        steps = ours
    elif steps > 1 and "gradient_merge" in declared:
        yield f"gradient_accumulation_steps={steps} in TrainingArguments, but gradient_merge is off: remove one of them"
    if steps > 1:
        made.gradient_merge = {"k_steps": steps, "avg": False}


def _data_parallel(args: TrainingArguments, made: DistributedStrategy, declared: dict[str, Any]) -> Iterator[str]:
    for theirs, ours in _FLAT.items():
        value = getattr(args, theirs)
        if value is None:
            continue
        if declared.get(ours, value) != value:
            yield f"{theirs}={value} in TrainingArguments, but {ours}={declared[ours]} in the strategy: remove one"
        setattr(made, ours, value)
