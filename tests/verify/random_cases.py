"""Random trainings: a seed chooses model, optimizer, schedule, loop, strategies, settings and ranks."""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from random_loops import HALVES, LOOPS, evaluate
from random_models import MODELS, OUT, WIDTH
from torch.nn.functional import mse_loss

from fleetx import DistributedStrategy, StrategyError, fleet
from fleetx.comm.session import current, reset
from fleetx.strategy.part import switch_of
from fleetx.verify import oracle
from fleetx.verify.runs import whole

O, S = torch.optim, torch.optim.lr_scheduler

# --- optimizers and schedules ---------------------------------------------------------------------------
OPTIMIZERS = {
    "sgd": lambda params: O.SGD(params, lr=0.05),
    "momentum": lambda params: O.SGD(params, lr=0.05, momentum=0.9),
    "nesterov": lambda params: O.SGD(params, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    "dampening": lambda params: O.SGD(params, lr=0.05, momentum=0.8, dampening=0.3, foreach=False),
    "adam": lambda params: O.Adam(params, lr=0.01),
    "amsgrad": lambda params: O.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda params: O.AdamW(params, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99)),
    "nadam": lambda params: O.NAdam(params, lr=0.01),
    "radam": lambda params: O.RAdam(params, lr=0.01, weight_decay=0.01),
    "adagrad": lambda params: O.Adagrad(params, lr=0.02, initial_accumulator_value=0.1),
    "adadelta": lambda params: O.Adadelta(params, lr=0.5),
    "adafactor": lambda params: O.Adafactor(params, lr=0.01),
    "asgd": lambda params: O.ASGD(params, lr=0.05, t0=2.0),
    "rmsprop": lambda params: O.RMSprop(params, lr=0.01, momentum=0.5),
    "centered": lambda params: O.RMSprop(params, lr=0.01, centered=True),
    "adamax": lambda params: O.Adamax(params, lr=0.01),
}
RULES = {"lars": ["momentum", "nesterov_plain"], "lamb": ["adam", "adamw_plain"], "muon": ["adam", "adamw"]}
ONLY_THERE = {
    "nesterov_plain": lambda params: O.SGD(params, lr=0.05, momentum=0.8, nesterov=True),
    "adamw_plain": lambda params: O.AdamW(params, lr=0.01, weight_decay=0.0, betas=(0.8, 0.99)),
}
BETWEEN_REPLICAS = {"hierarchical", "nccl_comm_num", "fp16_allreduce", "localsgd", "adaptive_localsgd"}
WHOLE_TENSORS = {"adafactor"}  # sharding does not take them
NO_COMPLEX_THERE = {"adafactor", "nadam", "radam", "adamax", "asgd", "amsgrad", "centered"}
NO_COMPLEX = {"lars", "lamb", "muon", "adaptive_localsgd", "fp16_allreduce"}
CLOSURES = {"by_closure", "zero_in_closure"}
SCHEDULES = {
    "constant": None,
    "step": lambda o: S.StepLR(o, 2, 0.5),
    "cosine": lambda o: S.CosineAnnealingLR(o, 8),
    "warmup": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.2, total_iters=3), S.ExponentialLR(o, 0.8)], [3]),
    "lambda": lambda o: S.LambdaLR(o, lambda n: 1 / (1 + n)),
}


# --- cases --------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    ranks: int
    model: str
    optimizer: str
    schedule: str
    loop: str
    steps: int
    samples: int
    flush: bool
    resume: int  # before this step; 0: the run is not broken
    evaluates: bool  # before it is saved, after it is loaded, and before the end?
    seconds: bool  # has a second optimizer half of the parameters?
    declared: dict[str, Any]

    @property
    def name(self):
        flags = "-resumed" * bool(self.resume) + "-evaluated" * self.evaluates + "-two" * self.seconds
        how = f"{self.optimizer}-{self.schedule}-{self.loop}{flags}"
        return f"{self.seed}-{self.ranks}x-{self.model}-{how}-{'+'.join(self.declared) or 'plain'}"


