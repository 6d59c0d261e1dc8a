"""Tensors in a safetensors file: written and hashed in one pass, and read only if every byte is accounted for.

    8 bytes    the length of the header, little endian
    header     JSON: {name: {"dtype", "shape", "data_offsets"}}, padded with spaces
    data       the tensors, without gaps, those with the largest elements first, so that each is aligned

The format is safetensors' own, and its library reads these files. It is written here because that library copies all
tensors before it writes, cannot hash what it writes, and is not installed with torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.engine.checkpoint.hashing_file import LARGE, HashingFile, Written
from fleetx.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100 * 1024 * 1024  # bytes; the limit of safetensors' own library
_ALIGN = 64


def write_bytes(path: Path, content: bytes) -> Written:
    with HashingFile(path) as file:
        file.write(content)
        return file.finish()


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """The tensors must be whole, not DTensors; each is copied only if it is not contiguous or not on the CPU."""
    header, places, size = laid_out({name: (NAMES[t.dtype], list(t.shape)) for name, t in tensors.items()})
    with HashingFile(path, large=size >= LARGE) as file:
        file.write(header)
        for name in places:
            if tensors[name].numel():
                file.write(bytes_of(tensors[name]))
        return file.finish()


def laid_out(
    tensors: Mapping[str, tuple[str, list[int]]], metadata: Mapping[str, Any] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The header of a file of tensors {name: (type, shape)}, where each of them begins, in order, and its size."""
    header = dict(metadata or {})
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name)):
        dtype, shape = tensors[name]
        starts[name], end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + s for name, s in starts.items()}, begin + end


def bytes_of(t: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


# --- reading --------------------------------------------------------------------------------------
class TensorFile:
    """A file whose hash was checked. Its tensors are views into the mapped file: copy what you keep."""

    def __init__(self, path: Path):
        self._path = path
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise CheckpointError(path, "is too short for a safetensors file")
            # Copy-on-write: torch warns about memory that it cannot write.
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        length = int.from_bytes(self._map[:8], "little")
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(path, f"has a header of {length} bytes, which is more than the file")
        self._begin = 8 + length
        self._entries = dict(_entries(path, self._map[8 : self._begin], size - self._begin))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def described(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape, _ = self._entries[name]
        return dtype, shape

    def tensor(self, name: str) -> Tensor:
        dtype, shape, start = self._entries[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._begin + start).view(shape)


@contextmanager
def open_file(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading; a symbolic link may lead out of the folder, and a pipe would block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        missing = "is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise CheckpointError(path, "is a symbolic link" if path.is_symlink() else missing) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(path, "is not a regular file")
    with os.fdopen(fd, "rb") as file:
        yield file


def _entries(path: Path, text: bytes, room: int) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...], int]]]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(path, "has a header that is not a JSON object")
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, end) = _checked(path, name, entry)
        if math.prod(shape) * dtype.itemsize != end - start:
            raise CheckpointError(path, f"{name!r} has {end - start} bytes, but its shape is {list(shape)}")
        if start % dtype.itemsize:
            raise CheckpointError(path, f"{name!r} is not aligned")
        found.append((start, end, name, dtype, shape))
    expected = 0
    for start, end, name, dtype, shape in sorted(found, key=lambda f: f[:2]):
        if start != expected:
            raise CheckpointError(path, f"{name!r} overlaps another tensor, or leaves a gap before it")
        expected = end
        yield name, (dtype, shape, start)
    if expected != room:
        raise CheckpointError(path, f"has {room} bytes of data, but its tensors have {expected}")


def _checked(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(path, f"{name!r} is not described as a tensor")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(path, f"{name!r} has an impossible size: {str(numbers)[:80]}")
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > 64 or math.prod(n for n in shape if n) >= 2**63:
        raise CheckpointError(path, f"{name!r} has an impossible size: {str(shape)[:80]}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise CheckpointError(path, f"{name!r} has an unknown type: {str(entry['dtype'])[:40]}")
    return DTYPES[entry["dtype"]], tuple(shape), (offsets[0], offsets[1])
