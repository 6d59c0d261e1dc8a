"""Small files of every format, and what tests look at in batches."""

from __future__ import annotations

import gzip

import numpy as np
from PIL import Image

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PAD, CLS, SEP, MASK = range(4)
VOCABULARY = 200


def write_vocabulary(folder, size=VOCABULARY):
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *(f"w{i}" for i in range(size - 4))]) + "\n")
    return path


def pair(number, first=6, second=5):
    """A line whose words are drawn by its number: [CLS] a [SEP] b [SEP]."""
    random = np.random.default_rng(number)
    words = [CLS, *random.integers(4, VOCABULARY, first), SEP, *random.integers(4, VOCABULARY, second), SEP]
    sentences = [0] * (first + 2) + [1] * (second + 1)
    return words, sentences, list(range(len(words)))


def line(number, label=1, **lengths):
    return ";".join([*(" ".join(map(str, column)) for column in pair(number, **lengths)), str(label)])


def digital(folder, lines, files=2, packed=()):
    """Lines over some files of a folder, of which those with these numbers are .gz; returns folder and vocabulary."""
    data = folder / "digital"
    data.mkdir(exist_ok=True)
    for i in range(files):
        text = "".join(x + "\n" for x in lines[i::files]).encode()
        if i in packed:
            (data / f"part{i}.gz").write_bytes(gzip.compress(text))
        else:
            (data / f"part{i}").write_bytes(text)
    return data, write_vocabulary(folder)


def varied(count):
    return [line(i, first=3 + i % 7, second=2 + i % 5) for i in range(count)]


def images(folder, count, phase="train", suffix=".JPEG", side=40):
    """A list of images, each of one colour that tells which it is, or nearly; its label is its number."""
    (folder / phase).mkdir(exist_ok=True)
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 40, (side, side + 8, 3))
        pixels = (noise + np.array([5 * i % 200, 90, 200 - 5 * i % 200])).astype(np.uint8)
        Image.fromarray(pixels).save(folder / phase / f"{i}{suffix}", format="JPEG")
    path = folder / f"{phase}.txt"
    path.write_text("".join(f"{i}.JPEG {i}\n" for i in range(count)))
    return path


def idx(path, values):
    head = b"\0\0\x08" + bytes([values.ndim]) + np.array(values.shape, ">u4").tobytes()
    data = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def labels(batches):
    return [batch["label"].flatten().tolist() for batch in batches]


def rows(batches):
    """Each sample of BERT batches as a tuple, without what fills it up: what was seen, masking included."""
    found = []
    for batch in batches:
        width = batch["src_ids"].shape[1]
        masked = dict(zip(batch["mask_pos"].flatten().tolist(), batch["mask_label"].flatten().tolist(), strict=True))
        for i in range(len(batch["src_ids"])):
            n = int(batch["input_mask"][i].sum())
            columns = [tuple(batch[name][i, :n].tolist()) for name in ("src_ids", "pos_ids", "sent_ids")]
            chosen = tuple((p - i * width, w) for p, w in sorted(masked.items()) if i * width <= p < (i + 1) * width)
            found.append((*columns, chosen, int(batch["labels"][i])))
    return found


def original(row):
    """The words before masking."""
    words = list(row[0])
    for place, word in row[3]:
        words[place] = word
    return tuple(words)
