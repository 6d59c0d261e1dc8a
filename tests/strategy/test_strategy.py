"""One object, three ways to write it, nothing ignored silently."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fleetx import DistributedStrategy, StrategyError, fleet
from fleetx.strategy.part import every

# Paddle v2.0's defaults, except where a comment says otherwise.
DEFAULTS = {
    "amp_configs": {
        "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
        "use_dynamic_loss_scaling": True,
        "custom_white_list": [],
        "custom_black_list": [],
        "custom_black_varnames": [],
    },
    "recompute_configs": {"checkpoints": [], "enable_offload": False, "checkpoint_shape": []},
    "gradient_merge_configs": {"k_steps": 1, "avg": True},
    "lars_configs": {
        "lars_coeff": 0.001,
        "lars_weight_decay": 0.0005,
        "epsilon": 0.0,
        "exclude_from_weight_decay": [],
    },
    "lamb_configs": {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": []},
    "dgc_configs": {"rampup_begin_step": 0, "rampup_step": 1, "sparsity": [0.999]},  # Paddle: [] that becomes [0.999]
    "localsgd_configs": {"k_steps": 1, "begin_step": 1},
    "adaptive_localsgd_configs": {"init_k_steps": 1, "begin_step": 1},
    "pipeline_configs": {"micro_batch": 1, "accumulate_steps": 1, "micro_batch_size": 1, "schedule_mode": "1F1B"},
    # Paddle: sharding_degree 8; here None, which is all ranks (decision 57)
    "sharding_configs": {"hybrid_dp": False, "sharding_degree": None, "sharding_group_size": None},
}
PLAIN = {
    "nccl_comm_num": 1,
    "use_hierarchical_allreduce": False,
    "hierarchical_allreduce_inter_nranks": 1,
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 32,
    "find_unused_parameters": False,
    "sync_nccl_allreduce": True,
    "sync_batch_norm": False,
    "fp16_allreduce": False,
    "auto": False,
}


def test_names_and_defaults_are_paddles():
    strategy = DistributedStrategy()
    for name, defaults in DEFAULTS.items():
        assert defaults.items() <= dict(getattr(strategy, name)).items(), name
        assert getattr(strategy, name.removesuffix("_configs")) is False
    for name, default in PLAIN.items():
        assert getattr(strategy, name) == default, name
    assert strategy.execution_strategy.num_iteration_per_drop_scope == 10
    assert strategy.build_strategy.fuse_bn_add_act_ops is True


def attribute_style():
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16", "custom_black_list": ["softmax"]}
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 4}
    strategy.fuse_grad_size_in_MB = 16
    strategy.execution_strategy = SimpleNamespace(num_threads=2)
    return strategy


def test_three_styles_describe_the_same_object(tmp_path):
    by_keywords = DistributedStrategy(
        execution_strategy={"num_threads": 2},
        fuse_grad_size_in_MB=16,
        gradient_merge={"k_steps": 4},
        amp={"custom_black_list": ["softmax"], "dtype": "bfloat16"},
    )
    by_hand = tmp_path / "by_hand.yaml"
    by_hand.write_text(
        "amp: {dtype: bfloat16, custom_black_list: [softmax]}\ngradient_merge: true\n"
        "gradient_merge_configs:\n  k_steps: 4\nfuse_grad_size_in_MB: 16\nexecution_strategy: {num_threads: 2}\n"
    )
    attribute_style().save(tmp_path / "saved.yaml")
    assert by_keywords == attribute_style()
    assert DistributedStrategy.load(by_hand) == attribute_style()
    assert DistributedStrategy.load(tmp_path / "saved.yaml") == attribute_style()
    assert eval(repr(attribute_style())) == attribute_style()
    assert copy.deepcopy(attribute_style()) == attribute_style()
    assert attribute_style() != DistributedStrategy()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "amp": st.booleans(),
            "lars": st.fixed_dictionaries({"lars_coeff": st.floats(1e-6, 1.0)}),
            "dgc": st.fixed_dictionaries({"sparsity": st.lists(st.floats(0, 0.999), max_size=4)}),
            "recompute": st.fixed_dictionaries({"checkpoints": st.lists(st.text(max_size=5), max_size=3)}),
            "pipeline": st.fixed_dictionaries({"micro_batch": st.integers(1, 10**6)}),
            "find_unused_parameters": st.booleans(),
        },
    )
)
def test_any_strategy_survives_yaml(tmp_path_factory, declared):
    path = tmp_path_factory.mktemp("yaml") / "s.yaml"
    strategy = DistributedStrategy(**declared)
    strategy.save(path)
    assert DistributedStrategy.load(path) == strategy


def test_assigning_replaces_and_editing_in_place_counts():
    strategy = DistributedStrategy(amp=True)
    strategy.amp_configs = {"custom_white_list": ["a"], "incr_ratio": 3.0}
    strategy.amp_configs = {"custom_white_list": ["b"]}
    assert strategy.amp_configs["custom_white_list"] == ["b"]
    assert strategy.amp_configs["incr_ratio"] == 2.0
    strategy.amp_configs["incr_ratio"] = 4.0
    strategy.amp_configs["custom_black_list"].append("c")
    assert (
        DistributedStrategy(amp={"custom_white_list": ["b"], "custom_black_list": ["c"], "incr_ratio": 4.0}) == strategy
    )
    del strategy.amp_configs["incr_ratio"]
    assert strategy.amp_configs["incr_ratio"] == 2.0


def test_a_list_edited_in_place_is_checked_when_the_plan_is_made():
    strategy = DistributedStrategy(dgc=True)
    strategy.dgc_configs["sparsity"].append(1.5)
    with pytest.raises(StrategyError, match=r"dgc_configs\['sparsity'\]\[1\]"):
        strategy.plan()


def test_values_are_kept_as_plain_data(tmp_path):
    """A tuple is a list, numpy's float64 is a float: they compare equal and can be written."""
    a = DistributedStrategy(recompute={"checkpoints": ("a", "b")}, clip={"clip_norm": np.float64(2.0)})
    b = DistributedStrategy(recompute={"checkpoints": ["a", "b"]}, clip={"clip_norm": 2.0})
    assert a == b
    a.save(tmp_path / "a.yaml")
    assert DistributedStrategy.load(tmp_path / "a.yaml") == b


