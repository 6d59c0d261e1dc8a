"""Models and optimizers that sharding must take as they are, or name in one clear error."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributions import Normal
from torch.nn.functional import linear

from fleetx import StrategyError, UsageError, fleet
from fleetx.comm import alarm

O = torch.optim
SAME = {"rtol": 1e-12, "atol": 1e-12}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def sgd(model):
    return O.SGD(model.parameters(), lr=0.1)


def inputs(shape=(4, 6)):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3)]


def whole(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in model.state_dict().items()}


def mean_square(model, x):
    return model(x).square().mean()


def train(model, o, loss=mean_square, shape=(4, 6), ranks=1, rank=0):
    for x in inputs(shape):
        loss(model, x.chunk(ranks)[rank]).backward()
        o.step()
        o.zero_grad()
    return whole(model)


def armed(make=net, optimizer=sgd, setting=None, **more):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(sharding=setting or True, **more))


def sharded(make, optimizer, loss, shape, setting=None, more=None):
    model, o = armed(make, optimizer, setting, **(more or {}))
    return train(model, o, loss, shape, fleet.worker_num(), fleet.worker_index())


def equals_one_rank(ranks, make=net, optimizer=sgd, loss=mean_square, shape=(4, 6), setting=None, **more):
    model = make()
    want = train(model, optimizer(model), loss, shape)
    for found in ranks.run(sharded, make, optimizer, loss, shape, setting, more):
        torch.testing.assert_close(found, want, **SAME)


def refused(make, optimizer, setting=None, more=None):
    with pytest.raises((StrategyError, UsageError)) as error:
        armed(make, optimizer, setting, **(more or {}))
    return str(error.value)


# --- optimizers -------------------------------------------------------------------------------------
def adagrad(model):
    """Has state before its first step."""
    return O.Adagrad(model.parameters(), initial_accumulator_value=0.5)


def stepped(model):
    o = O.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    o.step()
    o.zero_grad()
    return o


@pytest.mark.parametrize("optimizer", [adagrad, stepped], ids=lambda f: f.__name__)
def test_the_state_of_an_optimizer_is_divided_too(ranks, optimizer):
    equals_one_rank(ranks, optimizer=optimizer)


def adafactor(model):
    return O.Adafactor(model.parameters())


def rprop(model):
    return O.Rprop(model.parameters())


def fused_sgd(model):
    return O.SGD(model.parameters(), lr=0.1, fused=True)


def fused_adagrad(model):
    return O.Adagrad(model.parameters(), fused=True)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (adafactor, "Adafactor on shards is not supported yet in torch: use another optimizer"),
        (rprop, "Rprop on shards is not supported yet in torch: use another optimizer"),
        (fused_sgd, "SGD(fused=True) on shards is not supported yet in torch: remove fused=True"),
        (fused_adagrad, "Adagrad(fused=True) on shards is not supported yet in torch: remove fused=True"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_optimizers_that_need_whole_tensors_are_named(ranks, optimizer, message):
    for text in ranks.run(refused, net, optimizer):
        assert message in text


# --- models -----------------------------------------------------------------------------------------
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.body(x) * self.scale


def test_a_scalar_parameter_is_named(ranks):
    for text in ranks.run(refused, Scaled, sgd):
        assert "cannot divide the scalar parameter 'scale': give it the shape (1,)" in text


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.none = nn.Embedding(6, 3, sparse=True), nn.Parameter(torch.zeros(0, 3))


def test_sparse_gradients_and_empty_parameters_are_named(ranks):
    for text in ranks.run(refused, Embedded, sgd):
        assert "sharding with the sparse gradients of 'table' is not supported yet: set sparse=False there" in text
        assert "sharding of the empty parameter 'none' of shape (0, 3) is not supported yet in torch: remove it" in text


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.first(x.double()).float())


def test_several_dtypes_in_a_segment_are_named(ranks):
    for text in ranks.run(refused, TwoDtypes, sgd):
        assert "'first.weight' is torch.float64 and 'last.weight' is torch.float32, but torch gathers them" in text


def test_several_dtypes_in_segments_of_their_own(ranks):
    for shards, expected in ranks.run(two_dtypes):
        torch.testing.assert_close(shards, expected)


def two_dtypes():
    fleet.init()
    x, results = torch.ones(4, 6), []
    for settings in ({"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["first"]}, None):
        model, strategy = TwoDtypes(), fleet.DistributedStrategy(sharding=settings or False)
        model, optimizer = fleet.distribute(model, sgd(model), strategy)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({n: (p.full_tensor() if settings else p).detach() for n, p in model.named_parameters()})
    return results


def convolutional():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()
    return made.to(memory_format=torch.channels_last)


def test_channels_last(ranks):
    equals_one_rank(ranks, make=convolutional, shape=(4, 3, 6, 6))


def attention():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()


@pytest.mark.parametrize("stage", [1, 3])
def test_attention_that_is_larger_than_a_segment(ranks, stage):
    """It uses the parameters of its out_proj without calling it."""
    setting = {"stage": stage, "segment_broadcast_MB": 0.001}
    equals_one_rank(ranks, make=attention, shape=(4, 3, 8), setting=setting)


class Borrowing(nn.Module):
    """Uses the weight of a module that it does not call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own, self.other = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return linear(self.own(x), self.other.weight)


