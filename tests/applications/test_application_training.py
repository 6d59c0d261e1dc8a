"""Applications with strategies."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from small_applications import MAKERS, ROWS, batch, flat, make
from torch.utils.flop_counter import FlopCounterMode

from fleetx import StrategyError, UsageError, fleet
from fleetx.comm import session
from rank_pool import RankError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


def distributed(name, declared, *, optimizer=sgd, **options):
    fleet.init()
    model = make(name, **options)
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def trained(name, declared, *, steps=3, optimizer=sgd, **options):
    """Losses, and the final parameters of this rank; each replica takes its share of every batch."""
    model, update = distributed(name, declared, optimizer=optimizer, **options)
    torch.manual_seed(7)
    losses = []
    for step in range(steps):
        full = batch(name, seed=step)
        share = {k: v.chunk(fleet.replica_num())[fleet.replica_index()] for k, v in full.items()}
        losses.append(fleet.forward_backward(share).item())
        update.step()
        update.zero_grad()
    return losses, {k: v.clone() for k, v in model.state_dict().items() if not v.is_meta}


# --- recompute ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MAKERS)
def test_recompute_between_checkpoints_is_bit_exact(name):
    recompute = {"recompute": {"checkpoints": make(name).checkpoints}}
    (plain, before), (recomputed, after) = trained(name, {}), trained(name, recompute)
    assert recomputed == plain
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def flops(name, declared):
    model, _ = distributed(name, declared)
    fed = batch(name)
    with FlopCounterMode(display=False) as count:
        fleet.forward_backward(fed, model=model)
    return count.get_total_flops()


def saved_bytes(name, declared):
    """Bytes that forward saves for backward, without parameters."""
    model, _ = distributed(name, declared)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**batch(name)).loss
    total = sum(size for size, _ in seen.values())
    loss.backward()
    return total


@pytest.mark.parametrize("name", MAKERS)
def test_recompute_adds_flops_and_saves_memory(name):
    recompute = {"recompute": {"checkpoints": make(name).checkpoints}}
    assert flops(name, recompute) > flops(name, {})
    assert saved_bytes(name, recompute) < saved_bytes(name, {})


# --- update rules, and names ----------------------------------------------------------------------
def excluded(name, declared, **options):
    model, optimizer = distributed(name, declared, **options)
    names = [n for n, _ in model.named_parameters()]
    return {names[i] for i in optimizer.param_groups[0]["excluded"]}


def test_lars_excludes_parameters_of_resnet_by_paddles_names():
    by_paddle = excluded("resnet", {"lars": {"exclude_from_weight_decay": ["batch_norm", ".b_0"]}})
    model = make("resnet")
    assert by_paddle == {n for n, p in model.named_parameters() if p.dim() == 1}
    assert excluded("resnet", {"lars": {"exclude_from_weight_decay": ["normalization", "bias"]}}) == by_paddle
    one = excluded("resnet", {"lars": {"exclude_from_weight_decay": ["conv2d_4.w_0"]}})
    assert one == {"resnet.encoder.stages.0.layers.0.shortcut.convolution.weight"}


def test_lamb_excludes_parameters_of_bert_by_paddles_names():
    declared = {"lamb": {"exclude_from_weight_decay": ["layer_norm", ".b_0"]}}
    names = [n for n, _ in make("bert").named_parameters()]
    assert excluded("bert", declared, optimizer=adam) == {n for n in names if "LayerNorm" in n or "bias" in n}
    second = {"lamb": {"exclude_from_weight_decay": ["ffn_fc_1.w_0", "word_embedding"]}}
    expected = {f"bert.encoder.layer.{i}.output.dense.weight" for i in range(3)}
    assert excluded("bert", second, optimizer=adam) == expected | {"bert.embeddings.word_embeddings.weight"}
    with pytest.raises(
        StrategyError, match="'encoder_layer_16' in exclude_from_weight_decay matches no parameter name"
    ):
        excluded("bert", {"lamb": {"exclude_from_weight_decay": ["encoder_layer_16"]}}, optimizer=adam)


def falls(name, declared, *, optimizer=sgd, **options):
    """Does the loss on one batch fall?"""
    model, update = distributed(name, declared, optimizer=optimizer, **options)
    fed, losses = batch(name), []
    for _ in range(12):
        losses.append(fleet.forward_backward(fed, model=model).item())
        update.step()
        update.zero_grad()
    return losses[-1] < 0.9 * losses[0]


def test_resnet_learns_with_amp_recompute_and_lars():
    declared = {
        "amp": {"init_loss_scaling": 1024.0},
        "recompute": {"checkpoints": make("resnet").checkpoints},
        "lars": {"lars_coeff": 0.1, "exclude_from_weight_decay": ["batch_norm", ".b_0"]},
    }
    assert falls("resnet", declared)


def test_bert_learns_with_amp_recompute_and_lamb():
    declared = {
        "amp": {"dtype": "bfloat16"},
        "recompute": {"checkpoints": make("bert").checkpoints},
        "lamb": {"exclude_from_weight_decay": ["layer_norm", ".b_0"]},
    }
    assert falls("bert", declared, optimizer=adam)


@pytest.mark.parametrize("name", ["vgg", "transformer"])
def test_the_others_learn_too(name):
    declared = {"amp": {"dtype": "bfloat16"}, "recompute": {"checkpoints": make(name).checkpoints}}
    assert falls(name, declared, optimizer=adam, dropout=0.0)


# --- several ranks --------------------------------------------------------------------------------
@cache
def reference(name):
    """One rank, without a strategy."""
    return trained(name, {}, dropout=0.0)


def joined(results):
    return {key: value for _, held in results for key, value in held.items()}


@pytest.mark.parametrize("name", ["bert", "transformer"])
def test_two_ranks_equal_one(ranks, name):
    losses, weights = reference(name)
    results = ranks.run(_two, name, {})
    assert [sum(pair) / 2 for pair in zip(*(mine for mine, _ in results), strict=True)] == pytest.approx(losses)
    torch.testing.assert_close(joined(results), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("vgg", "features.5"),
        ("bert", "bert.encoder.layer.1"),
        ("transformer", "encoder.1"),
        ("transformer", "decoder.1"),
    ],
)
def test_a_pipeline_of_two_ranks_equals_one(ranks, name, start):
    losses, weights = reference(name)
    results = ranks.run(_two, name, {"pipeline": {"stages": [start], "micro_batch": 2}})
    for mine, _ in results:
        assert mine == pytest.approx(losses)
    torch.testing.assert_close(joined(results), weights, rtol=1e-4, atol=1e-5)


def _two(name, declared):
    return trained(name, declared, dropout=0.0)


@pytest.mark.parametrize("name", ["vgg", "bert", "transformer"])
def test_a_pipeline_is_cut_automatically(ranks, name):
    losses, _ = reference(name)
    for mine, _ in ranks.run(_two, name, {"pipeline": {"micro_batch": 2}}):
        assert mine == pytest.approx(losses)


DIVIDED = {"sharding": {"sharding_degree": 2}, "pipeline": {"stages": ["bert.encoder.layer.1"], "micro_batch": 2}}


@pytest.mark.parametrize("part", DIVIDED)
def test_a_divided_model_trains_but_save_params_is_an_error(ranks, part, tmp_path):
    losses, _ = reference("bert")
    shares = ranks.run(_divided, {part: DIVIDED[part]}, tmp_path)
    assert [sum(pair) / 2 for pair in zip(*shares, strict=True)] == pytest.approx(losses)
    assert not list(tmp_path.iterdir())


def _divided(declared, folder):
    losses, _ = trained("bert", declared, dropout=0.0)
    with pytest.raises(UsageError, match=r"call fleet\.save\(folder\) on every rank"):
        session.current().find().model.save_params(folder)
    return losses


def test_a_column_of_masked_positions_cannot_be_split_into_micro_batches(ranks):
    with pytest.raises(RankError, match='create the loader with masked="row"'):
        ranks.run(_column_in_pipeline)


def _column_in_pipeline():
    distributed("bert", {"pipeline": {"stages": ["bert.encoder.layer.1"], "micro_batch": 2}})
    fleet.forward_backward(flat(batch("bert", rows=ROWS)))
