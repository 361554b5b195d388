import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from zayajax.data import tokenizer
from zayajax.errors import UserError

HOSTILE = ["", "\0", "héllo ☃ \U0001f680\n", "<eos></s><bos>", "\ufeffa", "a\r\nb\t  c", "x" * 5000]


def train_bpe(folder, specials=("<pad>", "<eos>", "<bos>")):
    """A byte-level BPE of a few hundred ids, saved as folder/tokenizer.json."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the cat sat on the mat, the rat ran"] * 10, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return tokenizer.load(str(train_bpe(tmp_path_factory.mktemp("bpe"))))


def test_byte_ids():
    t = tokenizer.load("bytes")
    assert (t.vocab, t.pad, t.eos, t.bos) == (259, 0, 1, 2)
    assert t.document("aÿ").tolist() == [2, 3 + 97, 3 + 0xC3, 3 + 0xBF, 1]
    assert t.encode(b"\x00\xff").tolist() == [3, 258]
    assert t.decode([2, 3 + 97, 1, 0, 259, 10**6, -4, 3 + 98]) == "ab"
    assert t.decode([3 + 0xFF, 3 + 97]) == "\ufffda"


@given(st.one_of(st.text(), st.sampled_from(HOSTILE)))
@settings(max_examples=60, deadline=None)
def test_text_round_trips_and_bytes_are_counted(bpe, text):
    text = text.encode("utf-8", "replace").decode()
    for t in (tokenizer.load("bytes"), bpe):
        ids = t.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert t.decode(ids) == text
        assert t.bytes_of(t.document(text)) == len(text.encode())
        assert not {t.bos, t.eos, t.pad} & set(ids.tolist())
        document = t.document(text)
        assert document.dtype == np.int32
        assert document.tolist() == [t.bos, *ids.tolist(), t.eos]


@given(st.binary())
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_accepted(bpe, data):
    assert tokenizer.load("bytes").bytes_of(tokenizer.load("bytes").encode(data)) == len(data)
    assert bpe.decode(bpe.encode(data)) == data.decode(errors="replace")


def test_lone_surrogates_are_replaced(bpe):
    for t in (tokenizer.load("bytes"), bpe):
        assert t.decode(t.encode("a\ud800b")) == "a\ufffdb"


def test_bpe_merges_and_batches(bpe):
    assert len(bpe.encode("the the")) < len("the the")
    assert bpe.vocab > 259 and (bpe.pad, bpe.eos, bpe.bos) == (0, 1, 2)
    for one, many in zip(HOSTILE, bpe.documents(HOSTILE), strict=True):
        assert np.array_equal(bpe.document(one), many)
    assert bpe.bytes_of([[1, 2], [10**6, -1]]) == 0
    assert bpe.decode([bpe.vocab + 5]) == ""


def test_settings_of_the_last_call_do_not_truncate(tmp_path):
    path = train_bpe(tmp_path) / "tokenizer.json"
    short = tokenizers.Tokenizer.from_file(str(path))
    short.enable_truncation(4)
    short.enable_padding(length=4)
    short.save(str(path))
    assert len(tokenizer.load(str(path)).encode("q" * 50)) == 50
    assert len(tokenizer.load(str(path)).encode("q")) == 1


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, (None, 1, 0)),
        ({"tokenizer_config.json": {"bos_token": "<eos>", "eos_token": None}}, (1, None, 0)),
        ({"tokenizer_config.json": {"bos_token": {"content": "<x>"}}}, (2, 1, 0)),
        ({"special_tokens_map.json": {"pad_token": "<x>", "bos_token": "<absent>"}}, (None, 1, 2)),
        ({"generation_config.json": {"eos_token_id": [2, 1], "pad_token_id": -1}}, (None, 2, 0)),
        ({"config.json": {"bos_token_id": 9999, "eos_token_id": 0}}, (None, 0, 0)),
        (
            {"generation_config.json": {"bos_token_id": 1}, "config.json": {"bos_token_id": 0}},
            (1, 1, 0),
        ),
    ],
)
def test_special_ids(tmp_path, files, expected):
    folder = train_bpe(tmp_path, ("<pad>", "<eos>", "<x>"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    t = tokenizer.load(str(folder))
    assert (t.bos, t.eos, t.pad) == expected


def test_fingerprint_depends_on_content(tmp_path):
    a, b = (train_bpe(tmp_path / name) for name in "ab")
    c = train_bpe(tmp_path / "c", ("<pad>", "<eos>"))

    def load(folder):
        return tokenizer.load(str(folder)).fingerprint

    assert load(a) == load(b) != load(c)
    (b / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load(b) != load(a)
    assert len({load(a), load(c), tokenizer.load("bytes").fingerprint}) == 3


def test_errors_name_the_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name in ("absent.json", "tokenizer.json", "binary.json", "tokenizer.json/x"):
        with pytest.raises(UserError, match=str(tmp_path / name)) as caught:
            tokenizer.load(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty/tokenizer\.json"):
        tokenizer.load(str(tmp_path / "empty"))
    folder = train_bpe(tmp_path / "good")
    for bad in ("{", "[1]"):
        (folder / "tokenizer_config.json").write_text(bad)
        with pytest.raises(UserError, match=r"tokenizer_config\.json"):
            tokenizer.load(str(folder))
