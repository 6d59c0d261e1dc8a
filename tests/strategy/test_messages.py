"""Every message about a strategy, on one page. To read it, run pytest -s on this file."""

from __future__ import annotations

import ast
import itertools
import re
import typing
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fleetx import DistributedStrategy, StrategyError
from fleetx.strategy.compose import compose
from fleetx.strategy.part import defaults_of, every, switch_of
from fleetx.strategy.settings import place_of
from fleetx.strategy.stage import Fact, Stage

PARTS = every()
SWITCHES = [s for s, p in PARTS.items() if not p.always]
# Tried for every setting: each is in range for some settings and out of range for others.
VALUES = [
    True,
    False,
    -1,
    0,
    1,
    2,
    5,
    0.5,
    2.0,
    None,
    "zz",
    "min",
    [],
    ["0"],
    ["zz"],
    ["blocks"],
    ["0", "0"],
    [0.5],
    [2],
]

VERBS = "add|call|change|choose|freeze|give|keep|leave|list|make|name|pass|put|remove|set|start|turn|use|write"
CHOICES = r"did you mean|possible|[Tt]here are|[Tt]he [\w ]+ are"
REMEDY = re.compile(rf"(: |; |, |\. |\bor )({VERBS}|do not|must|{CHOICES})\b")
STAGES = re.compile(rf"\b({'|'.join(stage.name for stage in Stage)})\b")
CLASSES = re.compile(rf"\b({'|'.join(part.__name__ for part in PARTS.values())})\b|\b[A-Z]\w+\.\w+\b")


def choices(part, key):
    """The values of a setting's Literal, if it is one, besides those of VALUES."""
    annotation = part.__pydantic_fields__[key].annotation
    return [*VALUES, *(typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ())]


@cache
def accepted(part):
    """One setting at a time, with every value that is in range and not the default."""
    found = []
    for key, default in defaults_of(part).items():
        for value in choices(part, key):
            with suppress(ValidationError):
                if getattr(part(**{key: value}), key) != default:
                    found.append((key, value))
    return found


@cache
def variants(part):
    """The part at all combinations of up to two settings."""
    pairs = [dict(pair) for pair in itertools.combinations(accepted(part), 2)]
    return [part(**settings) for settings in [{}, *({k: v} for k, v in accepted(part)), *pairs]]


@cache
def acting(switch):
    """One valid part for each set of acts that its settings lead to."""
    found = {}
    for part in variants(PARTS[switch]):
        if not list(part.problems()):
            found.setdefault(tuple(a.name for a in part.acts()), part)
    return list(found.values())


def written(switch, problem):
    """As `strategy.plan()` reports the problem of a part."""
    return problem if PARTS[switch].flat else f"{switch}_configs: {problem}"


@cache
def conflicts():
    """Every pair of switches that does not compose: (switches, message)."""
    found = {}
    for a, b in itertools.combinations(SWITCHES, 2):
        for first, second in itertools.product(acting(a), acting(b)):
            try:
                compose([first, second])
            except StrategyError as error:
                found |= {(a, b, problem): None for problem in error.problems}
    return list(found)


@cache
def out_of_range():
    """Every setting that rejects one of VALUES: (setting, message)."""
    found = []
    for switch, part in PARTS.items():
        names = {field: name for name, field in part.flat.items()}
        for key in defaults_of(part):
            for value in choices(part, key):
                try:
                    DistributedStrategy(**({names[key]: value} if part.flat else {switch + "_configs": {key: value}}))
                except StrategyError as error:
                    found += [(names.get(key, f"{switch}_configs[{key!r}]"), p) for p in error.problems]
    return found


@cache
def contradictions():
    """Settings of one part that are in range, but not together: (switch, message)."""
    found = {}
    for switch, part in PARTS.items():
        for variant in variants(part):
            found |= {(switch, written(switch, p)): None for p in variant.problems()}
    return list(found)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return x


def models():
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    blocks.blocks = nn.ModuleList([nn.Linear(2, 2)])
    checkpointing = nn.Linear(2, 2)
    checkpointing.gradient_checkpointing = True
    yield blocks
    yield nn.Sequential(nn.Embedding(4, 2, sparse=True))
    yield nn.Sequential(nn.Linear(2, 2)).half()
    yield nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
    yield nn.Sequential(OwnNorm(2))
    yield nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    yield checkpointing


def optimizers(params):
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    yield sgd(params, 0.1)
    yield sgd(params, 0.1, momentum=0.9, weight_decay=0.1)
    yield sgd(params, 0.1, momentum=0.9, nesterov=True, maximize=True)
    yield sgd(params, 0.1, momentum=0.9, dampening=0.1)
    yield adam(params, 0.1, amsgrad=True)
    yield adam(params[:1], 0.1, weight_decay=0.1)
    yield torch.optim.RMSprop(params, 0.1)


@cache
def incompatible():
    """Models and optimizers that a part does not work with: (switch, message)."""
    plain, *others = models()
    cases = [(plain, optimizer) for optimizer in optimizers(list(plain.parameters()))]
    cases += [(model, next(optimizers(list(model.parameters())))) for model in others]
    found = {}
    for switch, part in PARTS.items():
        valid = [v for v in variants(part)[:40] if not list(v.problems())]
        for (model, optimizer), variant, size in itertools.product(cases, valid, (1, 4)):
            world = SimpleNamespace(size=size, hosts=lambda: ["a", "b", "b", "b"])
            found |= {(switch, p): None for p in variant.incompatibilities(model, optimizer, world)}
    return list(found)


