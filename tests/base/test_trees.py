"""Tensors in nested structures."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from fleetx.base.trees import map_tensors, samples_in, tensors_of

Pair = namedtuple("Pair", "first second")


@dataclass
class Boxed:
    inside: Any


def test_all_tensors_are_found_in_the_order_in_which_they_are_mapped():
    a, b, c, d, e, f, g = (torch.tensor(float(i)) for i in range(7))
    value = ((a, [b, None, "text"]), {"z": c, "a": Pair(d, 3)}, Boxed({"x": [e]}), OrderedDict(y=f), 1.5,
             BaseModelOutput(last_hidden_state=g))  # fmt: skip
    mapped = []
    map_tensors(lambda tensor: mapped.append(tensor) or tensor, value)
    assert list(map(id, tensors_of(value))) == list(map(id, mapped)) == list(map(id, (a, b, c, d, e, f, g)))


def test_the_samples_of_a_batch_are_its_most_common_first_dimension():
    assert samples_in(((torch.ones(5, 2), torch.ones(5)), {"scale": torch.ones(()), "mask": torch.ones(1, 5)})) == 5
    assert samples_in({"text": "no tensor"}) == 0
