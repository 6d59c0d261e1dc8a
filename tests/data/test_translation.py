"""Parallel text in byte pair encoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fleetx import UsageError, data
from fleetx.data import DataError, load_wmt16_dataset_from_file, translation_train, translation_val

WORDS = ["<s>", "<e>", "<unk>", *(f"w{i}" for i in range(20))]


def wmt(folder, count=40, longest=9):
    (folder / "vocab_all.bpe.32000").write_text("\n".join(WORDS) + "\n")
    random = np.random.default_rng(0)

    def sentence():
        return " ".join(WORDS[i] for i in random.integers(3, len(WORDS), random.integers(1, longest)))

    lines = [f"{sentence()}\t{sentence()}\n" for _ in range(count)]
    for part in range(2):
        (folder / f"part{part}").write_text("".join(lines[part::2]))
    (folder / "train.txt").write_text("part0\npart1\n")
    (folder / "val.txt").write_text("part1\n")
    return folder


def pairs(batches):
    found = []
    for batch in batches:
        for i, row in enumerate(batch["src_word"].tolist()):
            source = row[: int((batch["src_slf_attn_bias"][i].flatten() == 0).sum())]
            n = int(batch["lbl_weight"][i].sum())
            found.append((*source, "|", *batch["lbl_word"][i, :n].tolist()))
    return found


def test_a_batch_has_marks_positions_biases_and_weights(tmp_path):
    wmt(tmp_path)
    (tmp_path / "part0").write_text("w0 w1 zebra\tw2\nw3\tw4 w5\n")
    (tmp_path / "train.txt").write_text("part0\n")
    (batch,) = translation_train(tmp_path, batch_size=64, max_seq_len=16, shuffle=False)
    w = [WORDS.index(f"w{i}") for i in range(6)]
    start, end, unknown = 0, 1, 2
    assert batch["src_word"].tolist() == [[w[0], w[1], unknown, end], [w[3], end, end, end]]
    assert batch["src_pos"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch["trg_word"].tolist() == [[start, w[2], end], [start, w[4], w[5]]]
    assert batch["lbl_word"].tolist() == [[w[2], end, end], [w[4], w[5], end]]
    assert batch["lbl_weight"].tolist() == [[1, 1, 0], [1, 1, 1]]
    hidden = batch["src_slf_attn_bias"]
    assert (hidden < -1e8).flatten(1).tolist() == [[False] * 4, [False, False, True, True]]
    torch.testing.assert_close(batch["trg_src_attn_bias"], hidden)
    assert batch["trg_slf_attn_bias"].shape == (2, 1, 3, 3)
    assert torch.equal(batch["trg_slf_attn_bias"][1, 0] < -1e8, torch.ones(3, 3).triu(1).bool())


def test_batches_count_tokens_and_hold_every_pair_once(tmp_path):
    loader = translation_train(wmt(tmp_path), batch_size=48, max_seq_len=16)
    first, second = list(loader), list(loader)
    assert len(first) > 3
    assert sorted(pairs(first), key=str) == sorted(pairs(second), key=str)
    assert pairs(first) != pairs(second)
    assert len(pairs(first)) == 40
    for batch in first:
        longest = max(batch["src_word"].shape[1], batch["trg_word"].shape[1] + 1)
        assert len(batch["src_word"]) * longest <= 48


def test_two_ranks_share_the_pairs_out_and_a_run_resumes(tmp_path):
    wmt(tmp_path)
    options = {"batch_size": 48, "max_seq_len": 16}
    shares = [pairs(translation_train(tmp_path, replica=(rank, 2), **options)) for rank in range(2)]
    assert sorted(shares[0] + shares[1], key=str) == sorted(pairs(translation_train(tmp_path, **options)), key=str)
    loader, again = (translation_train(tmp_path, **options) for _ in range(2))
    batches = iter(loader)
    next(batches)
    again.load_state_dict(loader.state_dict())
    assert pairs(batches) == pairs(again)


def test_a_pattern_of_files_gives_the_same_pairs(tmp_path):
    wmt(tmp_path)
    vocabulary = tmp_path / "vocab_all.bpe.32000"
    loader = load_wmt16_dataset_from_file(vocabulary, vocabulary, tmp_path / "part*", 64, max_seq_len=16)
    expected = translation_train(tmp_path, 64, max_seq_len=16)
    assert pairs(loader) == pairs(expected)
    one = load_wmt16_dataset_from_file(vocabulary, vocabulary, tmp_path / "part1", 64, shuffle=False, max_seq_len=16)
    assert pairs(one) == pairs(translation_val(tmp_path, 64, max_seq_len=16))


def test_the_bom_of_windows_editors_is_no_part_of_the_text(tmp_path):
    options = {"batch_size": 48, "max_seq_len": 16, "shuffle": False}
    want = pairs(translation_train(wmt(tmp_path), **options))
    for file in tmp_path.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert pairs(translation_train(tmp_path, **options)) == want


def test_long_pairs_are_dropped_and_wrong_lines_are_errors_or_skipped(tmp_path, caplog):
    wmt(tmp_path)
    (tmp_path / "part0").write_text("w0\tw1\nno tab\n" + "w0 " * 20 + "w1\tw1\n")
    (tmp_path / "train.txt").write_text("part0\n")
    with pytest.raises(DataError, match="part0, line 2: must be a sentence, a tab and its translation"):
        translation_train(tmp_path, 64, max_seq_len=16)
    loader = translation_train(tmp_path, 64, max_seq_len=16, on_error="skip")
    assert len(pairs(loader)) == 1
    assert "dropped 1 pairs with a sentence longer than max_seq_len = 16" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"batch_size": 8}, UsageError, "batch_size = 8 tokens cannot hold a sample of max_seq_len = 16"),
        ({"vocab_size": 20}, DataError, "has 23 words, but the model 20: create it with vocab_size=23"),
        ({"shufle": True}, UsageError, "did you mean 'shuffle'"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path, options, error, says):
    with pytest.raises(error, match=says):
        data.translation_train(wmt(tmp_path), **{"batch_size": 64, "max_seq_len": 16} | options)


def test_a_vocabulary_without_its_marks_is_an_error(tmp_path):
    wmt(tmp_path)
    (tmp_path / "vocab_all.bpe.32000").write_text("a\nb\n")
    with pytest.raises(DataError, match="has no <s>, <e>, <unk>"):
        translation_train(tmp_path, 64, max_seq_len=16)
    (tmp_path / "train.txt").write_text("part9\n")
    with pytest.raises(DataError, match="part9 does not exist; it is one of 1 files in"):
        translation_train(tmp_path, 64, max_seq_len=16)
