"""FleetTrainer on two ranks against transformers' own Trainer in one process, in float64."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from guests import SAME, Model, Samples, as_launched, error_of, whole
from safetensors.torch import load_file

from fleetx import StrategyError, fleet

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate, which is not installed")

from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from transformers import TrainingArguments as Arguments

from fleetx.integrations.transformers import FleetTrainer

QUIET = {
    "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
    "learning_rate": 0.3, "optim": "sgd", "num_train_epochs": 1,
}  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    """Rows with different numbers of labels."""

    def __init__(self, n=24):
        g = torch.Generator().manual_seed(2)
        self.ids = torch.randint(16, (n, 8), generator=g)
        self.labels = torch.where(torch.arange(8) < torch.randint(2, 8, (n, 1), generator=g), self.ids, -100)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(8), "labels": self.labels[i]}


def language_model(dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, pad_token_id=0, bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


MODELS = {"samples": (Model, Samples), "tokens": (language_model, Tokens)}


def plain(kind, folder, batch=4, **asked):
    """A Trainer of transformers, in this process."""
    make, data = MODELS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = Arguments(folder, per_device_train_batch_size=batch, **QUIET | asked)
        made = Trainer(make(), args, train_dataset=data(), eval_dataset=data(11))
        made.train()
    return made


def fleet_size():
    fleet.init()
    return fleet.worker_num()


def ours(kind, folder, declared, dropout=0.0, **asked):
    make, data = MODELS[kind]
    batch = 4 // fleet_size()
    args = Arguments(folder, per_device_train_batch_size=batch, per_device_eval_batch_size=2, **QUIET | asked)
    strategy = fleet.DistributedStrategy(**declared)
    return FleetTrainer(make(dropout), args, train_dataset=data(), eval_dataset=data(11), strategy=strategy)


def trained(kind, folder, declared, asked):
    made = ours(kind, folder, declared, **asked)
    made.train()
    return whole(made.model), made.state.log_history, made.lr_scheduler.last_epoch


def run(ranks, *args):
    return ranks.run(as_launched, *args)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("declared", "asked"),
    [
        ({}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({}, {"gradient_accumulation_steps": 4}),  # the last window of the epoch has only two batches
        ({"gradient_merge": {"k_steps": 4}}, {"max_grad_norm": 0.1}),
        ({"clip": {"clip_norm": 0.05}}, {}),
        ({"sharding": True}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
    ],
    ids=["nothing", "accumulation", "short window", "merge", "clip", "sharding"],
)
def test_two_ranks_equal_the_plain_trainer(ranks, tmp_path, kind, declared, asked):
    logs = {"logging_strategy": "steps", "logging_steps": 1}
    same = {
        "gradient_accumulation_steps": declared.get("gradient_merge", {}).get("k_steps", 1),
        "max_grad_norm": declared.get("clip", {}).get("clip_norm", 1.0),
    }
    expected = plain(kind, str(tmp_path), **same | asked | logs)
    for found, history, updates in run(ranks, trained, kind, str(tmp_path), declared, asked | logs):
        torch.testing.assert_close(found, whole(expected.model), **SAME)
        assert updates == expected.state.global_step == expected.lr_scheduler.last_epoch
        for mine, theirs in zip(history[:-1], expected.state.log_history[:-1], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)  # it is logged in float32
            assert mine["learning_rate"] == theirs["learning_rate"]
            if "grad_norm" in mine:  # not of a short window
                assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)


# --- evaluation ------------------------------------------------------------------------------------------
def mean_square(found):
    return {"mse": float(((found.predictions - found.label_ids) ** 2).mean())}


def evaluated(folder, declared):
    made = ours("samples", folder, declared, eval_strategy="steps", eval_steps=2)
    made.compute_metrics = mean_square
    before = made.evaluate()["eval_mse"]
    made.train()
    return [before, *(entry["eval_mse"] for entry in made.state.log_history if "eval_mse" in entry)]


@pytest.mark.parametrize("declared", [{}, {"sharding": True}], ids=["nothing", "sharding"])
def test_evaluation_on_two_ranks_sees_every_sample_once(ranks, tmp_path, declared):
    """11 samples in batches of 2 on two ranks."""
    model, data = plain("samples", str(tmp_path)).model, Samples(11)
    start, end = (mean_square_of(m, data) for m in (Model(), model))
    for found in run(ranks, evaluated, str(tmp_path), declared):
        assert found[0] == pytest.approx(start, rel=1e-9)
        assert found[-1] == pytest.approx(end, rel=1e-9)
        assert len(found) == 4  # before, and after updates 2, 4 and 6


def mean_square_of(model, data):
    with torch.no_grad():
        return float(((model(data.x, data.y)["logits"] - data.y) ** 2).mean())


# --- checkpoints -----------------------------------------------------------------------------------------
RESUMED = [
    {"gradient_merge": {"k_steps": 2}},
    {"sharding": True},
    {"dgc": {"sparsity": [0.5]}},
    {"localsgd": {"k_steps": 3}},
    {"amp": {"dtype": "float16"}},
]


def with_saves(kind, folder, declared, resume=None, dropout=0.2):
    asked = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0}
    made = ours(kind, folder, declared, dropout, **asked)
    if "amp" in declared:
        made.model.float()
    out = made.train(resume_from_checkpoint=resume)
    return whole(made.model), out.global_step


@pytest.mark.parametrize("declared", RESUMED, ids=lambda d: next(iter(d)))
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(ranks, tmp_path, declared):
    """From the middle of the first epoch, with dropout and a shuffled order."""
    unbroken = run(ranks, with_saves, "tokens", str(tmp_path), declared)
    again = run(ranks, with_saves, "tokens", str(tmp_path), declared, str(tmp_path / "checkpoint-2"))
    for (expected, steps), (found, their_steps) in zip(unbroken, again, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert steps == their_steps == (6 if "gradient_merge" in declared else 12)


def test_one_process_resumes_what_two_ranks_saved(ranks, tmp_path):
    merged = {"gradient_merge": {"k_steps": 2}}
    [(expected, _), _] = run(ranks, with_saves, "samples", str(tmp_path), merged, None, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = with_saves("samples", str(tmp_path), merged, str(tmp_path / "checkpoint-2"), 0.0)
    torch.testing.assert_close(found, expected, **SAME)


def test_true_resumes_from_the_newest_complete_checkpoint(ranks, tmp_path):
    [(expected, _), _] = run(ranks, with_saves, "samples", str(tmp_path), {})
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()  # as a kill may leave it
    for found, steps in run(ranks, with_saves, "samples", str(tmp_path), {}, True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert steps == 12
    for number in range(2, 14, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    texts = ranks.run(error_of, with_saves, "samples", str(tmp_path), {}, True)
    assert all(f"there is no complete checkpoint in {tmp_path}" in text for text in texts)


def saved(folder, declared):
    made = ours("tokens", folder, declared)
    made.train()
    made.save_model()
    return whole(made.model)


@pytest.mark.parametrize("declared", [{}, {"sharding": True}], ids=["nothing", "sharding"])
def test_from_pretrained_reads_what_save_model_writes(ranks, tmp_path, declared):
    found, _ = run(ranks, saved, str(tmp_path), declared)
    read = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(whole(read), found, rtol=0, atol=0)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def only_model(folder, resume=None):
    made = ours("tokens", folder, {}, save_strategy="steps", save_steps=3, save_only_model=True)
    made.train(resume)


def test_a_checkpoint_without_the_state_of_fleetx_is_not_resumed(ranks, tmp_path):
    run(ranks, only_model, str(tmp_path))
    assert not (tmp_path / "checkpoint-3" / "fleetx").exists()
    texts = ranks.run(error_of, only_model, str(tmp_path), str(tmp_path / "checkpoint-3"))
    assert all("has no folder 'fleetx': it was saved by another Trainer or with save_only_model" in t for t in texts)
    texts = ranks.run(error_of, only_model, str(tmp_path), str(tmp_path / "checkpoint-4"))
    assert all("there is no folder" in t and "checkpoint-4" in t for t in texts)


def best(folder, declared):
    made = ours(
        "samples", folder, declared, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    made.train()
    return whole(made.model), made.state.best_model_checkpoint


@pytest.mark.parametrize("declared", [{}, {"sharding": True}], ids=["nothing", "sharding"])
def test_the_best_model_is_loaded_at_the_end(ranks, tmp_path, declared):
    for found, where in run(ranks, best, str(tmp_path), declared):
        assert not where.endswith("checkpoint-6")  # the last one
        torch.testing.assert_close(found, load_file(Path(where, "model.safetensors")), rtol=0, atol=0)


# --- arguments that become switches -----------------------------------------------------------------------
def strategy_of(declared, **asked):
    return ours("samples", "unused", declared, **asked).strategy


def test_fp16_and_bf16_become_amp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half = strategy_of({}, fp16=True, max_grad_norm=0)
    scaler = torch.amp.GradScaler("cpu")
    assert half.amp_configs["dtype"] == "float16"
    assert half.amp_configs["init_loss_scaling"] == scaler.get_scale()
    assert half.amp_configs["incr_every_n_steps"] == scaler.get_growth_interval()
    assert half.amp_configs["incr_ratio"] == scaler.get_growth_factor()
    assert half.amp_configs["decr_ratio"] == scaler.get_backoff_factor()
    assert not half.clip
    assert strategy_of({}, bf16=True).amp_configs["dtype"] == "bfloat16"
    assert strategy_of({"amp": {"dtype": "bfloat16"}}, bf16=True).amp


def test_bf16_equals_the_plain_trainer_bit_for_bit(tmp_path):
    def train(kind, **given):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = language_model(0.1).float()
            args = Arguments(
                str(tmp_path),
                per_device_train_batch_size=4,
                bf16=True,
                max_grad_norm=0,
                **QUIET | {"optim": "adamw_torch_fused"},
            )
            made = kind(model, args, train_dataset=Tokens(), **given)
            made.train()
        assert made.model(**Tokens()[slice(2)]).logits.dtype is torch.float32
        return whole(model)

    torch.testing.assert_close(train(FleetTrainer), train(Trainer), rtol=0, atol=0)


def overflowing(folder):
    made = ours("samples", folder, {"amp": {"init_loss_scaling": 1e38, "decr_every_n_nan_or_inf": 1}})
    made.model.float()
    made.train_dataset.x, made.train_dataset.y = made.train_dataset.x.float(), made.train_dataset.y.float()
    start = whole(made.model)
    made.train()
    return all(map(torch.equal, start.values(), whole(made.model).values())), made.lr_scheduler.last_epoch


def test_a_skipped_update_does_not_advance_the_schedule(ranks, tmp_path):
    assert run(ranks, overflowing, str(tmp_path)) == [(True, 0)] * 2


@pytest.mark.parametrize(
    ("declared", "asked", "message"),
    [
        ({"gradient_merge": {"k_steps": 2}}, {"gradient_accumulation_steps": 4}, "gradient_merge has k_steps=2"),
        ({"gradient_merge": False}, {"gradient_accumulation_steps": 4}, "but gradient_merge is off"),
        ({"gradient_merge": {"k_steps": 2, "avg": False}}, {}, "takes the mean over accumulated batches"),
        ({"amp": {"dtype": "float16"}}, {"bf16": True}, "bf16 in TrainingArguments, but float16 in amp_configs"),
        ({"clip": {"clip_norm": 0.5}}, {"max_grad_norm": 0.1}, "but the strategy clips at 0.5"),
        ({}, {"torch_compile": True}, "torch_compile in TrainingArguments is not supported yet"),
        ({}, {"auto_find_batch_size": True}, "use fleet.largest_batch"),
        ({}, {"ddp_static_graph": True}, "ddp_static_graph in TrainingArguments"),
        ({"find_unused_parameters": True}, {"ddp_find_unused_parameters": False}, "remove one"),
        ({"pipeline": True}, {}, "pipeline in a Trainer is not supported yet"),
        ({"auto": True}, {}, "auto needs a sample"),
        ({"recompute": {"checkpoints": ["net.0"]}}, {"gradient_checkpointing": True}, "would both recompute"),
        ({}, {"optim": "lomo"}, "updates parameters during backward"),
    ],
    ids=lambda v: next(iter(v), "") if isinstance(v, dict) else "",
)  # fmt: skip
def test_what_would_act_beside_the_strategy_is_an_error(tmp_path, monkeypatch, declared, asked, message):
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")  # pytest restores them
    with pytest.raises(StrategyError, match=message):
        strategy_of(declared, **asked)


def test_a_conflict_names_the_argument_that_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrategyError, match=r"clip comes from max_grad_norm in TrainingArguments"):
        strategy_of({"dgc": True}, max_grad_norm=1.0)


def test_a_dict_is_no_strategy(tmp_path):
    with pytest.raises(TypeError, match=r"strategy must be a fleet\.DistributedStrategy, not dict"):
        FleetTrainer(Model(), Arguments(str(tmp_path), use_cpu=True, report_to=[]), strategy={"amp": True})


def unseen(folder):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name)
        ours("samples", folder, {})


def test_workers_that_accelerate_does_not_see_are_an_error(ranks, tmp_path):
    """As under srun: the Trainer would give every worker all of the data."""
    texts = ranks.run(error_of, unseen, str(tmp_path))
    assert all("sees 1 of 2 workers: start the script with fleetrun or torchrun" in text for text in texts)


# --- other ways to use a Trainer ---------------------------------------------------------------------------
class Both(FleetTrainer, Seq2SeqTrainer):
    pass


def train_twice(folder):
    args = Seq2SeqTrainingArguments(folder, per_device_train_batch_size=2, **QUIET)
    made = Both(Model(), args, train_dataset=Samples(), strategy=fleet.DistributedStrategy())
    made.train()
    made.train()
    return whole(made.model)


def test_a_trainer_of_another_class_trains_twice(ranks, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = Arguments(str(tmp_path), per_device_train_batch_size=4, **QUIET)
        expected = Trainer(Model(), args, train_dataset=Samples())
        expected.train()
        expected.train()
    for found in run(ranks, train_twice, str(tmp_path)):
        torch.testing.assert_close(found, whole(expected.model), **SAME)


def with_model_init(folder):
    args = Arguments(folder, per_device_train_batch_size=2, **QUIET)
    made = FleetTrainer(
        model_init=lambda: Model(), args=args, train_dataset=Samples(), strategy=fleet.DistributedStrategy()
    )
    made.train()
    first = whole(made.model)
    made.train()
    return first, whole(made.model)


def test_model_init_makes_a_new_model_for_each_training(ranks, tmp_path):
    for first, second in run(ranks, with_model_init, str(tmp_path)):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
