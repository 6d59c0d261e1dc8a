"""Programs, default ones and others, the scope, and what is said of names that they do not cover; in a world of one."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from small_applications import batch, make
from small_applications import resnet as resnet_of_any_seed
from static_models import minimized, started

from fleetx import UsageError
from fleetx.comm.session import current
from fleetx.paddle.api import fleet as paddle_fleet
from fleetx.paddle.api import fluid, static
from fleetx.paddle.static import programs, training


@pytest.fixture
def resnet():
    return started()


# --- programs -------------------------------------------------------------------------------------
def test_a_clone_for_test_neither_trains_nor_drops_out():
    model, executor = started("vgg")
    twin = make("vgg").eval()
    test = model.main_prog.clone(for_test=True)
    before = copy.deepcopy(model.state_dict())
    found = executor.run(test, batch("vgg"), ["loss", "acc1"])
    assert found[0].item() == twin(**batch("vgg")).loss.item()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    executor.run(model.main_prog, batch("vgg"))
    assert executor.run(test, batch("vgg"), ["loss"])[0] != found[0]


def test_other_clones_are_refused():
    model = make("vgg")
    for program, for_test in ((model.main_prog, False), (model.startup_prog, True)):
        with pytest.raises(UsageError, match=r"only clone\(for_test=True\) of a main program is supported"):
            program.clone(for_test=for_test)


def test_the_default_programs_are_those_of_the_model_that_was_made_last():
    first, second = make("vgg"), make("resnet")
    assert fluid.default_main_program() == second.main_prog != first.main_prog
    assert fluid.default_startup_program() == second.startup_prog
    current().application = None
    assert not programs.in_use()
    with pytest.raises(UsageError, match="there is no program yet"):
        fluid.Executor().run(fluid.default_main_program())


def test_a_copy_of_a_model_is_not_described(resnet):
    model, _ = resnet
    assert training.is_minimized(model)
    assert not training.is_minimized(copy.deepcopy(model))


# --- the scope ------------------------------------------------------------------------------------
def test_parameters_are_read_and_set_in_the_scope_by_either_name():
    model, _ = started()
    scope = fluid.global_scope()
    weight = scope.var("fc_0.w_0").get_tensor()
    assert weight.shape() == [32, 10]
    np.testing.assert_array_equal(np.array(weight), model.classifier[1].weight.detach().T)
    new = np.arange(320, dtype=np.float32).reshape(32, 10)
    weight.set(new, fluid.CPUPlace())
    np.testing.assert_array_equal(model.classifier[1].weight.detach(), new.T)
    np.testing.assert_array_equal(np.array(scope.find_var("classifier.1.weight").get_tensor()), new.T)
    assert np.array(weight, dtype=np.float64).dtype == np.float64
    with pytest.raises(UsageError, match=r"has the shape \(32, 10\), but the array has \(10, 32\)"):
        weight.set(new.T)


def test_the_scope_knows_no_other_names():
    model = make("resnet")
    scope = fluid.global_scope()
    assert scope.var(model.parameter_list()[0].name).application is model
    assert scope.find_var("fc_9.w_0") is None
    with pytest.raises(UsageError, match=r"no variable 'fc_0\.w_00': did you mean 'fc_0\.w_0'"):
        scope.var("fc_0.w_00")
    with pytest.raises(UsageError, match=r"fetch it with fetch_list=\['loss'\]"):
        scope.var("loss")


def bias(name="fc_0.b_0"):
    return np.array(fluid.global_scope().var(name).get_tensor())


def test_names_mean_the_model_in_use_and_not_one_that_was_only_made():
    model, _ = started()
    fluid.global_scope().var("fc_0.b_0").get_tensor().set(np.ones(10, np.float32))
    other = make("resnet")
    assert bias().tolist() == [1] * 10
    assert fluid.default_main_program().application is other
    del other
    gc.collect()
    assert fluid.default_main_program().application is model


def test_a_name_of_two_models_in_use_is_refused_and_one_of_a_model_that_is_gone_is_not():
    model, executor = started()
    second, _ = started("vgg")
    with pytest.raises(UsageError, match=r"2 models in use have a parameter 'fc_0\.b_0', Resnet50 and VGG16"):
        bias()
    assert bias("fc_2.b_0").shape == (10,)  # of VGG16 alone
    assert executor.run(model.main_prog, batch("resnet"), ["fc_0.b_0"])[0].shape == (10,)
    del model, executor
    assert bias().shape == (16,)
    assert second is not None


def test_a_model_of_which_a_script_keeps_nothing_is_run_by_the_default_programs():
    def build():
        model = make("resnet")
        fluid.optimizer.SGD(0.1).minimize(model.loss)
        return model.loss.name

    name, executor = build(), fluid.Executor()
    gc.collect()
    executor.run(fluid.default_startup_program())
    gc.collect()
    (first,) = executor.run(fluid.default_main_program(), batch("resnet"), [name])
    assert executor.run(feed=batch("resnet"), fetch_list=[name])[0] < first


# --- random_seed ----------------------------------------------------------------------------------
def test_a_default_program_that_is_seeded_before_the_model_seeds_its_weights():
    current().application = None
    main, startup = fluid.default_main_program(), fluid.default_startup_program()
    torch.manual_seed(5)
    expected = resnet_of_any_seed().state_dict()
    current().application = None
    startup.random_seed = 5
    model = resnet_of_any_seed()
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    paddle_fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(model.loss, startup)
    executor = fluid.Executor()
    executor.run(startup)
    assert len(executor.run(main, batch("resnet"), [model.loss])) == 1
    assert main.clone(for_test=True) == model.main_prog.clone(for_test=True)


def test_the_startup_program_draws_the_weights_of_its_seed():
    torch.manual_seed(5)
    expected = resnet_of_any_seed().state_dict()
    torch.manual_seed(6)
    model = minimized()
    assert (model.startup_prog.random_seed, model.main_prog.random_seed) == (0, 0)
    model.startup_prog.random_seed = 5
    drawn = torch.get_rng_state()
    executor = fluid.Executor()
    executor.run(model.startup_prog)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert fluid.default_startup_program() == model.startup_prog
    assert model.startup_prog.random_seed == 5
    model.startup_prog.random_seed = 7
    with pytest.raises(UsageError, match="random_seed = 7 is set too late"):
        executor.run(model.startup_prog)


def test_the_main_program_seeds_dropout():
    model, executor = started("bert", fluid.optimizer.SGD(0.0))

    def loss() -> float:
        model.main_prog.random_seed = 3
        return executor.run(model.main_prog, batch("bert"), [model.loss])[0].item()

    assert loss() == loss() != executor.run(model.main_prog, batch("bert"), [model.loss])[0].item()
    with pytest.raises(UsageError, match="random_seed = -1: must be an integer of at least 0"):
        model.main_prog.random_seed = -1


# --- names that are not covered -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("find", "says"),
    [
        (
            lambda m: m.main_prog.global_block,
            r"does not support paddle\.static\.Program\.global_block: .*clone, inputs",
        ),
        (lambda m: m.main_prog.parameter, "did you mean 'parameters'"),
        (lambda m: m.loss.astype, r"does not support paddle\.static\.Variable\.astype: .*name, shape, dtype"),
        (
            lambda m: fluid.global_scope().new_scope,
            r"does not support paddle\.static\.Scope\.new_scope: .*var, find_var",
        ),
        (
            lambda m: setattr(m.main_prog, "kind", "test"),
            r"Program\.kind is read-only",
        ),
        (lambda m: setattr(m.loss, "persistable", True), r"does not support paddle\.static\.Variable\.persistable"),
        (lambda m: static.Program, "programs belong to a model of fleetx.applications: use model.main_prog"),
    ],
)
def test_what_a_description_does_not_cover_says_so(find, says):
    model = make("vgg")
    with pytest.raises(AttributeError, match=says):
        find(model)
    assert len({model.main_prog, model.main_prog, copy.copy(model.main_prog)}) == 1
