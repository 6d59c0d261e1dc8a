"""A checkpoint that was damaged, mixed, cut short or made to do harm: one clear error, and the model is not touched."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fleetx import CheckpointError, UsageError, fleet
from fleetx.comm.session import current
from fleetx.engine.checkpoint import chunks, manifest, tensor_file, tree
from training import adamw, batches, net, zero_last


def build(make=net, optimizer=adamw, **declared):
    fleet.init()
    current().entries.clear()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def state(model, optimizer):
    values = [v for s in optimizer.state.values() for v in s.values()]
    return [t.clone() for t in (*model.state_dict().values(), *values)]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint, and a training with other values that must not change."""
    model, optimizer = build()
    for x, y in batches(2):
        zero_last(model, optimizer, x, y)
    fleet.save(tmp_path / "good", step=7, extra={"a": 1})
    for x, y in batches(3):
        zero_last(model, optimizer, x, y)
    return tmp_path / "good", model, optimizer


def refused(folder, model, optimizer, match=None):
    before = state(model, optimizer)
    with pytest.raises(CheckpointError, match=match) as caught:
        fleet.load(folder)
    assert all(map(torch.equal, before, state(model, optimizer)))
    assert Path(caught.value.file).is_relative_to(folder)
    return str(caught.value)


# --- 16 to 19: bits, lengths, files -------------------------------------------------------------------
def test_every_flipped_bit_is_found_before_the_model_is_touched(saved):
    folder, *training = saved
    draw = random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(40):
            content = bytearray(whole)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            refused(folder, *training)
        path.write_bytes(whole)
    fleet.load(folder)


