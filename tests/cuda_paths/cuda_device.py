"""A CUDA device that computes on the CPU and keeps accounts. Import it before torch; it needs the CPU build.

A `CudaTensor` says that it lives on cuda:0 and holds its values in a CPU tensor. Every operation on it is run there, so
results are real and can be compared with a run on the CPU. On the way, each operation is checked and counted:

    devices   operands on different devices raise an error, as they do on a GPU
    reads     values that the host asks for, for which it waits: .item(), .cpu(), nonzero(), a boolean index
    sends     values that the host hands over from ordinary memory, for which it waits too: torch.tensor(..., device=)
    streams   an operation that uses what another stream has written raises an error, unless its stream has waited
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import traceback
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

TORCH = Path(importlib.util.find_spec("torch").origin).parent
SOURCE = f"{Path(importlib.util.find_spec('fleetx').origin).parent}/"


def load(guard):
    """Before torch is imported: it looks for CUDA once."""
    for name in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for path in sorted((TORCH / "lib").glob(name))[:1]:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(guard), mode=ctypes.RTLD_GLOBAL)


load(os.environ["FAKE_CUDA_GUARD"])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
aten = torch.ops.aten

# The result depends on values, so the host waits for them.
READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive}
MOVES = {aten._to_copy, aten.copy_, aten._foreach_copy_, aten.set_, aten.index, aten.index_put_, aten.record_stream}


class CudaTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=CUDA, requires_grad=False,
        )  # fmt: skip
        made.values_on_host = values
        return made

    def __init__(self, values):
        pass

    def __repr__(self):
        return f"CudaTensor({self.values_on_host!r})"

    def tolist(self):
        return self.cpu().tolist()  # torch does this for other devices too, but for no subclass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        leaves = _tensors([args, kwargs])
        if fakes := [x for x in leaves if isinstance(x, FakeTensor)]:
            args, kwargs = _mapped(partial(_without_values, fakes[0].fake_mode), [args, kwargs])
            return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {}, leaves)


def _without_values(mode, x):
    """As on a GPU, where the mode turns a tensor that meets one of its own into such a one."""
    if not isinstance(x, CudaTensor):
        return x
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)


class Device(TorchDispatchMode):
    """While it is entered, `device="cuda"` works."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = _tensors([args, kwargs])
        if _faked() or any(isinstance(x, FakeTensor) for x in leaves):
            return func(*args, **(kwargs or {}))  # there is nothing to compute
        return _run(func, args, kwargs or {}, leaves)


def _faked():
    """torch asks this mode before a FakeTensorMode, whichever was entered last."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# --- accounts -------------------------------------------------------------------------------------
class Accounts:
    def __init__(self):
        self.reads, self.sends, self.queued = Counter(), Counter(), Counter()  # by the line of fleetx
        self.streams = set()

    @property
    def waits(self):
        return sum(self.reads.values()) + sum(self.sends.values())


_accounts = []


@contextmanager
def accounts():
    made = Accounts()
    _accounts.append(made)
    try:
        yield made
    finally:
        _accounts.remove(made)


def _note(kind, func):
    for each in _accounts:
        getattr(each, kind)[_line(func)] += 1


def _line(func):
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(SOURCE):
            return f"{frame.filename.removeprefix(SOURCE)}: {frame.line}"
    return str(func)


# --- operations -----------------------------------------------------------------------------------
def _tensors(value):
    """All tensors of an operation's arguments. torch's own tree functions take several times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [t for each in value for t in _tensors(each)]


