"""The bytes of DGC: their number, the code of the indices, and what comes damaged from the network."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_tools import SPARSITIES, USUAL, both, built, decoded, halves, same_bits, sent_at, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.parts.dgc import codec, native, payload, plain, rice


# --- the size -----------------------------------------------------------------------------------------
@built
@pytest.mark.parametrize("n", [1_000_000, 25_000_000])
def test_a_value_takes_its_16_bits_and_little_more_than_the_entropy_of_its_index(n):
    g, u, v = tensors(n, 1)[0], torch.zeros(n), torch.zeros(n)
    data = native.encode(g, u, v, **USUAL | {"half": True})
    assert codec.header(data).count == n // 1000
    assert data.numel() * 8 <= 1.03 * 27.4 * (n // 1000)


@both
@halves
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_the_room_is_enough_wherever_the_values_lie(sparsity, half, way):
    n = 20_000
    k = payload.wanted(n, sparsity)
    for count in {1, 2, k // 2, k - 1, k}:
        for where in (np.arange(count), n - 1 - np.arange(count), np.linspace(0, n - 1, max(count, 1)).astype(int)):
            g = torch.zeros(n)
            g[where] = 1.0
            data = way.encode(g, torch.zeros(n), torch.zeros(n), **USUAL | {"sparsity": sparsity, "half": half})
            assert data.numel() <= payload.room(n, k, half)
            assert torch.equal(decoded(way, data, n), g.double())


@pytest.mark.parametrize("name", [pytest.param("native", marks=built), "plain"])
def test_no_temporary_is_as_large_as_the_tensor(name):
    code = f"""
