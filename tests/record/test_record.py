"""fleet.record: the lines equal what the loop computed, and recording changes nothing."""

from __future__ import annotations

import gc
import json
import math
import weakref

import psutil
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

import forked_command
from fleetx import fleet
from fleetx.comm.session import current
from fleetx.errors import UsageError
from fleetx.record.read import read
from fleetx.record.schema import SCHEMA, TIMES, encode, number
from fleetx.record.tally import Span, trace
from training import batches, net, sgd, share, train_fleet, zero_last


def start(folder, declared, *, make=net, predict_memory=False, **options):
    fleet.init()
    recorder = fleet.record(folder, predict_memory=predict_memory, **options)
    model = make()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    return recorder, model, optimizer


def test_the_lines_equal_what_the_loop_computed(tmp_path):
    recorder, model, optimizer = start(tmp_path, {"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 0.1}})
    losses = []
    for x, y in batches(8):
        loss = mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    latest = fleet.metrics()
    recorder.close()
    found = read(tmp_path)
    assert [r["round"] for r in found.rounds] == [1, 2, 3, 4]
    assert [r["loss"] for r in found.rounds] == [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert {(r["samples"], r["steps"], r["rate"], r["updated"]) for r in found.rounds} == {(8, 2, 0.1, True)}
    assert all(r["norm"] > 0 for r in found.rounds)
    assert latest["loss"] == found.rounds[-1]["loss"]
    assert {"peak", "sent_in_all", "events"} <= latest.keys()
    for r in found.rounds:
        assert set(r["time"]) == set(TIMES)
        assert sum(r["time"].values()) == pytest.approx(r["seconds"], abs=1e-5)


def test_the_norm_is_that_of_the_gradient_before_it_is_clipped(tmp_path):
    recorder, model, optimizer = start(tmp_path, {"clip": {"clip_norm": 0.01}})
    expected = []
    for x, y in batches(3):
        plain = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        expected.append(torch.cat([g.flatten() for g in plain]).norm().item())
        zero_last(model, optimizer, x, y)
    recorder.close()
    assert [r["norm"] for r in read(tmp_path).rounds] == pytest.approx(expected, rel=1e-5)


def test_a_record_says_how_to_repeat_the_run(tmp_path):
    recorder, *_ = start(tmp_path, {"clip": {"clip_norm": 2.0}})
    recorder.close()
    found = read(tmp_path)
    assert found.starts[0]["schema"] == SCHEMA
    assert found.starts[0]["versions"]["torch"] == torch.__version__
    plan = found.plans[0]
    assert fleet.DistributedStrategy(**plan["strategy"]).clip_configs["clip_norm"] == 2.0
    assert ["GRADIENT", "clip", "limit the norm of the gradient to clip_norm"] in plan["acts"]
    assert plan["parameters"] == sum(p.numel() for p in net().parameters())


def test_nothing_is_recorded_by_default():
    fleet.init()
    plain = torch.autograd.backward
    train_fleet(batches(2), {})
    assert current().recorder is None
    assert torch.autograd.backward is plain
    fleet.log(accuracy=1.0)  # no-op
    with pytest.raises(UsageError, match="nothing is recorded"):
        fleet.metrics()


def test_closing_leaves_torch_as_it_was(tmp_path):
    plain = torch.autograd.backward
    recorder, *_ = start(tmp_path, {})
    assert torch.autograd.backward is not plain
    recorder.close()
    assert current().recorder is None
    assert torch.autograd.backward is plain


def test_a_record_does_not_keep_a_model_alive(tmp_path):
    _, model, optimizer = start(tmp_path, {"clip": {"clip_norm": 1.0}})
    zero_last(model, optimizer, *batches(1)[0])
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_an_evaluation_counts_as_such_however_long_it_is(tmp_path):
    recorder, model, optimizer = start(tmp_path, {})
    (x, y), *_ = batches(1)
    zero_last(model, optimizer, x, y)
    with torch.no_grad():
        for _ in range(100):
            model(x)
    assert len(recorder._spans) < 5
    zero_last(model, optimizer, x, y)
    recorder.close()
    first, second = read(tmp_path).rounds
    assert first["time"]["other"] == 0 < second["time"]["other"]
    assert second["samples"] == 4


def test_a_second_record_is_an_error(tmp_path):
    start(tmp_path, {})
    with pytest.raises(UsageError, match=r"recorded in .* already"):
        fleet.record(tmp_path / "other")


def test_values_of_the_script_are_kept(tmp_path):
    recorder, model, optimizer = start(tmp_path, {})
    zero_last(model, optimizer, *batches(1)[0])
    fleet.log(accuracy=torch.tensor(0.5), epoch=1)
    with pytest.raises(TypeError, match="must be a number"):
        fleet.log(name="digits")
    recorder.close()
    (line,) = read(tmp_path).values
    assert (line["round"], line["values"]) == (1, {"accuracy": 0.5, "epoch": 1.0})


def test_skipped_updates_are_events(tmp_path):
    recorder, model, optimizer = start(tmp_path, {})
    (x, y), *_ = batches(1)
    zero_last(model, optimizer, x, y)
    with pytest.warns(UserWarning, match="not finite"):
        zero_last(model, optimizer, x * math.nan, y)
    told = fleet.metrics()["events"]
    recorder.close()
    found = read(tmp_path)
    assert (told["skipped"], told["fault"]) == (1, 0)
    assert [(e["what"], e["round"]) for e in found.events] == [("skipped", 2), ("end", 2)]
    assert math.isnan(number(found.rounds[1]["loss"]))
    assert not found.rounds[1]["updated"]


def test_overflows_are_events_and_lower_the_scale(tmp_path):
    scaling = {"init_loss_scaling": 1e30, "decr_every_n_nan_or_inf": 1}
    recorder, model, optimizer = start(tmp_path, {"amp": scaling})
    for x, y in batches(3):
        zero_last(model, optimizer, x, y)
    recorder.close()
    found = read(tmp_path)
    assert [e["what"] for e in found.events] == ["overflow"] * 3 + ["end"]
    scales = [r["scale"] for r in found.rounds]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] < 1e30


def test_checkpoints_are_events_and_a_resumed_run_appends(tmp_path):
    for _ in range(2):
        recorder, model, optimizer = start(tmp_path / "run", {})
        for x, y in batches(2):
            zero_last(model, optimizer, x, y)
        fleet.save(tmp_path / "saved")
        recorder.close()
        fleet.release()
    found = read(tmp_path / "run")
    assert len(found.starts) == 2
    assert [e["what"] for e in found.events] == ["checkpoint", "end"] * 2
    assert [r["round"] for r in found.rounds] == [1, 2]  # the second run repeated them


def test_half_a_line_of_a_killed_process_is_no_obstacle(tmp_path):
    for _ in range(2):
        recorder, *_ = start(tmp_path, {})
        recorder.close()
        fleet.release()
        with open(tmp_path / "rank0.jsonl", "a") as file:
            file.write('{"ki')
    found = read(tmp_path)
    assert (found.unreadable, len(found.starts)) == (1, 2)  # the last may still be completed


@pytest.mark.parametrize(
    "line",
    ["[1]", "3", "hello", '{"kind": [1]}', '{"kind": "round"}', '{"kind": "rank", "t": 1, "rank": 0}',
     '{"kind": "event", "what": "end"}', '{"kind": "start", "schema": "x"}', '{"kind": "value", "values": [1]}',
     '{"kind": "rank", "t": 1, "rank": 0, "rounds": 1, "time": {"data": "x"}}'],
)  # fmt: skip
def test_lines_that_are_not_ours_are_counted_and_left_out(tmp_path, line):
    recorder, *_ = start(tmp_path, {})
    recorder.close()
    plain = read(tmp_path)
    with open(tmp_path / "rank0.jsonl", "a") as file:
        file.write(line + "\n")
    found = read(tmp_path)
    assert (plain.unreadable, found.unreadable) == (0, 1)
    assert (found.events, found.ranks, found.starts) == (plain.events, plain.ranks, plain.starts)
    (tmp_path / "rank0.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match="is not a record of fleetx"):
        read(tmp_path)


def test_a_folder_without_a_record_and_one_of_a_later_version_are_errors(tmp_path):
    with pytest.raises(UsageError, match=r"has no rank0\.jsonl"):
        read(tmp_path)
    (tmp_path / "rank0.jsonl").write_text('{"kind": "start", "schema": 99, "other": 1}\n')
    with pytest.raises(UsageError, match="newer fleetx"):
        read(tmp_path)


def test_numbers_that_json_does_not_have_survive():
    line = json.loads(encode({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": 1.5}))
    assert math.isnan(number(line["a"]))
    assert [number(line["b"][0]), number(line["b"][1]["c"]), number(line["d"])] == [math.inf, -math.inf, 1.5]


def test_a_profile_has_ranges_named_by_stage_and_act(tmp_path):
    _, model, optimizer = start(tmp_path, {"clip": {"clip_norm": 1.0}})
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        zero_last(model, optimizer, *batches(1)[0])
    names = {event.name for event in profiler.events()}
    assert {"fleetx forward", "fleetx backward", "fleetx update", "fleetx GRADIENT clip.shrink"} <= names


def test_tokens_are_counted_where_a_batch_is_of_words(tmp_path):
    def make():
        return torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(20, 1))

    recorder, model, optimizer = start(tmp_path, {}, make=make)
    zero_last(model, optimizer, torch.ones(3, 5, dtype=torch.long), torch.zeros(3, 1))
    recorder.close()
    (line,) = read(tmp_path).rounds
    assert (line["samples"], line["tokens"]) == (3, 15)


def three_blocks():
    def layers():
        return [layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]

    return torch.nn.Sequential(*[torch.nn.Sequential(*layers()) for _ in range(3)])


# In sizes of the input: itself, 12 outputs of Tanh (recomputed: 3, and 4 inside a block), the loss, 2 to 3 gradients.
@pytest.mark.parametrize(
    ("declared", "kept"),
    [({}, 16), ({"recompute": {"checkpoints": ["0", "1", "2"]}}, 11.5)],
    ids=["plain", "recompute"],
)
def test_the_memory_of_a_step_is_predicted(tmp_path, declared, kept):
    recorder, model, optimizer = start(tmp_path, declared, make=three_blocks, predict_memory=None)
    before, x = torch.get_rng_state(), torch.ones(1 << 14, 8)
    model(x).mean().backward()
    optimizer.step()
    told = fleet.metrics()["predicted"]
    recorder.close()
    assert torch.equal(torch.get_rng_state(), before)
    found = read(tmp_path).plans[0]["predicted"]
    assert told == found
    assert found / x.nbytes == pytest.approx(kept, abs=0.6)


def recorded(declared, folder):
    fleet.init()
    fleet.record(folder, predict_memory=False)
    return train_fleet(batches(8), declared)


@pytest.mark.parametrize(
    "declared",
    [{}, {"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 0.1}}, {"localsgd": {"k_steps": 2}},
     {"amp": {"init_loss_scaling": 64.0}}, {"dgc": True}],
    ids=["plain", "merge and clip", "localsgd", "amp", "dgc"],
)  # fmt: skip
def test_recording_changes_no_bit(ranks, declared, tmp_path):
    plain = ranks.run(train_fleet, batches(8), declared)
    for a, b in zip(plain, ranks.run(recorded, declared, str(tmp_path)), strict=True):
        assert all(map(torch.equal, a.values(), b.values()))


def two(folder, every_rank):
    recorder, model, optimizer = start(folder, {}, every_rank=every_rank)
    for x, y in share(batches(4), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    recorder.close()
    return dict(recorder.latest)


def test_rank_0_gathers_what_the_others_measured(ranks, tmp_path):
    ranks.run(two, str(tmp_path), False)
    found = read(tmp_path)
    assert not (tmp_path / "rank1.jsonl").exists()
    assert found.ranks.keys() == {0, 1}
    for lines in found.ranks.values():
        last = lines[-1]
        assert (last["rounds"], last["samples"]) == (4, 8)
        assert last["sent"] > 4 * sum(p.nbytes for p in net().parameters()) / 2  # gradients, in each round
        assert last["peak"] > 0
    assert {trace["rank"] for trace in found.traces} == {0, 1}
    assert {trace["round"] for trace in found.traces} == {3}


def counted(folder):
    recorder, model, optimizer = start(folder, {})
    usage, before, told = recorder.stream.usage, None, []
    for x, y in share(batches(6), fleet.worker_index(), 2):
        recorder._bytes.due = 0.0  # there is time
        zero_last(model, optimizer, x, y)
        now = usage.sent()
        told.append((recorder.latest.get("sent"), None if before is None else now - before))
        before = now
    kept = dict(recorder.latest)
    for _ in range(3):
        recorder._bytes.due = math.inf  # there is none
        zero_last(model, optimizer, x, y)
    recorder.close()
    return told, kept


def test_each_round_has_its_bytes_where_counting_them_is_cheap(ranks, tmp_path):
    gradients = sum(p.nbytes for p in net().parameters())
    for told, kept in ranks.run(counted, str(tmp_path)):
        assert told[0][0] is None  # it takes two rounds to know
        assert all(gradients / 2 < sent <= counted + 4096 for sent, counted in told[1:])
        assert kept["peak"] > 0
    found = read(tmp_path)
    assert ["sent" in r for r in found.rounds] == [False] + [True] * 5 + [False] * 3
    assert ["peak" in r for r in found.rounds] == [True] * 6 + [False] * 3


def test_where_counting_bytes_is_not_cheap_it_is_done_in_pairs_of_rounds(tmp_path):
    recorder, model, optimizer = start(tmp_path, {})
    for due in (0.0, math.inf, math.inf, math.inf, 0.0, math.inf):
        recorder._bytes.due = due
        zero_last(model, optimizer, *batches(1)[0])
    recorder.close()
    assert ["sent" in r for r in read(tmp_path).rounds] == [False, True, False, False, False, True]


def halves(folder):
    recorder, model, optimizer = start(folder, {"sharding": {"stage": 3}})
    for x, y in share(batches(2), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    recorder.close()
    return sum(p.to_local().nbytes for p in model.parameters()), sum(
        v.to_local().nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    )


def test_the_bytes_of_a_divided_model_are_those_of_the_rank(ranks, tmp_path):
    (parameters, state), _ = ranks.run(halves, str(tmp_path))
    found = read(tmp_path)
    assert found.plans[0]["bytes"] == {"parameters": parameters, "gradients": parameters, "kept": 0}
    assert found.plans[0]["parameters"] == sum(p.numel() for p in net().parameters())
    assert found.ranks[0][-1]["optimizer"] == state
    assert parameters < sum(p.nbytes for p in net().parameters())


def test_the_plan_says_why_acts_run_in_this_order(tmp_path):
    recorder, *_ = start(tmp_path, {"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 1.0}})
    recorder.close()
    told = {switch: told for stage, switch, told in read(tmp_path).plans[0]["acts"] if stage == "GRADIENT"}
    assert "runs after gradient_merge, because" in told["clip"]


def test_a_record_names_the_command_of_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    recorder, *_ = start(tmp_path, {})
    recorder.close()
    assert read(tmp_path).starts[0]["command"] == psutil.Process().parent().cmdline()


def test_the_other_ranks_write_their_own_when_asked(ranks, tmp_path):
    latest = ranks.run(two, str(tmp_path), True)
    lines = [json.loads(text) for text in (tmp_path / "rank1.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "round"][-1] == latest[1]["loss"]
    assert latest[0]["loss"] != latest[1]["loss"]  # each rank has its own batch


def test_a_trace_begins_with_its_earliest_span():
    """A wait ends, and is known, before the span in which it lies."""
    spans = [Span("communication", 11.0, 12.0, "data", "gather"), Span("data", 10.0, 13.0, name="data")]
    assert trace(spans) == [["wait", "gather", 1.0, 1.0], ["compute", "data", 0.0, 3.0]]


def piped(folder):
    recorder, _, optimizer = start(folder, {"pipeline": {"stages": ["2"], "accumulate_steps": 4}})
    for x, y in batches(4):
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def test_the_schedule_of_a_pipeline_is_recorded_as_it_ran(ranks, tmp_path):
    ranks.run(piped, str(tmp_path))
    found = read(tmp_path)
    for rank in (0, 1):
        (trace,) = [t for t in found.traces if t["rank"] == rank]
        stages = [name for lane, name, *_ in trace["spans"] if lane == "stage"]
        assert sorted(stages) == sorted(f"{kind}{i}/{rank}" for kind in "FB" for i in range(4))
    assert all(r["samples"] == 4 and r["time"]["communication"] > 0 for r in found.rounds)


def test_the_bytes_of_a_pipeline_are_those_of_the_stage(ranks, tmp_path):
    ranks.run(piped, str(tmp_path))
    plan = read(tmp_path).plans[0]
    assert plan["divided"]
    assert plan["bytes"]["parameters"] == plan["bytes"]["gradients"] == sum(p.nbytes for p in net()[:2].parameters())


def under_python(script):
    return forked_command.python([script], cwd=script.parent)


def under_fleetrun(script):
    return forked_command.fleetrun(["--device", "cpu", script], cwd=script.parent)


@pytest.mark.parametrize("run", [under_python, under_fleetrun])
def test_a_script_that_fails_before_it_distributes_leaves_its_error(tmp_path, run):
    script = tmp_path / "fails.py"
    script.write_text(
        "from fleetx import fleet\nfleet.init()\nfleet.record('run')\nfleet.DistributedStrategy(amp={'dtyp': 'x'})\n"
    )
    assert "did you mean 'dtype'?" in run(script).stderr
    (fault,) = read(tmp_path / "run").events
    assert fault["what"] == "fault"
    assert "did you mean 'dtype'?" in fault["text"]