def test_every_missing_or_shortened_file_is_named(saved):
    folder, *training = saved
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for kept in (len(whole) - 1, len(whole) // 2, 0):
            path.write_bytes(whole[:kept])
            refused(folder, *training)
        path.write_bytes(whole + b"\0")
        refused(folder, *training)
        path.unlink()
        message = refused(folder, *training)
        assert path.name in message or "manifest" in message
        path.write_bytes(whole)


def test_files_of_another_step_are_found(saved, tmp_path):
    folder, *training = saved
    fleet.save(tmp_path / "later", step=8)
    for name in sorted(os.listdir(folder)):
        mixed = tmp_path / "mixed"
        shutil.copytree(folder, mixed)
        shutil.copy(tmp_path / "later" / name, mixed / name)
        same = (folder / name).read_bytes() == (mixed / name).read_bytes()
        if not same:
            refused(mixed, *training)
        shutil.rmtree(mixed)


def save_apart(folder):
    """Each rank has state of its own: the random numbers."""
    build()
    torch.manual_seed(fleet.worker_index())
    fleet.save(folder)


def said_on_load(folder):
    model, optimizer = build()
    before = state(model, optimizer)
    try:
        fleet.load(folder)
    except CheckpointError as error:
        return str(error), all(map(torch.equal, before, state(model, optimizer)))
    return "loaded", False


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_files_swapped_between_two_ranks_are_found_on_both(ranks, tmp_path, kind):
    ranks.run(save_apart, tmp_path / "c")
    a, b = (tmp_path / "c" / f"rank-0000{rank}.{kind}" for rank in range(2))
    left, right = a.read_bytes(), b.read_bytes()
    assert left != right
    a.write_bytes(right), b.write_bytes(left)
    for message, untouched in ranks.run(said_on_load, tmp_path / "c"):
        assert f".{kind}: " in message
        assert untouched


# --- 20, 21: documents that lie, with hashes that fit -------------------------------------------------
def forge(folder, name, content):
    """Replace a file and make the manifest agree, as someone who wants to be read would."""
    listed = json.loads((folder / "manifest.json").read_text())
    if name == "manifest.json":
        listed = content(listed)
    else:
        (folder / name).write_bytes(content)
        listed["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(listed).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_bytes(manifest.digest_line(text))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 99}, "newer fleetx"), ({"step": float("nan")}, "NaN"), ({"step": -1}, "step"),
     ({"step": 1.5}, "step"),
     ({"step": "1"}, "step"), ({"ranks": 2}, "files of 2 ranks"), ({"ranks": 10**9}, "ranks"), ({"more": 1}, "more"),
     ({"files": {"../../etc/passwd": {"size": 1, "sha256": "0" * 64}}}, "does not list the files"),
     ({"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}}, "does not list the files")],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(saved, change, message):
    folder, *training = saved
    forge(folder, "manifest.json", lambda listed: listed | change)
    refused(folder, *training, match=message)


def header(entries, data=b""):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "too short"), (b"\xff" * 8, "more than the file"), ((10**9).to_bytes(8, "little"), "more than the file"),
     (header([]), "not a JSON object"), (b"\x03" + b"\0" * 7 + b"{{{", "not JSON"),
     (header({"a": GOOD | {"shape": [2**62]}}, b"\0" * 8), "its shape"),
     (header({"a": GOOD | {"shape": [-2]}}, b"\0" * 8), "impossible"),
     (header({"a": GOOD | {"shape": [2**62, 2**62, 0]}}, b"\0" * 8), "impossible"),
     (header({"a": GOOD | {"shape": [True, 2]}}, b"\0" * 8), "impossible"),
     (header({"a": GOOD | {"shape": [1.0]}}, b"\0" * 8), "impossible"),
     (header({"a": GOOD | {"dtype": "OBJECT"}}, b"\0" * 8), "unknown type"),
     (header({"a": GOOD | {"dtype": ["F32"]}}, b"\0" * 8), "unknown type"),
     (header({"a": GOOD, "b": GOOD}, b"\0" * 8), "overlaps"),
     (header({"a": GOOD, "b": GOOD | {"data_offsets": [12, 20]}}, b"\0" * 20), "gap"),
     (header({"a": GOOD | {"data_offsets": [8, 0]}}, b"\0" * 8), "impossible"),
     (header({"a": GOOD}, b"\0" * 12), "bytes of data"), (header({"a": GOOD}, b"\0" * 4), "bytes of data"),
     (header({"a": 3}), "not described"), (pickle.dumps(print), "more than the file")],
    ids=range(19),
)  # fmt: skip
def test_a_tensor_file_that_lies_is_refused(tmp_path, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        tensor_file.TensorFile(tmp_path / "f")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [(["chunks", 0, "offsets"], [2**40, 0], "outside"), (["chunks", 0, "writer"], 5, "does not exist"),
     (["chunks", 0, "shape"], [1, 6], "as described"), (["shape"], [17, 6], "not complete"),
     (["dtype"], "I8", "as described"),
     (["dtype"], "OBJECT", "unknown type"), (["chunks"], [], "chunks"), (["chunks", 0, "offsets"], [-1, 0], "offsets"),
     (["chunks", 0, "file"], "../x", "file")],
    ids=str,
)  # fmt: skip
def test_an_index_that_lies_is_refused(saved, path, value, message):
    folder, *training = saved
    index = json.loads((folder / "index.json").read_text())
    at = index["tensors"]["model.0.weight"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    forge(folder, "index.json", json.dumps(index).encode())
    refused(folder, *training, match=message)


boxes = st.lists(st.tuples(st.tuples(*[st.integers(0, 4)] * 2), st.tuples(*[st.integers(1, 3)] * 2)), max_size=6)


@given(boxes)
def test_pieces_overlap_if_two_of_them_do(regions):
    regions = sorted(set(regions))
    naive = any(chunks._overlap(a, b) for a, b in itertools.combinations(regions, 2))
    assert chunks._any_overlap(regions) == naive


def test_thousands_of_pieces_are_checked_each_against_few():
    regions = [((0, row), (1, 1)) for row in range(20_000)]
    looked = []

    def overlap(a, b):
        looked.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_overlap", overlap)
        assert not chunks._any_overlap(regions)
    assert len(looked) < 20_000


def test_a_piece_that_is_listed_twice_is_refused(saved):
    folder, *training = saved
    index = json.loads((folder / "index.json").read_text())
    index["tensors"]["model.0.weight"]["chunks"] *= 2
    forge(folder, "index.json", json.dumps(index).encode())
    refused(folder, *training, match="two pieces from one rank")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("optimizer.0.weight.step", {"name": "optimizer.0.weight.$zz"}, "fromhex"),
     ("optimizer.0.weight.exp_avg", {"name": "optimizer.0.weight.exp_avg#number"}, "is not a number"),
     ("optimizer.0.weight.exp_avg", {"dtype": "CF32"}, "is not complex"),
     ("optimizer.0.bias.exp_avg", {"dtype": "CF32"}, "is not complex")],
)  # fmt: skip
def test_a_state_of_the_optimizer_that_lies_is_refused_before_the_model_is_touched(saved, name, change, message):
    folder, *training = saved
    index = json.loads((folder / "index.json").read_text())
    entry = index["tensors"].pop(name)
    content = (folder / "rank-00000.safetensors").read_bytes()
    new = change.pop("name", name)
    index["tensors"][new] = entry | change
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    entries[new] = entries.pop(name)
    forge(folder, "index.json", json.dumps(index).encode())
    forge(folder, "rank-00000.safetensors", header(entries, content[8 + length :]))
    refused(folder, *training, match=message)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/fleetx_was_here_and_should_not",)


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors", "training.json", "index.json"])
def test_a_pickle_in_place_of_a_file_runs_no_code(saved, name):
    folder, *training = saved
    forge(folder, name, pickle.dumps(Bomb()))
    refused(folder, *training)
    assert not Path("/tmp/fleetx_was_here_and_should_not").exists()


