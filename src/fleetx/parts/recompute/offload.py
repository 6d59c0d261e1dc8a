"""The inputs of segments, kept in host memory while the accelerator works on the others."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Host:
    """Copies go over a stream of their own, so that computation does not wait for them."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: weakref.ref[Line] | None = None

    def line(self) -> Line:
        """For the next segment of a forward."""
        made = Line(self, self._last)
        self._last = weakref.ref(made)
        return made


class Line:
    """What one segment holds. When it is taken back, the segment before it, which is needed next, is sent for."""

    def __init__(self, host: Host, before: weakref.ref[Line] | None):
        self._host, self._before = host, before
        self._kept: list[_Copy] = []

    def put(self, tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            return tensor  # a mask, or the batch, which the user holds: nothing would be gained
        copy = _Copy(tensor, self._host.stream)
        self._kept.append(copy)
        return copy

    def fetch(self) -> None:
        for copy in self._kept:
            copy.fetch()

    def take(self, kept: list[Any]) -> list[Any]:
        self.fetch()
        out = [value.take() if isinstance(value, _Copy) else value for value in kept]
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return out


class _Copy:
    def __init__(self, tensor: Tensor, stream: Any):
        self._device, self._grad, self._stream = tensor.device, tensor.requires_grad, stream
        self._back: Tensor | None = None
        with torch.no_grad():
            if stream is None:
                self._here = tensor.detach().clone()
            else:
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
                with torch.cuda.stream(stream):
                    self._here = torch.empty_like(tensor, device="cpu", pin_memory=True)
                    self._here.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(stream)  # it must not be written over before the copy has been made

    def fetch(self) -> None:
        if self._back is None:
            if self._stream is None:
                self._back = self._here
            else:
                with torch.cuda.stream(self._stream):
                    self._back = self._here.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        self.fetch()
        back, self._back = self._back, None
        assert back is not None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            back.record_stream(torch.cuda.current_stream(self._device))
        return back.detach().requires_grad_(self._grad)
