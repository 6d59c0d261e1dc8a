"""BERT data: masking, negative samples, the English format, files and the cache."""

from __future__ import annotations

import gzip
import logging
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from data_files import CLS, MASK, PAD, SEP, VOCABULARY, digital, line, original, pair, rows, varied, write_vocabulary
from hypothesis import given
from hypothesis import strategies as st

from fleetx.data import DataError, digital_train, digital_val, load_digital_dataset_from_file
from fleetx.data.bert_lines import parse
from fleetx.data.vocabulary import Vocabulary, mask, read_vocabulary
from fleetx.errors import UsageError

WORDS = Vocabulary(VOCABULARY, PAD, CLS, SEP, MASK)


def text(count, width=64):
    """Rows of [CLS] words [SEP] words [SEP]."""
    words = np.random.default_rng(0).integers(4, VOCABULARY, (count, width))
    words[:, 0], words[:, width // 2], words[:, -1] = CLS, SEP, SEP
    return words


# --- masking --------------------------------------------------------------------------------------
def test_fifteen_percent_are_chosen_of_which_eighty_are_hidden_ten_replaced_and_ten_kept():
    words = text(2000)
    before = words.copy()
    row, column, answers = mask(words, np.ones(words.shape, bool), np.arange(2000), WORDS, 0, 0)
    assert np.array_equal(answers, before[row, column])
    after = words[row, column]
    assert not np.isin(answers, [CLS, SEP]).any()
    share = len(row) / (words.size - 3 * 2000)
    assert abs(share - 0.15) < 0.005
    hidden, kept = (after == MASK).mean(), (after == answers).mean()
    assert abs(hidden - 0.8) < 0.015
    assert abs(kept - 0.1 - 0.1 / (VOCABULARY - 4)) < 0.01
    replaced = after[(after != MASK) & (after != answers)]
    assert abs(len(replaced) / len(row) - 0.1) < 0.01
    assert set(replaced) == set(range(4, VOCABULARY))
    untouched = np.ones(words.shape, bool)
    untouched[row, column] = False
    assert np.array_equal(words[untouched], before[untouched])


def test_at_least_one_word_of_every_sample_is_hidden():
    words = np.array([[CLS, 9, SEP, SEP]] * 300)
    row, column, _ = mask(words, np.ones(words.shape, bool), np.arange(300), WORDS, 0, 0)
    assert row.tolist() == list(range(300))
    assert set(column) == {1}
    assert (words[:, 1] == MASK).mean() > 0.9


def test_padding_is_never_masked():
    words, present = text(50), np.ones((50, 64), bool)
    present[:, 40:] = False
    _, column, _ = mask(words, present, np.arange(50), WORDS, 0, 0)
    assert column.max() < 40


def test_a_sample_is_masked_the_same_in_any_batch_but_differently_in_another_epoch():
    words, wide = text(8), np.full((3, 90), PAD)
    wide[:, :64] = words[[5, 0, 2]]
    present = np.arange(90) < 64
    mask(words, np.ones(words.shape, bool), np.arange(8), WORDS, 1, 2)
    other = wide.copy()
    mask(wide, np.tile(present, (3, 1)), np.array([5, 0, 2]), WORDS, 1, 2)
    assert np.array_equal(wide[:, :64], words[[5, 0, 2]])
    mask(other, np.tile(present, (3, 1)), np.array([5, 0, 2]), WORDS, 1, 3)
    assert not np.array_equal(other, wide)


# --- samples --------------------------------------------------------------------------------------
def test_positive_samples_are_the_lines_themselves(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9), files=1)
    found = rows(load_digital_dataset_from_file(data, vocabulary, 4, 32, shuffle=False, generate_neg_sample=False))
    for number, row in enumerate(found):
        words, sentences, positions = pair(number, 3 + number % 7, 2 + number % 5)
        assert (original(row), row[1], row[2], row[4]) == (tuple(words), tuple(positions), tuple(sentences), 1)


def test_a_negative_sample_has_its_second_sentence_from_the_next_line(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9), files=1)
    found = rows(load_digital_dataset_from_file(data, vocabulary, 4, 32, shuffle=False))
    assert [row[4] for row in found] == [1, 0] * 9
    for number, row in enumerate(found[1::2]):
        other = (number + 1) % 9
        first = pair(number, 3 + number % 7, 2 + number % 5)[0]
        second = pair(other, 3 + other % 7, 2 + other % 5)[0]
        a, b = first[: first.index(SEP) + 1], second[second.index(SEP) + 1 :]
        assert original(row) == tuple(a + b)
        assert row[1] == tuple(range(len(a + b)))
        assert row[2] == (0,) * len(a) + (1,) * len(b)