def borrowed():
    model, _ = armed(Borrowing, sgd, {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["other"]})
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 6))
    return error.value.__notes__


def test_a_segment_that_is_not_called_is_explained(ranks):
    for (note,) in ranks.run(borrowed):
        assert "uses a parameter of another segment" in note
        assert "segment_anchors" in note


def called_alone():
    """As an error that leaves the script: a module of the model, which is no segment."""
    model, _ = armed(net)
    with pytest.raises(RuntimeError) as error:
        model[0](inputs()[0])
    alarm.add_hint(error.value)
    alarm.add_hint(error.value)
    return error.value.__notes__


def test_a_module_that_is_called_alone_is_explained(ranks):
    for (note,) in ranks.run(called_alone):
        assert "call the model, not one of its modules" in note
        assert "register_fsdp_forward_method(model, 'method')" in note


class Remembering(nn.Module):
    """Makes its hidden state from a weight, as the word_language_model of pytorch/examples does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)
        self.double()

    def init_hidden(self, n):
        return next(self.parameters()).new_zeros(1, n, 5)

    def forward(self, x, hidden):
        out, hidden = self.cell(x, hidden)
        return self.head(out), hidden


def remembered(model, x):
    out, _ = model(x, hidden=model.init_hidden(len(x)))
    return out.square().mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_input_that_is_made_from_a_weight(ranks, stage):
    setting = {"stage": stage, "segment_broadcast_MB": 0.0005}
    equals_one_rank(ranks, make=Remembering, loss=remembered, shape=(4, 2, 6), setting=setting)


class Hiding(nn.Module):
    """Returns an object in which FSDP does not find the tensors, at which its backward would begin."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return Normal(self.net(x), 1.0)


def hidden():
    model, _ = armed(Hiding)
    with pytest.raises(UsageError) as error:
        model(inputs()[0])
    return str(error.value)


def test_an_output_that_hides_its_tensors_is_an_error(ranks):
    for message in ranks.run(hidden):
        assert "the model returns a Normal, and the strategy cannot see the gradient of its loc" in message


def reads_whole_weights(model, x):
    weights = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return model(x).square().mean() + 0.1 * sum(p.square().sum() for p in weights)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_that_reads_whole_weights(ranks, stage):
    equals_one_rank(ranks, loss=reads_whole_weights, setting={"stage": stage})


def uses_whole_weights(model, x):
    """What a rank's data do to the weight differs between ranks."""
    weight = model[2].weight
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return model(x).square().mean() + (x[:, :3] @ weight).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_that_uses_whole_weights_on_data(ranks, stage):
    """torch alone would keep this rank's part of this rank's gradient."""
    equals_one_rank(ranks, loss=uses_whole_weights, setting={"stage": stage})


def reads_shards(plain):
    model, _ = armed()
    loss = model(inputs()[0]).square().mean() + sum(p.square().sum() for p in model.parameters())
    with pytest.raises(UsageError) as error:
        loss.backward() if plain else fleet.backward(loss)
    return str(error.value)


@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "fleet.backward"])
def test_a_loss_that_reads_shards_is_told_to_read_whole_weights(ranks, plain):
    for text in ranks.run(reads_shards, plain):
        assert "use p.full_tensor()" in text


# --- settings ---------------------------------------------------------------------------------------
def test_all_ranks_by_default(four):
    assert four.run(shard_count) == [4] * 4


def shard_count():
    model, _ = armed()
    return next(model.parameters()).device_mesh.size()


