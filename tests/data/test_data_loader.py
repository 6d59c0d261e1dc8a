"""What all loaders share: order, sharding, resuming, workers and options."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from data_files import digital, images, labels, original, rows, varied
from torch import nn

from fleetx import fleet
from fleetx.data import (
    digital_train,
    imagenet_train,
    load_digital_dataset_from_file,
    load_digits,
    load_imagenet_from_file,
)
from fleetx.errors import UsageError

SMALL = {"image_size": 8}


def kinds(folder):
    """Write the files; return a factory for each kind of loader."""
    images(folder, 23)
    digital(folder, varied(23), packed=[1])
    return existing(folder)


def existing(folder):
    """Like `kinds`, but for existing files, because ranks must not write what others read."""
    filelist, data, vocabulary = folder / "train.txt", folder / "digital", folder / "vocab.txt"
    return {
        "images": lambda **o: load_imagenet_from_file(filelist, 4, **SMALL, **o),
        "samples": lambda **o: load_digital_dataset_from_file(data, vocabulary, 4, 32, **o),
        "tokens": lambda **o: load_digital_dataset_from_file(data, vocabulary, 64, 32, True, **o),
    }


KINDS = ["images", "samples", "tokens"]


def seen(batches):
    batches = list(batches)
    if batches and "label" in batches[0]:
        return [
            (int(label), image.numpy().tobytes())
            for b in batches
            for label, image in zip(b["label"], b["image"], strict=True)
        ]
    return rows(batches)


def test_both_ways_to_iterate_give_the_same(tmp_path):
    make = kinds(tmp_path)["tokens"]
    a, b = make(), make()
    assert len(a) == len(list(b()))
    assert seen(a) == seen(make()())


@pytest.mark.parametrize("kind", KINDS)
def test_only_seed_and_epoch_determine_the_order(tmp_path, kind):
    make = kinds(tmp_path)[kind]
    loader = make()
    first, second = seen(loader), seen(loader)
    again = make()
    assert [seen(again), seen(again)] == [first, second]
    assert first != second
    assert seen(make(seed=1)) != first
    if kind == "images":
        assert {x[0] for x in first} == {x[0] for x in second} == set(range(23))


@pytest.mark.parametrize(("kind", "size"), [("images", 2), ("samples", 3), ("tokens", 2)])
def test_ranks_together_see_what_one_rank_sees(tmp_path, kind, size):
    make = kinds(tmp_path)[kind]
    shares = [list(make(replica=(r, size))) for r in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == len(make(replica=(0, size)))
    assert sorted(seen([b for share in shares for b in share])) == sorted(seen(make()))


@pytest.mark.parametrize(("kind", "workers"), [("images", 0), ("samples", 2), ("tokens", 0)])
def test_a_loader_resumes_in_the_middle_of_an_epoch(tmp_path, kind, workers):
    make = kinds(tmp_path)[kind]
    full = make(num_workers=workers)
    batches, states = [], []
    for batch in full:
        batches.append(batch)
        states.append(full.state_dict())
    following = seen(full)
    for stop in (0, 1, len(batches) - 1):
        loader = make(num_workers=workers)
        loader.load_state_dict(states[stop])
        assert len(loader) == len(batches) - stop - 1 or stop == len(batches) - 1
        if stop < len(batches) - 1:
            assert seen(loader) == seen(batches[stop + 1 :])
        assert seen(loader) == following


@pytest.mark.parametrize(("kind", "sizes"), [("images", (1, 3)), ("samples", (3, 2)), ("tokens", (2, 4))])
def test_another_number_of_ranks_loses_and_repeats_no_sample(tmp_path, kind, sizes):
    make = kinds(tmp_path)[kind]
    got, states = [], []
    for rank in range(sizes[0]):
        loader = make(replica=(rank, sizes[0]))
        steps = iter(loader)
        got += [next(steps)]
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(sizes[1]):
        loader = make(replica=(rank, sizes[1]))
        loader.load_state_dict(states[0])
        got += list(loader)
    assert sorted(seen(got)) == sorted(seen(make()))


def test_the_state_does_not_count_prefetched_batches(tmp_path):
    loader = load_imagenet_from_file(images(tmp_path, 23), 4, num_workers=2, prefetch_factor=3, **SMALL)
    steps = loader()
    next(steps), next(steps)
    assert loader.state_dict()["position"] == 8


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_workers_change_nothing(tmp_path, kind):
    make = kinds(tmp_path)[kind]
    plain, with_workers = make(), make(num_workers=2, prefetch_factor=2, persistent_workers=True)
    assert seen(plain) == seen(with_workers)
    assert seen(plain) == seen(with_workers)  # the second epoch, from the same workers


def test_batches_from_workers_are_writable_tensors_of_any_size(tmp_path):
    """Small tensors are sent by value, large ones in shared memory."""
    filelist = images(tmp_path, 8)
    for workers in (0, 2):
        (batch,) = load_imagenet_from_file(filelist, 8, image_size=128, num_workers=workers)
        assert type(batch) is dict
        assert batch["image"].nbytes > 1 << 20
        for tensor in batch.values():
            tensor.zero_()


def test_the_global_random_generators_are_not_used(tmp_path):
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    list(load_imagenet_from_file(images(tmp_path, 6), 4, **SMALL))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_after_a_break_the_next_epoch_starts():
    loader, other = load_digits(100), load_digits(100)
    for _ in loader:
        break
    list(other)
    assert labels(loader) == labels(other)


def test_drop_last_drops_the_tail_and_a_state_after_it_starts_the_next_epoch():
    loader = load_digits(400, drop_last=True)
    assert [len(b["label"]) for b in loader] == [400, 400, 400]
    following = load_digits(400, drop_last=True)
    following.load_state_dict(loader.state_dict())
    assert labels(following) == labels(loader)
    with pytest.raises(UsageError, match="drop_last leaves no batch"):
        iter(load_digits(2000, drop_last=True))


def test_without_shards_every_rank_sees_everything():
    assert labels(load_digits(300, "val", shard=False)) == labels(load_digits(300, "val", replica=(0, 1)))
    with pytest.raises(UsageError, match="pass only one"):
        load_digits(shard=False, replica=(0, 2))


@pytest.mark.parametrize("begun", [True, False])
def test_an_older_for_cannot_continue_and_does_not_disturb_the_newer_one(tmp_path, begun):
    filelist = images(tmp_path, 12)
    loader, other = (load_imagenet_from_file(filelist, 4, **SMALL) for _ in range(2))
    list(other)
    older = iter(loader)
    if begun:
        next(older)
    newer = iter(loader)
    got = [next(newer)]
    with pytest.raises(UsageError, match="cannot continue: another one was started"):
        next(older)
    assert seen([*got, *newer]) == seen(other)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"on_error": "skp"}, "did you mean 'skip'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"phase": "trian"}, "did you mean 'train'"),
        ({"replica": (2, 2)}, "replica"),
        ({"seed": -1}, "seed = -1"),
        ({"on_error": "skip"}, "is not supported here"),
        ({"num_worker": 2}, "has no option 'num_worker': did you mean 'num_workers'"),
    ],
)
def test_wrong_options_are_errors(options, word):
    with pytest.raises(UsageError, match=word):
        load_digits(**options)


# --- several ranks --------------------------------------------------------------------------------
def _share(folder, kind):
    loader = existing(folder)[kind]()
    fleet.init(is_collective=True)
    got = list(loader)
    return got, len(loader), loader.state_dict()


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_two_ranks_that_create_loaders_before_fleet_init_share_the_epoch(ranks, tmp_path, kind):
    make = kinds(tmp_path)[kind]
    (a, _, state), (b, _, other) = ranks.run(_share, tmp_path, kind)
    assert len(a) == len(b)
    assert state == other
    assert sorted(seen(a + b)) == sorted(seen(make()))
    assert seen(a) == seen(make(replica=(0, 2)))


def _stages(folder):
    loader = existing(folder)["images"]()
    fleet.init(is_collective=True)
    before = labels(loader)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    strategy = fleet.DistributedStrategy(pipeline={"micro_batch": 2})
    fleet.distribute(model, torch.optim.SGD(model.parameters(), 0.1), strategy)
    return before, labels(loader)


def test_the_stages_of_a_pipeline_get_the_same_batches(ranks, tmp_path):
    make = kinds(tmp_path)["images"]
    (a, after_a), (b, after_b) = ranks.run(_stages, tmp_path)
    assert a != b
    alone = make()
    list(alone)
    assert after_a == after_b == labels(alone)


def _resumed(folder, kind, state):
    fleet.init(is_collective=True)
    loader = existing(folder)[kind]()
    loader.load_state_dict(state)
    return list(loader)


def test_two_ranks_resume_where_one_stopped(ranks, tmp_path):
    kind = "samples"
    make = kinds(tmp_path)[kind]
    loader = make()
    steps = iter(loader)
    got = [next(steps), next(steps)]
    a, b = ranks.run(_resumed, tmp_path, kind, loader.state_dict())
    assert sorted(seen(got + a + b)) == sorted(seen(make()))


def test_before_fleet_init_the_launchers_environment_determines_the_share(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert labels(load_digits(50)) == labels(load_digits(50, replica=(1, 3)))


def test_a_loader_can_be_copied_and_listed(tmp_path):
    loader = imagenet_train(images(tmp_path, 6).parent, 4, **SMALL)
    assert seen(copy.deepcopy(loader)) == seen(loader)


def test_every_line_is_read_once_without_negatives(tmp_path):
    lines = varied(23)
    data, vocabulary = digital(tmp_path, lines, packed=[0])
    loader = load_digital_dataset_from_file(data, vocabulary, 64, 32, True, generate_neg_sample=False)
    want = sorted(tuple(map(int, x.split(";")[0].split())) for x in lines)
    assert sorted(original(row) for row in rows(loader)) == want


def test_lists_of_files_and_batches_in_tokens(tmp_path):
    data, vocabulary = digital(tmp_path, varied(10))
    (data / "train.txt").write_text("part0\npart1\n")
    vocabulary.rename(data / "vocab.txt")
    by_tokens = list(digital_train(data, 64, 32))
    assert all(b["src_ids"].numel() <= 64 for b in by_tokens)
    assert {len(b["src_ids"]) for b in digital_train(data, 64, 32, in_tokens=False)} == {2}
    with pytest.raises(UsageError, match="at least max_seq_len"):
        digital_train(data, 16, 32)