def test_shuffled_negatives_are_paired_differently_in_every_epoch_and_never_with_themselves(tmp_path):
    data, vocabulary = digital(tmp_path, varied(12))
    loader = load_digital_dataset_from_file(data, vocabulary, 4, 32)
    positive, negative = ({original(r) for r in epoch if r[4] == label} for epoch in [rows(loader)] for label in (1, 0))
    assert len(positive) == len(negative) == 12
    assert not positive & negative
    assert negative != {original(r) for r in rows(loader) if r[4] == 0}


def test_long_lines_and_long_negatives_are_dropped(tmp_path, caplog):
    lines = [line(0, first=2, second=20), line(1, first=20, second=2), line(2, first=30, second=30)]
    data, vocabulary = digital(tmp_path, lines, files=1)
    with caplog.at_level(logging.WARNING):
        loader = load_digital_dataset_from_file(data, vocabulary, 4, 30, shuffle=False)
    assert [r.getMessage() for r in caplog.records] == ["dropped 1 lines longer than max_seq_len = 30"]
    found = rows(loader)  # of the two negatives one has 2 + 2 words, and the other 20 + 20
    assert [(len(r[0]), r[4]) for r in found] == [(25, 1), (7, 0), (25, 1)]
    with pytest.raises(DataError, match="all 3 lines are longer than max_seq_len = 9"):
        load_digital_dataset_from_file(data, vocabulary, 4, 9)


def test_a_batch_has_seven_tensors_in_order_and_rows_are_padded(tmp_path):
    data, vocabulary = digital(tmp_path, [line(0, first=3), line(1, first=9)], files=1)
    (batch,) = load_digital_dataset_from_file(data, vocabulary, 2, 32, shuffle=False, generate_neg_sample=False)
    names = ["src_ids", "pos_ids", "sent_ids", "input_mask", "mask_label", "mask_pos", "labels"]
    assert list(batch) == names
    assert [batch[n].dtype for n in names] == [torch.int64] * 3 + [torch.float32] + [torch.int64] * 3
    chosen = len(batch["mask_pos"])
    assert [tuple(batch[n].shape) for n in names] == [(2, 17)] * 3 + [(2, 17, 1), (chosen, 1), (chosen, 1), (2, 1)]
    assert batch["input_mask"].sum((1, 2)).tolist() == [11, 17]
    assert set(batch["src_ids"][0, 11:].tolist()) == {PAD}


def test_masked_words_by_row_are_the_same_words(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9))
    flat, by_row = (list(load_digital_dataset_from_file(data, vocabulary, 4, 32, masked=m)) for m in ("batch", "row"))
    for a, b in zip(flat, by_row, strict=True):
        width = a["src_ids"].shape[1]
        real = b["mask_label"] != -100
        places = (b["mask_pos"] + width * torch.arange(len(real))[:, None])[real]
        assert torch.equal(places[:, None], a["mask_pos"])
        assert torch.equal(b["mask_label"][real][:, None], a["mask_label"])
        assert real.any(1).all()


def test_a_bert_learns_from_its_batches(tmp_path):
    from fleetx.applications import BertBase

    data, vocabulary = digital(tmp_path, varied(8))
    model = BertBase(layers=1, hidden=32, heads=2, vocab_size=VOCABULARY, max_seq_len=32, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = load_digital_dataset_from_file(data, vocabulary, 16, 32)
    losses = []
    for _ in range(25):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_every_validation_masks_the_same_words_and_every_training_epoch_others(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9))
    vocabulary.rename(data / "vocab.txt")
    for name in ("train", "val"):
        (data / f"{name}.txt").write_text("part0\npart1\n")
    val, train = digital_val(data, 64, 32), digital_train(data, 64, 32, shuffle=False)
    assert rows(val) == rows(val)
    assert rows(train) != rows(train)


def test_the_error_for_a_missing_file_mentions_downloads_in_shards(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9), files=1)
    vocabulary.rename(data / "vocab.txt")
    (data / "train.txt").write_text("part0\npart1\n")
    with pytest.raises(DataError, match=r"part1 does not exist; .* one of 2 files in .*train.txt.*shard_num.*replica="):
        digital_train(data, 64, 32)


def test_a_model_that_knows_fewer_words_than_the_vocabulary(tmp_path):
    lines = [line(i) for i in range(40)]
    data, vocabulary = digital(tmp_path, lines, files=1)
    largest = max(int(word) for x in lines for word in x.split(";")[0].split())
    with pytest.raises(DataError, match=rf"part0, line \d+: token id {largest} is outside the vocabulary of {largest}"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32, vocab_size=largest)
    few = [x for x in lines if max(map(int, x.split(";")[0].split())) < 190]
    assert 5 < len(few) < 40
    loader = load_digital_dataset_from_file(data, vocabulary, 40, 32, vocab_size=190, on_error="skip")
    assert loader.skipped == 0
    for _ in range(20):  # substitutes of masked words too
        assert max(batch["src_ids"].max() for batch in loader) < 190
    assert loader.skipped == 40 - len(few)
    with pytest.raises(DataError, match=r"has \[MASK\] as id 3, outside the model's 3 words"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32, vocab_size=3)


