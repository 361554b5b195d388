"""Text to token ids and back: bytes as they are, or any `tokenizer.json`.

Text never becomes a control token: bos and eos come from `document` alone, so a corpus that
happens to contain the string "<eos>" cannot end a document early.
"""

import abc
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from zayajax.errors import UserError

SPECIALS = ("bos", "eos", "pad")

# Tried in this order where no file beside tokenizer.json says which token plays the role.
WELL_KNOWN = {
    "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "<|bos|>"),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "<|eos|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
}


def load(name: str) -> "Tokenizer":
    """`"bytes"`, or the path of a `tokenizer.json` or of a folder that holds one.

    Raises UserError, naming the file, where it is missing or is not a tokenizer.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())


class Tokenizer(abc.ABC):
    """Ids lie in 0 .. vocab - 1; a special id that the tokenizer does not have is None."""

    vocab: int
    bos: int | None
    eos: int | None
    pad: int | None
    fingerprint: str  # equal fingerprints give equal ids for equal text

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The ids of each text, int32, without special tokens."""

    @abc.abstractmethod
    def decode(self, ids) -> str:
        """Text of the ids: invalid UTF-8 is replaced; special and unknown ids are dropped."""

    @abc.abstractmethod
    def bytes_of(self, ids) -> int:
        """Bytes of text that the ids stand for: the denominator of bits per byte.

        Special and unknown ids count 0. Exact for bytes and for byte-level BPE; a SentencePiece
        tokenizer that puts a space before the text has one byte more per text.
        """

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of the text, int32 [T], without special tokens."""
        return self.encode_batch([text])[0]

    def document(self, text: str | bytes) -> np.ndarray:
        """bos, the ids of the text, eos, as far as the tokenizer has them: int32 [T]."""
        return self.documents([text])[0]

    def documents(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`document` of each text; faster than one by one where threads encode in parallel."""
        head, tail = ([] if t is None else [t] for t in (self.bos, self.eos))
        return [
            np.concatenate((head, ids, tail), dtype=np.int32, casting="unsafe")
            for ids in self.encode_batch(texts)
        ]


class ByteTokenizer(Tokenizer):
    """Ids 0 pad, 1 eos, 2 bos, and byte b is 3 + b."""

    vocab, pad, eos, bos = 259, 0, 1, 2
    first = 3
    fingerprint = hashlib.sha256(b"zayajax bytes: pad 0, eos 1, bos 2, byte + 3").hexdigest()

    def encode_batch(self, texts):
        data = (t if isinstance(t, bytes) else _valid(t).encode() for t in texts)
        return [np.frombuffer(d, np.uint8).astype(np.int32) + self.first for d in data]

    def decode(self, ids):
        return self._bytes(ids).tobytes().decode(errors="replace")

    def bytes_of(self, ids):
        return self._bytes(ids).size

    def _bytes(self, ids) -> np.ndarray:
        ids = np.asarray(ids, np.int64).ravel() - self.first
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8)


class FileTokenizer(Tokenizer):
    """A `tokenizer.json`, read by the `tokenizers` library; see `load`."""

    def __init__(self, path: Path):
        if path.is_dir():
            path = path / "tokenizer.json"
        content = _read(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{path}: is not a tokenizer.json ({_one_line(error)})") from None
        # Such files often keep the settings of the last call: a maximal length, padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as plain text: see the head of this file
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise UserError(f"{path}: the vocabulary of this tokenizer is empty")
        self.vocab = max(ids.values()) + 1  # not the count: ids may have gaps
        found = _special_ids(path.parent, ids, self._tokenizer.get_added_tokens_decoder())
        self.bos, self.eos, self.pad = (found[role] for role in SPECIALS)
        described = json.dumps([content, found], sort_keys=True)
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    def encode_batch(self, texts):
        texts = [t.decode(errors="replace") if isinstance(t, bytes) else _valid(t) for t in texts]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encodings]

    def decode(self, ids):
        return self._tokenizer.decode(self._text_ids(ids).tolist(), skip_special_tokens=True)

    def bytes_of(self, ids):
        return int(self._byte_lengths[self._text_ids(ids)].sum())

    def _text_ids(self, ids) -> np.ndarray:
        """Without the ids that the vocabulary lacks (a model's may be rounded up), and specials."""
        ids = np.asarray(ids, np.int64).ravel()
        ids = ids[(ids >= 0) & (ids < self.vocab)]
        return ids[~np.isin(ids, [i for i in (self.bos, self.eos, self.pad) if i is not None])]

    @functools.cached_property
    def _byte_lengths(self) -> np.ndarray:
        """Bytes of text of each id, int64 [vocab]."""
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        added = self._tokenizer.get_added_tokens_decoder()
        lengths = np.zeros(self.vocab, np.int64)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                lengths[i] = 0 if added[i].special else len(token.encode())
            elif byte_level:
                lengths[i] = len(token)  # one printable character stands for one byte
            elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                lengths[i] = 1  # byte fallback
            else:
                lengths[i] = len(token.replace("\u2581", " ").encode())
        return lengths


def _special_ids(folder: Path, ids: dict[str, int], added: dict) -> dict[str, int | None]:
    """{"bos": id or None, ...}, by the files beside tokenizer.json, else by well-known names.

    The first file that mentions a role decides, also by saying null; one that names a token or an
    id outside the vocabulary is passed over.
    """
    found = {}
    files = ("tokenizer_config.json", "special_tokens_map.json")
    for settings in map(_neighbour, (folder / f for f in files)):
        for role in SPECIALS:
            token = settings.get(f"{role}_token", "")
            token = token.get("content") if isinstance(token, dict) else token
            if token is None or (isinstance(token, str) and token in ids):
                found.setdefault(role, ids.get(token))
    known = set(ids.values())
    for settings in map(
        _neighbour, (folder / f for f in ("generation_config.json", "config.json"))
    ):
        for role in SPECIALS:
            value = settings.get(f"{role}_token_id")
            value = value[0] if isinstance(value, list) and value else value  # several eos
            if type(value) is int and value in known:
                found.setdefault(role, value)
    names = {t.content: i for i, t in added.items()}
    for role, tokens in WELL_KNOWN.items():
        found.setdefault(role, next((names[t] for t in tokens if t in names), None))
    return found


def _neighbour(path: Path) -> dict:
    """A JSON object, {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        settings = json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return settings


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path}: there is no such tokenizer; data.tokenizer is 'bytes', or the path of a "
            "tokenizer.json or of a folder that holds one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({_one_line(error)})") from None


def _valid(text: str) -> str:
    """The text with lone surrogates, which JSON can spell and UTF-8 cannot, replaced by U+FFFD."""
    if text.isascii() or not re.search("[\ud800-\udfff]", text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