def _mapped(change, value):
    """`value` with `change(tensor)` for each of its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(change, each) for each in value])
    return {name: _mapped(change, each) for name, each in value.items()} if isinstance(value, dict) else value


def _run(func, args, kwargs, leaves):
    ours = [x for x in leaves if isinstance(x, CudaTensor)]
    asked = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    packet = func.overloadpacket
    if packet is aten.record_stream:
        return _record(args[0], args[1])
    if packet is aten._pin_memory or packet is aten.pin_memory:
        return _pin(args[0].clone())
    if packet is aten.is_pinned:
        return _is_pinned(args[0])
    _check_devices(func, packet, leaves, ours)
    _count(func, packet, args, kwargs, asked)
    pins = kwargs.pop("pin_memory", None) if "pin_memory" in kwargs else None
    given, options = _mapped(lambda x: x.values_on_host if isinstance(x, CudaTensor) else x, [args, kwargs])
    if asked == "cuda":
        options["device"] = CPU
    here = asked == "cuda" or (asked is None and bool(ours))
    out = func(*given, **options)
    known = {id(x.values_on_host): x for x in ours}

    def result(t):
        if not here:
            return _pin(t) if pins else t
        return known[id(t)] if id(t) in known else CudaTensor(t)

    made = _mapped(result, out)
    if here and not _is_view(func):
        _order(func, ours, _tensors(made))
    return made


def _check_devices(func, packet, leaves, ours):
    if not ours or packet in MOVES or func.namespace == "c10d":
        return
    fused = "_fused" in str(packet)
    if strangers := [x for x in leaves if not isinstance(x, CudaTensor) and (x.dim() or fused)]:
        raise RuntimeError(f"{func}: tensors on cuda:0 and on the CPU {[tuple(x.shape) for x in strangers]}")


def _count(func, packet, args, kwargs, asked):
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    here = isinstance(first, CudaTensor)
    if packet in READS and here:
        _note("reads", func)
    elif packet in (aten.index, aten.index_put_) and here:
        if any(i is not None and i.dtype is torch.bool for i in args[1]):
            _note("reads", func)
    elif packet is aten._to_copy and asked is not None and here != (asked == "cuda"):
        _move(func, here, first if not here else None, kwargs.get("non_blocking", False))
    elif packet is aten.copy_ and here != isinstance(args[1], CudaTensor) and args[1].numel():
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        _move(func, not here, first if not here else args[1], not blocking)


def _move(func, from_device, host, non_blocking):
    if non_blocking and ((from_device and host is None) or (host is not None and _is_pinned(host))):
        _note("queued", func)
    else:
        _note("reads" if from_device else "sends", func)


# --- pinned memory --------------------------------------------------------------------------------
_pinned = {}  # by address; the tensors are kept, so that no other memory gets their address


def _pin(t):
    _pinned[t.untyped_storage().data_ptr()] = t
    return t


def _is_pinned(t):
    return not isinstance(t, CudaTensor) and t.untyped_storage().data_ptr() in _pinned


# --- streams --------------------------------------------------------------------------------------
class Stream:
    """Ordered as on a GPU: `clock[other]` is how much of the other stream this one has waited for."""

    _all = []

    def __init__(self, device=None, priority=0, **_):
        self.number, self.clock, self.device = len(Stream._all), Counter(), CUDA
        Stream._all.append(self)

    def wait_stream(self, other):
        self.clock |= other.clock  # the larger of each

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        _note("reads", "Stream.synchronize")

    def __eq__(self, other):
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self):
        return self.number


_stack = [Stream()]


@contextmanager
def _stream(stream):
    _stack.append(stream)
    try:
        yield
    finally:
        _stack.pop()


class Future(torch.futures.Future[Any]):
    """On a GPU, a future that knows its device makes the stream that waits for it follow the one that completed it."""

    __class_getitem__ = classmethod(lambda cls, kind: cls)

    def __init__(self, *, devices=None):
        super().__init__()
        self._ordered, self._clock = bool(devices), Counter()

    def set_result(self, result):
        self._clock = Counter(_stack[-1].clock)
        super().set_result(result)

    def wait(self):
        return self._follow(super().wait())

    def value(self):
        return self._follow(super().value())

    def then(self, callback):
        """A callback runs on a stream of its own that follows the future."""
        assert self.done()  # on a device nothing here runs in the background
        made = Future(devices=[CUDA] if self._ordered else None)
        with _stream(Stream()):
            made.set_result(callback(self))
        return made

    def _follow(self, result):
        if self._ordered:
            _stack[-1].clock |= self._clock
        return result


class Event:
    def __init__(self, *_, **__):
        self._clock = Counter()

    def record(self, stream=None):
        self._clock = Counter((stream or _stack[-1]).clock)

    def wait(self, stream=None):
        (stream or _stack[-1]).clock |= self._clock

    def synchronize(self):
        _note("reads", "Event.synchronize")


_written = {}  # by address of the memory: [(from, to, stream, its clock)] of the last writes


def _order(func, read, made):
    """This operation runs after everything before it on its stream, and after what that stream has waited for."""
    here = _stack[-1]
    given = {_place(t)[0] for t in read}
    for t in read:
        memory, begin, end = _place(t)
        for a, b, stream, when in _written.get(memory, ()):
            if begin < b and a < end and stream is not here and here.clock[stream] < when:
                raise RuntimeError(f"{func} on stream {here.number} uses what stream {stream.number} may be writing")
    here.clock[here] += 1
    for each in _accounts:
        each.streams.add(here.number)
    for t in made:
        memory, begin, end = _place(t)
        before = _written.get(memory, ()) if memory in given else ()  # else it is new, and held something else before
        others = [w for w in before if w[0] < begin or w[1] > end]
        _written[memory] = [*others, (begin, end, here, here.clock[here])]


def _place(t):
    """The memory, and the first and last byte in it."""
    host = t.values_on_host
    begin = host.storage_offset() * host.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(host.shape, host.stride(), strict=True)) if host.numel() else 0
    return host.untyped_storage().data_ptr(), begin, begin + span * host.element_size()


def _is_view(func):
    """It only returns an alias, and touches no memory."""
    marks = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(marks) and not any(mark.is_write for mark in marks)


def _record(t, stream):
    """The allocator keeps the memory until this stream is done with it; here memory is never reused too early."""


# --- torch.cuda -----------------------------------------------------------------------------------
def install():
    torch.autograd.set_multithreading_enabled(False)  # so that `Device` is also entered in a backward
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) is made on the host and then sent
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a module gets new parameters, with our class
    torch.Tensor.record_stream = lambda t, stream: _record(t, stream)
    cuda = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda._lazy_init = lambda: None
    cuda.set_device = lambda device: None
    cuda.Stream, cuda.stream, cuda.current_stream = Stream, _stream, lambda device=None: _stack[-1]
    cuda.Event, torch.futures.Future = Event, Future
    cuda.synchronize = lambda device=None: _note("reads", "torch.cuda.synchronize")
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.mem_get_info = lambda device=None: (80 << 30, 80 << 30)
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0


def forget():
    _pinned.clear()
    _written.clear()