import resource, torch
from fleetx.parts.dgc import {name} as way
n = 1 << 24
g, u, v = torch.randn(n), torch.zeros(n), torch.zeros(n)
out = torch.ones(n)
settings = dict(momentum=0.9, factor=1.0, sparsity=0.999, half=True, norm_limit=1e9)
way.decode_add(way.encode(g[:1000], u[:1000], v[:1000], **settings), out[:1000], 1.0)
u.add_(0), v.add_(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
way.decode_add(way.encode(g, u, v, **settings), out, 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 * 1024  # KB; the tensor has 64 MB


# --- the indices --------------------------------------------------------------------------------------
def index_sets():
    """Sets of indices below some n: spread, dense, or in clusters."""
    gap = st.one_of(st.integers(0, 3), st.integers(0, 200), st.integers(0, 2**20))
    return st.lists(gap, min_size=1, max_size=200).map(lambda gaps: np.cumsum(np.array(gaps) + 1) - 1)


def round_trip(indices, n):
    shift, lows, unary = rice.pack(indices.astype(np.uint32))
    found = [piece for _, piece in rice.unpack(lows, unary, len(indices), shift, n)]
    return shift, lows, unary, np.concatenate(found)


@given(index_sets(), st.integers(0, 100))
def test_indices_come_back(indices, beyond):
    *_, found = round_trip(indices, int(indices[-1]) + 1 + beyond)
    assert np.array_equal(found, indices)


@given(index_sets())
def test_no_other_parameter_takes_fewer_bits(indices):
    gaps = np.diff(indices, prepend=-1) - 1
    shift, lows, unary, _ = round_trip(indices, int(indices[-1]) + 1)
    bits = [len(gaps) * (s + 1) + int((gaps >> s).sum()) for s in range(32)]
    assert shift == int(np.argmin(bits))
    assert len(lows) == (len(gaps) * shift + 7) // 8
    assert len(unary) == (bits[shift] - len(gaps) * shift + 7) // 8


@built
@settings(max_examples=200)
@given(index_sets(), st.integers(1, 5000), st.booleans())
def test_the_compiled_coder_writes_the_same_bits(indices, beyond, half):
    indices = indices[indices < 1_000_000]
    if not len(indices):
        return
    n = int(indices[-1]) + 1 + beyond
    g = torch.zeros(n)
    g[indices] = 1.0
    settings = {"momentum": 0.0, "factor": 1.0, "sparsity": 1 / (n + 1), "half": half}
    data = native.encode(g, torch.zeros(n), torch.zeros(n), **settings)
    assert np.array_equal(sent_at(data, n), indices)
    of = codec.header(data)
    shift, lows, unary = rice.pack(indices.astype(np.uint32))
    assert of.shift == shift
    assert np.array_equal(data.numpy()[payload.HEADER_BYTES + of.value_bytes :], np.concatenate([lows, unary]))
    assert torch.equal(decoded(native, data, n), g.double())


def test_many_indices_are_coded_in_pieces():
    indices = np.flatnonzero(np.random.default_rng(0).random(300_000) < 0.3)
    *_, found = round_trip(indices, 300_000)
    assert np.array_equal(found, indices)
    far = np.array([0, 2**32 - 2])
    assert np.array_equal(round_trip(far, 2**32 - 1)[-1], far)


# --- what comes from the network ----------------------------------------------------------------------
def good(n=20_000, **settings):
    g, u, v = tensors(n)
    return plain.encode(g, u, v, **USUAL | {"half": True} | settings)


def damaged(data, at, value):
    out = data.clone()
    out[at] = value
    return out


def with_header(data, **changes):
    of = codec.header(data)
    values = {name: getattr(of, name) for name in of.__dataclass_fields__} | changes
    head = torch.frombuffer(bytearray(payload.Header(**values).bytes()), dtype=torch.uint8)
    return torch.cat([head, data[payload.HEADER_BYTES :]])


WHOLE = good()
LONGER = torch.cat([with_header(WHOLE, length=len(WHOLE) + 9), torch.zeros(9, dtype=torch.uint8)])
SHORTER = with_header(WHOLE, length=len(WHOLE) - 1)[:-1]
BEGINNING = payload.HEADER_BYTES
MALFORMED = {
    "nothing": (torch.zeros(0, dtype=torch.uint8), "truncated: 0 bytes"),
    "half a header": (good()[:10], "truncated: 10 bytes"),
    "half a body": (good()[:40], "truncated: 40 bytes of"),
    "too much": (torch.cat([good(), good()]), "bytes, and .* were given"),
    "not bytes": (good().int(), "uint8"),
    "another format": (damaged(good(), 0, 0), "no payload of version 1: it begins with 00"),
    "another version": (damaged(good(), 2, 2), "no payload of version 1"),
    "unknown flags": (damaged(good(), 3, 8), "no payload of version 1"),
    "reserved bytes": (damaged(good(), 6, 1), "no payload of version 1"),
    "another tensor": (good(20_001), "of 20001 elements, not of 20000"),
    "too many values": (with_header(good(), count=2**32 - 1), "contradicts itself"),
    "more values than elements": (with_header(good(sparsity=0.0), dense=False), "contradicts itself"),
    "dense but not all": (with_header(good(), dense=True), "contradicts itself"),
    "too wide low bits": (with_header(good(), shift=200), "contradicts itself"),
    "a scale out of range": (with_header(good(), exponent=127), "contradicts itself"),
    "a scale of whole floats": (with_header(good(half=False), exponent=1), "contradicts itself"),
    "indices that end early": (SHORTER, "indices end before its values"),
    "bytes behind the indices": (LONGER, "too long"),
    "narrower low bits": (with_header(good(), shift=0), "beyond|too long"),
    "an index beyond": (damaged(good(), slice(BEGINNING + 40, BEGINNING + 60), 255), "beyond|too long"),
    "an infinite half": (damaged(good(), slice(BEGINNING + 2, BEGINNING + 4), 0x7C), "not finite"),
    "a nan": (damaged(good(half=False), slice(BEGINNING, BEGINNING + 4), 255), "not finite"),
    "a dense nan": (damaged(good(half=False, sparsity=0.0), slice(-4, None), 255), "not finite"),
}


@both
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_payload_is_refused_and_changes_nothing(name, way):
    data, why = MALFORMED[name]
    out = torch.ones(20_000)
    with pytest.raises(ValueError, match=why):
        way.decode_add(data, out, 1.0)
    assert torch.equal(out, torch.ones(20_000))


@built
@settings(max_examples=300)
@given(st.data(), st.sampled_from([0.0, 0.5, 0.99]), st.booleans())
def test_no_damage_writes_beyond_the_tensor_and_both_ways_judge_alike(data, sparsity, half):
    payload_bytes = good(1000, sparsity=sparsity, half=half)
    for _ in range(data.draw(st.integers(1, 4))):
        payload_bytes[data.draw(st.integers(0, len(payload_bytes) - 1))] = data.draw(st.integers(0, 255))
    around = torch.full((3, 1000), 5.0)
    other = torch.full((1000,), 5.0)
    outcomes = []
    for way, out in ((native, around[1]), (plain, other)):
        try:
            way.decode_add(payload_bytes, out, 1.0)
            outcomes.append("")
        except ValueError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]
    assert same_bits(around[1], other)
    assert bool((around[0] == 5).all())
    assert bool((around[2] == 5).all())