def draw(seed: int) -> Case:
    """A legal case; the same one for the same seed."""
    r = random.Random(seed)
    while True:
        ranks = r.choice([1, 2, 2, 2, 3, 4])
        name, model = r.choice(list(MODELS.items()))
        declared = {switch: make(r, ranks, model) for switch, make in STRATEGIES.items() if r.random() < 0.3}
        chosen = set(declared)
        local = {"localsgd", "adaptive_localsgd"} & chosen
        apart = local or "fp16_allreduce" in chosen
        if apart and "sync_batch_norm" in declared:  # the oracle follows these only in a flat model: see test_verify
            continue
        sharding = declared.get("sharding") or {"hybrid_dp": True}
        if None in declared.values() or ("hybrid_dp" not in sharding and chosen & BETWEEN_REPLICAS):
            continue
        if model.unused:
            declared["find_unused_parameters"] = True
        if (model.complex and chosen & NO_COMPLEX) or (model.checkpoints_itself and chosen & {"recompute", "pipeline"}):
            continue
        rule = next((rule for rule in RULES if rule in declared), None)
        fits = set(OPTIMIZERS) - (WHOLE_TENSORS if "sharding" in declared else set())
        fits -= NO_COMPLEX_THERE if model.complex else set()
        optimizer = r.choice(RULES[rule] if rule else sorted(fits))
        loop = _loop(r, declared, model)
        if model.unused and loop == "zero_first":  # its zeros are gradients, with which torch updates an unused branch
            loop = "zero_last"
        if declared.pop("hierarchical", None):
            declared |= {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
        try:
            DistributedStrategy(**declared).plan()
        except StrategyError:
            continue
        steps = r.randint(3, 8)
        schedule = "constant" if "adaptive_localsgd" in declared else r.choice(list(SCHEDULES))
        resume = r.choice([0, 0, 0, r.randint(1, steps - 1)])
        samples = ranks * 8 * r.choice([1, 2])
        flush, evaluates = r.random() < 0.8, r.random() < 0.5
        plain = chosen <= {
            "recompute",
            "find_unused_parameters",
            "nccl_comm_num",
            "hierarchical",
            "fuse_grad_size_in_MB",
        }
        seconds = plain and not resume and loop not in CLOSURES and r.random() < 0.5
        return Case(
            seed, ranks, name, optimizer, schedule, loop, steps, samples, flush, resume, evaluates, seconds, declared
        )


def _loop(r, declared, model):
    if "pipeline" in declared:
        return "scheduled"
    if "adaptive_localsgd" in declared:
        return "told"
    loops = set(LOOPS) - {"scheduled"}
    if not declared.get("gradient_merge", {}).get("avg", True) or model.norms or model.unused or "localsgd" in declared:
        loops -= {"weighted"}  # its oracle is the big batch
    if "fp16_allreduce" in declared:  # which rounds once per backward
        loops -= {"weighted", "in_halves"}
    if model.norms or model.counts:  # every forward counts
        loops -= HALVES | {"looking"} if "sync_batch_norm" in declared else HALVES
    if "find_unused_parameters" in declared:  # one backward right after each forward, into all that was used
        loops -= HALVES | {"looking"}
    return r.choice(sorted(loops))


def _pipeline(r, ranks, model):
    fits = model.cut and ranks in (2, 4) and not model.unused
    return {"micro_batch": r.choice([2, 4]), "degree": 2, "stages": [model.cut]} if fits else None


def _local(r, ranks, key):
    return {key: r.randint(1, 4), "begin_step": r.randint(1, 3)} if ranks > 1 else None


def _sharding(r, ranks, model):
    if ranks == 1 or not model.shards:
        return None
    halves = ranks == 4 and r.random() < 0.4
    more = {"hybrid_dp": True} if halves else {}
    return {"sharding_degree": 2 if halves else ranks, "stage": r.choice([1, 2, 3])} | more


STRATEGIES = {
    "gradient_merge": lambda r, ranks, model: {"k_steps": r.randint(1, 4), "avg": r.random() < 0.8},
    "clip": lambda r, ranks, model: {"clip_norm": r.choice([0.01, 0.3, 10.0])},
    "recompute": lambda r, ranks, model: (
        {"checkpoints": list(model.checkpoints)} if r.random() < 0.8 or model.unused else {"memory_budget": "min"}
    ),
    "fp16_allreduce": lambda r, ranks, model: {"dtype": r.choice(["float16", "bfloat16"])} if ranks == 2 else None,
    "lars": lambda r, ranks, model: {
        "lars_coeff": r.choice([0.001, 0.05]),
        "lars_weight_decay": r.choice([0.001, 0.1]),
    },
    "lamb": lambda r, ranks, model: {"lamb_weight_decay": r.choice([0.0, 0.1])},
    "muon": lambda r, ranks, model: {"momentum": r.choice([0.8, 0.95]), "nesterov": r.random() < 0.5},
    "localsgd": lambda r, ranks, model: _local(r, ranks, "k_steps"),
    "adaptive_localsgd": lambda r, ranks, model: _local(r, ranks, "init_k_steps"),
    "sharding": _sharding,
    "pipeline": _pipeline,
    "sync_batch_norm": lambda r, ranks, model: {} if model.norms else None,
    "hierarchical": lambda r, ranks, model: True if ranks == 4 else None,
    "find_unused_parameters": lambda r, ranks, model: True,
    "nccl_comm_num": lambda r, ranks, model: 2 if ranks > 1 else None,
    "fuse_grad_size_in_MB": lambda r, ranks, model: r.choice([0.0001, 0.001]),
}


def make(case: Case):
    torch.manual_seed(case.seed)
    model = MODELS[case.model].make().double()
    for module in model.modules():  # double() takes these too
        if "seen" in module._buffers:
            module.seen = module.seen.float()
    return model


def optimizer_for(case: Case, model):
    return (OPTIMIZERS | ONLY_THERE)[case.optimizer](model.parameters())


def batches(case: Case):
    g = torch.Generator().manual_seed(case.seed)
    kinds = {"dtype": torch.float64, "generator": g}
    return [
        (torch.randn(case.samples, WIDTH, **kinds), torch.randn(case.samples, OUT, **kinds)) for _ in range(case.steps)
    ]


def strategy_of(case: Case) -> DistributedStrategy:
    return DistributedStrategy(**{k: v if v != {} else True for k, v in case.declared.items()})


class Both:
    """Two optimizers that a loop steps one after the other."""

    def __init__(self, *each):
        self.each = each

    def step(self):
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self, **kwargs):
        for optimizer in self.each:
            optimizer.zero_grad(**kwargs)


