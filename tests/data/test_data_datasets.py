"""`fleet.loader`: any map-style dataset, shared between ranks, in a seeded order, resumed in the middle of an epoch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fleetx import fleet
from fleetx.errors import UsageError


class Numbers(Dataset):
    """Sample i is (i, something random)."""

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return i, torch.rand(()).item() + random.random() + np.random.rand()


class AtOnce(Numbers):
    def __getitems__(self, numbers):
        return [(i, 0.0) for i in numbers]


def seen(loader):
    return [batch[0].tolist() for batch in loader]


def by_ranks(ranks, state=None, size=4, **options):
    """What each rank gets, as steps: [[rank 0's batch, rank 1's batch], ...]."""
    got = []
    for rank in range(ranks):
        loader = fleet.loader(Numbers(), size, replica=(rank, ranks), **options)
        if state is not None:
            loader.load_state_dict(state)
        got.append(seen(loader))
    return [list(step) for step in zip(*got, strict=True)]


def flat(steps):
    return [i for step in steps for batch in step for i in batch]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_is_read_once_in_equally_many_steps(ranks):
    steps = by_ranks(ranks)
    assert sorted(flat(steps)) == list(range(23))
    assert flat(steps) == flat(by_ranks(1))  # the same order, whoever reads it
    assert flat(by_ranks(1, shuffle=False)) == list(range(23))
    full = by_ranks(ranks, drop_last=True)
    assert all(len(batch) == 4 for step in full for batch in step)


def test_epochs_and_seeds_have_orders_of_their_own():
    loader = fleet.loader(Numbers(), 4)
    first, second = seen(loader), seen(loader)
    assert first != second
    assert seen(fleet.loader(Numbers(), 4, seed=1)) != first
    again = fleet.loader(Numbers(), 4)
    again.set_epoch(1)
    assert seen(again) == second


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_other_ranks_resume_in_the_middle_of_an_epoch_without_losing_or_repeating_a_sample(before, after):
    loaders = [fleet.loader(Numbers(47), 4, replica=(rank, before)) for rank in range(before)]
    running = [iter(loader) for loader in loaders]
    read = [i for _ in range(2) for batches in running for i in next(batches)[0].tolist()]
    state = loaders[0].state_dict()
    assert all(loader.state_dict() == state for loader in loaders)
    rest = []
    for rank in range(after):
        loader = fleet.loader(Numbers(47), 4, replica=(rank, after))
        loader.load_state_dict(state)
        rest.append(seen(loader))
    assert len({len(batches) for batches in rest}) == 1
    assert read + flat(zip(*rest, strict=True)) == flat([seen(fleet.loader(Numbers(47), 4))])


def drawn(loader):
    return {i: value for numbers, values in loader for i, value in zip(numbers.tolist(), values.tolist(), strict=True)}


def test_what_a_sample_draws_depends_on_its_epoch_and_number_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = fleet.loader(Numbers(), 4)
    first, second = drawn(loader), drawn(loader)
    assert torch.equal(torch.get_rng_state(), before[0])  # the training draws as if there were no loader
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert all(first[i] != second[i] for i in first)
    torch.manual_seed(4)
    mine = [drawn(fleet.loader(Numbers(), 5, replica=(rank, 2))) for rank in range(2)]
    assert mine[0] | mine[1] == first
    workers = fleet.loader(Numbers(), 4, num_workers=2)
    assert drawn(workers) == first
    assert drawn(workers) == second


def test_samples_may_be_fetched_together_and_collated_by_a_function():
    assert seen(fleet.loader(AtOnce(), 4)) == seen(fleet.loader(Numbers(), 4))
    for batch in fleet.loader(Numbers(), 4, collate_fn=lambda samples: [str(i) for i, _ in samples]):
        assert all(isinstance(text, str) for text in batch)


def test_a_loader_has_the_dataset_and_batch_size_that_scripts_print():
    dataset = Numbers()
    loader = fleet.loader(dataset, 4)
    assert loader.dataset is dataset
    assert (len(loader.dataset), loader.batch_size, len(loader)) == (23, 4, 6)


def test_batches_keep_the_form_that_the_dataset_gives_them():
    (x, y), *_ = fleet.loader(TensorDataset(torch.arange(6).float(), torch.arange(6)), 3, shuffle=False)
    assert (x.tolist(), y.tolist()) == ([0, 1, 2], [0, 1, 2])
    named = [{"a": torch.tensor(i), "b": str(i)} for i in range(4)]  # a list is map-style, too
    (batch,) = fleet.loader(named, 4, shuffle=False)
    assert type(batch) is dict
    assert batch["b"] == ["0", "1", "2", "3"]
    (tensor,) = fleet.loader(torch.arange(4), 4, shuffle=False, device="meta")
    assert tensor.is_meta


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fleet.loader(Stream(), 2), r"Stream is not map-style.*fleet\.join\(DataLoader"),
        (lambda: fleet.loader(iter([1]), 2), "is not map-style"),
        (lambda: fleet.loader(DataLoader([1, 2]), 2), "pass its dataset to fleet.loader"),
        (lambda: fleet.loader([1, 2], 0), "batch_size = 0: must be an integer"),
        (lambda: fleet.loader([1, 2], 1, sampler=None), "a loader of a dataset has no option 'sampler'"),
        (lambda: fleet.loader([1, 2], 1, on_error="skip"), "is not supported here"),
        (lambda: fleet.loader(Numbers(5), 2).load_state_dict(fleet.loader(Numbers(6), 2).state_dict()), "other data"),
    ],
)
def test_what_cannot_be_loaded_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


# --- in a training --------------------------------------------------------------------------------
def _trained(size):
    """One epoch of 22 samples; the last batches are smaller."""
    fleet.init()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(22, 3, generator=g, dtype=torch.float64) for _ in range(2)))
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = []
    for x, y in fleet.loader(data, size // fleet.worker_num()):
        fleet.weight(len(x))
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(x))
    return model.weight.detach(), sizes


def test_ranks_with_smaller_last_batches_equal_one_process(ranks):
    expected, whole = _trained(8)
    found = ranks.run(_trained, 8)
    assert [a + b for a, b in zip(*(sizes for _, sizes in found), strict=True)] == whole == [8, 8, 6]
    for weight, _ in found:
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def _resumed(folder, stop):
    fleet.init()
    data = TensorDataset(torch.arange(40.0)[:, None])
    model = nn.Linear(1, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    loader = fleet.loader(data, 4)
    read = []
    batches = (batch for _ in range(9) for batch in loader)
    for _ in fleet.checkpoints(folder, every=1, loader=loader, steps=stop):
        (x,) = next(batches)
        read += x.flatten().int().tolist()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return read


def test_checkpoints_keep_the_place_for_another_number_of_ranks(ranks, tmp_path):
    first = [i for read in ranks.run(_resumed, tmp_path, 3) for i in read]
    second = _resumed(tmp_path, 7)
    assert sorted(first + second) == list(range(40))
