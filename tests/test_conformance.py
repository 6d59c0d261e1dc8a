"""What every part owes, whatever it does. A new part needs no line here."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import mse_loss

from fleetx import DistributedStrategy, StrategyError, fleet
from fleetx.comm.session import current
from fleetx.engine.context import StepContext
from fleetx.strategy.part import Part, claims, defaults_of, every, name_of, switch_of
from fleetx.strategy.stage import Stage
from training import adam, assert_equal, batches, net, resumes, sgd, train, train_fleet, zero_last

ROOT = Path(__file__).parent.parent
PARTS = list(every().values())
BUILT = [p for p in PARTS if claims(p)]  # the others stand for them
each_part = pytest.mark.parametrize("part", PARTS, ids=name_of)
each_built = pytest.mark.parametrize("part", BUILT, ids=name_of)


def _file(part):
    return Path(inspect.getfile(part)).relative_to(ROOT)


@each_part
def test_a_part_is_frozen_and_refuses_what_it_does_not_know(part):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part(), next(iter(defaults_of(part)), "x"), 1)
    with pytest.raises((ValidationError, TypeError)):
        part(surely_no_such_setting=1)


@each_part
def test_every_setting_has_a_sentence_in_the_source(part):
    """The docstring below a field is the manual."""
    told = {
        a.target.id
        for cls in part.__mro__
        if cls.__module__.startswith("fleetx.parts")
        for a, b in itertools.pairwise(ast.parse(inspect.getsource(cls)).body[0].body)
        if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant)
    }
    for field in sorted(set(defaults_of(part)) - told):
        pytest.fail(f"add a docstring below `{field}` in {_file(part)}")


@each_part
def test_every_setting_survives_the_strategy(part):
    strategy = DistributedStrategy()
    for key, default in defaults_of(part).items():
        name = {v: k for k, v in part.flat.items()}.get(key)
        found = getattr(strategy, name) if name else getattr(strategy, switch_of(part) + "_configs")[key]
        assert found == default, f"strategy.{switch_of(part)} loses {key} = {default!r}"


@each_part
def test_a_part_has_a_docstring_that_is_its_own(part):
    assert part.__doc__ != Part.__doc__, f"add a docstring to {part.__name__} in {_file(part)}"
    first = part.__doc__.strip().splitlines()[0]
    assert len(first) > 20, f"say what {part.__name__} does in the first line of its docstring, not just {first!r}"


@each_part
def test_a_part_says_what_it_costs_and_what_each_act_does(part):
    assert part.costs, f"set `costs` in {_file(part)}: one line, for `explain`"
    for method in claims(part):
        assert (getattr(part, method).__doc__ or "").strip(), f"add a docstring to {part.__name__}.{method}"


@each_built
def test_a_part_declares_how_it_is_observed_to_act(part):
    """`tests/verify` then observes it, alone and in every pair."""
    assert part.effect, f"{part.__name__}.effect: declare what a run with it shows, such as less('bytes_sent', ...)"


@each_part
def test_a_part_has_a_card_that_names_every_setting_and_default(part):
    path = ROOT / "docs" / "parts" / f"{name_of(part)}.md"
    assert path.exists(), f"write docs/parts/{path.name}: docs/parts/clip.md is a short one to start from"
    card = path.read_text()
    for key, default in defaults_of(part).items():
        row = re.search(rf"^\| `{re.escape(key)}` \|(.*)$", card, re.M)
        assert row, f"add a row for `{key}` to the settings in docs/parts/{path.name}"
        assert f"`{default!r}`" in row.group(1), f"give the default `{default!r}` of `{key}` in docs/parts/{path.name}"
    for heading in ("## What it does", "## Settings", "## Neutral setting", "## Shown by"):
        assert heading in card, f"add the heading {heading!r} to docs/parts/{path.name}"


@each_part
def test_a_part_has_tests_of_its_own(part):
    path = f"tests/parts/test_{name_of(part)}.py"
    assert (ROOT / path).exists(), f"write {path}"


@each_built
def test_acts_take_what_their_stage_gives(part):
    for method, claim in claims(part).items():
        assert not (told := _mistake(getattr(part, method), claim.stage)), told


# What an act receives; at PARAMETER its name too, because it would also be a list of tensors at GRADIENT.
GIVES = {
    Stage.MODEL: "nn.Module", Stage.FORWARD: "", Stage.LOSS: "", Stage.GATE: "int", Stage.REDUCE: "Bucket",
    Stage.WIRE: "Outgoing", Stage.GRADIENT: "list[Tensor]", Stage.UPDATE: "Optimizer",
    Stage.PARAMETER: "list[Tensor]", Stage.SCHEDULE: "StepInput",
}  # fmt: skip
VALUES = {Stage.GRADIENT: "grads", Stage.PARAMETER: "params"}


def _mistake(method, stage):
    """What is wrong with the parameters of an act at this stage."""
    given = list(inspect.signature(method).parameters.values())
    takes = ["self", "ctx"] if not GIVES[stage] else ["self", "a value", "ctx"]
    if (given[-1].name, len(given)) != ("ctx", len(takes)):
        return f"{method.__qualname__} must take {', '.join(takes)}: see strategy/stage.py"
    for value in given[1:-1]:
        if (value.annotation, value.name) == (GIVES[stage], VALUES.get(stage, value.name)):
            continue
        meant = [s.name for s in Stage if (GIVES[s], VALUES.get(s, value.name)) == (value.annotation, value.name)]
        right = f"{VALUES[stage]}: {GIVES[stage]}" if stage in VALUES else GIVES[stage]
        told = f"takes {value.name}: {value.annotation}, but at {stage.name} it receives {right}"
        return f"{method.__qualname__} {told}" + f": did you mean {' or '.join(meant)}?" * bool(meant)
    return ""


def test_an_act_at_the_wrong_stage_is_told_which_one_was_meant():
    def act(self, grads: list[Tensor], ctx: StepContext): ...

    def alone(self, ctx: StepContext): ...

    for stage, given in ((Stage.WIRE, "Outgoing"), (Stage.PARAMETER, "params: list[Tensor]")):
        told = f"takes grads: list[Tensor], but at {stage.name} it receives {given}: did you mean GRADIENT?"
        assert _mistake(act, stage).endswith(told)
    assert "must take self, ctx" in _mistake(act, Stage.LOSS)
    assert "must take self, a value, ctx" in _mistake(alone, Stage.GATE)
    assert not _mistake(act, Stage.GRADIENT)


def _declared(part, settings):
    if part.always:
        return {}
    if part.flat:
        names = {field: name for name, field in part.flat.items()}
        return {switch_of(part): True} | {names[field]: value for field, value in settings.items()}
    return {switch_of(part): dict(settings) or True}


@pytest.mark.parametrize("part", [p for p in BUILT if p.neutral is not None], ids=name_of)
def test_at_its_neutral_setting_a_part_is_plain_pytorch_bit_for_bit(part):
    suits = _optimizer_for(part)
    loop = _only_form if Stage.SCHEDULE in {claim.stage for claim in claims(part).values()} else zero_last
    assert_equal(
        train_fleet(batches(), _declared(part, part.neutral), optimizer=suits, loop=loop),
        train(batches(), optimizer=suits),
    )


def _only_form(model, optimizer, x, y):
    fleet.forward_backward(x, y, loss_fn=mse_loss)
    optimizer.step()
    optimizer.zero_grad()


def _optimizer_for(part):
    """The first of the common ones that the part does not object to."""
    fleet.init()
    made = part(**(part.neutral or {}))
    model = net()
    return next(o for o in (sgd, adam) if not list(made.incompatibilities(model, o(model), current().here())))


# For parts that divide the model, see tests/engine/test_checkpoint.py. The example of a part that cuts the forward into
# segments names modules of verify's model, which this model does not have.
RESUMED = [
    pytest.param(part, how, marks=pytest.mark.nightly if how == "neutral" and not part.segments else ())
    for part in BUILT
    for how in ("neutral", "default", "example")
    if not part.divides and not (how == "example" and part.segments)
]


@pytest.mark.parametrize(("part", "how"), RESUMED, ids=lambda v: v if isinstance(v, str) else name_of(v))
def test_a_part_resumes_bit_for_bit_whatever_it_keeps(part, how, ranks):
    declared = _declared(part, {"neutral": part.neutral or {}, "default": {}, "example": part.example}[how])
    for window in ({"gradient_merge": {"k_steps": 4}}, {}):
        try:
            DistributedStrategy(**(window | declared)).plan()
        except StrategyError:
            continue  # some parts cannot be merged, and some have no default that works
        told = (
            f"{part.__name__} at {declared} trains differently after a resume: keep what it carries across steps in "
            "`init`, and draw from a generator seeded with ctx.round (docs/design/add_a_strategy.md)"
        )
        assert ranks.run(resumes, window | declared, _optimizer_for(part)) == [True, True], told
        return
    if how != "default":
        pytest.fail(f"a part must resume at `{how}`")


_VAGUE = r"n.t support(?!.* yet)|cannot be combined"


def _said(tree):
    """The strings of a file; those with inserted values as a whole."""
    inserted = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    inside = {id(child) for n in inserted for child in ast.walk(n)}
    yield from map(ast.unparse, inserted)
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    yield from (n.value for n in strings if id(n) not in inside)


MESSAGES = [*(ROOT / "src/fleetx/parts").rglob("*.py"), *(ROOT / "src/fleetx/strategy").glob("*.py")]
MESSAGES += [ROOT / "src/fleetx" / name for name in ("engine/checks.py", "optim/adopt.py", "base/module_names.py")]


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_an_error_says_not_supported_yet_or_why(path):
    """What is merely missing must not read like a law of nature."""
    vague = [text for text in _said(ast.parse(path.read_text())) if re.search(_VAGUE, text)]
    assert not vague, f"say in {path.name} that it is not supported yet, or why it can never work: {vague}"


def test_every_card_is_that_of_a_part():
    cards = {p.stem for p in (ROOT / "docs" / "parts").glob("*.md")} - {"README"}
    strays = cards - {name_of(p) for p in PARTS}
    assert not strays, f"docs/parts has cards of parts that do not exist: {sorted(strays)}"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/parts/README.md"])
def test_every_part_has_a_row_in_the_tables(page):
    text = (ROOT / page).read_text()
    missing = [name_of(p) for p in PARTS if f"{name_of(p)}.md)" not in text]
    assert not missing, f"add a row with a link to the card to {page}: {', '.join(missing)}"


@each_built
def test_the_table_of_cards_lists_the_stages_of_a_part(part):
    """In parentheses: those at which it acts only with certain settings."""
    acts = claims(part).values()
    usual = {claim.stage for claim in acts if claim.when(part()) or claim.when(part(**part.example))}
    stages = sorted({claim.stage for claim in acts})
    told = ", ".join(stage.name if stage in usual else f"({stage.name})" for stage in stages)
    text = (ROOT / "docs/parts/README.md").read_text()
    found = re.search(rf"\]\({name_of(part)}\.md\) \| [^|]* \| ([^|;]*[^|; ])", text)
    row = found and found[1]
    assert row == told, (
        f"the row of {name_of(part)} in docs/parts/README.md must list the stages {told}; or, if that is not what you "
        "meant, change `@at`"
    )
