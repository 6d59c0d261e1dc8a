"""Keeps the inputs of segments in host memory while the accelerator works on other segments."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Offload:
    """Copies on its own stream, so that computation does not wait."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: weakref.ref[OffloadedInputs] | None = None

    def next_segment(self) -> OffloadedInputs:
        made = OffloadedInputs(self, self._last)
        self._last = weakref.ref(made)
        return made


class OffloadedInputs:
    """The inputs of one segment. Taking them back also prefetches those of the segment before, which is needed next."""

    def __init__(self, offload: Offload, before: weakref.ref[OffloadedInputs] | None):
        self._offload, self._before = offload, before
        self._copies: list[_HostCopy] = []

    def put(self, tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            return tensor  # a mask or the batch, which the user holds anyway
        copy = _HostCopy(tensor, self._offload.stream)
        self._copies.append(copy)
        return copy

    def fetch(self) -> None:
        for copy in self._copies:
            copy.fetch()

    def take(self, kept: list[Any]) -> list[Any]:
        self.fetch()
        out = [value.take() if isinstance(value, _HostCopy) else value for value in kept]
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return out


class _HostCopy:
    def __init__(self, tensor: Tensor, stream: Any):
        self._device, self._grad, self._stream = tensor.device, tensor.requires_grad, stream
        self._back: Tensor | None = None
        with torch.no_grad():
            if stream is None:
                self._host = tensor.detach().clone()
            else:
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
                with torch.cuda.stream(stream):
                    self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                    self._host.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(stream)  # its memory must not be reused before the copy is done

    def fetch(self) -> None:
        if self._back is None:
            if self._stream is None:
                self._back = self._host
            else:
                with torch.cuda.stream(self._stream):
                    self._back = self._host.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        self.fetch()
        back, self._back = self._back, None
        assert back is not None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            back.record_stream(torch.cuda.current_stream(self._device))
        return back.detach().requires_grad_(self._grad)
