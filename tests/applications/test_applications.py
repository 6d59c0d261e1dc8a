"""Applications: sizes, descriptions, names, options, saving and loading."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from small_applications import MAKERS, batch, flat, make

from fleetx import FleetxError, UsageError, applications
from fleetx.applications import Program, Variable
from fleetx.comm.session import current
from fleetx.optim import parameter_names


def on_meta(name, **options):
    with torch.device("meta"):
        return getattr(applications, name)(**options)


# --- sizes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("Resnet50", {}, 25_557_032),
        ("VGG16", {}, 138_357_544),
        ("BertBase", {}, 102_882_442),
        ("BertBase", {"lang": "en"}, 110_106_428),
        ("BertLarge", {"lang": "en"}, 336_226_108),
        ("Bert_base", {}, 110_106_428),
        ("Bert_large", {}, 336_226_108),
    ],
)
def test_the_published_sizes(name, options, count):
    assert sum(p.numel() for p in on_meta(name, **options).parameters()) == count


def test_the_size_of_the_transformer():
    d, f = 512, 2048
    norm, attention, ffn = 2 * d, 4 * d * d, 2 * d * f + f + d
    encoder, decoder = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    count = sum(p.numel() for p in on_meta("Transformer").parameters())
    assert count == 37000 * d + 6 * (encoder + decoder) + 2 * norm


def test_a_transformer_on_meta_is_there_as_a_whole(monkeypatch):
    """linspace as transformers leaves it behind: not among the functions that torch.device applies to."""
    monkeypatch.setattr(torch, "linspace", lambda *args, _real=torch.linspace, **kwargs: _real(*args, **kwargs))
    model = on_meta("Transformer")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize(("name", "blocks"), [("Resnet50", 16), ("VGG16", 5), ("BertBase", 12), ("BertLarge", 24)])
def test_checkpoints_are_the_blocks(name, blocks):
    model = on_meta(name)
    modules = dict(model.named_modules())
    assert len(model.checkpoints) == blocks
    assert all(checkpoint in modules for checkpoint in model.checkpoints)


def test_parameters_have_the_names_of_transformers_and_torchvision():
    from transformers import BertConfig, BertForPreTraining, ResNetConfig, ResNetForImageClassification

    with torch.device("meta"):
        theirs = [ResNetForImageClassification(ResNetConfig()), BertForPreTraining(BertConfig())]
    for ours, other in zip(("Resnet50", "BertBase"), theirs, strict=True):
        assert on_meta(ours).state_dict().keys() == other.state_dict().keys()
    torchvision = [f"features.{i}" for i in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)]
    torchvision += [f"classifier.{i}" for i in (0, 3, 6)]
    assert [*on_meta("VGG16").state_dict()] == [f"{n}.{field}" for n in torchvision for field in ("weight", "bias")]


# --- description ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MAKERS)
def test_descriptions_match_the_outputs(name):
    model = make(name)
    out = model(**batch(name))
    assert out._fields == (model.loss.name, *model.target)
    for variable, value in zip([model.loss, *model.target.values()], out, strict=True):
        assert (variable.shape, variable.dtype) == (tuple(value.shape), value.dtype)
        assert value.requires_grad == (variable == model.loss)
    assert set(batch(name)) <= {v.name for v in model.inputs}


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_matches_the_inputs(name):
    fed = batch(name)
    if name == "bert":  # (batch, length), and columns
        fed |= {key: flat(fed)[key] for key in ("mask_pos", "mask_label")}
    for variable in make(name).inputs:
        if variable.name in fed:
            value = fed[variable.name]
            assert variable.dtype == value.dtype
            assert all(want in (-1, got) for want, got in zip(variable.shape, value.shape, strict=True))


def test_the_old_attributes_and_methods():
    model = make("resnet", data_layout="NHWC")
    assert [(v.name, v.shape) for v in model.inputs] == [("image", (-1, 32, 32, 3)), ("label", (-1, 1))]
    assert list(model.target) == ["acc1", "acc5"]
    assert model.get_loss() == model.loss
    assert (model.main_program(), model.startup_program()) == (model.main_prog, model.startup_prog)
    assert model.main_prog != model.startup_prog
    assert model.loss != make("resnet").loss
    assert [v.name for v in make("bert").inputs] == [
        "src_ids", "pos_ids", "sent_ids", "input_mask", "mask_label", "mask_pos", "labels",
    ]  # fmt: skip


def test_a_variable_knows_its_application_and_a_copy_describes_the_copy():
    model = make("bert")
    assert model.loss.application is model
    twin = copy.deepcopy(model)
    assert twin.loss.application is twin
    assert twin.main_prog.application is twin
    with pytest.raises(AttributeError):
        model.loss.name = "other"


def test_a_program_finds_variables_by_every_name():
    model = make("resnet")
    program = model.main_prog
    assert isinstance(program, Program)
    assert program.variable("acc5") == model.target["acc5"]
    assert program.variable("image") == model.inputs[0]
    weight = program.variable("classifier.1.weight")
    assert isinstance(weight, Variable)
    assert weight == program.variable("fc_0.w_0") == program.variable("linear_0.w_0")
    assert weight.shape == (10, 32)
    with pytest.raises(UsageError, match=r"no variable 'conv2d_0\.w0': did you mean 'conv2d_0\.w_0'\?"):
        program.variable("conv2d_0.w0")


# --- names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MAKERS)
def test_every_parameter_has_its_own_name_of_paddle(name):
    model = make(name)
    listed = model.parameter_list()
    assert [p.torch_name for p in listed] == [n for n, _ in model.named_parameters()]
    assert len({p.name for p in listed}) == len(listed)
    assert not {p.name for p in listed} & {p.torch_name for p in listed}
    for p in listed:
        assert model.get_parameter(p.name) is model.get_parameter(p.torch_name) is dict(model.named_parameters())[
            p.torch_name
        ]  # fmt: skip
        assert p.shape == tuple(model.get_parameter(p.name).shape)


def test_bert_by_the_names_of_paddles_static_bert():
    names = {p.name: p.torch_name for p in on_meta("Bert_large").parameter_list()}
    layer = "bert.encoder.layer.16"
    expected = {
        "word_embedding": "bert.embeddings.word_embeddings.weight",
        "pos_embedding": "bert.embeddings.position_embeddings.weight",
        "sent_embedding": "bert.embeddings.token_type_embeddings.weight",
        "pre_encoder_layer_norm_scale": "bert.embeddings.LayerNorm.weight",
        "encoder_layer_16_multi_head_att_query_fc.w_0": f"{layer}.attention.self.query.weight",
        "encoder_layer_16_multi_head_att_output_fc.b_0": f"{layer}.attention.output.dense.bias",
        "encoder_layer_16_post_att_layer_norm_bias": f"{layer}.attention.output.LayerNorm.bias",
        "encoder_layer_16_ffn_fc_0.w_0": f"{layer}.intermediate.dense.weight",
        "encoder_layer_16_ffn_fc_1.w_0": f"{layer}.output.dense.weight",
        "encoder_layer_16_post_ffn_layer_norm_scale": f"{layer}.output.LayerNorm.weight",
        "pooled_fc.w_0": "bert.pooler.dense.weight",
        "mask_lm_trans_fc.w_0": "cls.predictions.transform.dense.weight",
        "mask_lm_trans_layer_norm_scale": "cls.predictions.transform.LayerNorm.weight",
        "mask_lm_out_fc.b_0": "cls.predictions.bias",
        "next_sent_fc.b_0": "cls.seq_relationship.bias",
    }
    assert {name: names[name] for name in expected} == expected


def test_resnet_is_numbered_in_the_order_of_paddles_program():
    """The convolutions of a block, then its shortcut."""
    names = {p.torch_name: p.name for p in on_meta("Resnet50").parameter_list()}
    block = "resnet.encoder.stages.0.layers.0"
    convolutions = [names[f"{block}.layer.{i}.convolution.weight"] for i in range(3)]
    assert names["resnet.embedder.embedder.convolution.weight"] == "conv2d_0.w_0"
    assert convolutions == ["conv2d_1.w_0", "conv2d_2.w_0", "conv2d_3.w_0"]
    assert names[f"{block}.shortcut.convolution.weight"] == "conv2d_4.w_0"
    assert names[f"{block}.shortcut.normalization.bias"] == "batch_norm_4.b_0"
    assert names["resnet.encoder.stages.0.layers.1.layer.0.convolution.weight"] == "conv2d_5.w_0"
    assert names["classifier.1.bias"] == "fc_0.b_0"
    assert {f"conv2d_{i}.w_0" for i in range(53)} <= set(names.values())
    assert {f"batch_norm_{i}.{field}" for i in range(53) for field in ("w_0", "b_0")} <= set(names.values())


def test_a_models_own_names_replace_the_numbered_ones():
    """In BERT, `fc_1` is the second layer of a feed-forward network, not the second Linear of the model."""
    names = parameter_names.names(make("bert"))
    assert names["bert.encoder.layer.0.output.dense.weight"] == [
        "bert.encoder.layer.0.output.dense.weight",
        "encoder_layer_0_ffn_fc_1.w_0",
    ]
    assert parameter_names.names(torch.nn.Linear(2, 2))["weight"] == ["weight", "linear_0.w_0", "fc_0.w_0"]


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_names_stay_what_they_are_when_a_part_is_compiled(name):
    model = make(name)
    before = [(p.name, p.torch_name, model.get_parameter(p.name)) for p in model.parameter_list()]
    for block in {"bert": ["bert.encoder.layer.0"], "resnet": ["resnet.encoder.stages.0", model.checkpoints[-1]]}[name]:
        owner, _, field = block.rpartition(".")
        setattr(model.get_submodule(owner), field, torch.compile(model.get_submodule(block), backend="eager"))
    after = [(p.name, p.torch_name, model.get_parameter(p.torch_name)) for p in model.parameter_list()]
    assert [x[:2] for x in after] == [x[:2] for x in before]
    assert all(x[2] is y[2] for x, y in zip(before, after, strict=True))
    assert model.main_prog.variable(before[0][0]).torch_name == before[0][1]


def test_last_ignores_applications_that_could_not_be_created():
    model = make("bert")
    for options in ({"lang": "zz"}, {"layer": 2}):
        with pytest.raises(UsageError):
            make("bert", **options)
    assert current().application() is model


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(AttributeError, match=r"no parameter 'batch_norm_0.w0': did you mean 'batch_norm_0\.w_0'\?"):
        make("resnet").get_parameter("batch_norm_0.w0")


# --- options --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Resnet50", {"layer": 3}, "Resnet50 has no option 'layer': did you mean 'layers'?"),
        ("Resnet50", {"zzz": 3}, "its options are data_layout, layers, hidden, image_size, num_classes"),
        ("Resnet50", {"data_layout": "NHCW"}, "data_layout = 'NHCW': must be 'NCHW' or 'NHWC'"),
        ("Resnet50", {"layers": (3, 0)}, r"layers[1] = 0: must be an integer, at least 1"),
        ("Resnet50", {"layers": 3}, "layers = 3: must be a list of integers, one per stage"),
        ("VGG16", {"layers": ()}, "layers = (): must be a list of integers"),
        ("VGG16", {"image_size": 100}, "image_size = 100: must be a multiple of 32"),
        ("VGG16", {"dropout": 1.0}, "dropout = 1.0: must be at least 0 and less than 1"),
        ("BertBase", {"vocabsize": 100}, "did you mean 'vocab_size'?"),
        ("BertBase", {"lang": "zh"}, "lang = 'zh': must be 'ch' or 'en'"),
        ("BertBase", {"hidden": 30, "heads": 4}, "hidden = 30: must be a multiple of heads = 4"),
        ("BertLarge", {"layers": True}, "layers = True: must be an integer"),
        ("Transformer", {"lang": "en"}, "Transformer has no option 'lang'"),
        ("Transformer", {"label_smoothing": -1}, "label_smoothing = -1: must be at least 0"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(FleetxError) as error:
        on_meta(name, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["BertSmall", "Resnet5O"])
def test_an_unknown_application_is_an_error(name):
    with pytest.raises(AttributeError, match=f"fleetx.applications has no '{name}': did you mean"):
        getattr(applications, name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("resnet", {"image": torch.zeros(8, 32, 32, 3)}, r"expects \(-1, 3, 32, 32\)"),
        ("bert", {"src_ids": torch.zeros(8, 13).long()}, "13 words per row, but this BERT was created with"),
        ("bert", {"mask_pos": torch.zeros(3, 1).long()}, "mask_label has 16 entries, but mask_pos has 3"),
        ("bert", {"mask_pos": torch.zeros(4, 4).long()}, "mask_pos has 4 rows, but the batch has 8"),
        ("transformer", {"trg_word": torch.zeros(8, 13).long()}, "13 words per row, but this Transformer was created"),
    ],
)
def test_bad_batches(name, change, message):
    with pytest.raises(UsageError, match=message):
        make(name)(**batch(name) | change)


# --- save and load --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MAKERS)
def test_parameters_and_buffers_are_saved_and_loaded(name, tmp_path):
    model = make(name)
    model(**batch(name)).loss.backward()  # BatchNorm has seen something
    model.save_params(tmp_path / "saved")
    torch.manual_seed(5)
    other = MAKERS[name]()
    other.load_params(str(tmp_path / "saved"))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    model.save_params(tmp_path / "saved")
    assert [p.name for p in (tmp_path / "saved").iterdir()] == ["params.pt"]


def test_parameters_of_another_model_are_an_error_and_change_nothing(tmp_path):
    make("bert").save_params(tmp_path)
    cases = [
        (make("resnet"), "has no 'resnet"),
        (make("bert", layers=4), "has no 'bert.encoder.layer.3"),
        (make("bert", layers=2), "which BertBase with these options does not have"),
        (make("bert", vocab_size=41), r"has shape \(40, 32\), but BertBase with these options needs \(41, 32\)"),
    ]
    for model, message in cases:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match=message):
            model.load_params(tmp_path)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(UsageError, match="pass the folder that was passed to save_params"):
        make("bert").load_params(tmp_path / "elsewhere")


def test_a_part_of_a_model_cannot_be_saved_or_loaded(tmp_path):
    with pytest.raises(UsageError, match=r"call fleet\.save\(folder\) on every rank"):
        on_meta("Resnet50").save_params(tmp_path)
    with pytest.raises(UsageError, match=r"call fleet\.load\(folder\) on every rank"):
        on_meta("Resnet50").load_params(tmp_path)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"Resnet50 needs transformers: pip install 'fleetx\[applications\]'"):
        make("resnet")
    make("vgg")  # needs torch alone