def test_loading_on_an_instance_raises_because_it_would_change_nothing(tmp_path):
    with pytest.raises(TypeError, match=r"returns a new strategy: write strategy = DistributedStrategy.load\(path\)"):
        DistributedStrategy().load(tmp_path / "s.yaml")


def test_a_strategy_may_change_after_distribute_without_effect():
    fleet.init()
    model = nn.Linear(2, 2)
    strategy = DistributedStrategy(clip=True)
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    strategy.amp = True
    assert fleet.explain().requested == ["clip"]


def test_two_strategies_share_nothing():
    a, b = DistributedStrategy(), DistributedStrategy()
    a.amp_configs["custom_white_list"].append("x")
    a.execution_strategy.num_threads = 7
    assert b.amp_configs["custom_white_list"] == []
    assert b.execution_strategy.num_threads == 1
    twin = copy.copy(a)
    twin.amp = True
    assert not a.amp


BAD = [
    ({"ampp": True}, r"no 'ampp': did you mean 'amp'\?"),
    ({"amp_config": {}}, r"no 'amp_config': did you mean 'amp_configs'\?"),
    ({"zzz": 1}, r"no 'zzz': possible names: .*gradient_merge"),
    ({"amp": 1}, r"amp = 1: must be True or False or a dict"),
    ({"amp": "True"}, r"amp = 'True': must be True or False"),
    ({"use_hierarchical_allreduce": {"a": 1}}, r"must be True or False$"),
    ({"amp_configs": 3}, r"amp_configs = 3: must be a dict; possible keys: init_loss_scaling"),
    ({"amp": {"incr_ration": 2.0}}, r"amp_configs has no 'incr_ration': did you mean 'incr_ratio'\?"),
    (
        {"gradient_merge": {"k_steps": 0}},
        r"gradient_merge_configs\['k_steps'\] = 0: must be at least 1",
    ),
    ({"gradient_merge": {"k_steps": 2.5}}, r"k_steps'\] = 2.5: must be an integer \(default 1\)"),
    ({"gradient_merge": {"k_steps": True}}, r"k_steps'\] = True: must be an integer"),
    ({"gradient_merge": {"k_steps": "4"}}, r"k_steps'\] = '4': must be an integer"),
    ({"gradient_merge": {"avg": 1}}, r"avg'\] = 1: must be True or False"),
    ({"dgc": {"sparsity": [0.5, 1.5]}}, r"dgc_configs\['sparsity'\]\[1\] = 1.5: must be less than 1"),
    (
        {"recompute": {"memory_budget": []}},
        r"= \[\]: must be a size such as '6GiB', a share such as 0\.5, or 'min' \(default None\)",
    ),
    ({"pipeline": {"micro_batch": -1}}, r"micro_batch'\] = -1: must be at least 1"),
    ({"recompute": {"checkpoints": "layer1"}}, r"checkpoints'\] = 'layer1': must be a list"),
    ({"amp": {"dtype": "float8"}}, r"dtype'\] = 'float8': must be 'float16' or 'bfloat16'"),
    ({"clip": {"clip_norm": 0}}, r"clip_norm'\] = 0: must be greater than 0"),
    ({"nccl_comm_num": 0}, r"^nccl_comm_num = 0: must be at least 1"),
    ({"fuse_grad_size_in_MB": "32"}, r"^fuse_grad_size_in_MB = '32': must be a number"),
    ({"cudnn_exhaustive_search": "no"}, r"must be a bool"),
    ({"execution_strategy": {"num_thread": 2}}, r"no 'num_thread': did you mean 'num_threads'"),
    ({"execution_strategy": 3}, r"must be a dict or an object; possible fields: num_threads"),
    ({"execution_strategy": {"num_threads": "many"}}, r"execution_strategy.num_threads = 'many': must be int"),
    ({"build_strategy": SimpleNamespace(sync_batch_norm=True)}, r"build_strategy has no 'sync_batch_norm'"),
    ({"fuse_grad_size_in_MB": float("inf")}, r"must be a finite number"),
    ({"a_sync": True}, r"a_sync: parameter-server training is not supported yet"),
    ({"tensor_parallel": True}, r"tensor_parallel: .*not supported yet: use sharding or pipeline"),
]


