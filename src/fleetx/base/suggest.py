"""Values and names in messages: shortened, and with a hint at what was meant."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


def did_you_mean(
    name: object, known: Iterable[str], *, otherwise: str = "", most: int = 1, cutoff: float = 0.6, quote: bool = True
) -> str:
    """`did you mean 'x'?` if a known name is close to this one, else `otherwise`."""
    text = name if isinstance(name, str) else shown(name)
    if len(text) < 3:  # one or two characters are close to many names by chance
        known, cutoff = [choice for choice in known if len(choice) <= len(text) + 1], max(cutoff, 0.65)
    near = difflib.get_close_matches(text[:100], list(known), n=most, cutoff=cutoff)
    names = (repr(n) if quote else n for n in near)
    return f"did you mean {' or '.join(names)}?" if near else otherwise


def either(choices: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    *rest, last = map(str, choices)
    return f"{', '.join(rest)} or {last}" if rest else last


def printable(text: str) -> str:
    """The text on one line: line breaks and other characters that a terminal would act on are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python does not print integers of more than 4300 digits
            return f"an integer of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 120, 120, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12


def shown(value: object) -> str:
    """`repr`, short enough for a message whatever the value is."""
    return _SHORT.repr(value)