LIES = [
    {"$tensor": "../../x"}, {"$tensor": "model.0.weight"}, {"$tuple": 3}, {"$what": 1}, {"$dict": [[1]]},
    {"$dict": [[[1], 2]]}, {"$float": "1"}, {"$tensor": "state.0", "$stride": [0]},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_state_that_lies_is_refused(saved, lie):
    folder, *training = saved
    document = json.loads((folder / "rank-00000.json").read_text())
    document["extra"] = lie
    forge(folder, "rank-00000.json", json.dumps(document).encode())
    refused(folder, *training)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"$tuple": []}, "not named"), ({"lr": None}, "lr is not a number"), ({"betas": 3}, "not a tuple")],
)
def test_options_of_the_optimizer_that_lie_are_refused(saved, options, message):
    folder, *training = saved
    document = json.loads((folder / "training.json").read_text())
    document["groups"][0]["options"] = options
    forge(folder, "training.json", json.dumps(document).encode())
    refused(folder, *training, match=message)


RAW = {
    "deep": b"[" * 200_000, "deep objects": b'{"a":' * 100_000, "marked": b"\xef\xbb\xbf{}",
    "utf-16": "{}".encode("utf-16"), "empty": b"", "null": b"null", "a long number": b"1" * 5000,
    "not a number": b"NaN", "not utf-8": b'"\xff"', "a key twice": b'{"tensors":{},"tensors":{}}',
}  # fmt: skip


@pytest.mark.parametrize("name", ["rank-00000.json", "index.json", "training.json"])
@pytest.mark.parametrize("raw", RAW)
def test_odd_json_is_refused(saved, name, raw):
    folder, *training = saved
    forge(folder, name, RAW[raw])
    if (name, raw) == ("index.json", "a key twice"):  # then it is an index without tensors
        with pytest.raises(UsageError, match="does not have"):
            fleet.load(folder)
    else:
        assert len(refused(folder, *training)) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _changed(node, place, value):
    if not place or not isinstance(node, dict | list) or not node:
        return value
    key = (list(node) if isinstance(node, dict) else range(len(node)))[place[0] % len(node)]
    node[key] = _changed(node[key], place[1:], value)
    return node


DOCUMENTS = ["manifest.json", "index.json", "training.json", "rank-00000.json"]


@given(where=st.lists(st.integers(0, 50), max_size=5), value=json_values, name=st.sampled_from(DOCUMENTS))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_a_document_gives_a_result_or_one_of_our_errors(saved, where, value, name):
    folder, *_ = saved
    forged = folder.with_name("forged")
    shutil.rmtree(forged, ignore_errors=True)
    shutil.copytree(folder, forged)
    new = _changed(json.loads((forged / name).read_text()), where, value)
    if name == "manifest.json":
        text = json.dumps(new).encode()
        (forged / name).write_bytes(text)
        (forged / "manifest.sha256").write_bytes(manifest.digest_line(text))
    else:
        forge(forged, name, json.dumps(new).encode())
    with contextlib.suppress(CheckpointError, UsageError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loader's state that is not asked for
        fleet.load(forged)


@given(where=st.lists(st.integers(0, 50), max_size=3), value=json_values)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_of_a_tensor_file_gives_a_result_or_our_error(saved, where, value):
    folder, *_ = saved
    forged = folder.with_name("forged")
    shutil.rmtree(forged, ignore_errors=True)
    shutil.copytree(folder, forged)
    content = (folder / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    new = _changed(json.loads(content[8 : 8 + length]), where, value)
    forge(forged, "rank-00000.safetensors", header(new, content[8 + length :]))
    with contextlib.suppress(CheckpointError):
        fleet.load(forged)


@given(json_values | st.tuples(json_values, json_values) | st.dictionaries(st.integers(), json_values, max_size=3))
def test_plain_data_comes_back_from_json_as_it_was(value):
    encoded = json.loads(json.dumps(tree.encode(value, {}, "value"), allow_nan=False))
    assert repr(tree.decode(encoded, {}.__getitem__)) == repr(value)


# --- 22: another model --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: nn.Linear(6, 3), "is it from another"), (lambda: net().double(), "torch.float64"),
     (lambda: nn.Sequential(net(), nn.Identity()), "is it from another")],
)  # fmt: skip
def test_a_checkpoint_of_another_model_or_type_is_refused(saved, make, message):
    folder, *_ = saved
    build(make)
    with pytest.raises(UsageError, match=message):
        fleet.load(folder)


