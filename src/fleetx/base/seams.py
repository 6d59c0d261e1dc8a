"""Every private name of torch that fleetx relies on, and what it is for. Other modules import them from here.

    from fleetx.base.seams import find_tensors     torch's own object, imported on first use
    seams.version(tensor)                          reads an attribute
    seams.check_reducer_finalized(ddp)             calls a method
    setattr(optimizer, seams.SCALES_ITSELF, True)  the name of an attribute, to set it or to look for it

`tests/base/test_seams.py` reports which of them a new torch has changed, and checks that no other file uses any.
Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

from fleetx.base.user_line import warn
from fleetx.errors import VersionError

SUPPORTED = (2, 13), (2, 16)  # from (inclusive), to (exclusive); the same as in pyproject.toml


@dataclass(frozen=True)
class Seam:
    place: str  # module:name
    why: str
    takes: str | None = None  # the parameters that we pass; any other must have a default. None: not a function
    overridden: bool = False  # do we replace it in a subclass?

    @property
    def owner(self) -> Any:
        """The module or class that has it."""
        module, _, path = self.place.partition(":")
        found = importlib.import_module(module)
        for part in path.split(".")[:-1]:
            found = getattr(found, part)
        return found

    @property
    def name(self) -> str:
        return re.split("[.:]", self.place)[-1]


SEAMS: dict[str, Seam] = {}


def _named(**names: Seam) -> None:
    SEAMS.update(names)


def _reads(as_: str, place: str, why: str) -> Any:
    SEAMS[as_] = Seam(place, why)
    return attrgetter(SEAMS[as_].name)


def _calls(as_: str, place: str, takes: str, why: str) -> Callable[..., Any]:
    seam = SEAMS[as_] = Seam(place, why, takes)
    if not takes:
        return methodcaller(seam.name)
    return lambda target, *args, **kwargs: getattr(target, seam.name)(*args, **kwargs)


def _attribute(place: str, why: str) -> str:
    seam = SEAMS[place] = Seam(place, why)
    return seam.name


def _overrides(owner: str, **why: tuple[str, str]) -> None:
    for name, (takes, reason) in why.items():
        place = f"{owner}._{name}"
        SEAMS[place] = Seam(place, reason, takes, overridden=True)


def _set_by_us(place: str, why: str) -> None:
    """An attribute that torch reads from our subclass."""
    SEAMS[place] = Seam(place, why, overridden=True)


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in SEAMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_torch(str(importlib.import_module("torch").__version__))
    seam = SEAMS[name]
    found = globals()[name] = getattr(seam.owner, seam.name)
    return found


def check_torch(version: str) -> None:
    """Raise an error if torch is too old; warn once if it is newer than the versions that fleetx was tested with."""
    oldest, newest = (".".join(map(str, pair)) for pair in SUPPORTED)
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else SUPPORTED[0]
    range_ = f"torch>={oldest},<{newest}"
    if number < SUPPORTED[0]:
        raise VersionError(f"fleetx needs torch {oldest} or newer, but this is {version}: pip install '{range_}'")
    if number >= SUPPORTED[1] and version not in _told:
        _told.add(version)
        warn(
            f"fleetx was not tested with torch {version}, which may have changed private names that it needs: "
            f"pip install '{range_}', or run `fleetx verify` before you train"
        )


_told: set[str] = set()

# --- tensors --------------------------------------------------------------------------------------
version = _reads("version", "torch:Tensor._version", "how often a tensor was changed in place")
base = _reads("base", "torch:Tensor._base", "the tensor that this one is a view of")
values = _calls("values", "torch:Tensor._values", "", "the values of a sparse gradient, also if it is not coalesced")
hooks = _reads("hooks", "torch:Tensor._backward_hooks", "sharding would lose the user's hooks on a parameter")
is_view = _calls("is_view", "torch:Tensor._is_view", "", "torch cannot detach a view in place")
is_zerotensor = _calls("is_zerotensor", "torch:Tensor._is_zerotensor", "", "it has no memory that a kernel could read")
storage_id = _reads("storage_id", "torch:UntypedStorage._cdata", "tells whether two tensors share memory")
local_tensor = _reads("local_tensor", "torch.distributed.tensor:DTensor._local_tensor", "this rank's part, not a copy")
_named(
    offsets=Seam("torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
                 "where a shard lies in the whole, for checkpoints", "global_shape, mesh, placements"),
    pytree=Seam("torch.utils:_pytree", "tensors in nested structures"),
    FakeTensor=Seam("torch._subclasses:FakeTensor", "a tensor with a shape and without memory"),
    FakeTensorMode=Seam("torch._subclasses:FakeTensorMode", "measures a step without running it", ""),
    DataDependentOutputException=Seam("torch._subclasses.fake_tensor:DataDependentOutputException",
                                      "the model reads a value, which a fake step does not have"),
    DynamicOutputShapeException=Seam("torch._subclasses.fake_tensor:DynamicOutputShapeException",
                                     "a shape depends on values, which a fake step does not have"),
    is_fake=Seam("torch._subclasses.fake_tensor:is_fake", "a fake step does not communicate", "x"),
    no_dispatch=Seam("torch.utils._mode_utils:no_dispatch", "works on real tensors during a fake step", ""),
    TorchDispatchMode=Seam("torch.utils._python_dispatch:TorchDispatchMode", "sees every operation"),
)  # fmt: skip

# --- operations on many tensors at once, as torch's own optimizers use them -----------------------
_FOREACH = "add_ addcdiv_ addcmul_ copy_ div_ lerp_ mul_ norm sqrt_ sub sub_"
_named(
    **{f"foreach_{n}": Seam(f"torch:_foreach_{n}", "one call for all parameters", "self") for n in _FOREACH.split()},
    fused_sgd_=Seam("torch:_fused_sgd_", "LARS in one pass over a parameter", "self, grads, momentum_buffer_list, *, "
                    "weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step"),
    fused_adamw_=Seam("torch:_fused_adamw_", "the direction of LAMB in one pass", "self, grads, exp_avgs, exp_avg_sqs, "
                      "max_exp_avg_sqs, state_steps, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize"),
    unscale_=Seam("torch:_amp_foreach_non_finite_check_and_unscale_", "GradScaler's own operation, so that float16 "
                  "equals it", "self, found_inf, inv_scale"),
)  # fmt: skip

# --- autograd -------------------------------------------------------------------------------------
_named(
    graph_task_id=Seam("torch._C:_current_graph_task_id", "which backward is running; -1 for none"),
    will_execute=Seam("torch._C:_will_engine_execute_node", "does this backward reach a parameter?"),
    in_functorch=Seam("torch._C:_are_functorch_transforms_active", "torch.func has no backward to ask"),
    backward_engine=Seam("torch.autograd:Variable._execution_engine", "calls back at the end of a backward"),
    profiler_enabled=Seam("torch._C._autograd:_profiler_enabled", "a second profiler would end the user's"),
    sequence_number=Seam("torch.autograd:_get_sequence_nr", "which backward nodes a block has made", ""),
)  # fmt: skip
node_number = _calls("node_number", "torch.autograd.graph:Node._sequence_nr", "", "orders nodes by their forward")

# --- modules, optimizers and schedulers -----------------------------------------------------------
_named(
    BatchNormBase=Seam("torch.nn.modules.batchnorm:_BatchNorm", "every kind of BatchNorm"),
    InstanceNormBase=Seam("torch.nn.modules.instancenorm:_InstanceNorm", "every kind of InstanceNorm"),
    NormBase=Seam("torch.nn.modules.batchnorm:_NormBase", "every module with running statistics"),
    DropoutBase=Seam("torch.nn.modules.dropout:_DropoutNd", "every kind of dropout"),
    reparametrize_module=Seam("torch.nn.utils.stateless:_reparametrize_module", "runs a module with other tensors for "
                              "its parameters", "module, parameters_and_buffers"),
    clip_grads=Seam("torch.nn.utils.clip_grad:_clip_grads_with_norm_", "clip_grad_norm_ may measure a norm",
                    "parameters, max_norm, total_norm, foreach"),
    disable_dynamo=Seam("torch:_disable_dynamo", "a compiled model must not trace our hooks", "fn"),
    OptimizedModule=Seam("torch._dynamo:OptimizedModule", "a compiled model"),
)  # fmt: skip
_MODULE, _OPTIMIZER = "torch.nn:Module", "torch.optim:Optimizer"
parameters = _reads("parameters", f"{_MODULE}._parameters", "the parameters of one module, to replace them")
buffers = _reads("buffers", f"{_MODULE}._buffers", "the buffers of one module, to replace them")
check_input_dim = _calls("check_input_dim", "torch.nn.modules.batchnorm:_BatchNorm._check_input_dim", "input",
                         "BatchNorm's own error for a wrong shape")  # fmt: skip
_named(
    init_optimizer_state=Seam("torch.distributed.checkpoint.state_dict:_init_optim_state", "a new optimizer has no "
                              "names that torch.distributed.checkpoint could load", "optim"),
)  # fmt: skip
patch_step_function = _calls("patch_step_function", f"{_OPTIMIZER}._patch_step_function", "", "gives a class its hooks")
HOOKS = [_attribute(f"{_MODULE}._{when}_hooks", "hooks of the user, which must only see training")
         for when in ("forward", "forward_pre", "backward", "backward_pre")]  # fmt: skip
STEP_HOOKS = _attribute(f"{_OPTIMIZER}._optimizer_step_pre_hooks", "an object without them only wraps an optimizer")
CLIPS = _attribute("torch.nn.utils.clip_grad:_clip_grads_with_norm_", "what clip_grad_norm_ calls")
SCALES_ITSELF = _attribute("torch.optim.sgd:SGD._step_supports_amp_scaling", "does GradScaler leave unscaling to it?")
TRACKED = _attribute("torch.optim.lr_scheduler:LRScheduler._wrapped_by_lr_sched", "a scheduler has wrapped step()")
CALLED = _attribute("torch.optim.lr_scheduler:LRScheduler._opt_called", "tells a scheduler that step() was called")
ORIGINAL = _attribute("torch._dynamo.eval_frame:OptimizedModule._orig_mod", "in the names of a compiled model")
DYNAMO = "torch._dynamo"  # the module, which is slow to import
_overrides("torch.optim.lr_scheduler:LRScheduler", initial_step=("", "the step on construction follows no update"))

# --- operators, for amp's lists and for what a step needs -----------------------------------------
_named(
    OpOverloadPacket=Seam("torch._ops:OpOverloadPacket", "an operation with all its overloads"),
    has_kernel=Seam("torch._C:_dispatch_has_kernel", "TorchScript lists overloads that the dispatcher does not know"),
    has_kernel_for=Seam("torch._C:_dispatch_has_kernel_for_dispatch_key", "does autocast treat this operation?"),
    DispatchKey=Seam("torch._C:DispatchKey", "autocast's key"),
    DispatchKeySet=Seam("torch._C:DispatchKeySet", "autocast's key, to leave it out"),
    ExcludeDispatchKeyGuard=Seam("torch._C:_ExcludeDispatchKeyGuard", "calls an operation without autocast"),
)  # fmt: skip
schema = _reads("schema", "torch._ops:OpOverload._schema", "the name of an operation, and what it changes in place")
overload_name = _reads("overload_name", "torch._ops:OpOverload._overloadname", "which overload this is")

# --- DistributedDataParallel: it reduces for a module that it does not wrap -----------------------
_DDP, _REDUCER = "torch.nn.parallel:DistributedDataParallel", "torch.distributed:Reducer"
_named(
    find_tensors=Seam("torch.nn.parallel.distributed:_find_tensors", "where unused parameters are looked for", "obj"),
)  # fmt: skip
active_ddp = _reads("active_ddp", f"{_DDP}._active_ddp_module", "which DDP is running a forward, to find a wrapper")
inside_ddp_forward = _calls("inside_ddp_forward", f"{_DDP}._inside_ddp_forward", "", "compiled graphs split at buckets")
post_forward = _calls("post_forward", f"{_DDP}._post_forward", "output", "finds unused parameters")
check_reducer_finalized = _calls("check_reducer_finalized", f"{_DDP}._check_reducer_finalized", "",
                                 "was the last reduction complete?")  # fmt: skip
build_params = _calls("build_params", f"{_DDP}._build_params_for_reducer", "", "what goes into the buckets")
build_names = _calls("build_names", f"{_DDP}._build_debug_param_to_name_mapping", "parameters", "names for its errors")
ddp_init_helper = _calls("ddp_init_helper", f"{_DDP}._ddp_init_helper", "parameters, expect_sparse_gradient, "
                         "param_to_name_mapping, static_graph", "new buckets, in another order")  # fmt: skip
comm_hooks = _reads("comm_hooks", f"{_DDP}._comm_hooks", "new buckets need the hook again")
rebuild_buckets = _calls("rebuild_buckets", f"{_REDUCER}._rebuild_buckets", "", "after the backward, not in a forward")
push_rebuilt = _calls("push_rebuilt", f"{_REDUCER}._push_all_rebuilt_params", "", "fixes the order of the buckets")
zero_buckets = _calls("zero_buckets", f"{_REDUCER}._get_zeros_like_grad_buckets", "", "which parameter is in which")
UNSENT = _attribute(f"{_DDP}._ddp_params_and_buffers_to_ignore", "on a model: buffers that DDP must not send")

# --- torch's composable functions (fully_shard, replicate) ------------------------------------------
COMPOSABLE = "torch.distributed._composable.contract"
_named(applied_to=Seam(f"{COMPOSABLE}:_get_registry", "which of them the script has applied to a module", "module"),
       states=Seam("torch.distributed._composable_state:_module_state_mapping", "a module is divided only once"),
)  # fmt: skip

# --- process groups -------------------------------------------------------------------------------
_C10D = "torch.distributed.distributed_c10d"
_named(
    default_store=Seam(f"{_C10D}:_get_default_store", "where ranks meet without a collective", ""),
    broadcast_coalesced=Seam("torch.distributed:_broadcast_coalesced", "many tensors in few messages"),
    c10d_world=Seam(f"{_C10D}:_world", "a forked child forgets its parent's groups"),
    unregister_groups=Seam(f"{_C10D}:_unregister_all_process_groups", "a forked child forgets its parent's groups", ""),
)  # fmt: skip
GROUP_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")

# --- torch.utils.checkpoint -----------------------------------------------------------------------
_CHECKPOINT = "torch.utils.checkpoint"
_named(
    checkpoint_hook=Seam(f"{_CHECKPOINT}:_checkpoint_hook", "saves nothing inside a segment", "frame"),
    CheckpointFrame=Seam(f"{_CHECKPOINT}:_CheckpointFrame", "counts saved tensors and returns them again",
                         "recompute_fn, early_stop, unpack_error_cb, metadata_fn"),
    make_saved_tensor=Seam(f"{_CHECKPOINT}:_make_saved_tensor", "holds a segment's input", "tensor, is_output"),
    default_meta_extractor=Seam(f"{_CHECKPOINT}:_default_meta_extractor", "what a second pass must repeat", "x"),
    infer_device_type=Seam(f"{_CHECKPOINT}:_infer_device_type", "whose random numbers to restore", "args"),
    autocast_kwargs=Seam(f"{_CHECKPOINT}:_get_autocast_kwargs", "the precision of the first pass", "device_type"),
    device_module=Seam(f"{_CHECKPOINT}:_get_device_module", "whose random numbers to restore", "device"),
)  # fmt: skip
CHECKPOINTS = _attribute(f"{_CHECKPOINT}:_CheckpointFrame", "every checkpoint makes one; an error inside a pipeline")
INITIALIZED = _attribute("torch.cuda:_initialized", "a device that was never used has no random state")

# --- FSDP -----------------------------------------------------------------------------------------
_FSDP = "torch.distributed.fsdp._fully_shard"
_PARAM, _STATE = f"{_FSDP}._fsdp_param:FSDPParam", f"{_FSDP}._fsdp_state:FSDPState"
_named(
    TrainingState=Seam(f"{_FSDP}._fsdp_common:TrainingState", "was a forward left by an error?"),
    FSDPParamGroup=Seam(f"{_FSDP}._fsdp_param_group:FSDPParamGroup", "the parameters that are gathered together"),
    FSDPState=Seam(f"{_FSDP}._fsdp_state:FSDPState", "what FSDP knows of a module"),
)  # fmt: skip
fsdp_state = _calls(
    "fsdp_state", "torch.distributed.fsdp:FSDPModule._get_fsdp_state", "", "what FSDP knows of a module"
)
param_groups = _reads("param_groups", f"{_STATE}._fsdp_param_groups", "the segments of a module")
training_state = _reads("training_state", f"{_STATE}._training_state", "was a forward left by an error?")
state_context = _reads("state_context", f"{_STATE}._state_ctx", "was a segment called alone?")
set_on_modules = _calls("set_on_modules", f"{_PARAM}._setattr_on_modules", "param", "shows shards or full parameters")
param_name = _reads("param_name", f"{_PARAM}._param_fqn", "for errors")
unsharded = _reads("unsharded", f"{_PARAM}._unsharded_param", "the full parameter, in which backward accumulates")
UNSHARDED = _attribute(f"{_PARAM}._unsharded_param", "it exists once it was gathered")
_overrides(f"{_FSDP}._fsdp_param_group:FSDPParamGroup", to_sharded=("", "full parameters may wait for backward"))

# --- pipelining -----------------------------------------------------------------------------------
_SCHEDULE = "torch.distributed.pipelining.schedules:_PipelineSchedule"
step_microbatches = _calls("step_microbatches", f"{_SCHEDULE}._step_microbatches", "arg_mbs, kwarg_mbs, target_mbs, "
                           "losses, return_outputs", "runs a schedule on our micro-batches")  # fmt: skip
n_microbatches = _reads("n_microbatches", f"{_SCHEDULE}._n_microbatches", "for the drawing of a schedule")
num_stages = _reads("num_stages", f"{_SCHEDULE}._num_stages", "for the drawing of a schedule")

# --- torchelastic: fleetrun is its agent with other workers ---------------------------------------
_AGENT = "torch.distributed.elastic.agent.server.api:SimpleElasticAgent"
_overrides(
    _AGENT,
    assign_worker_ranks=("store, group_rank, group_world_size, spec", "--elastic changes the number of workers"),
    start_workers=("worker_group", "ours start before torch is imported"),
    stop_workers=("worker_group", "with our time limits"),
    monitor_workers=("worker_group", "an exit is noticed at once"),
    initialize_workers=("worker_group", "waits before a restart"),
    exit_barrier=("", "ours knows which nodes are done"),
    construct_event=("state, source", "nothing reads the events"),
)
_PROCESSES = "torch.distributed.elastic.multiprocessing.api:SubprocessContext"
_overrides(_PROCESSES, start=("", "our workers already run"), close=("death_sig, timeout", "we stop them ourselves"))
_LOCAL = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_set_by_us(f"{_AGENT}._remaining_restarts", "all nodes share one budget")
_set_by_us(f"{_LOCAL}._pcontext", "presents our workers to torchelastic")