# --- English --------------------------------------------------------------------------------------
ENGLISH = "1 3 6 2 7 2 0 0;1 1 1 1 1 1 0 0;0 0 0 0 1 1 0 0;1 4 0;55 7 0;1.0 1.0 0.0;0"


def test_english_lines_keep_their_masking(tmp_path):
    data, vocabulary = digital(tmp_path, [ENGLISH] * 3, files=1)
    (batch,) = load_digital_dataset_from_file(data, vocabulary, 3, 8)
    assert batch["src_ids"][1].tolist() == [1, 3, 6, 2, 7, 2, 0, 0]
    assert batch["pos_ids"][1].tolist() == list(range(8))
    assert batch["sent_ids"][1].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert batch["input_mask"][1].flatten().tolist() == [1] * 6 + [0] * 2
    assert batch["mask_pos"].flatten().tolist() == [1, 4, 9, 12, 17, 20]
    assert batch["mask_label"].flatten().tolist() == [55, 7] * 3
    assert batch["labels"].flatten().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (";0 0 0 0 1 1 0 0", ";0 0 0 0 1 1 0", "lengths 8, 8 and 7"),
        ("55 7 0", "55 7", "lengths 3, 2 and 3"),
        ("55 7 0", "555 7 0", "token id 555"),
        ("1 3 6", "1 3 666", "token id 666"),
        ("0 1 1 0 0;", "0 5 1 0 0;", "sentence 5 is neither 0 nor 1"),
        ("1 4 0;", "1 8 0;", "masked position 8 is outside the 8 words"),
        ("1.0 1.0", "0.0 0.0", "no masked word has a weight"),
        ("1.0 1.0", "1.0 0.5", "not an integer"),
        (";0;", ";0;0;", "8 fields instead of 7"),
    ],
)
def test_an_invalid_english_line_is_reported_by_file_and_line(tmp_path, old, new, words):
    bad = ENGLISH.replace(old, new, 1) if old != ";0;" else ENGLISH + ";0"
    data, vocabulary = digital(tmp_path, [ENGLISH, bad, ENGLISH], files=1)
    with pytest.raises(DataError, match=rf"part0, line 2: .*{words}"):
        load_digital_dataset_from_file(data, vocabulary, 3, 8)
    assert len(load_digital_dataset_from_file(data, vocabulary, 3, 8, on_error="skip")) == 1


def test_english_lines_have_their_own_negatives(tmp_path):
    data, vocabulary = digital(tmp_path, [ENGLISH] * 3)
    with pytest.raises(UsageError, match="generate_neg_sample=True is not supported for lines of 7 fields"):
        load_digital_dataset_from_file(data, vocabulary, 3, 8, generate_neg_sample=True)


def test_an_explicit_language_is_not_detected(tmp_path):
    data, vocabulary = digital(tmp_path, [ENGLISH] * 3, files=1)
    with pytest.raises(DataError, match="line 1: 7 fields instead of 4"):
        load_digital_dataset_from_file(data, vocabulary, 3, 8, lang="ch")