def explained(more):
    armed(**more)
    return str(fleet.explain())


def test_settings_of_data_parallelism_without_effect_are_named(ranks):
    for text in ranks.run(explained, {"fuse_grad_size_in_MB": 8}):
        assert "fuse_grad_size_in_MB has no effect under sharding" in text
    for text in ranks.run(explained, {"fuse_all_reduce_ops": False}):
        assert "fuse_all_reduce_ops has no effect under sharding" in text


# --- copies and files -------------------------------------------------------------------------------
def adam(model):
    return O.Adam(model.parameters(), lr=0.01)


def torch_saves():
    """Of the model's state, of the optimizer's, and of the model."""
    model, o = armed(optimizer=adam)
    mean_square(model, inputs()[0]).backward()
    o.step()
    messages = []
    for what in (model.state_dict(), o.state_dict(), model):
        with pytest.raises(UsageError) as error:
            torch.save(what, io.BytesIO())
        messages.append(str(error.value))
    file = io.BytesIO()
    torch.save(whole(model), file)  # whole tensors can be saved
    model.load_state_dict(model.state_dict())
    o.load_state_dict(copy.deepcopy(o.state_dict()))
    plain, o = fleet.release(model)
    torch.save([plain, plain.state_dict(), o.state_dict()], file)
    return messages


def test_torch_save_does_not_write_a_part_of_each_tensor(ranks):
    for messages in ranks.run(torch_saves):
        assert all("use fleet.save(folder) on every rank" in text for text in messages)


def averaged(model, o, own, rank=0, ranks=1):
    """A moving average by hand, and one by torch, on a copy made after the first step."""
    outputs = []
    for x in inputs():
        mean_square(model, x.chunk(ranks)[rank]).backward()
        o.step()
        o.zero_grad()
        if not outputs:
            mean, by_torch = copy.deepcopy(model), own(model)
        with torch.no_grad():
            for a, b in zip(mean.parameters(), model.parameters(), strict=True):
                a.mul_(0.5).add_(b, alpha=0.5)
        by_torch.update_parameters(model)
        with torch.no_grad():
            outputs += [mean(x), by_torch(x)]
    return outputs, whole(mean), whole(by_torch.module), whole(model)


def moving(model):
    return O.swa_utils.AveragedModel(model, multi_avg_fn=O.swa_utils.get_ema_multi_avg_fn(0.9))


def averages(setting, own):
    model, o = armed(setting=setting)
    return averaged(model, o, own, fleet.worker_index(), fleet.worker_num())


@pytest.mark.parametrize("own", [O.swa_utils.AveragedModel, moving], ids=["swa", "ema"])
@pytest.mark.parametrize(
    "setting",
    [{"stage": 1}, {"stage": 3, "sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "2"]}],
    ids=["stage 1", "segments"],
)
def test_averages_of_weights_on_a_copy(ranks, setting, own):
    model = net()
    want = averaged(model, sgd(model), own)
    for found in ranks.run(averages, setting, own):
        torch.testing.assert_close(found, want, **SAME)


# --- parameters without a gradient ------------------------------------------------------------------
class Branch(nn.Module):
    """Rows that are marked take another way; `never` takes none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        marked = x[:, 0] > 100
        out = self.a(x)
        return out + self.b(x) * marked[:, None] if marked.any() else out


def branch():
    return Branch().double()


def marked(model, x):
    """Rank 0 has the first half of the batch."""
    first = torch.equal(x[0], next(i for i in inputs() if (i == x[0]).all(1).any())[0])
    x = x.clone()
    x[0, 0] = 200.0 if first else x[0, 0]
    return model(x).square().mean()


def decaying(model):
    return O.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_branch_that_one_rank_alone_uses(ranks, stage):
    """A parameter that no rank uses has no gradient, so it does not decay."""
    setting = {"stage": stage, "segment_broadcast_MB": 1e-5}
    equals_one_rank(ranks, branch, decaying, marked, setting=setting, find_unused_parameters=True)


def branch_without_the_switch():
    model, _ = armed(branch)
    with pytest.raises(UsageError) as error:
        marked(model, inputs()[0].chunk(2)[fleet.worker_index()]).backward()
    return str(error.value)


def test_without_find_unused_parameters_it_is_named(ranks):
    for text in ranks.run(branch_without_the_switch):
        assert "'b.weight' got a gradient only on rank 0" in text
        assert "set strategy.find_unused_parameters = True" in text
