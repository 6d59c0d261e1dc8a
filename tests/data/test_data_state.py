"""Epochs, states of other data, and ranks whose data differ."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from data_files import digital, images, labels, line, rows, varied
from torch import nn

from fleetx import fleet
from fleetx.data import load_digital_dataset_from_file, load_digits, load_imagenet_from_file, rank_share
from fleetx.errors import UsageError


def shape(i):
    """Lengths for which some negative samples are longer than 20 words."""
    return {"first": 3 + i % 2 * 10, "second": 3 + (i + 1) % 2 * 10}


LINES = [line(i, **shape(i)) for i in range(20)]


# --- epochs ---------------------------------------------------------------------------------------
def at(loader):
    state = loader.state_dict()
    return state["epoch"], state["position"]


@pytest.mark.parametrize("drop_last", [True, False])
def test_after_the_last_batch_the_state_is_the_start_of_the_next_epoch(drop_last):
    loader = load_digits(400, drop_last=drop_last)
    steps = list(zip(loader, (at(loader) for _ in range(9)), strict=False))
    assert [state for _, state in steps][-2:] == ([(0, 800), (1, 0)] if drop_last else [(0, 1200), (1, 0)])
    assert (loader.epoch, loader.position) == (1, 0)
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            assert loader.epoch == 1  # until the loop ends
            break
    assert at(loader) == (2, 0)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_after_a_complete_epoch_another_number_of_ranks_starts_the_next(before, after):
    loader, single = load_digits(300, drop_last=True, replica=(0, before)), load_digits(300, replica=(0, 1))
    list(loader), list(single)
    got = []
    for rank in range(after):
        other = load_digits(300, drop_last=True, replica=(rank, after))
        other.load_state_dict(loader.state_dict())
        assert (other.epoch, other.position) == (1, 0)
        got.append(labels(other))
    together = [batch for step in zip(*got, strict=True) for batch in step]
    assert together == labels(single)[: len(together)]


def test_only_the_epoch_can_be_set():
    loader, other = load_digits(500), load_digits(500)
    epochs = [labels(other) for _ in range(4)]
    loader.set_epoch(2)
    assert loader.epoch == 2
    assert labels(loader) == epochs[2]
    assert labels(loader) == epochs[3]
    loader.set_epoch(0)
    steps = loader()
    assert labels([next(steps)]) == epochs[0][:1]
    other = load_digits(500)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(0)  # its current epoch: stays in the middle
    assert labels(other) == epochs[0][1:]
    loader.set_epoch(0)
    with pytest.raises(UsageError, match="cannot continue: another one was started, or the epoch or state was set"):
        next(steps)
    assert labels(loader) == epochs[0]
    for name in ("epoch", "position", "seed", "shuffle", "drop_last"):
        with pytest.raises(AttributeError):
            setattr(loader, name, 1)
    with pytest.raises(UsageError, match="epoch = -1"):
        loader.set_epoch(-1)


# --- states of other data -------------------------------------------------------------------------
def in_folder(folder, name, lines=LINES):
    (folder / name).mkdir()
    return digital(folder / name, lines, files=1)


@pytest.mark.parametrize("change", ["negatives", "longest", "vocabulary", "words", "labels"])
def test_a_state_of_other_lines_or_samples_is_an_error(tmp_path, change):
    data, vocabulary = in_folder(tmp_path, "a")
    state = load_digital_dataset_from_file(data, vocabulary, 4, 20, generate_neg_sample=False).state_dict()
    options = {"max_seq_len": 64 if change == "longest" else 20, "generate_neg_sample": change == "negatives"}
    if change == "vocabulary":
        vocabulary.write_text(vocabulary.read_text() + "another\n")
    if change == "words":
        data, _ = in_folder(tmp_path, "b", [line(100 + i, **shape(i)) for i in range(20)])
    if change == "labels":
        data, _ = in_folder(tmp_path, "b", [*LINES[:-1], LINES[-1][:-1] + "0"])
    loader = load_digital_dataset_from_file(data, vocabulary, 4, **options)
    with pytest.raises(UsageError, match="other data: a different dataset or length, or different files"):
        loader.load_state_dict(state)


def test_a_state_fits_the_same_data_elsewhere_in_batches_of_another_size(tmp_path):
    first = load_digital_dataset_from_file(*in_folder(tmp_path, "a"), 4, 20)
    next(iter(first))
    other = load_digital_dataset_from_file(*in_folder(tmp_path, "b"), 7, 20, masked="row", cache_dir=tmp_path / "cache")
    other.load_state_dict(first.state_dict())
    assert at(other) == at(first) == (0, 4)


def test_a_state_of_other_images_is_an_error(tmp_path):
    filelist = images(tmp_path, 4)
    state = load_imagenet_from_file(filelist, 2, image_size=8).state_dict()
    load_imagenet_from_file(filelist, 3, image_size=16).load_state_dict(state)
    for text in ("0.JPEG 0\n1.JPEG 1\n2.JPEG 2\n", "0.JPEG 0\n1.JPEG 1\n2.JPEG 2\n3.JPEG 0\n"):
        filelist.write_text(text)
        with pytest.raises(UsageError, match="other data"):
            load_imagenet_from_file(filelist, 2, image_size=8).load_state_dict(state)
    with pytest.raises(UsageError, match="other data"):
        load_digits(phase="val", shuffle=True).load_state_dict(load_digits().state_dict())


@pytest.mark.parametrize(("change", "word"), [({"seed": 1}, "seed = 1"), ({"shuffle": False}, "shuffle = False")])
def test_a_state_of_another_order_is_an_error(change, word):
    loader = load_digits()
    with pytest.raises(UsageError, match=word):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(UsageError, match="not the state of a fleetx loader"):
        loader.load_state_dict({"epoch": 1})


# --- ranks ----------------------------------------------------------------------------------------
FORMS = {
    "replica": {"replica": (0, 1)},
    "everything": {"shard": False},
    "files": {},
    "seed": {},
    "epoch": {},
    "same": {},
}


def _shared(folder):
    """For each form, the number of samples that this rank gets, or an error."""
    fleet.init(is_collective=True)
    rank, results = fleet.worker_index(), {}
    for form, options in FORMS.items():
        data = folder / ("ab"[rank] if form in ("files", "replica", "everything") else "a")
        seed = rank if form == "seed" else 0
        loader = load_digital_dataset_from_file(data / "digital", data / "vocab.txt", 4, 64, seed=seed, **options)
        if form == "epoch" and rank == 1:
            loader.set_epoch(3)
        try:
            results[form] = len(rows(loader))
        except UsageError as error:
            results[form] = str(error)
    return results


def test_ranks_that_share_data_must_have_the_same_data_and_order(ranks, tmp_path):
    in_folder(tmp_path, "a"), in_folder(tmp_path, "b", varied(16))
    first, second = ranks.run(_shared, tmp_path)
    for form, words in {
        "files": r"the ranks have different data \(rank 0 against 1\).*replica=.*shard=False",
        "seed": r"the ranks would split the same data differently \(rank 0 against 1\): seed",
        "epoch": r"the ranks would split the same data differently \(rank 0 against 1\): seed",
    }.items():
        assert first[form] == second[form]
        assert re.match(words, first[form])
    both = [(first[form], second[form]) for form in ("replica", "everything", "same")]
    assert both == [(40, 32), (40, 32), (20, 20)]


def _alone_then_together():
    fleet.init(is_collective=True)
    message, before = "", (rank_share.WARN_AFTER, rank_share.TIMEOUT)
    rank_share.WARN_AFTER = rank_share.TIMEOUT = 0.0
    try:
        if fleet.is_first_worker():
            next(iter(load_digits(100)))
    except UsageError as error:
        message = str(error)
    finally:
        rank_share.WARN_AFTER, rank_share.TIMEOUT = before
    fleet.barrier_worker()
    return message, len(list(load_digits(50))) * fleet.worker_num()


@pytest.mark.slow
def test_a_rank_that_uses_a_shared_loader_alone_learns_which_ranks_it_waits_for(ranks):
    first, _ = ranks.run(_alone_then_together)
    assert "waits for rank 1 to do the same: pass shard=False" in first[0]
    assert first[1] == 30


def _stale():
    fleet.init(is_collective=True)
    loader = load_digits(100)
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        strategy = fleet.DistributedStrategy(pipeline={"micro_batch": 2})
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), 0.1), strategy)
        while_it_lives = len(loader)
        del model, optimizer
        return while_it_lives, len(loader)
    finally:
        gc.enable()


def test_a_deleted_model_does_not_influence_the_shares(ranks):
    assert ranks.run(_stale) == [(15, 8), (15, 8)]


def test_a_state_is_plain_data_at_every_position():
    loader = load_digits(500, "train")
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    assert {type(value) for state in states for value in state.values()} == {int, bool, str}
