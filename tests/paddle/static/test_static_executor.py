"""Executor: feeds, fetches, their order, places and settings; in a world of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_applications import batch, flat, make
from static_models import losses, minimized, optimizer_of, started

from fleetx import UsageError, fleet
from fleetx.comm import notices
from fleetx.paddle.api import fleet as paddle_fleet
from fleetx.paddle.api import fluid


@pytest.fixture
def resnet():
    return started()


# --- fetches --------------------------------------------------------------------------------------
def test_any_output_input_or_parameter_is_fetched_by_its_name(resnet):
    model, executor = resnet
    fed = batch("resnet")
    names = [model.loss, "acc1", model.target["acc5"], "label", "conv2d_0.w_0", model.parameter_list()[1]]
    loss, acc1, acc5, label, weight, scale = executor.run(model.main_prog, feed=fed, fetch_list=names)
    assert all(isinstance(found, np.ndarray) for found in (loss, acc1, acc5, label, weight, scale))
    assert 0 <= acc1 <= acc5 <= 1
    np.testing.assert_array_equal(label, fed["label"])
    np.testing.assert_array_equal(weight, model.get_parameter("conv2d_0.w_0").detach())
    np.testing.assert_array_equal(scale, model.get_parameter("batch_norm_0.w_0").detach())


def test_a_number_is_an_array_of_one_and_prints_as_a_number(resnet):
    model, executor = resnet
    (loss,) = executor.run(model.main_prog, batch("resnet"), [model.loss.name])
    assert loss.shape == (1,)
    assert "%f" % loss == "%f" % loss[0]  # noqa: UP031
    assert float(loss) == loss.item()
    assert int(loss) == int(loss.item())
    assert repr(loss) == repr(np.array([loss.item()], np.float32))


def test_paddles_name_of_a_linear_weight_gives_paddles_shape(resnet):
    model, executor = resnet
    by_paddle, by_torch, bias = executor.run(
        model.main_prog, batch("resnet"), ["fc_0.w_0", "classifier.1.weight", "fc_0.b_0"]
    )
    assert by_paddle.shape == (32, 10)
    np.testing.assert_array_equal(by_paddle, by_torch.T)
    assert bias.shape == (10,)


def test_what_was_fetched_does_not_change_with_later_steps(resnet):
    model, executor = resnet
    first = executor.run(model.main_prog, batch("resnet"), ["conv2d_0.w_0"])[0]
    kept = first.copy()
    second = executor.run(model.main_prog, batch("resnet"), ["conv2d_0.w_0"])[0]
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(first, second)


def test_without_numpy_tensors_come_back_and_without_a_list_nothing(resnet):
    model, executor = resnet
    found = executor.run(model.main_prog, batch("resnet"), ["loss"], return_numpy=False)
    assert isinstance(found[0], torch.Tensor)
    assert executor.run(model.main_prog, feed=batch("resnet")) == []


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("los", "no variable 'los': did you mean 'loss'"),
        ("fc_0.w_00", "did you mean 'fc_0.w_0'"),
        (make("vgg").loss, "'loss' in fetch_list belongs to a different model"),
        (None, "fetch_list takes names and variables, such as model.loss, not None"),
        (3, "not 3"),
    ],
)
def test_a_fetch_that_is_not_there_is_refused_before_anything_is_trained(resnet, wanted, says):
    model, executor = resnet
    before = model.get_parameter("fc_0.b_0").clone()
    with pytest.raises(UsageError, match=says):
        executor.run(model.main_prog, batch("resnet"), [wanted])
    assert torch.equal(before, model.get_parameter("fc_0.b_0"))


def test_one_name_or_variable_alone_is_fetched_too(resnet):
    model, executor = resnet
    test, fed = model.main_prog.clone(for_test=True), batch("resnet")
    expected = executor.run(test, fed, [model.loss])
    for one in ("loss", model.loss, (model.loss,)):
        assert executor.run(test, fed, one) == expected
    with pytest.raises(UsageError, match=r"fetch_list must be a list of names and variables, not \{'loss'\}"):
        executor.run(test, fed, {"loss"})


def test_there_is_one_scope(resnet):
    model, executor = resnet
    executor.run(model.main_prog, batch("resnet"), scope=fluid.global_scope())
    with pytest.raises(UsageError, match=r"takes fluid\.global_scope\(\), or no scope, not 'mine'"):
        executor.run(model.main_prog, batch("resnet"), scope="mine")


def test_the_names_of_a_program_are_found_once_in_a_run(resnet, monkeypatch):
    model, executor = resnet
    asked = []
    names = type(model).paddle_names
    monkeypatch.setattr(type(model), "paddle_names", lambda self: asked.append(self) or names(self))
    executor.run(model.main_prog, batch("resnet"), ["loss", "acc1", "acc5"])
    once = len(asked)
    executor.run(model.main_prog, batch("resnet"), ["loss"])
    assert len(asked) == 2 * once


# --- feeds ----------------------------------------------------------------------------------------
def test_arrays_of_other_widths_and_lists_with_one_dict_are_the_same_batch():
    fed = batch("resnet")
    other = [{"label": fed["label"].numpy().astype(np.int32), "image": fed["image"].numpy().astype(np.float64)}]
    results = []
    for one in (fed, other, tuple(other)):
        model, executor = started()
        results.append(executor.run(model.main_prog, one, ["loss"])[0].item())
    assert len(set(results)) == 1


IMAGE, LABEL = np.zeros((2, 3, 32, 32), np.float32), np.zeros((2, 1), np.int64)


@pytest.mark.parametrize(
    ("feed", "says"),
    [
        (None, "feed must be a dict of arrays by name"),
        ([{}, {}], "not a list of 2"),
        ({"image": IMAGE}, "feed lacks label"),
        ({"imag": IMAGE, "label": LABEL}, "no input 'imag': did you mean 'image'"),
        ({"zzz": IMAGE, "label": LABEL}, "its inputs are image, label"),
        ({"image": IMAGE, "label": LABEL.astype(np.float32)}, r"feed\['label'\] holds torch.float32, but .*int64"),
        ({"image": IMAGE, "label": np.array(["a", "b"])}, "must hold real numbers"),
        (
            {"image": IMAGE[:, :, 1:], "label": LABEL},
            r"feed\[.image.\] has the shape \(2, 3, 31, 32\), but the program takes \(-1, 3, 32, 32\)",
        ),
        ({"image": IMAGE, "label": LABEL.reshape(1, 2)}, r"feed\[.label.\] has the shape \(1, 2\), but .* \(-1, 1\)"),
        ({"image": IMAGE, "label": np.zeros((2, 2), int)}, r"feed\[.label.\] has the shape \(2, 2\)"),
        ({"image": IMAGE, "label": np.zeros((4, 1), int)}, r"feed\[.label.\] has 4 rows, but feed\[.image.\] has 2"),
        ({"image": IMAGE, "label": 1}, r"feed\[.label.\] has 1 rows, but feed\[.image.\] has 2"),
        (
            {"image": IMAGE, "label": LABEL.astype(">i8")},
            r"feed\[.label.\] holds >i8, .*: feed array.astype\(.int64.\)",
        ),
        ({"image": IMAGE.astype(np.longdouble), "label": LABEL}, r"feed\[.image.\] holds <f16, .*astype\(.float64.\)"),
        ({"image": IMAGE.astype(complex), "label": LABEL}, "complex128: must hold real numbers"),
        ({"image": IMAGE, "label": [[1], [2, 3]]}, r"feed\[.label.\] cannot be converted to an array"),
    ],
)
def test_a_feed_that_does_not_fit_is_refused(resnet, feed, says):
    model, executor = resnet
    with pytest.raises(UsageError, match=says):
        executor.run(model.main_prog, feed, ["loss"])


def test_columns_may_come_without_their_last_dimension_or_with_more(resnet):
    model, executor = resnet
    test, fed = model.main_prog.clone(for_test=True), batch("resnet")
    labels = [fed["label"], fed["label"][:, 0], fed["label"][:, :, None]]
    assert len({executor.run(test, fed | {"label": label}, ["loss"])[0].item() for label in labels}) == 1


@pytest.mark.parametrize("name", ["pos_ids", "sent_ids", "input_mask"])
def test_words_that_lie_the_other_way_are_refused(name):
    model, executor = started("bert")
    test, fed = model.main_prog.clone(for_test=True), batch("bert")
    executor.run(test, fed, ["loss"])
    executor.run(test, flat(fed), ["loss"])
    with pytest.raises(UsageError, match=rf"feed\['{name}'\] has 12 rows, but feed\['src_ids'\] has 8"):
        executor.run(test, fed | {name: fed[name].flatten(1).t().contiguous()}, ["loss"])


def test_a_bias_that_may_be_left_out_is_broadcast():
    model, executor = started("transformer")
    test, fed = model.main_prog.clone(for_test=True), batch("transformer")
    length = fed["src_word"].shape[1]
    plain = executor.run(test, fed, ["loss"])[0].item()
    bias = np.zeros((1, 1, 1, length), np.float32)
    assert executor.run(test, fed | {"src_slf_attn_bias": bias}, ["loss"])[0].item() == pytest.approx(plain)
    with pytest.raises(UsageError, match=r"feed\['src_slf_attn_bias'\] has the shape \(1, 3, 1, 12\)"):
        executor.run(test, fed | {"src_slf_attn_bias": np.zeros((1, 3, 1, length), np.float32)}, ["loss"])


# --- order ----------------------------------------------------------------------------------------
def test_a_program_is_minimized_started_and_run_in_this_order():
    fleet.init()
    model, executor = make("resnet"), fluid.Executor()
    with pytest.raises(UsageError, match="no optimizer: call minimize"):
        executor.run(model.main_prog, batch("resnet"))
    with pytest.raises(UsageError, match="run the startup program first"):
        executor.run(model.main_prog.clone(for_test=True), batch("resnet"))
    model = minimized()
    with pytest.raises(UsageError, match="run the startup program first"):
        executor.run(model.main_prog, batch("resnet"))
    with pytest.raises(UsageError, match="remove feed and fetch_list"):
        executor.run(model.startup_prog, fetch_list=["loss"])
    executor.run(model.startup_prog)
    executor.run(model.startup_prog)  # nothing is lost yet
    with pytest.raises(UsageError, match="minimize was already called"):
        fluid.optimizer.SGD(0.1).minimize(model.loss)
    executor.run(model.main_prog, batch("resnet"))
    with pytest.raises(UsageError, match="has trained for 1 steps"):
        executor.run(model.startup_prog)


def test_minimize_may_come_after_the_startup():
    fleet.init()
    model, executor = make("resnet"), fluid.Executor()
    executor.run(fluid.default_startup_program())
    fluid.optimizer.Momentum(0.01, 0.9).minimize(model.loss)
    late = losses(model, executor, "resnet")
    assert late == losses(*started(), "resnet")


@pytest.mark.parametrize("loss", [3.0, "loss", None])
def test_minimize_takes_the_loss_of_a_model(loss):
    with pytest.raises(UsageError, match=r"minimize takes the loss of an application, such as model\.loss"):
        fluid.optimizer.SGD(0.1).minimize(loss)


def test_minimize_takes_no_other_output():
    with pytest.raises(UsageError, match="'acc1' has no gradient"):
        fluid.optimizer.SGD(0.1).minimize(make("resnet").target["acc1"])


def test_an_optimizer_that_is_distributed_first_begins_fleet_with_a_notice(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    model = make("resnet")
    paddle_fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(model.loss)
    assert fleet.worker_num() == 1
    assert "a missing fleet.init() has no effect: fleet.distributed_optimizer calls it" in capsys.readouterr().err
    fluid.Executor().run(model.startup_prog)
    assert "no effect: a missing fleet.init()" in str(fleet.explain(model=model))


def test_workers_that_would_train_each_alone_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"2 workers would train 2 separate models.*fleet\.distributed_optimizer"):
        fluid.optimizer.SGD(0.1).minimize(make("resnet").loss)


@pytest.mark.parametrize("wrong", ["main", None, 3])
def test_only_places_and_programs_are_taken(wrong):
    executor = fluid.Executor()
    if wrong is not None:
        with pytest.raises(UsageError, match="takes a program"):
            executor.run(wrong)
        with pytest.raises(UsageError, match="takes a place"):
            fluid.Executor(wrong)
    with pytest.raises(AttributeError, match=r"does not support paddle\.fluid\.Executor\.train_from_dataset"):
        executor.train_from_dataset()
    executor.close()


# --- places and settings --------------------------------------------------------------------------
def test_a_gpu_means_the_cpu_where_that_computes_and_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    assert fluid.CUDAPlace(0) == fluid.CUDAPlace(0)
    assert capsys.readouterr().err == "fleetx: CUDAPlace means the CPU here, because this run uses the CPU\n"
    fluid.CUDAPlace(1).check(torch.device("cpu"))
    with pytest.raises(UsageError, match="must be the number of a GPU"):
        fluid.CUDAPlace(-1)


def test_a_place_that_is_not_the_workers_own_is_refused():
    with pytest.raises(UsageError, match=r"this worker trains on cuda:0: write\s+CUDAPlace"):
        fluid.CUDAPlace(1).check(torch.device("cuda", 0))
    with pytest.raises(UsageError, match="start it with --device cpu"):
        fluid.CPUPlace().check(torch.device("cuda", 0))
    fluid.CUDAPlace(1).check(torch.device("cuda", 1))


def test_settings_of_the_graph_are_checked_by_name_and_said_to_have_no_meaning(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    execution, build = fluid.ExecutionStrategy(), fluid.BuildStrategy()
    execution.num_threads = 2
    build.enable_inplace = True
    minimized(declared={"execution_strategy": execution, "build_strategy": build})
    said = capsys.readouterr().err
    assert "execution_strategy has no effect: " in said
    assert "build_strategy has no effect: " in said
    with pytest.raises(AttributeError, match="ExecutionStrategy has no 'num_thread': did you mean 'num_threads'"):
        execution.num_thread = 2
    with pytest.raises(AttributeError, match=r"set it on fleet\.DistributedStrategy\(\)"):
        build.nccl_comm_num = 2
    with pytest.raises(AttributeError, match="the settings are enable_sequential_execution"):
        build.zzz = 2


def test_the_program_cache_has_no_meaning_and_says_so(resnet, capsys):
    model, executor = resnet
    executor.run(model.main_prog, batch("resnet"), use_program_cache=True)
    assert "use_program_cache has no effect" in capsys.readouterr().err


# --- parameters -----------------------------------------------------------------------------------
def test_only_the_parameters_of_the_list_are_trained_or_all_but_the_frozen():
    fleet.init()
    for only, frozen in ((["fc_0.w_0", "classifier.1.bias"], None), (None, "all but them")):
        model, executor = make("resnet"), fluid.Executor()
        mine = {"classifier.1.weight", "classifier.1.bias"}
        others = [p for p in model.parameter_list() if p.torch_name not in mine]
        fluid.optimizer.SGD(0.1).minimize(model.loss, parameter_list=only, no_grad_set=frozen and others)
        executor.run(model.startup_prog)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        executor.run(model.main_prog, batch("resnet"))
        assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == mine
        assert len(optimizer_of(model).param_groups[0]["params"]) == 2


def test_parameters_that_are_not_there_are_refused():
    fleet.init()
    model = make("resnet")
    with pytest.raises(UsageError, match=r"no parameter 'fc_0\.w_1': did you mean 'fc_0\.w_0'"):
        fluid.optimizer.SGD(0.1, parameter_list=["fc_0.w_1"]).minimize(model.loss)
    assert all(p.requires_grad for p in model.parameters())
    for none_left in (lambda model: {"no_grad_set": model.parameter_list()}, lambda model: {"parameter_list": []}):
        model = make("resnet")
        fluid.optimizer.SGD(0.1).minimize(model.loss, **none_left(model))
        with pytest.raises(UsageError, match="no parameter is left to train"):
            fluid.Executor().run(model.startup_prog)


def test_a_startup_program_of_another_model_is_refused():
    model, other = make("resnet"), make("vgg")
    with pytest.raises(UsageError, match="startup_program belongs to a different model"):
        fluid.optimizer.SGD(0.1).minimize(model.loss, other.startup_prog)
    fluid.optimizer.SGD(0.1).minimize(other.loss, fluid.default_startup_program())


# --- auto -----------------------------------------------------------------------------------------
class DistributedError(Exception):
    """In the place of a search, which takes seconds; the documents' script has one."""


@pytest.mark.parametrize("declared", [{}, {"pipeline": True}])
def test_auto_waits_for_the_first_batch_and_makes_no_pipeline_by_itself(monkeypatch, declared):
    given = {}

    def distribute(model, update, strategy, *, sample):
        given.update(strategy=strategy, sample=sample)
        raise DistributedError

    monkeypatch.setattr(fleet, "distribute", distribute)
    model, executor = started(declared={"auto": True} | declared)
    fed = batch("resnet")
    with pytest.raises(DistributedError):
        executor.run(model.main_prog, fed, ["loss"])
    torch.testing.assert_close(given["sample"], fed)
    assert given["strategy"].declared()["pipeline"] is bool(declared)
