"""The bytes of DGC: their number, the code of the indices, and damaged payloads from the network."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_tools import (
    BACKENDS,
    HALF,
    NATIVE,
    PLAIN,
    SPARSITIES,
    USUAL,
    built,
    cases,
    decoded,
    same_bits,
    sent_at,
    tensors,
    unbuilt,
    zeros,
)
from hypothesis import given
from hypothesis import strategies as st

from fleetx.parts.dgc import codec, payload, rice


# --- the size -----------------------------------------------------------------------------------------
@built
def test_a_value_takes_16_bits_and_little_more_than_the_entropy_of_its_index():
    n = 1_000_000
    data = NATIVE.encode(tensors(n, 1)[0], *zeros(n), **USUAL | {"half": True})
    assert codec.header(data).count == n // 1000
    assert data.numel() * 8 <= 1.03 * 27.4 * (n // 1000)


@cases(sparsity=SPARSITIES, half=HALF, backend=BACKENDS)
def test_the_allocated_room_is_enough_wherever_the_values_are(sparsity, half, backend):
    n = 20_000
    k = payload.wanted(n, sparsity)
    for count in {1, 2, k // 2, k - 1, k}:
        for where in (np.arange(count), n - 1 - np.arange(count), np.linspace(0, n - 1, max(count, 1)).astype(int)):
            g = torch.zeros(n)
            g[where] = 1.0
            data = backend.encode(g, *zeros(n), **USUAL | {"sparsity": sparsity, "half": half})
            assert data.numel() <= payload.room(n, k, half)
            assert torch.equal(decoded(backend, data, n), g.double())


@pytest.mark.slow
def test_no_temporary_is_as_large_as_the_tensor():
    names = ["plain"] if unbuilt else ["native", "plain"]
    code = f"""
import resource, torch
from fleetx.parts.dgc import codec, native, plain
n = 1 << 24
g, u, v, out = torch.randn(n), torch.zeros(n), torch.zeros(n), torch.ones(n)

def step(backend, *tensors):
    *tensors, out = tensors
    data = codec.encode(*tensors, momentum=0.9, factor=1.0, sparsity=0.999, half=True, norm_limit=1e9, backend=backend)
    codec.decode_add(data, out, 1.0, backend=backend)

backends = [{", ".join(names)}]
for backend in backends:
    step(backend, g[:1000], u[:1000], v[:1000], out[:1000])
