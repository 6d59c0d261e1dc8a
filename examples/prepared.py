"""Data for the examples, created on first use; nothing is downloaded. Several workers can call this at once."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
_EXTRA = "this example needs {}: pip install 'fleetx[applications]', or in a clone, pip install '.[applications]'"
WORDS = 2000  # vocabulary size
PACKAGES = (
    "asyncio",
    "email",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
)  # each has 150 docstrings or more


def digits(folder: str | Path, side: int = 32) -> Path:
    """Write scikit-learn's 1,797 handwritten digits as JPEG files with ImageNet-style lists.

    The side is appended to the folder's name. train.txt and val.txt have a line `name label` for each image in train/
    and val/.
    """
    return _once(Path(f"{folder}{side}"), lambda temporary: _write_digits(temporary, side))


def _write_digits(folder: Path, side: int) -> None:
    lists: dict[str, list[str]] = {"train": [], "val": []}
    for number, phase, label, image in _digit_images(side):
        (folder / phase).mkdir(exist_ok=True)
        image.save(folder / phase / f"{number}.jpg", quality=95)
        lists[phase].append(f"{number}.jpg {label}\n")
    for phase, lines in lists.items():
        (folder / f"{phase}.txt").write_text("".join(lines))


def digit_folders(folder: str | Path, side: int = 32) -> Path:
    """Write the same digits as train/7/123.png and so on: a folder per class, in `train` and in `val`."""

    def write(temporary: Path) -> None:
        for number, phase, label, image in _digit_images(side):
            path = temporary / phase / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)

    return _once(Path(folder), write)


def _digit_images(side: int) -> Iterator[tuple[int, str, int, Any]]:
    """(number, phase, label, image) of each digit; every sixth is held out."""
    data, image = sklearn_digits(), needed("PIL.Image", "pillow")
    for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        grey = image.fromarray((pixels * 255 / 16).astype("uint8"))
        yield number, "val" if number % 6 == 5 else "train", int(label), grey.resize((side, side)).convert("RGB")


def sklearn_digits() -> Any:
    return needed("sklearn.datasets", "scikit-learn").load_digits()


def needed(module: str, package: str) -> Any:
    """A module that not everybody has installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(_EXTRA.format(package)) from error


def transformers() -> Any:
    """The package, without the bars and reports that it prints for every worker."""
    package = needed("transformers", "transformers")
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def topics(folder: str | Path) -> Path:
    """Write the topics of Python's own `help()`, half a megabyte of text, as a file each."""

    def write(temporary: Path) -> None:
        for name, content in importlib.import_module("pydoc_data.topics").topics.items():
            (temporary / f"{name}.txt").write_text(content, encoding="utf-8")

    return _once(Path(folder), write)


def docstrings(folder: str | Path) -> Path:
    """Write first sentences of the standard library's documentation as train.tsv and val.tsv.

    A line is `package<tab>sentence`: which package does the sentence come from?
    """
    return _once(Path(folder), _write_docstrings)


def _write_docstrings(folder: Path) -> None:
    found: dict[str, list[str]] = {"train": [], "val": []}
    for package in PACKAGES:
        sentences = set()
        for path in sorted((Path(os.__file__).parent / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    sentence = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                    if len(sentence) > 20:
                        sentences.add(sentence)
        for number, sentence in enumerate(sorted(sentences)):
            found["val" if number % 6 == 5 else "train"].append(f"{package}\t{sentence}\n")
    for phase, lines in found.items():
        (folder / f"{phase}.tsv").write_text("".join(lines), encoding="utf-8")


def tiny_bert(folder: str | Path, sentences: list[str]) -> Path:
    """Write a BERT of two layers with fresh weights, and a tokenizer made of these sentences, for from_pretrained."""

    def write(temporary: Path) -> None:
        tokenizers = needed("tokenizers", "transformers")
        words = tokenizers.BertWordPieceTokenizer()
        words.train_from_iterator(sentences, vocab_size=WORDS, show_progress=False)
        words.save_model(str(temporary))
        transformers().BertTokenizerFast(vocab=str(temporary / "vocab.txt")).save_pretrained(temporary)
        config = transformers().BertConfig(
            vocab_size=words.get_vocab_size(), hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=256, max_position_embeddings=64,
        )  # fmt: skip
        config.save_pretrained(temporary)  # model.save_pretrained writes on the first worker only
        weights = transformers().BertModel(config).state_dict()
        needed("safetensors.torch", "safetensors").save_file(weights, temporary / "model.safetensors", {"format": "pt"})

    return _once(Path(folder), write)


def text(folder: str | Path) -> Path:
    """Write the documentation of this project as tokenized BERT data, two sentences per line.

    A line has four fields: words, sentences, positions, and the label 1, because the second sentence follows the first.
    The loader builds the negative samples and masks words.
    """
    return _once(Path(folder), _write_text)


def _write_text(folder: Path) -> None:
    pages = sorted(HERE.parent.glob("docs/**/*.md")) + sorted(HERE.parent.glob("*.md"))
    sentences = [
        words
        for page in pages
        for sentence in re.split(r"[.:;|\n]\s", page.read_text(encoding="utf-8"))
        if 4 <= len(words := re.findall(r"[a-z]+|\d", sentence.lower())) <= 28
    ]
    common = [word for word, _ in Counter(word for words in sentences for word in words).most_common(WORDS)]
    vocabulary = [*SPECIAL, *common][:WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    ids = {word: i for i, word in enumerate(vocabulary)}
    unk, cls, sep = ids["[UNK]"], ids["[CLS]"], ids["[SEP]"]
    lines = []
    for first, second in itertools.pairwise(sentences):
        a, b = ([ids.get(word, unk) for word in words] for words in (first, second))
        words = [cls, *a, sep, *b, sep]
        columns = words, [0] * (len(a) + 2) + [1] * (len(b) + 1), range(len(words))
        lines.append(";".join([*(" ".join(map(str, column)) for column in columns), "1"]))
    (folder / "part-0").write_text("\n".join(lines) + "\n")


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a temporary folder and rename it, so that `folder` is never incomplete. The first worker wins."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write(temporary)
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
