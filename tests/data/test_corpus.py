import json
import os
import shutil
import sysconfig

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from zayajax.data import corpus as corpora, sources, tokenizer
from zayajax.errors import UserError
from zayajax.settings import DataConfig

BYTES = tokenizer.load("bytes")


def open_(path, cache, vocab=259, tokens=BYTES, **options):
    return corpora.open_corpus(DataConfig(corpus=str(path), **options), tokens, vocab, cache)


def texts(documents):
    return {n: BYTES.decode(documents[i]) for i, n in enumerate(documents.names)}


def both(corpus):
    return texts(corpus.train) | texts(corpus.held_out)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def many(folder, n=200):
    return write(folder, {f"{i}.txt": f"text {i}\n" * (i % 7 + 1) for i in range(n)})


@pytest.fixture
def writes(monkeypatch):
    """Counts how often a corpus is tokenised."""
    calls = []
    inner = corpora._write
    monkeypatch.setattr(corpora, "_write", lambda *a: (calls.append(1), inner(*a)))
    return calls


def test_folder(tmp_path):
    files = {"b.txt": "bé\n", "a/z.py": "z", "a/.x": "hidden", ".git/config": "hidden", "e": ""}
    files |= {"bin": b"\x00\x01", "latin": b"\xe9", "bom.txt": b"\xef\xbb\xbfbom", "c.jsonl": ""}
    files |= {"d/two.jsonl": '{"text": "one\\u2603"}\n\n{"text": ""}\n{"text": "four", "x": 1}'}
    root = write(tmp_path / "in", files)
    os.symlink(root / "absent", root / "dangling")
    os.symlink(root, root / "a" / "circle")
    c = open_(root, tmp_path / "cache", held_out=0.0)
    expected = {"a/z.py": "z", "b.txt": "bé\n", "bom.txt": "bom", "d/two.jsonl:1": "one\u2603"}
    expected |= {"d/two.jsonl:4": "four"}
    assert texts(c.train) == expected and c.train.names == list(expected)
    assert len(c.held_out) == 0 and c.held_out.names == []
    assert c.skipped == {"empty": 2, "not text": 2}
    assert c.train.lengths.dtype == np.int64 and c.train[0].dtype == np.int32
    assert c.train[1].tolist() == BYTES.document("bé\n").tolist()
    assert c.train.read(1, 1, 2).tolist() == BYTES.encode("b\u00e9")[:2].tolist()


def test_split_is_stable_and_disjoint(tmp_path):
    root = many(tmp_path / "in")
    c = open_(root, tmp_path / "cache", held_out=0.2)
    train, held = texts(c.train), texts(c.held_out)
    assert not train.keys() & held.keys() and len(train | held) == 200
    assert 15 < len(held) < 70
    many(root, 300)
    more = open_(root, tmp_path / "cache", held_out=0.2)
    assert held.keys() <= texts(more.held_out).keys() and train.keys() <= texts(more.train).keys()
    assert c.fingerprint != more.fingerprint
    larger = open_(root, tmp_path / "cache", held_out=0.5)
    assert texts(more.held_out).keys() < texts(larger.held_out).keys()
    assert larger.fingerprint == more.fingerprint
    assert larger.train.fingerprint not in (more.train.fingerprint, larger.held_out.fingerprint)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_both_splits_have_a_document(hashes):
    hashes = np.array(hashes, np.uint64)
    for fraction in (1e-9, 0.5, 0.9):
        held_out = corpora._held_out(hashes, fraction, cut=False)
        assert held_out.any() and not held_out.all()
    assert not corpora._held_out(hashes, 0.0, cut=False).any()


@pytest.mark.parametrize(
    "text, held_out, head",
    [
        ("line\n" * 100, 0.05, "line\n" * 95),
        ("x" * 1000, 0.1, "x" * 900),  # no line edge
        ("t\n" + "x" * 998, 0.1, "t\n" + "x" * 898),  # none near
        ("ab", 0.05, "a"),
        ("é☃\n", 0.9, "é"),
        ("\n\n\n", 0.5, "\n"),
    ],
)
def test_single_document_is_cut(tmp_path, text, held_out, head):
    (tmp_path / "one.txt").write_text(text)
    c = open_(tmp_path / "one.txt", tmp_path / "cache", held_out=held_out)
    assert texts(c.train) == {"one.txt (head)": head}
    assert texts(c.held_out) == {"one.txt (tail)": text[len(head) :]}
    write(tmp_path, {"in/x": "", "in/o.jsonl": json.dumps({"text": text})})
    c = open_(tmp_path / "in", tmp_path / "cache", held_out=held_out)
    assert "".join(both(c).values()) == text and len(c.held_out) == 1


