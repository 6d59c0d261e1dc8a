"""The parameter shapes of two models of transformers, which takes longer to import than a measurement:

BertForPreTraining(BertConfig()) and ResNetForImageClassification(ResNetConfig(num_labels=1000)).
"""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def shapes(model: str) -> list[Shape]:
    return list({"bert": _bert_base, "resnet": _resnet50}[model]())


def excluded(shape: Shape) -> bool:
    """Biases and normalization weights, which LARS and LAMB usually neither decay nor scale."""
    return len(shape) == 1


def _bert_base() -> Iterator[Shape]:
    words, width, inner = 30522, 768, 3072
    norm = [(width,), (width,)]
    dense = [(width, width), (width,)]
    yield from [(words, width), (512, width), (2, width), *norm]
    for _ in range(12):
        yield from [*dense * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    yield from [*dense, (words,), *dense, *norm, (2, width), (2,)]


def _resnet50() -> Iterator[Shape]:
    def convolution(out: int, given: int, kernel: int) -> list[Shape]:
        return [(out, given, kernel, kernel), (out,), (out,)]  # and its BatchNorm

    yield from convolution(64, 3, 7)
    given = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            if i == 0:
                yield from convolution(4 * width, given, 1)
            yield from [*convolution(width, given, 1), *convolution(width, width, 3), *convolution(4 * width, width, 1)]
            given = 4 * width
    yield from [(1000, given), (1000,)]
