"""The names of parameters, torch's and Paddle's, and which of them match patterns such as "bias" or "batch_norm".

Paddle numbers the layers of each kind in the order of their creation: `layer2.0.bn1.weight` is `batch_norm_3.w_0`. Here
the order is that of `model.modules()`, which is the same for a model that creates its layers in the order in which it
uses them. Other models can define a method `paddle_names()`, whose names replace the numbered ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import plain_name

# Paddle's functions call the layer `fc` and its classes `linear`: accept both.
_KINDS: list[tuple[type[nn.Module], tuple[str, ...]]] = [
    (seams.BatchNormBase, ("batch_norm",)),
    (seams.InstanceNormBase, ("instance_norm",)),
    (nn.LayerNorm, ("layer_norm",)),
    (nn.GroupNorm, ("group_norm",)),
    (nn.Linear, ("linear", "fc")),
    (nn.Embedding, ("embedding",)),
    (nn.Conv1d, ("conv1d",)),
    (nn.Conv2d, ("conv2d",)),
    (nn.Conv3d, ("conv3d",)),
    (nn.ConvTranspose1d, ("conv1d_transpose",)),
    (nn.ConvTranspose2d, ("conv2d_transpose",)),
    (nn.ConvTranspose3d, ("conv3d_transpose",)),
    (nn.PReLU, ("prelu",)),
]
_FIELDS = {"weight": "w_0", "bias": "b_0"}


def names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its torch name, which comes first."""
    known = {plain_name(name): [plain_name(name)] for name, _ in model.named_parameters()}
    own = getattr(model, "paddle_names", None)
    for name, others in (own() if callable(own) else numbered(model.named_modules())).items():
        if name in known:  # not if tied to an earlier parameter
            known[name] += others
    return known


def numbered(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[str]]:
    """The names that Paddle gives to the parameters of layers that are created in this order."""
    named: dict[str, list[str]] = {}
    count: Counter[str] = Counter()
    for name, module in modules:
        kinds = next((kinds for kind, kinds in _KINDS if isinstance(module, kind)), ())
        for kind in kinds:
            for field, short in _FIELDS.items():
                full = plain_name(f"{name}.{field}" if name else field)
                named.setdefault(full, []).append(f"{kind}_{count[kind]}.{short}")
            count[kind] += 1
    return named


# --- patterns -------------------------------------------------------------------------------------
def problems(
    part: str,
    model: nn.Module,
    optimizer: Optimizer,
    patterns: Sequence[str],
    setting: str = "exclude_from_weight_decay",
) -> Iterator[str]:
    """Patterns in a setting of a part that match nothing, or everything."""
    known = names(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for pattern in patterns:
        if not pattern:
            yield f"{part}: an empty string in {setting} matches every parameter: remove it"
        elif not (matching := _matching(model, pattern)):
            told = [" = ".join(aliases) for aliases in known.values()]
            shown = "; ".join([*told[:2], *told[-1:]] if len(told) > 3 else told)
            yield (
                f"{part}: {pattern!r} in {setting} matches no parameter name, so it has no effect. "
                f"The names are: {shown}" + (" ..." if len(told) > 3 else "")
            )
        elif not any(id(p) in held for p in matching):
            yield (
                f"{part}: {pattern!r} in {setting} only matches parameters that are not in the "
                "optimizer, so it has no effect: remove it"
            )


def positions(model: nn.Module, patterns: Sequence[str], params: Sequence[Tensor]) -> list[int]:
    """The positions in `params` of the parameters that match a pattern."""
    excluded = {id(p) for pattern in patterns for p in _matching(model, pattern)}
    return [i for i, p in enumerate(params) if id(p) in excluded]


def _matching(model: nn.Module, pattern: str) -> list[Tensor]:
    """The parameters with a matching torch name (tied weights have several), or else with a matching Paddle name.

    Not both, because "fc", meant for the layer `model.fc`, is part of Paddle's name for every linear layer.
    """
    named: list[tuple[str, Tensor]] = [
        (plain_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    if matching := [p for name, p in named if pattern in name]:
        return matching
    known = names(model)
    return [p for name, p in named if any(pattern in alias for alias in known.get(name, ()))]
