"""Why acts do not work together, in one sentence for the user: what is wrong, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fleetx.strategy.part import Part, defaults_of, settings_of
from fleetx.strategy.settings import assigned, changed, place_of
from fleetx.strategy.stage import Act, Fact, Stage

Works = Callable[[list[Part]], bool]  # do these parts compose?


@dataclass(frozen=True)
class Conflict:
    """Acts that do not work together. The sentence is made only when it is needed, since looking for remedies costs."""

    among: tuple[Act, ...]
    sentence: Callable[[Works], str]

    @property
    def switches(self) -> frozenset[str]:
        return frozenset(a.switch for a in self.among)


def rivals(here: list[Act], stage: Stage) -> Iterator[Conflict]:
    """Only one of these acts can run at this stage."""
    both = "both" if len(here) == 2 else "all"
    for decides in sorted({a.part.decides for a in here if a.part.decides}):
        same = [a for a in here if a.part.decides == decides]
        if len(same) > 1:
            yield _one_of(same, f"{_names(same)} both decide {decides}, and only one can")
    if len({a.part.decides or a for a in here}) > 1:
        yield _one_of(here, f"{_names(here)} {both} {stage.solo}, and {stage.because}")


def circle(acts: list[Act]) -> Conflict:
    return _one_of(acts, f"{_names(acts)} each need the other to run first")


def missing(act: Act, fact: Fact) -> Conflict:
    switch = f"`{act.switch}`"
    text = f"{switch} needs {fact.what}, which nothing in this strategy produces: turn {switch} off"
    return Conflict((act,), lambda works: text)


def clash(act: Act, maker: Act, fact: Fact) -> Conflict:
    """`act` does not work with the fact that `maker` makes true, or not yet."""

    def sentence(works: Works) -> str:
        ours, theirs = _that_matter(act.part, maker.part, works), _that_matter(maker.part, act.part, works)
        act_, maker_ = _named(act, ours), _named(maker, theirs)
        if fact in act.claim.unbuilt:
            statement = f"{act_} does not support {maker_} yet, which {fact.how}"
        else:
            statement = f"{act_} does not work with {fact.what}, which {maker_} produces, because {act.claim.because}"
        off = [a for a in (act, maker) if not a.part.always]
        remedies = ["turn one of them off"] if len(off) == 2 else [f"turn `{a.switch}` off" for a in off]
        remedies += [*_instead([act, maker]), *_resets(act.part, ours), *_resets(maker.part, theirs)]
        return f"{statement}: {', or '.join(dict.fromkeys(remedies))}"

    return Conflict((act, maker), sentence)


def _one_of(acts: list[Act], statement: str) -> Conflict:
    def sentence(works: Works) -> str:
        remedies = ["use only one of them"]
        if len(acts) == 2:
            a, b = (act.part for act in acts)
            remedies += [
                *_instead(acts),
                *_resets(a, _that_matter(a, b, works)),
                *_resets(b, _that_matter(b, a, works)),
            ]
        return f"{statement}: {', or '.join(dict.fromkeys(remedies))}"

    return Conflict(tuple(acts), sentence)


def _instead(among: Iterable[Act]) -> list[str]:
    """Alternatives to turning off one of the conflicting switches."""
    switches = {a.switch for a in among}
    return list(dict.fromkeys(hint for a in among for switch, hint in a.part.instead.items() if switch in switches))


def _that_matter(part: Part, other: Part, works: Works) -> dict[str, Any]:
    """The defaults of the settings that the user changed and without which the two parts would work together."""
    defaults = {key: default for key, default in defaults_of(type(part)).items() if getattr(part, key) != default}
    return {key: default for key, default in defaults.items() if works([_with(part, key, default), other])}


def _with(part: Part, key: str, value: Any) -> Part:
    return type(part)(**settings_of(part) | {key: value})


def _resets(part: Part, defaults: dict[str, Any]) -> list[str]:
    """How to write these defaults, where the part accepts them."""
    return [
        f"set {place_of(type(part), key)} = {default!r}"
        for key, default in defaults.items()
        if not list(_with(part, key, default).problems())
    ]


def _named(act: Act, settings: dict[str, Any]) -> str:
    text = ", ".join(assigned(act.part, settings))
    if act.part.always:
        return f"`{text or changed(act.part)}`"
    return f"`{act.switch}`" + (f" with {text}" if text else "")


def _names(acts: Iterable[Act]) -> str:
    *rest, last = (f"`{a.switch}`" for a in acts)
    return f"{', '.join(rest)} and {last}" if rest else last