# --- 24: folders --------------------------------------------------------------------------------------
def test_links_and_folders_that_anyone_can_write_are_refused(saved, tmp_path):
    folder, model, optimizer = saved
    (tmp_path / "link").symlink_to(folder)
    refused(tmp_path / "link", model, optimizer, "symbolic link")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", model, optimizer, "symbolic link")
    assert fleet.latest(tmp_path) == folder
    for name in ("index.json", "rank-00000.safetensors", "manifest.json", "manifest.sha256"):
        (folder / name).rename(tmp_path / "outside")
        (folder / name).symlink_to(tmp_path / "outside")
        refused(folder, model, optimizer)
        (folder / name).unlink()
        (tmp_path / "outside").rename(folder / name)
    folder.chmod(0o777)
    refused(folder, model, optimizer, "every user of this machine")
    folder.chmod(0o755)
    os.unlink(folder / "index.json")
    os.mkfifo(folder / "index.json")
    refused(folder, model, optimizer, "regular file")


# --- every operation of a save can be the last --------------------------------------------------------
class Killed(BaseException):
    """Stands for kill -9: nothing after it runs, not even what cleans up."""


CALLS = ["open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "close"]


class Countdown:
    """Fails at the n-th call of the operating system that a save makes, and (`dead`) at every one after it."""

    def __init__(self, patch, n, error, dead):
        self.n, self.error, self.dead, self.made = n, error, dead, 0
        for name in CALLS:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            self.made += 1
            if self.made == self.n or (self.dead and self.made > self.n):
                raise self.error()
            return call(*args, **kwargs)

        return counted


@contextlib.contextmanager
def countdown(n, error, *, dead=False):
    """Without garbage collections, because what they finalize makes such calls, too, and hangs if one fails."""
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            yield Countdown(patch, n, error, dead)
    finally:
        gc.enable()


def calls_of_a_save(folder):
    with countdown(10**9, OSError) as counted:
        fleet.save(folder)
    return counted.made


@pytest.fixture(params=[tensor_file.LARGE, 0], ids=["small", "large"])
def direct(request, monkeypatch):
    """Large files are written directly."""
    monkeypatch.setattr(tensor_file, "LARGE", request.param)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_between_any_two_operations_leaves_a_whole_checkpoint(saved, tmp_path, replaces):
    good, *_ = saved
    old = good if replaces else tmp_path / "none"
    target = good if replaces else tmp_path / "new"
    count = calls_of_a_save(tmp_path / "probe") + 3
    shutil.rmtree(tmp_path / "probe")
    before = {p.name: p.read_bytes() for p in good.iterdir()}
    for n in range(1, count):
        with countdown(n, Killed, dead=True), contextlib.suppress(Killed):
            fleet.save(target, step=9)
        found = fleet.load(target)["step"] if replaces or target.exists() else None
        assert found in ((7, 9) if replaces else (9, None)), n
        newest = fleet.latest(tmp_path)
        assert newest == target if replaces else newest in (good, target), n
        if target.exists() and not replaces:
            shutil.rmtree(target)
        if replaces and found == 9:
            shutil.rmtree(old)
            old.mkdir()
            for name, content in before.items():
                (old / name).write_bytes(content)
    fleet.save(target, step=10)
    assert fleet.load(target)["step"] == 10
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(f".{target.name}")]


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_is_said_and_leaves_the_last_checkpoint(saved, tmp_path, code):
    good, *_ = saved
    count = calls_of_a_save(tmp_path / "probe")
    shutil.rmtree(tmp_path / "probe")
    whole = {p.name: p.read_bytes() for p in good.iterdir()}
    said = []
    for n in range(1, count + 1):
        with countdown(n, lambda: OSError(code, os.strerror(code))):
            try:
                fleet.save(tmp_path / "new")
            except CheckpointError as error:
                said.append(error)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] in ([], [".new.replaced"]), n
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert len(said) > count // 2
    for error in said:  # a full disk also says what to do
        assert error.reason.startswith(os.strerror(code))
        assert error.file.startswith(str(tmp_path))
    assert {p.name: p.read_bytes() for p in good.iterdir()} == whole