def test_single_document_without_held_out(tmp_path, writes):
    (tmp_path / "one.txt").write_text("a\nb\n")
    for held_out, parts in ((0.0, 0), (0.5, 1), (0.0, 0), (0.0, 0)):
        c = open_(tmp_path / "one.txt", tmp_path / "cache", held_out=held_out)
        assert (len(c.train), len(c.held_out)) == (1, parts)
    assert len(writes) == 3
    (tmp_path / "one.txt").write_text("a")
    c = open_(tmp_path / "one.txt", tmp_path / "cache", held_out=0.5)
    assert (len(c.train), len(c.held_out)) == (1, 0)


def test_cache_is_reused_exactly_when_nothing_changed(tmp_path, writes):
    root, cache = many(tmp_path / "in", 5), tmp_path / "cache"
    first = open_(root, cache)
    again = open_(root, cache, held_out=0.5)
    assert len(writes) == 1 and again.fingerprint == first.fingerprint
    os.utime(root / "0.txt", (1, 1))
    assert open_(root, cache).fingerprint == first.fingerprint and len(writes) == 2
    (root / "0.txt").write_text("other")
    assert open_(root, cache).fingerprint != first.fingerprint and len(writes) == 3
    open_(root, cache, text_field="other")
    open_(root, cache, tokens=type("Other", (tokenizer.ByteTokenizer,), {"fingerprint": "x"})())
    assert len(writes) == 5


DAMAGE = {
    "absent": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "garbage": lambda path: path.write_bytes(b"[1]"),
}


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "hashes.npy", "names.jsonl"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_rebuilt(tmp_path, writes, name, damage):
    root, cache = many(tmp_path / "in", 5), tmp_path / "cache"
    first = open_(root, cache)
    expected = both(first)
    DAMAGE[damage](next(cache.glob("corpus-*")) / name)
    again = open_(root, cache)
    assert len(writes) == 2 and both(again) == expected and again.fingerprint == first.fingerprint
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"result": {}}', '{"result": 3}'])
def test_damaged_manifest_is_rebuilt(tmp_path, writes, content):
    root, cache = many(tmp_path / "in", 5), tmp_path / "cache"
    open_(root, cache)
    (next(cache.glob("corpus-*")) / "manifest.json").write_text(content)
    open_(root, cache)
    assert len(writes) == 2


def test_interrupted_writing_leaves_nothing(tmp_path, monkeypatch):
    root, cache = many(tmp_path / "in", 5), tmp_path / "cache"

    class Interrupted(tokenizer.ByteTokenizer):
        def documents(self, texts):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_(root, cache, tokens=Interrupted())
    assert list(cache.iterdir()) == []
    # Killed, it leaves a part under another name, which is in nobody's way.
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)
    with pytest.raises(KeyboardInterrupt):
        open_(root, cache, tokens=Interrupted())
    monkeypatch.undo()
    assert len(both(open_(root, cache))) == 5