@pytest.mark.parametrize(("declared", "message"), BAD, ids=lambda v: str(v)[:60])
def test_bad_input_names_key_value_and_remedy(declared, message):
    with pytest.raises(StrategyError, match=message):
        DistributedStrategy(**declared)
    ((name, value),) = declared.items()
    strategy = DistributedStrategy()
    with pytest.raises(StrategyError, match=message):
        setattr(strategy, name, value)
    assert strategy == DistributedStrategy()


def test_reading_an_unknown_name_is_an_attribute_error_with_the_nearest_one():
    with pytest.raises(AttributeError, match="did you mean 'recompute'"):
        _ = DistributedStrategy().recompue
    assert not hasattr(DistributedStrategy(), "zzz")


def test_contradictory_settings_raise():
    with pytest.raises(StrategyError, match="are both given: use only one of them"):
        DistributedStrategy(amp={"incr_ratio": 3.0}, amp_configs={"decr_ratio": 0.5})
    with pytest.raises(StrategyError, match=r"^fuse_grad_size_in_MB has no effect with fuse_all_reduce_ops=False"):
        DistributedStrategy(fuse_all_reduce_ops=False, fuse_grad_size_in_MB=8).plan()


def test_all_problems_come_at_once():
    with pytest.raises(StrategyError) as caught:
        DistributedStrategy(ampp=True, gradient_merge={"k_steps": 0, "k_step": 1, "avg": 3}, clip="yes")
    assert len(caught.value.problems) == 5
    strategy = DistributedStrategy(auto=True, pipeline={"schedule_mode": "1F2B"}, amp={"use_pure_fp16": True})
    strategy.auto_configs["memory_budget"] = "much"
    strategy.recompute_configs = {"checkpoints": ["a"]}
    with pytest.raises(StrategyError) as caught:
        strategy.plan()
    text = str(caught.value)
    assert text.startswith("4 problems in the strategy:")
    for name in (
        "'much' is not a number of bytes",
        "did you mean '1F1B'",
        "use_pure_fp16",
        "recompute_configs is set, but",
    ):
        assert name in text


