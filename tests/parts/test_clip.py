from __future__ import annotations

import numpy as np
import torch

from fleetx import fleet
from training import assert_close, assert_equal, batches, big, net, sgd, train, train_fleet, weights


def test_it_equals_clip_grad_norm_between_backward_and_step():
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        torch.nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(train_fleet(batches(), {"clip": {"clip_norm": 0.05}}), weights(model))


def test_an_infinite_norm_is_plain_pytorch():
    assert_equal(train_fleet(batches(), {"clip": {"clip_norm": float("inf")}}), train(batches()))


def test_it_clips_the_mean_of_merged_gradients_not_their_sum():
    data = batches()
    merged = train_fleet(data, {"clip": {"clip_norm": 0.05}, "gradient_merge": {"k_steps": 4}})
    assert_close(merged, train_fleet(big(data, 4), {"clip": {"clip_norm": 0.05}}))


def test_it_clips_the_unscaled_gradient():
    scaled = train_fleet(batches(), {"clip": {"clip_norm": 0.05}, "amp": {"init_loss_scaling": 1024.0}})
    plain = {"use_dynamic_loss_scaling": False, "init_loss_scaling": 1.0}
    torch.testing.assert_close(
        scaled, train_fleet(batches(), {"clip": {"clip_norm": 0.05}, "amp": plain}), rtol=1e-3, atol=1e-4
    )


def test_the_formula_in_float64():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(clip={"clip_norm": 0.3}))
    x, y = batches(1)[0]
    torch.nn.functional.mse_loss(model(x), y).backward()
    before = np.concatenate([p.grad.double().numpy().ravel() for p in model.parameters()])
    optimizer.step()
    after = np.concatenate([p.grad.double().numpy().ravel() for p in model.parameters()])
    norm = np.sqrt((before**2).sum())
    assert norm > 0.3
    np.testing.assert_allclose(after, before * min(1.0, 0.3 / (norm + 1e-6)), rtol=1e-5)
