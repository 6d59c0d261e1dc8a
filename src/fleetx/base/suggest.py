"""Did you mean ...? One hint for every unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(
    name: object, known: Iterable[str], *, otherwise: str = "", most: int = 1, cutoff: float = 0.6, quote: bool = True
) -> str:
    """`did you mean 'x'?` where a known name is close to this one, else `otherwise`."""
    near = difflib.get_close_matches(str(name), list(known), n=most, cutoff=cutoff)
    shown = (repr(n) if quote else n for n in near)
    return f"did you mean {' or '.join(shown)}?" if near else otherwise
