"""Every sample occurs once, every rank gets equally many batches, none is empty; and stateless random numbers."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetx.data import rng
from fleetx.data.sharding_plan import MaxSamples, MaxTokens, _warn_too_large, batch_bounds
from fleetx.errors import UsageError

LENGTHS = st.lists(st.integers(1, 20), min_size=8, max_size=120).map(np.array)
LIMITS = st.one_of(st.integers(1, 9).map(MaxSamples), st.integers(20, 90).map(lambda size: MaxTokens(size, 20)))


@given(LENGTHS, LIMITS, st.integers(1, 4))
def test_every_sample_comes_once_in_equally_many_batches_that_are_never_empty(lengths, limit, ranks):
    bounds = batch_bounds(limit, lengths, 0, ranks, drop_last=False)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert (len(bounds) - 1) % ranks == 0
    assert np.all(np.diff(bounds) > 0)


@given(LENGTHS, LIMITS, st.integers(1, 4))
def test_batches_keep_to_their_size_unless_it_leaves_no_room_for_the_tail(lengths, limit, ranks):
    bounds = batch_bounds(limit, lengths, 0, ranks, drop_last=False).tolist()
    too_large = [lengths[a:b] for a, b in pairwise(bounds) if not limit.fits(lengths[a:b])]
    last = bounds[-1 - ranks :]
    assert all(b - a <= 2 for a, b in pairwise(last)) or not too_large
    assert all(len(batch) == 2 for batch in too_large)


@given(LENGTHS, LIMITS, st.integers(1, 4), st.integers(1, 4), st.data())
def test_another_number_of_ranks_resumes_where_the_first_stopped(lengths, limit, before, after, data):
    first = batch_bounds(limit, lengths, 0, before, drop_last=False)
    step = data.draw(st.integers(0, (len(first) - 1) // before))
    position = int(first[step * before])
    left = len(lengths) - position
    if 0 < left < after:
        words = rf"{left} samples are too few for {after} ranks.* fewer ranks, or skip these {left}"
        with pytest.raises(UsageError, match=words):
            batch_bounds(limit, lengths, position, after, drop_last=False)
        return
    rest = batch_bounds(limit, lengths, position, after, drop_last=False)
    assert (rest[0], rest[-1]) == (position, len(lengths))
    assert np.all(np.diff(rest) > 0)
    assert (len(rest) - 1) % after == 0


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4))
def test_with_drop_last_every_batch_is_full(lengths, size, ranks):
    bounds = batch_bounds(MaxSamples(size), lengths, 0, ranks, drop_last=True)
    assert set(np.diff(bounds)) <= {size}
    assert len(lengths) - bounds[-1] < size * ranks


@given(LENGTHS, LIMITS, st.integers(1, 8), st.booleans())
@example(np.ones(13, int), MaxSamples(3), 4, False)  # the last two steps are split together
@example(np.array([14, 8, 4, 9, 3, 18, 4, 13, 14]), MaxTokens(36, 20), 3, False)
def test_resuming_after_a_step_gives_the_batches_that_would_have_followed(lengths, limit, ranks, drop_last):
    full = batch_bounds(limit, lengths, 0, ranks, drop_last=drop_last).tolist()
    for step in range(0, len(full), ranks):
        assert batch_bounds(limit, lengths, full[step], ranks, drop_last=drop_last).tolist() == full[step:]


def test_the_last_step_is_split_evenly():
    assert np.diff(batch_bounds(MaxSamples(8), np.ones(20), 0, 2, drop_last=False)).tolist() == [8, 8, 2, 2]
    assert np.diff(batch_bounds(MaxSamples(8), np.ones(27), 0, 2, drop_last=False)).tolist() == [8, 8, 5, 6]


def test_a_tail_too_small_for_all_ranks_is_split_with_the_step_before():
    assert np.diff(batch_bounds(MaxSamples(4), np.ones(17), 0, 4, drop_last=False)).tolist() == [2, 2, 2, 2, 2, 2, 2, 3]


def test_if_no_batch_has_room_for_a_tail_some_are_larger_and_it_is_logged_once(caplog):
    _warn_too_large.cache_clear()
    for _ in range(2):
        assert sorted(np.diff(batch_bounds(MaxSamples(1), np.ones(5), 0, 4, drop_last=False))) == [1, 1, 1, 2]
        assert sorted(np.diff(batch_bounds(MaxTokens(20, 20), np.full(5, 20), 0, 4, drop_last=False))) == [1, 1, 1, 2]
    messages = [r.getMessage() for r in caplog.records]
    assert [re.findall(r"are larger than batch_size = (\d+),", m) for m in messages] == [["1"], ["20"]]


def test_tokens_include_padding():
    lengths = np.array([4, 4, 8, 2, 2])
    assert batch_bounds(MaxTokens(16, 8), lengths, 0, 1, drop_last=False).tolist() == [0, 2, 4, 5]


def test_fewer_samples_than_ranks_are_an_error():
    with pytest.raises(UsageError, match="3 samples are too few for 4 ranks"):
        batch_bounds(MaxSamples(2), np.ones(3), 0, 4, drop_last=False)


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(1, 300))
def test_seed_and_epoch_determine_a_permutation(seed, epoch, size):
    order = rng.permutation(rng.key(seed, epoch, "order"), size)
    assert sorted(order) == list(range(size))
    assert np.array_equal(order, rng.permutation(rng.key(seed, epoch, "order"), size))


def test_seeds_epochs_and_purposes_have_orders_of_their_own():
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (1, 1, "a"), (2, 0, "a")]
    assert len({tuple(rng.permutation(rng.key(*k), 50)) for k in keys}) == len(keys)


def test_numbers_are_uniform_and_unrelated_between_samples_and_counters():
    draws = rng.uniform(rng.key(0, 0, "x"), np.arange(400)[:, None], np.arange(250))
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert abs(counts - 5000).max() < 5 * 5000**0.5
    for other in (draws[1:, :] * draws[:-1, :], draws[:, 1:] * draws[:, :-1]):
        assert abs(other.mean() - 0.25) < 5 * (7 / 144 / other.size) ** 0.5


def test_a_number_does_not_depend_on_the_others_in_the_call():
    key = rng.key(3, 4, "x")
    table = rng.uniform(key, np.arange(9)[:, None], np.arange(7))
    assert rng.uniform(key, np.array([5]), np.array([6]))[0] == table[5, 6]
