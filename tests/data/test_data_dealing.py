"""Every sample once, every rank equally often, nobody with nothing; and randomness without a memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetx.data import rng
from fleetx.data.sharding_plan import BySamples, ByTokens, _say_too_large, deal
from fleetx.errors import UsageError

LENGTHS = st.lists(st.integers(1, 20), min_size=8, max_size=120).map(np.array)
CUTS = st.one_of(st.integers(1, 9).map(BySamples), st.integers(20, 90).map(lambda size: ByTokens(size, 20)))


@given(LENGTHS, CUTS, st.integers(1, 4))
def test_every_sample_comes_once_in_equally_many_batches_that_are_never_empty(lengths, cut, ranks):
    borders = deal(cut, lengths, 0, ranks, drop_last=False)
    assert borders[0] == 0
    assert borders[-1] == len(lengths)
    assert (len(borders) - 1) % ranks == 0
    assert np.all(np.diff(borders) > 0)


@given(LENGTHS, CUTS, st.integers(1, 4))
def test_batches_keep_to_their_size_unless_it_leaves_no_room_for_the_tail(lengths, cut, ranks):
    borders = deal(cut, lengths, 0, ranks, drop_last=False).tolist()
    too_large = [lengths[a:b] for a, b in pairwise(borders) if not cut.fits(lengths[a:b])]
    last = borders[-1 - ranks :]
    assert all(b - a <= 2 for a, b in pairwise(last)) or not too_large
    assert all(len(batch) == 2 for batch in too_large)


@given(LENGTHS, CUTS, st.integers(1, 4), st.integers(1, 4), st.data())
def test_another_number_of_ranks_goes_on_where_the_first_stopped(lengths, cut, before, after, data):
    first = deal(cut, lengths, 0, before, drop_last=False)
    step = data.draw(st.integers(0, (len(first) - 1) // before))
    position = int(first[step * before])
    left = len(lengths) - position
    if 0 < left < after:
        words = rf"{left} samples are too few for {after} ranks.* fewer ranks, or go on without these {left}"
        with pytest.raises(UsageError, match=words):
            deal(cut, lengths, position, after, drop_last=False)
        return
    rest = deal(cut, lengths, position, after, drop_last=False)
    assert (rest[0], rest[-1]) == (position, len(lengths))
    assert np.all(np.diff(rest) > 0)
    assert (len(rest) - 1) % after == 0


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4))
def test_with_drop_last_every_batch_is_full(lengths, size, ranks):
    borders = deal(BySamples(size), lengths, 0, ranks, drop_last=True)
    assert set(np.diff(borders)) <= {size}
    assert len(lengths) - borders[-1] < size * ranks


@given(LENGTHS, CUTS, st.integers(1, 8), st.booleans())
@example(np.ones(13, int), BySamples(3), 4, False)  # the last two steps are shared out together
@example(np.array([14, 8, 4, 9, 3, 18, 4, 13, 14]), ByTokens(36, 20), 3, False)
def test_whoever_goes_on_after_a_step_gets_the_batches_that_would_have_come(lengths, cut, ranks, drop_last):
    whole = deal(cut, lengths, 0, ranks, drop_last=drop_last).tolist()
    for step in range(0, len(whole), ranks):
        assert deal(cut, lengths, whole[step], ranks, drop_last=drop_last).tolist() == whole[step:]


def test_the_last_step_is_shared_out_evenly():
    assert np.diff(deal(BySamples(8), np.ones(20), 0, 2, drop_last=False)).tolist() == [8, 8, 2, 2]
    assert np.diff(deal(BySamples(8), np.ones(27), 0, 2, drop_last=False)).tolist() == [8, 8, 5, 6]


def test_a_tail_too_small_for_all_ranks_is_shared_out_with_the_step_before():
    assert np.diff(deal(BySamples(4), np.ones(17), 0, 4, drop_last=False)).tolist() == [2, 2, 2, 2, 2, 2, 2, 3]


def test_where_no_batch_has_room_for_a_tail_some_are_larger_which_is_said_once(caplog):
    _say_too_large.cache_clear()
    for _ in range(2):
        assert sorted(np.diff(deal(BySamples(1), np.ones(5), 0, 4, drop_last=False))) == [1, 1, 1, 2]
        assert sorted(np.diff(deal(ByTokens(20, 20), np.full(5, 20), 0, 4, drop_last=False))) == [1, 1, 1, 2]
    said = "some batches at the end of the epoch are larger: too few samples are left for another step"
    assert [r.getMessage() for r in caplog.records] == [f"batch_size = 1: {said}", f"batch_size = 20: {said}"]


def test_tokens_count_what_fills_up():
    lengths = np.array([4, 4, 8, 2, 2])
    assert deal(ByTokens(16, 8), lengths, 0, 1, drop_last=False).tolist() == [0, 2, 4, 5]


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(UsageError, match="3 samples are too few for 4 ranks"):
        deal(BySamples(2), np.ones(3), 0, 4, drop_last=False)


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(1, 300))
def test_an_order_is_a_permutation_that_seed_and_epoch_decide(seed, epoch, size):
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


def test_a_number_does_not_depend_on_what_else_is_asked_for():
    key = rng.key(3, 4, "x")
    whole = rng.uniform(key, np.arange(9)[:, None], np.arange(7))
    assert rng.uniform(key, np.array([5]), np.array([6]))[0] == whole[5, 6]