def test_slower_of_two_processes_takes_the_result_of_the_faster(tmp_path, monkeypatch):
    root, cache = many(tmp_path / "in", 5), tmp_path / "cache"
    inner = corpora._write

    def slow(folder, *arguments):
        inner(folder, *arguments)
        monkeypatch.setattr(corpora, "_write", inner)
        open_(root, cache)

    monkeypatch.setattr(corpora, "_write", slow)
    assert len(both(open_(root, cache))) == 5
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "is not valid JSON"),
        (b'{"text": "\xff"}', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("9" * 10_000, "is not valid JSON"),
        ('["text"]', "must be a JSON object"),
        ('{"body": "x"}', "no field 'text'.*'body'"),
        ('{"text": null}', "must be a string, and is null"),
        ('{"text": 3}', "must be a string, and is 3"),
    ],
)
def test_json_errors_name_file_and_line(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    write(tmp_path, {"in/a.txt": "fine", "in/b.jsonl": b'{"text": "a"}\n\n' + line + b"\n"})
    for path in (tmp_path / "in" / "b.jsonl", tmp_path / "in"):
        with pytest.raises(UserError, match=rf"b\.jsonl, line 3: .*{message}") as caught:
            open_(path, tmp_path / "cache")
        assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_json_text_field_and_strange_strings(tmp_path):
    line = '\ufeff{"body": "a\\ud800b", "text": 3}\r\n{"body": "\\u0000"}\n'
    write(tmp_path, {"x.jsonl": line})
    c = open_(tmp_path / "x.jsonl", tmp_path / "cache", text_field="body")
    assert both(c) == {"x.jsonl:1": "a\ufffdb", "x.jsonl:2": "\0"}


def test_errors(tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match=r"data\.corpus: .*absent does not exist"):
        open_(tmp_path / "absent", cache)
    write(tmp_path, {"empty.txt": "", "latin.txt": b"\xe9", "none/.hidden": "x", "bin/x": b"\0"})
    with pytest.raises(UserError, match=r"empty\.txt holds no text \(left out: 1 empty\)"):
        open_(tmp_path / "empty.txt", cache)
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8"):
        open_(tmp_path / "latin.txt", cache)
    with pytest.raises(UserError, match="none holds no text file"):
        open_(tmp_path / "none", cache)
    with pytest.raises(UserError, match=r"bin holds no text \(left out: 1 not text\)"):
        open_(tmp_path / "bin", cache)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        open_(tmp_path / "pipe", cache)
    with pytest.raises(UserError, match="cannot write"):
        open_(tmp_path / "none" / ".hidden", tmp_path / "empty.txt" / "cache")


def test_cache_inside_the_corpus(tmp_path):
    root = many(tmp_path / "in", 3)
    for cache in (root, root / "runs" / "cache"):
        with pytest.raises(UserError, match="would become part of the corpus"):
            open_(root, cache)
    first = open_(root, root / ".cache")
    assert open_(root, root / ".cache").fingerprint == first.fingerprint and len(both(first)) == 3


def test_unreadable_file(tmp_path, monkeypatch):
    root = many(tmp_path / "in", 3)

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(sources.Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"0\.txt cannot be read \(Permission denied\)"):
        open_(root, tmp_path / "cache")


def test_token_outside_the_vocabulary(tmp_path):
    root = write(tmp_path / "in", {"a.txt": "a", "b.txt": "\xff", "c.txt": "c"})
    message = r"b\.txt has token 198, but model\.vocab is 198"
    with pytest.raises(UserError, match=message):  # while it is tokenised
        open_(root, tmp_path / "cache", vocab=198)
    open_(root, tmp_path / "cache", vocab=199)
    with pytest.raises(UserError, match=message):  # and when it is found in the cache
        open_(root, tmp_path / "cache", vocab=198)


def test_names_that_are_not_utf8(tmp_path):
    root = many(tmp_path / "in", 2)
    (root / os.fsdecode(b"\xff\n.txt")).write_text("odd")
    c = open_(root, tmp_path / "cache")
    assert both(c)[os.fsdecode(b"\xff\n.txt")] == "odd"


def test_small_batches_give_the_same(tmp_path, monkeypatch):
    root = many(tmp_path / "in", 50)
    whole = open_(root, tmp_path / "a")
    monkeypatch.setattr(corpora, "BATCH_BYTES", 20)
    assert open_(root, tmp_path / "b").fingerprint == whole.fingerprint


def test_tokenizer_file(tmp_path):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<eos>"], show_progress=False)
    bpe.train_from_iterator([f"text {i}\n" for i in range(200)], trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    t = tokenizer.load(str(tmp_path))
    c = open_(many(tmp_path / "in", 20), tmp_path / "cache", vocab=t.vocab, tokens=t)
    assert c.train.tokens.dtype == np.min_scalar_type(t.vocab - 1)
    for documents in (c.train, c.held_out):
        for i, name in enumerate(documents.names):
            text = (tmp_path / "in" / name).read_text()
            assert documents[i].tolist() == [*t.encode(text).tolist(), t.eos]


def test_stdlib(tmp_path):
    files = dict(sources.find("stdlib", "text").files)
    assert "json/decoder.py" in files and len(files) > 500
    assert all(name.endswith(".py") for name in files)
    assert not any({"site-packages", "__pycache__"} & set(n.split("/")) for n in files)
    assert str(files["json/decoder.py"]).startswith(sysconfig.get_paths()["stdlib"])
    c = open_("stdlib", tmp_path)
    i = c.train.names.index("json/decoder.py") if "json/decoder.py" in c.train.names else 0
    text = files[c.train.names[i]].read_bytes()
    assert BYTES.bytes_of(c.train[i]) == len(text)
    assert c.train.lengths.sum() > 10**7 and c.held_out.lengths.sum() > 10**5
