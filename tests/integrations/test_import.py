"""`fleetx import`: the settings of other systems as a strategy, with a list of everything that is not in it."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from fleetx import DistributedStrategy, StrategyError
from fleetx.cli import main
from fleetx.integrations.settings_files import read


def written(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def imported(tmp_path, settings, name="ds.json", **options):
    text = yaml.safe_dump(settings) if name.endswith("yaml") else json.dumps(settings)
    return read(written(tmp_path / name, text), **options)


def named(lines, *words):
    return any(all(word in line for word in words) for line in lines)


# What the documentation of DeepSpeed and of transformers shows.
ZERO3 = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 2,
             "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"},
        "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto", "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 5e7, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "steps_per_print": 2000,
    "train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "wall_clock_breakdown": False,
}  # fmt: skip


def test_a_deepspeed_file_becomes_a_strategy(tmp_path):
    found = imported(tmp_path, ZERO3)
    assert found.strategy == DistributedStrategy(
        amp={"dtype": "float16", "init_loss_scaling": 4096.0, "incr_every_n_steps": 500, "decr_every_n_nan_or_inf": 2,
             "incr_ratio": 2.0, "decr_ratio": 0.5},
        sharding={"stage": 3, "offload": True}, gradient_merge={"k_steps": 4}, clip={"clip_norm": 0.5},
        batch={"feed": 8, "merged": 4, "replicas": 8},
    )  # fmt: skip
    assert named(found.script, "torch.optim.AdamW(model.parameters(), betas=[0.9, 0.95]")
    assert named(found.script, 'optimizer.params.lr is "auto"')
    assert named(found.script, "scheduler WarmupLR(")
    assert named(found.script, "call optimizer.step() after every batch")
    assert named(found.missing, "zero_optimization.overlap_comm", "speed and memory")
    assert named(found.missing, "stage3_prefetch_bucket_size")
    assert named(found.missing, "steps_per_print", "only measures or prints")
    assert named(found.differs, "fp16 of DeepSpeed keeps the parameters in float16")
    assert not found.ignored


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({"bf16": {"enabled": True}}, {"amp": {"dtype": "bfloat16"}}),
        ({"bfloat16": {"enabled": True}}, {"amp": {"dtype": "bfloat16"}}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, {"amp": {"dtype": "float16"}}),
        ({"fp16": {"enabled": True, "loss_scale": 128}},
         {"amp": {"dtype": "float16", "use_dynamic_loss_scaling": False, "init_loss_scaling": 128.0}}),
        ({"communication_data_type": "bfp16"}, {"fp16_allreduce": {"dtype": "bfloat16"}}),
        ({"zero_optimization": {"stage": 0}}, {}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"sharding": {"stage": 2, "offload": True}}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
         {"sharding": {"stage": 3, "sharding_degree": 4, "hybrid_dp": True}}),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, {"lamb": True}),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, {"muon": True}),
        ({"gradient_clipping": 0}, {}),
        ({"train_micro_batch_size_per_gpu": 4}, {}),
    ],
)  # fmt: skip
def test_settings_of_deepspeed(tmp_path, settings, strategy):
    assert imported(tmp_path, settings).strategy == DistributedStrategy(**strategy)


def test_merged_steps_follow_from_batch_sizes_and_ranks(tmp_path):
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert named(imported(tmp_path, sizes).missing, "give that with --ranks")
    found = imported(tmp_path, sizes, ranks=8).strategy
    assert found == DistributedStrategy(
        gradient_merge={"k_steps": 2}, batch={"feed": 4, "merged": 2, "replicas": 8}
    )  # fmt: skip
    found = imported(tmp_path, {"train_batch_size": 64, "gradient_accumulation_steps": 2}, ranks=8).strategy
    assert found.batch_configs["feed"] == 4
    other = imported(tmp_path, sizes, ranks=3)
    assert named(other.missing, "train_batch_size 64 is not", "3 workers: DeepSpeed would stop")
    assert not other.strategy.batch


@pytest.mark.parametrize("word", ["false", "False", False])
def test_false_in_quotes_is_false(tmp_path, word):
    assert not imported(tmp_path, {"fp16": {"enabled": word}}).strategy.amp
    fsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": word}}
    assert not imported(tmp_path, fsdp, "a.yaml").strategy.sharding_configs["offload"]


def test_what_the_trainer_fills_in_is_not_said_to_be_missing(tmp_path):
    found = imported(tmp_path, {"gradient_clipping": "auto"})
    assert named(found.script, "gradient_clipping")
    assert not found.differs


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_accumulation_step": 4}, ["gradient_accumulation_step: DeepSpeed has no such setting"]),
        ({"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1}}, ["only acts in stage 3"]),
        ({"zero_optimization": {"stage": 0, "overlap_comm": True}}, ["overlap_comm: stage is 0"]),
        ({"fp16": {"enabled": False, "hysteresis": 3}}, ["fp16.hysteresis: fp16.enabled is not true"]),
        ({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 3}}, ["fp16.hysteresis: loss_scale is fixed"]),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ["deepspeed.checkpointing.checkpoint"]),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, ["DeepSpeed sets it to 0"]),
    ],
)
def test_what_deepspeed_ignores_is_named(tmp_path, settings, words):
    assert named(imported(tmp_path, settings).ignored, *words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, ["optimizer OneBitAdam"]),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ["NVMe"]),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ["stage 3 only"]),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ["zero_quantized_weights"]),
        ({"elasticity": {"enabled": True}}, ["fleetrun --elastic"]),
        ({"activation_checkpointing": {"profile": True}}, ["strategy.recompute"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel", "not supported yet"]),
        ({"fp16": {"enabled": True, "min_loss_scale": 4}}, ["min_loss_scale"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["both enabled", "would stop"]),
        ({"fp16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, ["max_grad_norm"]),
    ],
)
def test_what_has_no_equivalent_is_named(tmp_path, settings, words):
    assert named(imported(tmp_path, settings).missing, *words)


def test_adam_of_deepspeed_is_adamw(tmp_path):
    found = imported(tmp_path, {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert named(found.script, "torch.optim.AdamW(model.parameters(), lr=0.001)")
    assert named(found.differs, "Adam is AdamW in DeepSpeed")
    plain = imported(tmp_path, {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}})
    assert named(plain.script, "torch.optim.Adam(")


# --- accelerate --------------------------------------------------------------------------------------------
CLUSTER = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "machine_rank": 0, "main_training_function": "main",
    "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True,
    "use_cpu": False, "gpu_ids": "all", "downcast_bf16": "no",
}  # fmt: skip


def test_an_accelerate_file_with_fsdp_becomes_a_strategy(tmp_path):
    fsdp = {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": False, "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_activation_checkpointing": True,
        "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True,
    }  # fmt: skip
    found = imported(tmp_path, CLUSTER | {"distributed_type": "FSDP", "fsdp_config": fsdp}, "a.yaml")
    assert found.strategy == DistributedStrategy(amp={"dtype": "bfloat16"}, sharding={"stage": 2, "offload": True})
    assert named(found.script, "fleetrun --nproc_per_node 8 script.py")
    assert named(found.missing, "fsdp_activation_checkpointing", "strategy.recompute")
    assert named(found.ignored, "fsdp_backward_prefetch", "FSDP2 does not have it")
    assert named(found.differs, "BertLayer")


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("FULL_SHARD", {"stage": 3}), ("SHARD_GRAD_OP", {"stage": 2}), ("NO_SHARD", None), (1, {"stage": 3}),
        ("HYBRID_SHARD", {"stage": 3, "sharding_degree": 4, "hybrid_dp": True}),
    ],
)  # fmt: skip
def test_sharding_strategies_of_fsdp1(tmp_path, name, sharding):
    settings = {"num_processes": 8, "num_machines": 2, "distributed_type": "FSDP"}
    found = imported(tmp_path, settings | {"fsdp_config": {"fsdp_sharding_strategy": name}}, "a.yaml").strategy
    assert found == DistributedStrategy(**({"sharding": sharding} if sharding else {}))


def test_an_accelerate_file_with_deepspeed_becomes_a_strategy(tmp_path):
    plugin = {
        "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_init_flag": True,
        "zero3_save_16bit_model": True, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    }  # fmt: skip
    settings = CLUSTER | {"distributed_type": "DEEPSPEED", "deepspeed_config": plugin}
    expected = {
        "amp": {"dtype": "bfloat16"}, "sharding": {"stage": 3, "offload": True}, "gradient_merge": {"k_steps": 2},
        "clip": {"clip_norm": 1.0},
    }  # fmt: skip
    assert imported(tmp_path, settings, "a.yaml").strategy == DistributedStrategy(**expected)
    written(tmp_path / "ds.json", {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.1})
    settings["deepspeed_config"] = {"deepspeed_config_file": "ds.json"}
    found = imported(tmp_path, settings, "a.yaml").strategy
    assert found == DistributedStrategy(
        amp={"dtype": "bfloat16"}, sharding={"stage": 1}, clip={"clip_norm": 0.1}
    )  # fmt: skip


def test_no_number_of_processes(tmp_path):
    assert not imported(tmp_path, CLUSTER | {"num_processes": -1}, "a.yaml").script


def test_sections_that_accelerate_does_not_use_are_named(tmp_path):
    settings = {
        "distributed_type": "MULTI_GPU",
        "fsdp_config": {"fsdp_offload_params": True},
        "mixed_precision": "fp16",
    }
    found = imported(tmp_path, settings, "a.yaml")
    assert named(found.ignored, "fsdp_config.fsdp_offload_params: distributed_type is MULTI_GPU")
    assert found.strategy.amp_configs["init_loss_scaling"] == 65536.0
    assert not found.strategy.sharding
    megatron = imported(tmp_path, {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"tp": 2}}, "a.yaml")
    assert named(megatron.missing, "distributed_type MEGATRON_LM")


# --- Paddle ------------------------------------------------------------------------------------------------
PROTOTXT = """
amp: true
amp_configs { init_loss_scaling: 1024.0 custom_white_list: "softmax" }
gradient_merge: true
gradient_merge_configs { k_steps: 4 avg: true }
recompute: false
recompute_configs { checkpoints: "a" }
lars_configs { lars_coeff: 0.01 }
a_sync: true
sync_nccl_allreduce: false
"""


def test_a_prototxt_of_paddle_becomes_a_strategy(tmp_path):
    found = read(written(tmp_path / "s.prototxt", PROTOTXT))
    assert found.strategy.amp_configs["custom_white_list"] == ["softmax"]
    assert found.strategy.gradient_merge_configs["k_steps"] == 4
    assert not found.strategy.lars
    assert named(found.ignored, "lars_configs: lars is off")
    assert named(found.ignored, "recompute_configs: recompute is off")
    assert named(found.missing, "a_sync", "parameter-server training")
    assert named(found.missing, "sync_nccl_allreduce")


# --- the command, and bad files ------------------------------------------------------------------------------
def test_the_command_writes_the_strategy_and_lists_the_rest(tmp_path):
    source, target = written(tmp_path / "ds.json", ZERO3 | {"typo": 1}), tmp_path / "strategy.yaml"
    done = CliRunner().invoke(main, ["import", str(source), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert DistributedStrategy.load(target) == read(source).strategy
    assert "no equivalent:\n" in done.output
    assert "DeepSpeed ignores these silently:\n  - typo: DeepSpeed has no such setting" in done.output


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "line 1, column 2: is not JSON"),
        ("a.json", '{"a": 1, "a": 2}', "'a' is given more than once"),
        ("a.json", "[1]", "must be an object"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", " " * (1 << 20) + "{}", "is longer than 1024 KiB"),
        ("a.json", '{"zero_optimization": {"stage": "x"}}', "a value has the wrong type"),
        ("a.json", '{"fp16": true}', "fp16 = True: must be a section of names and values"),
        ("a.json", '{"optimizer": {"type": "Adam", "params": 1}}', "optimizer.params = 1: must be a section"),
        ("a.json", '{"bf16": {"enabled": "maybe"}}', "bf16.enabled = 'maybe': must be true or false"),
        ("a.json", '{"gradient_accumulation_steps": "four"}', "gradient_accumulation_steps = 'four': must be a whole"),
        ("a.json", '{"train_batch_size": 0}', "train_batch_size = 0: must be a whole number of at least 1"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 9}", "must be one of FULL_SHARD"),
        ("a.yaml", "num_machines: 3\nnum_processes: 2", "num_processes 2 cannot be divided between num_machines 3"),
        ("a.yaml", "a: !!python/object:os.system x", "could not determine a constructor"),
        ("a.yaml", "a: &x [1]\nb: *x", "alias"),
        ("a.prototxt", "amp: {", "a closing brace is missing"),
        ("a.bin", "", "the suffix '.bin' is unknown"),
    ],
)
def test_a_bad_file_is_an_error_in_one_sentence(tmp_path, name, text, message):
    path = written(tmp_path / name, text)
    with pytest.raises(StrategyError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    done = CliRunner().invoke(main, ["import", str(path), "-o", str(tmp_path / "out.yaml")])
    assert done.exit_code == 1
    assert not (tmp_path / "out.yaml").exists()
