"""Losses, compared with plain models that have the same weights."""

from __future__ import annotations

import pytest
import torch
from small_applications import LENGTH, ROWS, batch, flat, make
from torch import nn

EXACT = {"rtol": 0, "atol": 0}


def test_resnet_equals_the_one_of_transformers():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[16, 32], depths=[1, 2])
    config.num_labels = 10
    plain, model, fed = ResNetForImageClassification(config), make("resnet"), batch("resnet")
    plain.load_state_dict(model.state_dict())
    theirs = plain(pixel_values=fed["image"], labels=fed["label"].reshape(-1))
    ours = model(**fed)
    torch.testing.assert_close(ours.loss, theirs.loss, **EXACT)
    ours.loss.backward()
    theirs.loss.backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, **EXACT)


@pytest.mark.parametrize("form", [lambda fed: fed, flat], ids=["rows", "column"])
def test_bert_equals_the_one_of_transformers(form):
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    plain, model, fed = BertForPreTraining(config).eval(), make("bert").eval(), batch("bert")
    plain.load_state_dict(model.state_dict())
    labels = torch.full((ROWS, LENGTH), -100).scatter(1, fed["mask_pos"], fed["mask_label"])
    theirs = plain(
        fed["src_ids"],
        attention_mask=fed["input_mask"][:, :, 0],
        token_type_ids=fed["sent_ids"],
        position_ids=fed["pos_ids"],
        labels=labels,
        next_sentence_label=fed["labels"],
    )
    ours = model(**form(fed))
    torch.testing.assert_close(ours.loss, theirs.loss)
    guessed = theirs.seq_relationship_logits.argmax(-1)
    assert ours.next_sent_acc == (guessed == fed["labels"][:, 0]).float().mean()
    ours.loss.backward()
    theirs.loss.backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-6)


def test_rows_can_have_different_numbers_of_masked_words():
    model, fed = make("bert").eval(), batch("bert")
    column = flat(fed)
    kept = torch.arange(2 * ROWS) != 5  # the second of row 2
    column |= {key: column[key][kept] for key in ("mask_pos", "mask_label")}
    fed["mask_label"][2, 1], fed["mask_pos"][2, 1] = -100, 0
    torch.testing.assert_close(model(**fed), model(**column), rtol=1e-6, atol=1e-6)


def test_vgg_equals_its_layers_in_sequence():
    model, fed = make("vgg").eval(), batch("vgg")
    x = fed["image"]
    for stage in (["features.0"], ["features.3", "features.5"]):
        for name in stage:
            layer = model.get_submodule(name)
            x = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1).relu()
        x = nn.functional.max_pool2d(x, 2)
    x = x.flatten(1)
    for name, last in (("classifier.0", False), ("classifier.3", False), ("classifier.6", True)):
        layer = model.get_submodule(name)
        x = nn.functional.linear(x, layer.weight, layer.bias)
        x = x if last else x.relu()
    expected = nn.functional.cross_entropy(x, fed["label"][:, 0])
    torch.testing.assert_close(model(**fed).loss, expected, **EXACT)


@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_accuracies_count_labels_in_the_top_k(name):
    model, fed = make(name).eval(), batch(name)
    out, logits = model(**fed), model.logits(fed["image"])
    order = logits.argsort(dim=1, descending=True).tolist()
    for k, got in ((1, out.acc1), (5, out.acc5)):
        assert got == sum(label in best[:k] for label, best in zip(fed["label"], order, strict=True)) / ROWS
    assert make(name, num_classes=3)(image=fed["image"], label=torch.zeros(ROWS, dtype=torch.long)).acc5 == 1


@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_both_layouts_give_the_same_results(name):
    first, last, fed = make(name).eval(), make(name, data_layout="NHWC").eval(), batch(name)
    turned = fed | {"image": fed["image"].permute(0, 2, 3, 1).contiguous()}
    torch.testing.assert_close(last(**turned), first(**fed), rtol=1e-5, atol=1e-5)
    weight = last.get_parameter("conv2d_0.w_0")
    assert weight.is_contiguous(memory_format=torch.channels_last)


# --- the Transformer, compared with torch's layers ------------------------------------------------
def copy_attention(theirs, ours):
    theirs.in_proj_weight.data = torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]).detach()
    theirs.out_proj.weight.data = ours.output.weight.detach()


def torch_transformer(model):
    """nn.Transformer with the same weights; its additional biases are 0."""
    options = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "norm_first": True}
    plain = nn.Transformer(16, 2, 2, 2, **options).eval()
    for side, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        for theirs, ours in zip(getattr(plain, side).layers, layers, strict=True):
            copy_attention(theirs.self_attn, ours.attention)
            pairs = [(theirs.linear1, ours.widen), (theirs.linear2, ours.narrow), (theirs.norm1, ours.norm_self)]
            if side == "decoder":
                copy_attention(theirs.multihead_attn, ours.cross)
                pairs += [(theirs.norm2, ours.norm_cross), (theirs.norm3, ours.norm_ffn)]
            else:
                pairs += [(theirs.norm2, ours.norm_ffn)]
            for a, b in pairs:
                a.load_state_dict(b.state_dict())
        getattr(plain, side).norm.load_state_dict(getattr(model, f"{side}_norm").state_dict())
    return plain


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_transformer_equals_torchs():
    model, fed = make("transformer").eval(), batch("transformer")
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(p)
    angles = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(8) / 7)
    encoding = torch.cat([angles.sin(), angles.cos()], 1)
    source, target = (model.src.table(fed[key]) * 4 + encoding[: fed[key].shape[1]] for key in ("src_word", "trg_word"))
    causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
    out = torch_transformer(model)(source, target, tgt_mask=causal)
    logits = (out @ model.src.table.weight.T).transpose(1, 2)
    expected = nn.functional.cross_entropy(logits, fed["lbl_word"], label_smoothing=0.1)
    result = model(**fed)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.sum_cost, expected.detach() * ROWS * (LENGTH - 1))
    assert result.token_num == ROWS * (LENGTH - 1)


def test_padding_does_not_count():
    """Biases hide it from attention, weights from the loss."""
    model, fed = make("transformer").eval(), batch("transformer")
    source, target = 9, 7
    short = {"src_word": fed["src_word"][:, :source]}
    short |= {key: fed[key][:, :target] for key in ("trg_word", "lbl_word")}
    hidden = torch.zeros(ROWS, 1, 1, LENGTH).index_fill(3, torch.arange(source, LENGTH), -1e9)
    length = LENGTH - 1
    filled = fed | {
        "src_pos": torch.arange(LENGTH).expand(ROWS, LENGTH)[:, :, None],
        "trg_pos": torch.arange(length).expand(ROWS, length),
        "src_slf_attn_bias": hidden.expand(ROWS, 2, LENGTH, LENGTH),
        "trg_slf_attn_bias": torch.full((length, length), -1e9).triu(1).expand(ROWS, 2, length, length),
        "trg_src_attn_bias": hidden,
        "lbl_weight": (torch.arange(length) < target).float().expand(ROWS, length),
    }
    torch.testing.assert_close(model(**filled), model(**short))
    column = {key: filled[key].reshape(-1, 1) for key in ("lbl_word", "lbl_weight")}  # Paddle's shape
    torch.testing.assert_close(model(**filled | column), model(**filled), **EXACT)
