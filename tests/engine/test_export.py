"""`fleet.export`: other programs read the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx import UsageError, fleet
from training import adamw, net


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("none", torch.empty(0, 2, dtype=torch.bfloat16))
        self.register_buffer("kept_out", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.last(self.first(x))


def exported(make, declared, folder):
    fleet.init()
    model = make()
    want = {k: v.clone() for k, v in model.state_dict().items()}
    fleet.distribute(model, adamw(model), fleet.DistributedStrategy(**declared))
    fleet.export(folder)
    return want


def test_safetensors_reads_every_name_also_of_tied_weights_and_empty_tensors(tmp_path):
    from safetensors.torch import load_file

    want = exported(Tied, {}, tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    Tied().load_state_dict(found)


@pytest.mark.parametrize(
    "declared",
    [{}, {"sharding": {"sharding_degree": 2, "stage": 3}}, {"pipeline": {"stages": ["2"], "micro_batch": 2}}],
)
def test_ranks_write_it_together(ranks, tmp_path, declared):
    from safetensors.torch import load_file

    want = ranks.run(exported, net, declared, tmp_path / "model")[0]
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), want, rtol=0, atol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_from_pretrained_reads_a_transformers_model(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    fleet.init()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8))
    fleet.distribute(model, adamw(model))
    fleet.export(tmp_path / "gpt")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt")
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_inside_a_merge_window_it_is_refused(tmp_path):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"call fleet.flush\(\) first"):
        fleet.export(tmp_path / "model")


def test_what_else_is_in_the_folder_stays(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("mine")
    (folder / "model.safetensors").write_text("an older one")
    exported(net, {}, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert (folder / "tokenizer.json").read_text() == "mine"
    assert (folder / "model.safetensors").stat().st_size > 100
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_file_in_the_place_of_the_folder_is_refused_and_stays(tmp_path):
    (tmp_path / "hf").write_text("mine")
    with pytest.raises(UsageError, match=r"is a file, but fleet.export writes a folder"):
        exported(net, {}, tmp_path / "hf")
    assert (tmp_path / "hf").read_text() == "mine"