def page():
    yield "\n## Switches that do not work together"
    yield from (problem for *_, problem in conflicts())
    yield "\n## Settings out of range, one of each"
    yield from dict(reversed(out_of_range())).values()
    yield "\n## Settings that contradict each other"
    yield from (problem for _, problem in contradictions())
    yield "\n## Models and optimizers that a strategy does not work with"
    yield from (problem for _, problem in incompatible())


def test_the_page():
    print("\n".join(page()))


def test_every_kind_of_message_is_generated():
    assert len(conflicts()) > 15
    assert {switch for switch, _ in contradictions()} >= {s for s, p in PARTS.items() if "problems" in vars(p)}
    names = {switch for switch, _ in incompatible()}
    assert names >= {s for s, p in PARTS.items() if "incompatibilities" in vars(p)}


@pytest.mark.parametrize("messages", [conflicts, out_of_range, contradictions, incompatible], ids=lambda f: f.__name__)
def test_messages_name_no_class_method_or_stage(messages):
    wrong = [m for *_, m in messages() if STAGES.search(m) or CLASSES.search(m)]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


@pytest.mark.parametrize("messages", [conflicts, out_of_range, contradictions, incompatible], ids=lambda f: f.__name__)
def test_messages_say_what_to_do(messages):
    wrong = [m for *_, m in messages() if not REMEDY.search(m)]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_a_conflict_names_both_switches():
    for a, b, problem in conflicts():
        assert f"`{a}`" in problem
        assert f"`{b}`" in problem


def changed_as_told(change, first, second):
    """Both parts after a remedy such as "set clip_configs['clip_norm'] = 1.0 instead of `dgc`"."""
    told = re.fullmatch(r"set (?P<place>\S+?)( = (?P<value>\S+))?( instead of [`'](?P<instead>\w+)[`'])?", change)
    assert told, change
    (part,) = [p for p in (first, second) if told["place"] in places(p)]
    key = places(part)[told["place"]]
    value = ast.literal_eval(told["value"]) if told["value"] else dict(accepted(type(part)))[key]
    given = {key: value}
    if told["instead"] in defaults_of(type(part)):
        given[told["instead"]] = defaults_of(type(part))[told["instead"]]
    (other,) = [p for p in (first, second) if p is not part]
    return [replace(part, **given), *([other] if switch_of(type(other)) != told["instead"] else [])]


def places(part):
    """Where each setting of a part is set, such as `clip_configs['clip_norm']`."""
    return {place_of(type(part), key): key for key in defaults_of(type(part))}


def one_setting(part):
    """The part with its defaults, and with each setting changed alone: one value for each set of acts it leads to."""
    found = {}
    for settings in [{}, *({k: v} for k, v in accepted(part))]:
        changed = part(**settings)
        if not list(changed.problems()):
            found.setdefault((tuple(settings), tuple(a.name for a in changed.acts())), changed)
    return list(found.values())


def test_each_remedy_for_a_conflict_helps():
    told = set()
    for a, b in itertools.combinations(PARTS.values(), 2):
        for first, second in itertools.product(one_setting(a), one_setting(b)):
            try:
                compose([first, second])
            except StrategyError as error:
                (problem,) = error.problems
            else:
                continue
            for remedy in problem.rpartition(": ")[2].split(", or "):
                told.add(remedy)
                if remedy in ("turn one of them off", "use only one of them"):
                    left = [[first], [second]]
                elif off := re.fullmatch(r"turn `(\w+)` off", remedy):
                    left = [[p for p in (first, second) if switch_of(type(p)) != off[1]]]
                    assert len(left[0]) == 1
                else:
                    left = [changed_as_told(remedy, first, second)]
                for parts in left:
                    assert compose(parts), problem
                    assert not [text for p in parts for text in p.problems()], problem
    assert {"turn one of them off", "set localsgd_configs['group_size'] = 1", "set nccl_comm_num = 1"} <= told
    assert "set dgc_configs['momentum_correction'] = None" in told


def test_no_change_of_settings_is_offered_where_none_helps():
    for other in ({"localsgd": {"k_steps": 4, "group_size": 2}}, {"dgc": {"momentum_correction": False}}):
        with pytest.raises(StrategyError, match=r"`noise_scale` does not support `\w+` yet, .*: turn one of them off$"):
            DistributedStrategy(noise_scale=True, **other).plan()


def test_a_setting_out_of_range_is_named_as_it_is_written():
    for name, problem in out_of_range():
        assert problem.startswith(name)


@pytest.mark.parametrize("fact", Fact)
def test_a_fact_reads_well_where_it_is_used(fact):
    """`needs X` and `does not work with X` ask for a noun, `does not support <switch> yet, which X` for a verb."""
    assert re.match(r"(gradients|parameters|a model) \w+", fact.what)
    assert re.match(r"[a-z]+s \w+", fact.how)
