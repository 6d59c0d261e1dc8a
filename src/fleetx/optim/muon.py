"""Muon (Jordan et al. 2024) with the step size of AdamW (Liu et al. 2025), for matrices; AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Size, Tensor, nn

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.optim.dispatch import local
from fleetx.optim.layerwise import Layerwise, ParamGroup, accumulated, adamw_update, check_number, gradients
from fleetx.optim.orthogonal import Sharing, blocks, orthogonalized, sides


class Muon(Layerwise):
    """Orthogonalized momentum: a step moves all directions of a matrix equally.

        b = momentum * b + (1 - momentum) * g,   d = momentum * b + (1 - momentum) * g, or b without nesterov
        p = p - lr * weight_decay * p - lr * scale * U V^T,   where d = U S V^T

    U V^T is approximated by `ns_steps` Newton-Schulz iterations. With scale = rms * sqrt(max(rows, columns)), a step is
    as large as AdamW's, so AdamW's learning rate still fits; with `rms=None`, scale = sqrt(max(1, rows / columns)), as
    in the original.

    Parameters with fewer than two dimensions or a side of 1, and those whose names contain a string of `adamw`, are
    updated bit for bit as by torch.optim.AdamW with `lr`, `betas`, `eps` and `weight_decay`. List embeddings and the
    output layer in `adamw`: `adamw_names(model)` finds them.
    """

    needs: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")
    own: ClassVar[tuple[str, ...]] = ("momentum", "nesterov", "ns_steps", "rms", "bf16", "excluded")
    continues: ClassVar[tuple[str, ...]] = ("AdamW",)
    excludes: ClassVar[str] = "adamw"
    replicas: Any = None  # a process group whose ranks hold the same gradients and divide the work

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        rms: float | None = 0.2,
        bf16: bool = False,
        maximize: bool = False,
        adamw: Sequence[str] = (),
        differentiable: bool = False,
    ):
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "nesterov": nesterov, "ns_steps": ns_steps, "rms": rms, "bf16": bf16, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, exclude=adamw, differentiable=differentiable)

    def _complete(self, group: ParamGroup, chosen: ParamGroup) -> None:
        super()._complete(group, chosen)
        others = [i for i, p in enumerate(group["params"]) if not is_matrix(p.shape)]
        group["excluded"] = sorted({*group["excluded"], *others})

    @staticmethod
    def check(group: ParamGroup) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(group, name)
        check_number(group, "momentum", below=1.0)
        for i, beta in enumerate(group["betas"]):
            check_number({f"betas[{i}]": beta}, f"betas[{i}]", below=1.0)
        if not 1 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps must be between 1 and 99, not {group['ns_steps']}")
        if group["rms"] is not None and not 0 < group["rms"] < math.inf:
            raise ValueError(f"rms must be above 0, or None, not {group['rms']}")

    def update(self, group: ParamGroup, params: list[Tensor], excluded: list[bool]) -> None:
        others = [p for p, skip in zip(params, excluded, strict=True) if skip]
        if others:
            adamw_update(self, group, others, [float(group["weight_decay"])] * len(others))
        matrices: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in (p for p, skip in zip(params, excluded, strict=True) if not skip):
            sharing = self._sharing(p)
            matrices.setdefault((sharing, p.dtype, p.device), []).append(p)
        for (sharing, *_), some in matrices.items():
            for run in blocks([p.shape for p in some], sharing):
                self._step_together(group, [some[i] for i in run], sharing)

    def _sharing(self, p: Any) -> Sharing | None:
        """The ranks that divide the work on this parameter."""
        if hasattr(p, "fake_mode"):
            return None
        if not hasattr(p, "device_mesh"):
            return Sharing(self.replicas) if self.replicas is not None else None
        divided = [(dim, place) for dim, place in enumerate(p.placements) if not place.is_replicate()]
        if not divided:
            return None
        if len(divided) > 1 or not divided[0][1].is_shard():
            raise RuntimeError(f"Muon cannot update a parameter with the placements {p.placements}")
        return Sharing(p.device_mesh.get_group(divided[0][0]), divided[0][1].dim)

    def _step_together(self, group: ParamGroup, params: list[Tensor], sharing: Sharing | None) -> None:
        momentum, lr = float(group["momentum"]), float(group["lr"])
        moments = [local(self._moment(p)) for p in params]
        grads = [local(g, getattr(p, "placements", None)) for g, p in zip(gradients(params), params, strict=True)]
        grads = [g.to(m.dtype) for g, m in zip(grads, moments, strict=True)]
        if group["maximize"]:
            grads = [-g for g in grads]
        seams.foreach_lerp_(moments, grads, 1 - momentum)

        def direction(i: int) -> Tensor:
            return grads[i].lerp(moments[i], momentum) if group["nesterov"] else moments[i]

        shapes = [p.shape for p in params]
        updates = orthogonalized(
            direction, shapes, steps=group["ns_steps"], bf16=group["bf16"], like=moments[0], sharing=sharing
        )
        for p, update in zip(params, updates, strict=True):
            own = local(p)
            value = own if own.dtype is update.dtype else own.to(update.dtype)  # in 16 bits, only the result is rounded
            value.mul_(1 - lr * float(group["weight_decay"])).add_(update, alpha=-lr * scale_of(p.shape, group["rms"]))
            if value is not own:
                own.copy_(value)

    def _moment(self, p: Tensor) -> Tensor:
        """The momentum. If AdamW started the run, its first moment is used, which is the same average."""
        state = self.state[p]
        if "momentum_buffer" not in state and "exp_avg" in state:
            first = state["exp_avg"]
            state.clear()
            state["momentum_buffer"] = first
        return accumulated(state, "momentum_buffer", p)


def scale_of(shape: Size, rms: float | None) -> float:
    rows, columns = sides(shape)
    return math.sqrt(max(1.0, rows / columns)) if rms is None else rms * math.sqrt(max(rows, columns))


def is_matrix(shape: Size) -> bool:
    return len(shape) >= 2 and min(sides(shape)) > 1


def adamw_names(model: nn.Module) -> list[str]:
    """The matrices of a model that should stay with AdamW: embeddings, normalizations and the output layer.

    Embeddings are found by their class, or by "embed" in their name. The output layer is the last matrix, or shares the
    weight of an embedding.
    """
    kept = set(_kept(model))
    return sorted({plain_name(name) for name, p in model.named_parameters() if p in kept})


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, seams.NormBase)


def _kept(model: nn.Module) -> Iterator[nn.Parameter]:
    last = None
    for module_name, module in model.named_modules():
        for name, p in module.named_parameters(module_name, recurse=False):
            if not is_matrix(p.shape):
                continue
            last = p
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_NORMS)) or "embed" in name.lower():
                yield p
    if last is not None:
        yield last