# --- files ----------------------------------------------------------------------------------------
def test_compressed_and_plain_files_give_the_same(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    plain, vocabulary = digital(tmp_path / "a", varied(9))
    packed, _ = digital(tmp_path / "b", varied(9), packed=[0, 1])
    a, b = (rows(load_digital_dataset_from_file(data, vocabulary, 4, 32)) for data in (plain, packed))
    assert a == b


def test_the_error_for_a_truncated_gz_file_names_it(tmp_path):
    data, vocabulary = digital(tmp_path, varied(200), files=1, packed=[0])
    file = data / "part0.gz"
    file.write_bytes(file.read_bytes()[:-100])
    for on_error in ("raise", "skip"):
        with pytest.raises(DataError, match=r"cannot read .*part0.gz after line \d+"):
            load_digital_dataset_from_file(data, vocabulary, 4, 32, on_error=on_error)
    file.write_bytes(gzip.compress(b"")[:-4])
    with pytest.raises(DataError, match=r"cannot read .*part0.gz"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32)


def test_folders_without_data_are_an_error(tmp_path):
    vocabulary = write_vocabulary(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_digital_dataset_from_file(tmp_path / "nowhere", vocabulary)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data files"):
        load_digital_dataset_from_file(tmp_path / "empty", vocabulary)
    (tmp_path / "empty" / "blank").write_text("\n\n")
    with pytest.raises(DataError, match="no records"):
        load_digital_dataset_from_file(tmp_path / "empty", vocabulary)


def test_the_vocabulary_in_the_data_folder_is_not_data(tmp_path):
    data, vocabulary = digital(tmp_path, varied(6))
    inside = data / "vocab.txt"
    inside.write_text(vocabulary.read_text())
    a, b = (rows(load_digital_dataset_from_file(data, v, 4, 32)) for v in (inside, inside))
    assert a == b
    assert len(a) == 12


def test_a_vocabulary_can_have_explicit_ids(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\t0\n[CLS]\t101\n[SEP]\t102\n[MASK]\t103\nword\t7\n")
    assert read_vocabulary(path) == Vocabulary(104, 0, 101, 102, 103)
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")  # the BOM of Windows editors
    assert read_vocabulary(path) == Vocabulary(104, 0, 101, 102, 103)
    path.write_text("[PAD]\n[CLS]\nword\n")
    with pytest.raises(DataError, match=r"has no \[SEP\], \[MASK\]"):
        read_vocabulary(path)
    path.write_text("[PAD]\tx\n")
    with pytest.raises(DataError, match=r"vocab.txt, line 1: 'x'"):
        read_vocabulary(path)


def test_the_cache_is_used_until_a_file_changes(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9), files=1)
    cache = tmp_path / "cache"

    def load():
        return rows(load_digital_dataset_from_file(data, vocabulary, 4, 32, cache_dir=cache))

    def folders():
        return {path for path in cache.iterdir() if path.is_dir()}

    assert load() == rows(load_digital_dataset_from_file(data, vocabulary, 4, 32))
    (before,) = folders()
    stamp = before.stat().st_mtime_ns
    assert load() == load()
    assert folders() == {before}
    assert before.stat().st_mtime_ns == stamp
    (data / "part0").write_text(line(77) + "\n" + line(78) + "\n")
    assert len(load()) == 4
    assert len(folders()) == 2


def test_the_cache_can_be_in_the_data_folder(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9))
    for _ in range(3):
        assert len(rows(load_digital_dataset_from_file(data, vocabulary, 4, 32, cache_dir=data))) == 18
    assert len([path for path in data.iterdir() if path.is_dir()]) == 1


def _load_cached(data, vocabulary, cache):
    assert rows(load_digital_dataset_from_file(data, vocabulary, 4, 32, cache_dir=cache))


def test_concurrent_processes_write_one_cache_entry(tmp_path):
    data, vocabulary = digital(tmp_path, varied(9))
    context = get_context("fork")
    processes = [context.Process(target=_load_cached, args=(data, vocabulary, tmp_path / "cache")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


# --- blocks of lines ------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.data(), st.booleans(), st.booleans())
def test_lines_are_parsed_the_same_together_as_alone(numbers, data, only_positive, english):
    """Invalid ones included: an error of one line is never blamed on another."""
    texts = [ENGLISH.encode() if english else line(i, first=1 + i % 5, second=1 + i % 3).encode() for i in numbers]
    for _ in range(data.draw(st.integers(0, 2))):
        index = data.draw(st.integers(0, len(texts) - 1))
        place = data.draw(st.integers(1, len(texts[index]) - 1))
        new = data.draw(st.sampled_from([b"", b" ", b";", b"9", b"x", b"-", b"\t", b"2", b" 2 ", b"0"]))
        removed = data.draw(st.integers(0, 1))
        texts[index] = (texts[index][:place] + new + texts[index][place + removed :]).strip()
    rules = {"longest": data.draw(st.integers(4, 12)), "only_positive": only_positive and not english}
    lang = "en" if english else "ch"
    together, invalid = parse(texts, WORDS, lang, **rules)
    alone = [parse([text], WORDS, lang, **rules) for text in texts]
    assert invalid == {i: messages[0] for i, (_, messages) in enumerate(alone) if messages}
    for name, values in together._asdict().items():
        assert np.array_equal(values, np.concatenate([getattr(corpus, name) for corpus, _ in alone]))


def test_the_first_invalid_line_of_a_block_is_reported(tmp_path):
    """A value out of range before a line that cannot be parsed."""
    data, vocabulary = digital(tmp_path, [line(0), line(1)[:-1] + "7", "nonsense"], files=1)
    with pytest.raises(DataError, match="part0, line 2: label 7"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32)


def test_lines_dropped_for_their_length_can_have_any_positions():
    corpus, invalid = parse([line(i, first=9).encode() for i in range(3)], WORDS, "ch", longest=16)
    assert corpus.lengths.tolist() == [17] * 3
    assert not invalid