u.add_(0), v.add_(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for backend in backends:
    step(backend, g, u, v, out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    # The low threshold makes malloc return freed memory at once, so that the growth is that of live memory.
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout) < 8 * 1024  # KB; the tensor has 64 MB


# --- the indices --------------------------------------------------------------------------------------
def index_sets():
    """Sets of indices: spread out, dense, or in clusters."""
    gap = st.one_of(st.integers(0, 3), st.integers(0, 200), st.integers(0, 2**20))
    return st.lists(gap, min_size=1, max_size=200).map(lambda gaps: np.cumsum(np.array(gaps) + 1) - 1)


def round_trip(indices, n):
    shift, lows, unary = rice.pack(indices.astype(np.uint32))
    pieces = [piece for _, piece in rice.unpack(lows, unary, len(indices), shift, n)]
    return shift, lows, unary, np.concatenate(pieces)


@given(index_sets(), st.integers(0, 100))
def test_indices_survive_a_round_trip_with_the_best_parameter(indices, beyond):
    shift, lows, unary, found = round_trip(indices, int(indices[-1]) + 1 + beyond)
    assert np.array_equal(found, indices)
    gaps = np.diff(indices, prepend=-1) - 1
    bits = [len(gaps) * (s + 1) + int((gaps >> s).sum()) for s in range(32)]
    assert shift == int(np.argmin(bits))
    assert len(lows) == (len(gaps) * shift + 7) // 8
    assert len(unary) == (bits[shift] - len(gaps) * shift + 7) // 8


@built
@given(index_sets(), st.integers(1, 5000), st.booleans())
def test_the_compiled_encoder_writes_the_same_bits(indices, beyond, half):
    indices = indices[indices < 100_000]
    if not len(indices):
        return
    n = int(indices[-1]) + 1 + beyond
    g = torch.zeros(n)
    g[indices] = 1.0
    data = NATIVE.encode(g, *zeros(n), momentum=0.0, factor=1.0, sparsity=1 / (n + 1), half=half)
    assert np.array_equal(sent_at(data, n), indices)
    head = codec.header(data)
    shift, lows, unary = rice.pack(indices.astype(np.uint32))
    assert head.shift == shift
    assert np.array_equal(data.numpy()[payload.HEADER_BYTES + head.value_bytes :], np.concatenate([lows, unary]))
    assert torch.equal(decoded(NATIVE, data, n), g.double())


def test_many_indices_are_coded_in_pieces():
    indices = np.flatnonzero(np.random.default_rng(0).random(300_000) < 0.3)
    *_, found = round_trip(indices, 300_000)
    assert np.array_equal(found, indices)
    far = np.array([0, 2**32 - 2])
    assert np.array_equal(round_trip(far, 2**32 - 1)[-1], far)


# --- damaged payloads ---------------------------------------------------------------------------------
N = 20_000


def make(n=N, **settings):
    g, u, v = tensors(n)
    return PLAIN.encode(g, u, v, **USUAL | {"half": True} | settings)


def damaged(data, at, value):
    out = data.clone()
    out[at] = value
    return out


def with_header(data, **changes):
    head = codec.header(data)
    values = {name: getattr(head, name) for name in head.__dataclass_fields__} | changes
    start = torch.frombuffer(bytearray(payload.Header(**values).bytes()), dtype=torch.uint8)
    return torch.cat([start, data[payload.HEADER_BYTES :]])


GOOD, FULL, DENSE = make(), make(half=False), make(half=False, sparsity=0.0)
LONGER = torch.cat([with_header(GOOD, length=len(GOOD) + 9), torch.zeros(9, dtype=torch.uint8)])
SHORTER = with_header(GOOD, length=len(GOOD) - 1)[:-1]
BODY = payload.HEADER_BYTES
MALFORMED = {
    "nothing": (torch.zeros(0, dtype=torch.uint8), "truncated: 0 bytes"),
    "half a header": (GOOD[:10], "truncated: 10 bytes"),
    "half a body": (GOOD[:40], "truncated: 40 bytes of"),
    "too much": (torch.cat([GOOD, GOOD]), r"should have \d+ bytes, but has"),
    "not bytes": (GOOD.int(), "uint8"),
    "another format": (damaged(GOOD, 0, 0), "not a payload of version 1: it starts with 00"),
    "another version": (damaged(GOOD, 2, 2), "not a payload of version 1"),
    "unknown flags": (damaged(GOOD, 3, 8), "not a payload of version 1"),
    "reserved bytes": (damaged(GOOD, 6, 1), "not a payload of version 1"),
    "another tensor": (make(N + 1), "for a tensor of 20001 elements, not 20000"),
    "too many values": (with_header(GOOD, count=2**32 - 1), "inconsistent"),
    "more values than elements": (with_header(DENSE, dense=False), "inconsistent"),
    "dense but not all": (with_header(GOOD, dense=True), "inconsistent"),
    "too wide low bits": (with_header(GOOD, shift=200), "inconsistent"),
    "a scale out of range": (with_header(GOOD, exponent=127), "inconsistent"),
    "a scale for fp32": (with_header(FULL, exponent=1), "inconsistent"),
    "indices that end early": (SHORTER, "fewer indices than values"),
    "bytes after the indices": (LONGER, "too long"),
    "narrower low bits": (with_header(GOOD, shift=0), "beyond|too long"),
    "an index beyond": (damaged(GOOD, slice(BODY + 40, BODY + 60), 255), "beyond|too long"),
    "an infinite half": (damaged(GOOD, slice(BODY + 2, BODY + 4), 0x7C), "not finite"),
    "a nan": (damaged(FULL, slice(BODY, BODY + 4), 255), "not finite"),
    "a dense nan": (damaged(DENSE, slice(-4, None), 255), "not finite"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_payload_is_an_error_and_changes_nothing(name):
    data, why = MALFORMED[name]
    for backend in BACKENDS[unbuilt:]:
        out = torch.ones(N)
        with pytest.raises(ValueError, match=why):
            backend.decode_add(data, out, 1.0)
        assert torch.equal(out, torch.ones(N))


SMALL = {(sparsity, half): make(1000, sparsity=sparsity, half=half) for sparsity in (0.0, 0.5, 0.99) for half in HALF}


@built
@given(st.data(), st.sampled_from(list(SMALL)))
def test_no_damage_writes_beyond_the_tensor_and_both_backends_agree(data, kind):
    message = SMALL[kind].clone()
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    around, other = torch.full((3, 1000), 5.0), torch.full((1000,), 5.0)
    failed = []
    for backend, out in ((NATIVE, around[1]), (PLAIN, other)):
        try:
            backend.decode_add(message, out, 1.0)
            failed.append(False)
        except ValueError:
            failed.append(True)
    assert failed[0] == failed[1]
    assert same_bits(around[1], other)
    assert bool((around[::2] == 5).all())
