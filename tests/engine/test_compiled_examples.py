"""The examples with --compile, on two ranks: forward and backward really run as graphs.

The backend traces as torch.compile does by default and runs the graphs as they are, without compiling C++.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter

import pytest
import torch
from compiled_graphs import EXAMPLES as SAID
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from test_examples import EXAMPLES, printed, some_images, some_listed_images, some_sentences, some_text

BACKEND = "counted"


def some_digits(folder):
    return ["--epochs", 1, "--batch", 64]


# what each is given, and how many steps that is
CASES = {
    "digits": (some_digits, 11),
    "resnet": (lambda folder: [*some_listed_images(folder), "--epochs", 1], 4),
    "image_folder": (some_images, 6),
    "bert": (lambda folder: ["--steps", 4, "--batch", 2], 4),
    "finetune": (some_sentences, 6),
    "language_model": (some_text, 5),
    "slow_network": (lambda folder: ["--only", "plain,localsgd", "--epochs", 1], 2 * 22),
}


runs = Counter()


def counting(direction):
    def compiled(graph, inputs):
        def run(*args):
            runs[direction] += 1
            return graph(*args)

        return make_boxed_func(run)

    return compiled


def counted(*example):
    """What it printed, and how often a graph ran."""
    if BACKEND not in torch._dynamo.list_backends():  # a rank lives for many tests
        backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
        torch._dynamo.register_backend(backend, name=BACKEND)
    torch._dynamo.reset()
    runs.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # dynamo looks at it where a graph breaks
        said = printed(*example)
    torch._dynamo.reset()
    return said, dict(runs)


# Half a minute, in which nothing is compiled that is unlike a ResNet and a transformer of the other examples.
NIGHTLY = ("bert", "resnet")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in NIGHTLY)) for n in CASES])
def test_a_compiled_example_trains_in_graphs(ranks, tmp_path, name):
    make, steps = CASES[name]
    options = [*make(tmp_path / "mine"), "--compile", BACKEND]
    if name in ("image_folder", "finetune", "language_model"):
        options += ["--epochs", 1, "--output", "out"]
    for said, runs in ranks.run(counted, name, list(map(str, options)), str(tmp_path), {}):
        assert runs.get("backward", 0) >= steps, said
        assert runs["forward"] >= runs["backward"]
        assert all(math.isfinite(float(found)) for found in re.findall(r"(?:loss|accuracy) ([\d.na]+)", said))


def test_the_page_says_of_every_example_whether_it_is_compiled():
    assert {name for name, why in SAID.items() if why.startswith("yes")} == set(CASES)
    assert set(SAID) == {path.stem for path in EXAMPLES.glob("*.py")} - {"prepared"}
