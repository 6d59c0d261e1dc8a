"""Paddle's names for the parameters of a torch model, such as `batch_norm_3.w_0` for `layer2.0.bn1.weight`.

Paddle numbers the layers of each kind in the order of their creation. Here the order is that of `model.modules()`,
which is the same for a model that creates its layers in the order in which it uses them. Other models can define a
method `paddle_names()`, whose names replace the numbered ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

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
