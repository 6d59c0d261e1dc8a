from __future__ import annotations

import copy
import gc
import io
import re
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, UsageError, fleet
from fleetx.comm.session import current
from fleetx.parts.dgc import DGC, exchange
from fleetx.verify import oracle, oracle_updates
from training import Batch, assert_close, assert_equal, big, net, share, train, train_fleet, weights, zero_last


def wide():
    """One tensor that is compressed (128 x 160), and small ones that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 128), nn.Tanh(), nn.Linear(128, 3))


def data(n=8, size=8) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 160, generator=g), torch.randn(size, 3, generator=g)) for _ in range(n)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def decayed(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def run(declared, optimizer=sgd, n=8):
    return train_fleet(data(n), declared, make=wide, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [sgd, decayed])
def test_sparsity_zero_is_sgd_with_momentum(ranks, optimizer):
    expected = train(data(), make=wide, optimizer=optimizer)
    for got in ranks.run(run, {"dgc": {"sparsity": [0.0]}}, optimizer):
        assert_close(got, expected)


def merged():
    model, optimizer = build({"dgc": {"sparsity": [0.0]}, "gradient_merge": {"k_steps": 4}})
    for x, y in share(data(6), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    fleet.flush()
    return weights(model)


def test_merged_gradients_are_accumulated_as_their_mean(ranks):
    """The window that is flushed is shorter, so it has another divisor."""
    expected = train([*big(data(6)[:4], 4), *big(data(6)[4:], 2)], make=wide, optimizer=sgd)
    for got in ranks.run(merged):
        assert_close(got, expected)


def reference(batches, size, sparsity_at, *, begin=0, momentum=0.9, lr=0.1, decay=0.0, limit=None):
    """In float64, one rank after the other, with an exact selection of the largest."""
    models = [wide().double() for _ in range(size)]
    state = [{} for _ in range(size)]
    buffers = {}
    for t, (x, y) in enumerate(batches):
        grads = []
        for rank, model in enumerate(models):
            model.zero_grad()
            mse_loss(model(x.double().chunk(size)[rank]), y.double().chunk(size)[rank]).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for i, params in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            if params[0].numel() < 16384 or t < begin:
                g = torch.stack([grads[r][i] for r in range(size)]).mean(0) + decay * params[0].detach()
                buffers[i] = momentum * buffers.get(i, 0.0) + g
                step = buffers[i]
            else:
                sent = []
                for rank in range(size):
                    g = grads[rank][i]
                    if limit is not None:
                        g = g * min(1.0, limit / size**0.5 / g.norm().item())
                    s = state[rank].setdefault(i, {"u": buffers.get(i, torch.zeros_like(g)), "v": torch.zeros_like(g)})
                    s["u"] = momentum * s["u"] + g + decay * params[rank].detach()
                    s["v"] = s["v"] + s["u"]
                    k = max(1, int(g.numel() * (1 - sparsity_at(t))))
                    chosen = torch.zeros(g.numel(), dtype=torch.bool)
                    chosen[s["v"].abs().flatten().topk(k).indices] = True
                    chosen = chosen.view_as(g)
                    sent.append(torch.where(chosen, s["v"], 0.0))
                    s["v"] = torch.where(chosen, 0.0, s["v"])
                    s["u"] = torch.where(chosen, 0.0, s["u"])
                step = torch.stack(sent).mean(0)
            with torch.no_grad():
                for p in params:
                    p.sub_(lr * step)
    return {k: v.float() for k, v in weights(models[0]).items()}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"clip_norm": 0.05}, {"limit": 0.05}),
        ({"rampup_begin_step": 3}, {"begin": 3}),
    ],
    ids=["plain", "clipped", "after uncompressed rounds"],
)
def test_it_equals_float64_with_an_exact_selection(ranks, settings, more):
    expected = reference(data(), 2, lambda t: 0.99, **more)
    for got in ranks.run(run, {"dgc": {"sparsity": [0.99], **settings}}):
        assert_close(got, expected)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)  # smaller ones would amplify rounding


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def without_correction(batches, make_optimizer, settings, sparsity=0.99):
    """In float64: every rank keeps a residual, and the update rule takes the mean of what is sent."""
    model = wide().double()
    update = oracle_updates.rule_for(model, make_optimizer(model), settings)
    residuals = [{}, {}]
    for x, y in batches:
        sent = []
        for residual, x_, y_ in zip(residuals, x.double().chunk(2), y.double().chunk(2), strict=True):
            model.zero_grad()
            mse_loss(model(x_), y_).backward()
            sent.append({})
            for name, p in model.named_parameters():
                v = residual.get(name, 0.0) + p.grad
                k = max(1, int(v.numel() * (1 - sparsity))) if v.numel() >= 16384 else v.numel()
                chosen = torch.zeros(v.numel(), dtype=torch.bool)
                chosen[v.abs().flatten().topk(k).indices] = True
                sent[-1][name] = torch.where(chosen.view_as(v), v, 0.0)
                residual[name] = v - sent[-1][name]
        grads = {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}
        if "clip" in settings:
            oracle._clip(grads, settings["clip"]["clip_norm"])
        update(grads)
    return {k: v.float() for k, v in weights(model).items()}


LARS = {"lars_coeff": 0.02, "lars_weight_decay": 0.0005, "epsilon": 0.0}
OFF = {"momentum_correction": False}


@pytest.mark.parametrize(
    ("optimizer", "dgc", "others"),
    [
        (sgd, {}, {"lars": LARS}),
        (adam, {}, {"lamb": {"lamb_weight_decay": 0.01}}),
        (adam, OFF, {}),
        (nesterov, OFF, {}),
        (sgd, OFF, {"clip": {"clip_norm": 0.05}}),
    ],
    ids=["lars", "lamb", "adam", "nesterov", "clip"],
)
def test_without_momentum_correction_it_equals_float64_with_an_exact_selection(ranks, optimizer, dgc, others):
    expected = without_correction(data(), optimizer, others)
    for got in ranks.run(run, {"dgc": {"sparsity": [0.99], **dgc}, **others}, optimizer):
        assert_close(got, expected)


def test_weight_decay_is_accumulated_with_the_gradient(ranks):
    expected = reference(data(), 2, lambda t: 0.99, decay=0.01)
    for got in ranks.run(run, {"dgc": {"sparsity": [0.99]}}, decayed):
        assert_close(got, expected)


def test_the_ramp_up_of_the_sparsity(ranks):
    settings = {"sparsity": [0.5, 0.9, 0.99], "rampup_begin_step": 1, "rampup_step": 6}
    part = DGC(**settings)
    assert [part.sparsity_at(t) for t in range(1, 9)] == [0.5, 0.5, 0.9, 0.9, 0.99, 0.99, 0.99, 0.99]
    expected = reference(data(), 2, part.sparsity_at, begin=1)
    for got in ranks.run(run, {"dgc": settings}):
        assert_close(got, expected)


def test_sixteen_bits_on_the_wire_lose_nothing_in_the_end(ranks):
    """Rounding errors stay on the rank. A few values are sent a step earlier or later than with 32 bits."""
    full, half = (ranks.run(run, {"dgc": {"sparsity": [0.9], "value_dtype": t}})[0] for t in ("float32", "float16"))
    start = weights(wide())
    for name in full:
        assert (half[name] - full[name]).norm() < 0.05 * (full[name] - start[name]).norm()


@pytest.mark.parametrize(
    "others",
    [
        {"recompute": {"checkpoints": ["0"]}},
        {"use_hierarchical_allreduce": True},
        {"nccl_comm_num": 2},
        {"fuse_grad_size_in_MB": 0.001},
        {"sync_batch_norm": True},
    ],
    ids=str,
)
def test_with_other_strategies(ranks, others):
    expected = reference(data(), 2, lambda t: 0.99)
    for got in ranks.run(run, {"dgc": {"sparsity": [0.99]}} | others):
        assert_close(got, expected)


@pytest.mark.parametrize("amp", [{"dtype": "bfloat16"}, {"init_loss_scaling": 4096.0}], ids=["bf16", "fp16"])
def test_with_half_precision(ranks, amp):
    plain = train_fleet(data(), {"amp": amp}, make=wide, optimizer=sgd)
    for got in ranks.run(run, {"dgc": {"sparsity": [0.0]}, "amp": amp}):
        torch.testing.assert_close(got, plain, rtol=3e-2, atol=1e-2)


def build(declared):
    fleet.init()
    model = wide()
    return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))


def not_finite_on_one_rank(others, how, checks):
    """What every rank holds before and after a step whose gradient is not finite on rank 1 alone."""
    fleet.init()
    current().checks = checks and fleet.Checks(**checks)  # as if the first fleet.init had asked for it
    model, optimizer = build({"dgc": {"sparsity": [0.99]}} | others)
    steps = others.get("gradient_merge", {}).get("k_steps", 1)
    batches = [batch for batch in share(data(), fleet.worker_index(), 2) for _ in range(steps)]
    state = fleet._engine(model).state["DGC"]
    for x, y in batches[: 3 * steps]:
        zero_last(model, optimizer, x, y)
    before = [state[k]["0.weight"].clone() for k in "uv"], weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 says that the update is skipped
        for x, y in batches[3 * steps : 4 * steps]:
            (mse_loss(model(x), y) * (float(how) if fleet.worker_index() == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    skipped = not fleet.updated
    after = [state[k]["0.weight"].clone() for k in "uv"], weights(model)
    for x, y in batches[4 * steps : 5 * steps]:
        zero_last(model, optimizer, x, y)
    current().checks = None
    finite = [state[k]["0.weight"].isfinite().all().item() for k in "uv"]
    return skipped, before, after, fleet.updated, finite, all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("others", "how", "checks"),
    [
        ({}, "nan", None),
        ({}, "inf", {"on_nonfinite": "restore"}),
        ({"amp": {"init_loss_scaling": 1024.0}}, "inf", None),
        ({"amp": {"init_loss_scaling": 1024.0}}, "nan", {"on_nonfinite": "ignore"}),
        ({"amp": {"dtype": "bfloat16"}}, "nan", None),
        ({"gradient_merge": {"k_steps": 2}}, "nan", None),
        ({"lars": True}, "nan", None),
    ],
    ids=str,
)
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_every_residual_unchanged(ranks, others, how, checks):
    for skipped, before, after, updated, *finite in ranks.run(not_finite_on_one_rank, others, how, checks):
        assert skipped
        assert updated
        assert finite == [[True, True], True]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def save_poisoned(folder):
    """What fleet.save says on this rank if a residual of rank 1 is not finite."""
    model, optimizer = build({"dgc": {"sparsity": [0.99]}})
    zero_last(model, optimizer, *share(data(1), fleet.worker_index(), 2)[0])
    if fleet.worker_index() == 1:
        fleet._engine(model).state["DGC"]["v"]["0.weight"][0, 0] = float("nan")
    with pytest.raises(UsageError) as raised:
        fleet.save(folder / "saved")
    checkpoints = fleet.checkpoints(folder / "loop", every=1)
    checkpoints.stepped()
    checkpoints.close()
    return str(raised.value)


def test_residuals_that_are_not_finite_are_not_saved(ranks, tmp_path):
    for said in ranks.run(save_poisoned, tmp_path):
        assert "what `dgc` keeps for parameter '0.weight' is not finite" in said
    assert not list(tmp_path.rglob("*.json"))


def bytes_sent(declared):
    model, optimizer = build(declared)
    for x, y in share(data(), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    engine = fleet._engine(model)
    return engine.network.traffic.sent / engine.round, str(fleet.explain(model=model))


def test_little_is_sent_and_explain_reports_it(ranks):
    dense = sum(p.numel() for p in wide().parameters()) * 4
    small = sum(p.numel() for p in wide().parameters() if p.numel() < 16384) * 4
    for sent, text in ranks.run(bytes_sent, {"dgc": {"sparsity": [0.99]}}):
        assert sent - small < dense / 40
        assert re.search(r"this rank sends \S+ MB per round", text)


def held_back(declared):
    """Nothing is encoded until the means of the small tensors have arrived."""
    model, optimizer = build(declared)
    network, encode = fleet._engine(model).network, exchange.encode
    mean, seen, arrived = network.mean, [], threading.Event()

    def noted(buffer, number=0):
        future = mean(buffer, number)
        future.add_done_callback(lambda _: arrived.set())
        return future

    def late(*args, **kwargs):
        seen.append(arrived.wait(60))
        return encode(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "mean", noted)
        patch.setattr(exchange, "encode", late)
        for x, y in share(data(4), fleet.worker_index(), 2):
            zero_last(model, optimizer, x, y)
            arrived.clear()
    return all(seen) and len(seen), weights(model)


def test_small_tensors_do_not_wait_until_the_large_ones_are_encoded(ranks):
    declared = {"dgc": {"sparsity": [0.99]}}
    expected = ranks.run(run, declared, sgd, 4)
    for (encoded, got), plain in zip(ranks.run(held_back, declared), expected, strict=True):
        assert encoded == 4
        assert_equal(got, plain)


def resumed(others):
    declared = {"dgc": {"sparsity": [0.5, 0.99], "rampup_begin_step": 2, "rampup_step": 4}} | others
    model, optimizer = build(declared)
    batches = share(data(8), fleet.worker_index(), 2)
    for i, (x, y) in enumerate(batches):
        zero_last(model, optimizer, x, y)
        if i == 3:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, optimizer2 = build(declared)
    again.load_state_dict(saved[0])
    optimizer2.load_state_dict(saved[1])
    for x, y in batches[4:]:
        zero_last(again, optimizer2, x, y)
    return weights(model), weights(again)


FP16 = {"amp": {"init_loss_scaling": 1024.0}}


@pytest.mark.parametrize(
    "others", [{}, FP16, {"lars": LARS}, {"lars": LARS} | FP16], ids=lambda o: "-".join(o) or "alone"
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(ranks, others):
    for uninterrupted, again in ranks.run(resumed, others):
        assert_equal(uninterrupted, again)


def loaded_over(amp, used):
    """Three rounds from a checkpoint, loaded by a run that stopped after a backward of that round, or by a new one."""
    model, optimizer = build({"dgc": {"sparsity": [0.9]}} | amp)
    batches = share(data(8), fleet.worker_index(), 2)
    for x, y in batches[:2]:
        zero_last(model, optimizer, x, y)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    if used:
        mse_loss(model(batches[2][0]), batches[2][1]).backward()
        optimizer.zero_grad()
    else:
        model, optimizer = build({"dgc": {"sparsity": [0.9]}} | amp)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for x, y in batches[3:6]:
        zero_last(model, optimizer, x, y)
    return weights(model)


@pytest.mark.parametrize("amp", [{}, {"amp": {"init_loss_scaling": 1024.0}}], ids=["fp32", "fp16"])
def test_loading_drops_what_a_backward_has_sent(ranks, amp):
    for got, expected in zip(ranks.run(loaded_over, amp, True), ranks.run(loaded_over, amp, False), strict=True):
        assert_equal(got, expected)


def saved_on_two(folder):
    model, optimizer = build({"dgc": {"sparsity": [0.99]}})
    for x, y in share(data(3), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    fleet.save(folder)
    return optimizer.state_dict()["fleetx"]["parts"]["DGC"]


def test_another_number_of_ranks_takes_over_the_mean_of_the_residuals(ranks, tmp_path):
    """Then the mean of all that is still to be sent is what it was."""
    first, second = ranks.run(saved_on_two, tmp_path / "saved")
    assert not torch.equal(first["v"]["0.weight"], second["v"]["0.weight"])
    _, optimizer = build({"dgc": {"sparsity": [0.99], "allow_single": True}})
    fleet.load(tmp_path / "saved")
    found = optimizer.state_dict()["fleetx"]["parts"]["DGC"]
    for key in ("u", "v"):
        assert_close(found[key], {name: (t + second[key][name]) / 2 for name, t in first[key].items()})


def personal():
    model, optimizer = build({"dgc": {"sparsity": [0.99]}})
    for x, y in share(data(3), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    saved = optimizer.state_dict()
    saved["fleetx"] = saved["fleetx"] | {"rank": 1 - fleet.worker_index()}
    with pytest.raises(UsageError, match="only that rank can use the state of dgc in it"):
        optimizer.load_state_dict(saved)
    return True


def test_residuals_belong_to_their_rank(ranks):
    assert all(ranks.run(personal))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (
            torch.optim.Adam,
            {"allow_single": True},
            "dgc takes over the momentum of torch.optim.SGD, which Adam does not have: use SGD, or set dgc_configs",
        ),
        (
            lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
            {"allow_single": True},
            "dgc with SGD's nesterov is not supported yet",
        ),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9), {}, r"one worker, so there is nothing to communicate.*allow_single"),
    ],
)
def test_unsupported_optimizers_and_worlds(make, settings, message):
    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match=message):
        fleet.distribute(model, make(model.parameters()), fleet.DistributedStrategy(dgc=settings or True))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"dgc": {"sparsity": []}}, "sparsity is empty"),
        ({"dgc": {"sparsity": [1.0]}}, "sparsity"),
        (
            {"dgc": {"momentum_correction": True}, "lars": True},
            "`dgc` and `lars` both change the optimizer's update rule",
        ),
        ({"dgc": True, "clip": True}, "`clip` does not work with gradients that already contain momentum"),
        ({"dgc": True, "fp16_allreduce": True}, "a value can be compressed only once.*value_dtype"),
    ],
    ids=str,
)
def test_conflicts(declared, message):
    with pytest.raises(StrategyError, match=message):
        fleet.DistributedStrategy(**declared).plan()


def test_a_single_rank_is_plain_sgd():
    alone = train_fleet(data(), {"dgc": {"allow_single": True}}, make=wide, optimizer=sgd)
    assert_equal(alone, train(data(), make=wide, optimizer=sgd))


def channels_last(optimizer, declared):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(64, 3)).to(memory_format=torch.channels_last)

    g = torch.Generator().manual_seed(1)
    images = [(torch.randn(8, 32, 3, 3, generator=g), torch.randn(8, 3, generator=g)) for _ in range(6)]
    if declared is None:
        return train(images, make=make, optimizer=optimizer)
    return train_fleet(images, declared, make=make, optimizer=optimizer)


@pytest.mark.parametrize("more", [{}, {"rampup_begin_step": 2}], ids=str)
def test_the_memory_format_does_not_matter(ranks, more):
    expected = channels_last(decayed, None)
    for got in ranks.run(channels_last, decayed, {"dgc": {"sparsity": [0.0], **more}}):
        assert_close(got, expected)


def second_backward():
    model, _ = build({"dgc": {"sparsity": [0.99]}})
    x, y = data(1)[0]
    mse_loss(model(x), y).backward()
    with pytest.raises((UsageError, RuntimeError), match="a second backward before"):
        mse_loss(model(x), y).backward()
    return True


def test_a_second_backward_before_the_step_is_an_error(ranks):
    assert all(ranks.run(second_backward))


def released():
    fleet.init()
    model = wide()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(dgc=True))
    for x, y in share(data(2), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    engine = weakref.ref(fleet._engine(optimizer))
    running = [t.name for t in threading.enumerate() if t.name.startswith("fleetx-")]
    del model, optimizer
    gc.collect()
    return engine() is None, running, [t.name for t in threading.enumerate() if t.name.startswith("fleetx-")]


def test_a_deleted_model_takes_its_engine_and_threads_with_it(ranks):
    for gone, before, after in ranks.run(released):
        assert gone
        assert before
        assert after == ["fleetx-heartbeat"]  # of the process, not of the model
