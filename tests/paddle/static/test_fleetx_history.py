"""What scripts of FleetX's history use: names, signatures and defaults of its public interface."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch
from small_applications import batch, make
from static_models import losses, minimized, optimizer_of, started

import fleetx
from fleetx import UsageError, fleet
from fleetx.comm import notices
from fleetx.errors import StrategyError
from fleetx.paddle.api import fleet as paddle_fleet
from fleetx.paddle.api import fluid, optimizer
from fleetx.paddle.api.fluid.incubate.fleet import collective


@pytest.fixture
def said(monkeypatch, capsys):
    monkeypatch.setattr(notices, "_said", set())
    return lambda: capsys.readouterr().err


# --- Fleet 1.x ----------------------------------------------------------------------------------------
def test_the_strategy_of_fleet_1_means_what_that_of_fleet_2_means():
    old = collective.DistributedStrategy()
    assert (old.mode, old.collective_mode, old.use_amp, old.forward_recompute) == ("nccl2", None, False, False)
    execution = fluid.ExecutionStrategy()
    execution.num_threads = 2
    old.exec_strategy, old.fuse_bn_act_ops, old.nccl_comm_num = execution, True, 3
    old.mode, old.collective_mode = "collective", "grad_allreduce"
    old.use_amp, old.amp_loss_scaling = True, 128
    old.forward_recompute, old.recompute_checkpoints = True, ["a", make("resnet").target["acc1"]]
    new = fleet.DistributedStrategy(
        execution_strategy={"num_threads": 2},
        build_strategy={"fuse_bn_act_ops": True},
        nccl_comm_num=3,
        amp={"init_loss_scaling": 128.0},
        recompute={"checkpoints": ["a", "acc1"]},
    )
    assert old.declared() == new.declared() | {"localsgd": False}
    assert (old.exec_strategy.num_threads, old.amp_loss_scaling, old.fuse_bn_act_ops) == (2, 128.0, True)


def test_local_sgd_of_fleet_1_is_localsgd():
    old = collective.DistributedStrategy()
    old.collective_mode = "local_sgd"
    assert old.use_local_sgd
    assert old.localsgd


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("mode", "PS", "parameter servers are not supported"), ("use_dist_fc", True, "fleetx supports False")],
)
def test_what_fleet_1_could_and_this_cannot_is_an_error(name, value, says):
    with pytest.raises(StrategyError, match=says):
        setattr(collective.DistributedStrategy(), name, value)


def test_the_programs_of_fleet_are_the_default_ones():
    model = minimized()
    assert collective.fleet is paddle_fleet
    assert paddle_fleet.main_program == model.main_prog
    assert paddle_fleet.startup_program == model.startup_prog


# --- the strategy ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["elastic", "a_sync", "tensor_parallel", "asp", "qat"])
def test_a_switch_that_is_off_asks_for_nothing(name):
    strategy = paddle_fleet.DistributedStrategy()
    setattr(strategy, name, False)
    assert getattr(strategy, name) is False
    assert strategy == fleet.DistributedStrategy()
    for on in (paddle_fleet.DistributedStrategy(), fleet.DistributedStrategy()):
        with pytest.raises(StrategyError):
            setattr(on, name, True)
    with pytest.raises(StrategyError):
        setattr(fleet.DistributedStrategy(), name, False)  # a new script has no reason to say so


def test_a_strategy_goes_through_prototxt(tmp_path):
    strategy = paddle_fleet.DistributedStrategy(
        amp={"init_loss_scaling": 1024.0, "custom_black_list": ["softmax"]},
        gradient_merge={"k_steps": 4, "avg": False},
        lars={"exclude_from_weight_decay": ["bn", ".b_0"]},
        nccl_comm_num=2,
    )
    strategy.save_to_prototxt(tmp_path / "s.prototxt")
    assert (
        "gradient_merge: true\ngradient_merge_configs {\n  k_steps: 4\n  avg: false\n}\n"
        in (tmp_path / "s.prototxt").read_text()
    )
    read = paddle_fleet.DistributedStrategy()
    read.load_from_prototxt(tmp_path / "s.prototxt")
    assert read == strategy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ampp: true", "did you mean 'amp'"),
        ("amp_configs { init_loss_scaling: many }", "'many' is neither a number"),
        ("amp_configs {", "a closing brace is missing"),
        ("amp true", "must be followed by a value"),
        ("amp", "must be followed by a value"),
        ('amp: "', "line 1: is not Protobuf's text format"),
    ],
)
def test_a_wrong_prototxt_is_an_error_with_its_file(tmp_path, text, says):
    (tmp_path / "s").write_text(text)
    with pytest.raises(StrategyError, match=says) as error:
        paddle_fleet.DistributedStrategy().load_from_prototxt(tmp_path / "s")
    assert str(tmp_path) in str(error.value)


# --- notices instead of errors, for what Paddle lets pass ---------------------------------------------------
def test_a_pattern_without_a_match_is_left_out_aloud(said):
    declared = {"lars": {"exclude_from_weight_decay": ["batch_norm", "nothing_like_it"]}}
    model = minimized(declared=declared)
    text = "'nothing_like_it' in lars_configs['exclude_from_weight_decay']"
    assert f"{text} has no effect: no parameter has it in its name" in said()
    fluid.Executor().run(model.startup_prog)
    assert text in str(fleet.explain(model=model))
    plain = make("resnet")
    with pytest.raises(StrategyError, match="matches no parameter name"):
        fleet.distribute(plain, torch.optim.SGD(plain.parameters(), 0.1, 0.9), fleet.DistributedStrategy(**declared))


def test_a_decay_beside_lars_is_left_out_aloud(said):
    decayed = fluid.optimizer.Momentum(0.01, 0.9, regularization=fluid.regularizer.L2Decay(0.1))
    found = losses(*started(described=decayed, declared={"lars": True}), "resnet")
    assert "the weight decay of the optimizer, 0.1 has no effect: lars includes its own" in said()
    assert found == losses(*started(declared={"lars": True}), "resnet")


def test_groups_larger_than_a_node_are_the_node(said):
    model, _ = started(
        declared={"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 8},
    )
    assert (
        "hierarchical_allreduce_inter_nranks = 8 has no effect: a node has 1 worker, and each node is one group"
        in said()
    )
    assert "hierarchical_allreduce_inter_nranks = 8" in str(fleet.explain(model=model))


# --- optimizers, fetches, files -------------------------------------------------------------------------
def test_set_gradient_clip_clips_what_is_minimized_after_it():
    clip = fluid.clip.GradientClipByGlobalNorm(0.01)
    expected = losses(*started(described=fluid.optimizer.Momentum(0.1, 0.9, grad_clip=clip)), "resnet")
    fluid.clip.set_gradient_clip(clip)
    assert losses(*started(described=fluid.optimizer.Momentum(0.1, 0.9)), "resnet") == expected
    with pytest.raises(UsageError, match="remove param_list"):
        fluid.clip.set_gradient_clip(clip, param_list=["a"])


def test_the_optimizers_of_paddle_2_take_fluids_names_too():
    decay = fluid.regularizer.L2Decay(0.1)
    for former, new in (
        (optimizer.Momentum(0.1, regularization=decay, parameter_list=["a"]), optimizer.Momentum(0.1, 0.9, ["a"])),
        (optimizer.SGD(0.1, regularization=decay), optimizer.SGD(0.1)),
        (optimizer.Adam(0.1, regularization=decay), optimizer.Adam(0.1)),
    ):
        assert (former.decay, new.decay) == (0.1, 0.0)
        assert former.parameters == new.parameters
    with pytest.raises(TypeError, match="regularization"):
        optimizer.Momentum(0.1, regularization=decay, weight_decay=decay)
    with pytest.raises(TypeError, match="weight_decay"):
        fluid.optimizer.Momentum(0.1, 0.9, weight_decay=decay)


def test_learning_rate_and_loss_scale_are_fetched_by_their_names():
    rate = fleetx.utils.linear_warmup_decay(0.1, 2, 10)
    model, executor = started(
        described=fluid.optimizer.Momentum(rate, 0.9), declared={"amp": {"init_loss_scaling": 64.0}}
    )
    found = [executor.run(model.main_prog, batch("resnet"), [rate.name, "loss_scaling_0"]) for _ in range(2)]
    assert [[float(value) for value in values] for values in found] == [[0.0, 64.0], [pytest.approx(0.05), 64.0]]
    other, executor = started()
    with pytest.raises(UsageError, match="only strategy\\.amp in float16 scales the loss"):
        executor.run(other.main_prog, batch("resnet"), ["loss_scaling_0"])


def test_targets_are_a_list_and_a_dict():
    model, executor = started()
    assert [t.name for t in model.target] == ["acc1", "acc5"]
    assert [v.name for v in [model.loss] + model.target] == ["loss", "acc1", "acc5"]  # noqa: RUF005
    assert len(executor.run(model.main_prog, batch("resnet"), [t.name for t in model.target])) == 2


def test_fluid_io_writes_safetensors_with_paddles_names(tmp_path, said):
    from safetensors import safe_open

    model, executor = started()
    losses(model, executor, "resnet", steps=2)
    names = fluid.io.save_inference_model(
        dirname=str(tmp_path), feeded_var_names=[model.inputs[0].name], target_vars=model.target, executor=executor
    )
    assert names == ["acc1", "acc5"]
    assert "safetensors format with Paddle's names" in said()
    with safe_open(tmp_path / "params.safetensors", "pt") as file:
        assert {p.name for p in model.parameter_list()} <= set(file.keys())
        assert file.get_tensor("fc_0.w_0").shape == tuple(reversed(model.classifier[1].weight.shape))
    twin, executor = started()
    fluid.io.load_persistables(executor, tmp_path, twin.main_prog)
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert "momentum_buffer" not in str(optimizer_of(twin).state_dict())
    with pytest.raises(UsageError, match="there is no input 'x': the inputs are image, label"):
        paddle_fleet.save_inference_model(executor, tmp_path, ["x"], [model.loss])
    with pytest.raises(UsageError, match="does not exist"):
        fluid.io.load_params(executor, tmp_path / "elsewhere")


def test_sharding_alone_shards_over_all_ranks(ranks):
    assert ranks.run(sharded) == [True, True]


def sharded():
    model, executor = started(declared={"sharding": True})
    executor.run(model.main_prog, batch("resnet"), [model.loss])
    return all(len(p.device_mesh.mesh) == 2 for p in model.parameters())


# --- parameter servers --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "ask",
    [
        lambda: fleetx.CPUTrainer,
        lambda: fleetx.applications.MultiSlotCTR,
        lambda: paddle_fleet.init_server,
        lambda: fleet.init(fleet.PaddleCloudRoleMaker()),
    ],
)
def test_a_parameter_server_script_hears_that_word(ask):
    with pytest.raises((AttributeError, StrategyError), match="parameter servers") as error:
        ask()
    assert "parameter servers" in str(error.value)[:100]


# --- names that FleetX had and that have no meaning here ------------------------------------------------
@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: fleetx.imagenet_dataset_from_filelist, "call model.load_imagenet_from_file"),
        (lambda: fleetx.applications.save_program, "there is no program to save or load; use save_params"),
        (lambda: fleetx.MultiGPUTrainr, "did you mean 'MultiGPUTrainer'"),
        (lambda: fleetx.utils.Downloadr, "fleetx.utils has no 'Downloadr'"),
    ],
)
def test_a_name_of_fleetx_that_is_gone_says_what_to_use(ask, says):
    with pytest.raises(AttributeError, match=says):
        ask()


def test_a_script_may_catch_the_end_of_paddles_readers():
    assert issubclass(fluid.core.EOFException, Exception)


# --- signatures -----------------------------------------------------------------------------------------
IMAGE_LIST = "filelist, batch_size=32, phase='train', shuffle=None, use_dali=False"  # FleetX shuffles only "train" too
IMAGE_FOLDER = "local_path, batch_size=32, shuffle=SHUFFLE, use_dali=False"
BERT_FOLDER = "data_dir, batch_size=4096, max_seq_len=None, in_tokens=True, shuffle=SHUFFLE"
TEXT_FOLDER = "local_path, batch_size=2048, shuffle=SHUFFLE"
DIGITAL = "data_dir, vocab_path, batch_size=None, max_seq_len=None, in_tokens=None"  # each BERT has its own defaults
DOWNLOAD = "fs_yaml=None, local_path='./', shard_num=-1, shard_id=-1, process_num=10"
SIGNATURES = {
    "MultiGPUTrainer.fit": "model, dataloader, epoch, use_dali=False, start_step=10",
    "MultiGPUTrainer.val": "model, dataloader, target_list, current_epoch=-1, use_dali=False",
    "MultiGPUTrainer.quick_benchmark": "model, dataloader, start_step=20, end_step=200",
    "MultiGPUTrainer.benchmark": "model, dataloader, epoch, use_dali=False, start_step=20",
    "MultiGPUTrainer.benchmark_val": "model, dataloader, target_list, use_dali=False",
    "utils.Downloader.download_from_bos": DOWNLOAD,
    "utils.Downloader.download_from_hdfs": DOWNLOAD,
    "utils.linear_warmup_decay": "learning_rate, warmup_steps, num_train_steps",
    "applications.Transformer.load_wmt16_dataset_from_file": (
        "src_vocab_fpath, trg_vocab_fpath, train_file_pattern, batch_size=2048, shuffle=True"
    ),
    "applications.BertLarge": "lang='ch'",
    "applications.BertBase": "lang='ch'",
    "applications.BertHuge": "lang='en'",
    "applications.BertGiant": "lang='en'",
}
for _image in ("Resnet50", "VGG16"):
    SIGNATURES[f"applications.{_image}"] = "data_layout='NCHW'"
    SIGNATURES[f"applications.{_image}.load_imagenet_from_file"] = IMAGE_LIST
for _model, _folder in (("Resnet50", IMAGE_FOLDER), ("VGG16", IMAGE_FOLDER), ("BertBase", BERT_FOLDER),
                        ("BertLarge", BERT_FOLDER), ("Transformer", TEXT_FOLDER)):  # fmt: skip
    SIGNATURES[f"applications.{_model}.get_train_dataloader"] = _folder.replace("SHUFFLE", "True")
    SIGNATURES[f"applications.{_model}.get_val_dataloader"] = _folder.replace("SHUFFLE", "False")
for _model in ("BertBase", "BertLarge"):
    SIGNATURES[f"applications.{_model}.load_digital_dataset_from_file"] = DIGITAL
    SIGNATURES[f"applications.{_model}.load_digital_dataset_from_file_v2"] = DIGITAL


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_names_order_and_defaults_of_fleetx(name):
    found = operator.attrgetter(name)(fleetx)
    found = found.__init__ if isinstance(found, type) else found  # the class has its metaclass's
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(found).parameters.values() if p.name != "self"]
    positional = [str(p) for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = SIGNATURES[name].split(", ")
    assert positional[: len(expected)] == expected
