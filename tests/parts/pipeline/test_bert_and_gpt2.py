"""BERT and GPT-2 from transformers, unmodified. Their embeddings are tied across stages."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from covering import covering
from fleetx import StrategyError, fleet

STEPS = 5


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=4, n_head=2, vocab_size=50, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS = {"bert": (bert, "bert.encoder.layer"), "gpt2": (gpt2, "transformer.h")}


def data():
    g = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 50, (16, 12), generator=g)
        mask = (torch.arange(12) < torch.randint(4, 13, (16, 1), generator=g)).long()
        yield {"input_ids": ids, "labels": ids, "attention_mask": mask}


def trained(name, declared, dtype=torch.float32):
    fleet.init()
    model = MODELS[name][0]().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))
    losses = []
    for batch in data():
        half = {k: v.chunk(fleet.replica_num())[fleet.replica_index()] for k, v in batch.items()}
        losses.append(fleet.forward_backward(half).item())
        optimizer.step()
        optimizer.zero_grad()
    held = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, held, state


def joined(results):
    total = {}
    for _, held, *_ in results:
        for key, value in held.items():  # tied weights are equal bit for bit on all ranks
            assert torch.equal(total.setdefault(key, value), value), key
    return total


@pytest.mark.parametrize(("name", "mode"), covering(list(MODELS), ["1F1B", "ZBVZeroBubble"], strength=1))
def test_two_ranks_equal_one_and_hold_only_their_stages(ranks, name, mode):
    layers = MODELS[name][1]
    numbers = [2] if mode == "1F1B" else [1, 2, 3]
    config = {"stages": [f"{layers}.{i}" for i in numbers], "micro_batch": 4, "schedule_mode": mode}
    results = ranks.run(trained, name, {"pipeline": config, "clip": {"clip_norm": 0.5}})
    losses, want, size, _ = trained(name, {"clip": {"clip_norm": 0.5}}, torch.float64)
    found = joined(results)
    assert found.keys() == want.keys()
    for key, value in want.items():  # AdamW divides by a square root: values near 0 may get either sign
        torch.testing.assert_close(found[key], value.to(found[key].dtype), rtol=1e-3, atol=2e-4)
    for mine, _, held, state in results:
        # Masked tokens count, so all micro-batches have the same number and the mean is that of the batch.
        assert mine == pytest.approx(losses, rel=1e-4)
        assert held < 0.8 * size / 2  # the reference is in float64, and the embedding is on both ranks
        assert state == 2 * held


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_four_ranks_are_two_pipelines_that_are_cut_automatically(four, name):
    results = four.run(trained, name, {"pipeline": {"degree": 2, "micro_batch": 2}})
    joined(results)
    losses, *_ = trained(name, {}, torch.float64)
    both = [(a + b) / 2 for (a, b) in zip(results[0][0], results[2][0], strict=True)]
    assert both == pytest.approx(losses, rel=1e-4)


def test_a_model_that_recomputes_on_its_own_is_an_error():
    fleet.init()
    model = gpt2()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(StrategyError, match=r"recomputes on its own .*gradient_checkpointing_disable"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(pipeline={"micro_batch": 2}))