def begin(case: Case):
    """Model, optimizer and schedulers of a process that starts, or starts again."""
    reset()
    fleet.init()
    model = make(case)
    make_optimizer, schedule = (OPTIMIZERS | ONLY_THERE)[case.optimizer], SCHEDULES[case.schedule]
    params = list(model.parameters())
    if not case.seconds:
        model, optimizer = fleet.distribute(model, make_optimizer(params), strategy_of(case))
        return model, optimizer, [schedule(optimizer)] if schedule is not None else []
    first, second = make_optimizer(params[::2]), make_optimizer(params[1::2])
    schedulers = [schedule(o) for o in (first, second)] if schedule is not None else []
    model, first = fleet.distribute(model, first, strategy_of(case))
    return model, Both(first, second), schedulers


def share_of(case: Case, x: torch.Tensor, group):
    """This rank's part of a batch. With weights, every rank has another number of samples."""
    if case.loop != "weighted":
        return x.chunk(group.size)[group.rank]
    sizes = [1 + rank for rank in range(group.size)]
    return x.split([*sizes[:-1], len(x) - sum(sizes[:-1])])[group.rank]


def trained(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """On this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, schedulers = begin(case)
        share = current().find(model).layout.replica_group
        for number, (x, y) in enumerate(batches(case)):
            mine = share_of(case, x, share), share_of(case, y, share)
            if number and number == case.resume:
                _evaluate(case, model, mine[0])
                scheduler = next(iter(schedulers), None)
                fleet.save(Path(folder) / "here", scheduler=scheduler)
                model, optimizer, schedulers = begin(case)
                share = current().find(model).layout.replica_group
                _evaluate(case, model, mine[0])
                fleet.load(Path(folder) / "here", scheduler=next(iter(schedulers), None))
                _evaluate(case, model, mine[0])
            LOOPS[case.loop](model, optimizer, *mine)
            for scheduler in schedulers:
                scheduler.step()
        _evaluate(case, model, mine[0])
        if case.flush:
            fleet.flush()
        return {name: whole(t).clone() for name, t in model.state_dict().items()}


def _evaluate(case: Case, model, x) -> None:
    if case.evaluates and "pipeline" not in case.declared:
        evaluate(model, x)


def wanted(case: Case) -> dict[str, torch.Tensor]:
    """In one process, in plain words."""
    parts = [p for p in strategy_of(case).plan().parts if not p.always]
    settings = {switch_of(type(p)): {f.name: getattr(p, f.name) for f in dataclasses.fields(p)} for p in parts}
    replicas = case.ranks // (2 if "pipeline" in case.declared else 1)
    replicas = 1 if case.loop == "weighted" else replicas
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return oracle.train(
            make(case), lambda m: optimizer_for(case, m), settings, batches(case), mse_loss, replicas,
            flush=case.flush, schedule=SCHEDULES[case.schedule],
        )  # fmt: skip