def test_settings_without_their_switch_raise_unless_it_is_explicitly_off():
    strategy = DistributedStrategy(amp_configs={"incr_ratio": 3.0})
    with pytest.raises(StrategyError, match=r"add `strategy.amp = True`"):
        strategy.plan()
    strategy.amp = False
    assert [type(p).__name__ for p in strategy.plan().parts] == ["DataParallel"]
    strategy = DistributedStrategy(hierarchical_allreduce_inter_nranks=2)
    with pytest.raises(StrategyError, match="hierarchical_allreduce_inter_nranks is set, but use_hierarchical"):
        strategy.plan()


@pytest.mark.parametrize("switch", sorted(s for s, p in every().items() if not p.always))
def test_every_switch_is_in_the_plan_or_chooses_others(switch):
    needs = {"recompute": {"checkpoints": ["0"]}, "batch": {"feed": 8}}
    strategy = DistributedStrategy(**{switch: needs.get(switch, True)})
    assert (every()[switch] in [type(p) for p in strategy.plan().parts]) is not every()[switch].is_meta


def test_printing_gives_a_table_of_what_is_on():
    text = str(attribute_style())
    for word in ("gradient_merge", "k_steps", "bfloat16", "fuse_grad_size_in_MB", "16", "off: ", "localsgd"):
        assert word in text
    assert all(len(line) <= 118 for line in text.splitlines()[:-1])
    assert "lars_coeff" not in text


def test_settings_without_effect_are_reported():
    strategy = attribute_style()
    strategy.amp_configs["use_fp16_guard"] = False
    strategy.cudnn_exhaustive_search = False
    names = dict(strategy.without_meaning())
    assert sorted(names) == ["amp_configs['use_fp16_guard']", "cudnn_exhaustive_search", "execution_strategy"]
    text = str(fleet.explain(strategy))
    assert "no effect: execution_strategy (there is no graph executor" in text


def test_a_field_that_does_not_exist_is_an_error_on_the_records_too():
    with pytest.raises(AttributeError):
        DistributedStrategy().build_strategy.fuse_everything = True
    assert "num_threads" in [f.name for f in dataclasses.fields(DistributedStrategy().execution_strategy)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("amp: tru", r"s.yaml: amp = 'tru'"),
        ("- amp", r"s.yaml: must be a mapping"),
        ("amp: true\namp: false", r"s.yaml: line 2, column 1: 'amp' is given more than once"),
        ("lars: true\namp: [1, 2", r"s.yaml: line 2, column 11: .*\n    amp: \[1, 2\n              \^"),
        ("amp: !!python/object/apply:os.system [ls]", r"could not determine a constructor"),
        ("ampp: 1\nlarrs: 2", r"2 problems"),
    ],
)
def test_bad_yaml_raises_with_its_file(tmp_path, text, message):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(StrategyError, match=message):
        DistributedStrategy.load(path)


def test_numbers_in_yaml_are_what_people_write(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("lars: {lars_coeff: 1e-3, lars_weight_decay: 5e-4}")
    assert DistributedStrategy.load(path).lars_configs["lars_coeff"] == 0.001
    path.write_text("")
    assert DistributedStrategy.load(path) == DistributedStrategy()
    with pytest.raises(FileNotFoundError):
        DistributedStrategy.load(tmp_path / "missing.yaml")


def test_saving_leaves_the_old_file_when_it_fails(tmp_path):
    path = tmp_path / "s.yaml"
    attribute_style().save(path)
    before = path.read_text()
    broken = attribute_style()
    broken.amp_configs["custom_black_list"].append(object())
    with pytest.raises(Exception, match="cannot represent"):
        broken.save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.yaml"]
