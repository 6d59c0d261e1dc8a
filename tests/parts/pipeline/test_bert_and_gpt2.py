"""BERT and GPT-2 as transformers has them, cut without being rewritten. Their embeddings are tied across stages."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from fleetx import StrategyError, fleet

STEPS = 10


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
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


def joined(results):
    whole = {}
    for _, held in results:
        for key, value in held.items():  # who hold a tied weight hold the same, bit for bit
            assert torch.equal(whole.setdefault(key, value), value), key
    return whole


@pytest.mark.parametrize("mode", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_are_one(ranks, name, mode):
    layers = MODELS[name][1]
    numbers = [2] if mode == "1F1B" else [1, 2, 3]
    config = {"stages": [f"{layers}.{i}" for i in numbers], "micro_batch": 4, "schedule_mode": mode}
    results = ranks.run(trained, name, {"pipeline": config, "clip": {"clip_norm": 0.5}})
    losses, want = trained(name, {"clip": {"clip_norm": 0.5}}, torch.float64)
    found = joined(results)
    assert found.keys() == want.keys()
    for key, value in want.items():  # AdamW divides by its own square root: what is near 0 may go either way
        torch.testing.assert_close(found[key], value.to(found[key].dtype), rtol=1e-3, atol=2e-4)
    for mine, _ in results:
        # Each micro-batch has its own number of tokens: masked ones count, so the means are those of the batch.
        assert mine == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_are_two_pipelines_cut_by_themselves(four, name):
    results = four.run(trained, name, {"pipeline": {"degree": 2, "micro_batch": 2}})
    joined(results)
    losses, _ = trained(name, {}, torch.float64)
    both = [(a + b) / 2 for (a, b) in zip(results[0][0], results[2][0], strict=True)]
    assert both == pytest.approx(losses, rel=1e-4)


def sizes(name):
    fleet.init()
    model = MODELS[name][0]()
    before = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fleet.distribute(
        model, optimizer, fleet.DistributedStrategy(pipeline={"stages": [f"{MODELS[name][1]}.2"], "micro_batch": 2})
    )
    fleet.forward_backward(next(data()))
    optimizer.step()
    held = [p for p in model.parameters() if not p.is_meta]
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    return before, sum(p.nbytes for p in held), state


def test_a_rank_holds_its_stage_alone(ranks):
    results = ranks.run(sizes, "bert")
    for before, held, state in results:
        assert held < 0.7 * before  # the embedding is on both
        assert state == 2 * held


def test_a_model_that_recomputes_by_itself_is_refused():
    fleet.init()
    model = gpt2()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(StrategyError, match=r"recomputes by itself .*gradient_checkpointing_disable"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(pipeline={"micro_batch": 2}))
