"""The texts that `data.corpus` names, read one after another.

A text file is one document. A file that ends in .jsonl has a document a line, in the field
`data.text_field`. A folder is all files below it, of either kind; "stdlib" is the .py files of the
running interpreter's standard library.
"""

import codecs
import dataclasses
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from zayajax.errors import UserError

Text = tuple[str, str]  # name and content

NOT_LIBRARY = ("site-packages", "dist-packages", "__pycache__")


@dataclasses.dataclass(frozen=True)
class Source:
    """Files, found and not yet read.

    described: JSON values that change with the files (names, sizes, times) and the field.
    files: names and paths, by name.  named: the user named this one file, so that it must be text.
    skipped: counts what `texts` leaves out, as it goes: {"empty": ..., "not text": ...}.
    """

    described: dict
    files: list[tuple[str, Path]]
    text_field: str
    named: bool
    skipped: dict[str, int]

    def texts(self) -> Iterator[Text]:
        """Each document's name (a relative path, or `file:line`) and text, which is not empty.

        Raises UserError, naming file and line, where a file cannot be read, where a JSON line is
        wrong, and where the one file that the user named is not UTF-8. In a folder, files that are
        not UTF-8 or have a zero byte are skipped. Empty documents are skipped everywhere.
        """
        self.skipped.update({"empty": 0, "not text": 0})
        for name, path in self.files:
            try:
                found = self._lines(name, path) if _is_jsonl(path) else self._whole(name, path)
                for named, text in found:
                    if text:
                        yield named, text
                    else:
                        self.skipped["empty"] += 1
            except OSError as error:
                raise UserError(f"data.corpus: {path} cannot be read ({error.strerror})") from None

    def _whole(self, name: str, path: Path) -> Iterator[Text]:
        data = path.read_bytes()
        try:
            if b"\0" in data and not self.named:
                raise ValueError("a zero byte: most likely not text")
            yield name, data.decode("utf-8-sig")
        except ValueError as error:
            if self.named:
                raise UserError(f"data.corpus: {path} is not UTF-8 text ({error})") from None
            self.skipped["not text"] += 1

    def _lines(self, name: str, path: Path) -> Iterator[Text]:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield f"{name}:{number}", self._field(line, f"{path}, line {number}")

    def _field(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line.decode())
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: is not valid JSON ({error.msg}, column {error.colno})"
            ) from None
        except (ValueError, RecursionError) as error:  # not UTF-8; a vast number; deep nesting
            raise UserError(f"{where}: is not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: must be a JSON object with the field {self.text_field!r}")
        if self.text_field not in record:
            fields = ", ".join(map(repr, list(record)[:8])) or "none"
            raise UserError(
                f"{where}: has no field {self.text_field!r} (data.text_field), its fields: {fields}"
            )
        if not isinstance(text := record[self.text_field], str):
            raise UserError(
                f"{where}: the field {self.text_field!r} (data.text_field) must be a string, and "
                f"is {json.dumps(text)[:40]}"
            )
        return text


def find(corpus: str, text_field: str) -> Source:
    """Lists the files of a corpus; UserError where there is none."""
    if corpus == "stdlib":
        path = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in _below(path, NOT_LIBRARY) if f[0].endswith(".py")]
    else:
        path = Path(corpus).expanduser()
        if path.is_dir():
            files = _below(path)
        elif path.is_file():
            files = [(path.name, path)]
        elif path.exists():
            raise UserError(f"data.corpus: {path} is neither a file nor a folder")
        else:
            raise UserError(
                f"data.corpus: {path} does not exist; name a text file, a .jsonl file, a folder "
                "of them, or 'stdlib'"
            )
    if not files:
        raise UserError(f"data.corpus: the folder {path} holds no text file")
    try:
        listing = [(name, (s := f.stat()).st_size, s.st_mtime_ns) for name, f in files]
    except OSError as error:
        raise UserError(
            f"data.corpus: {error.filename} cannot be read ({error.strerror})"
        ) from None
    described = {
        "path": str(path.resolve()),
        "files": len(files),
        "listing": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "text_field": text_field,
    }
    return Source(described, files, text_field, named=path.is_file(), skipped={})


def hidden(path: Path) -> bool:
    """Whether any part of a relative path begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"


def _below(root: Path, left_out: tuple[str, ...] = ()) -> list[tuple[str, Path]]:
    """Relative POSIX path and path of each regular file that is not hidden, sorted by the first.

    Links to files are followed, links to folders are not: they could lead in circles.
    """

    def unreadable(error: OSError):
        raise UserError(f"data.corpus: {error.filename} cannot be read ({error.strerror})")

    def wanted(name: str) -> bool:
        return not hidden(Path(name)) and name not in left_out

    files = []
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = filter(wanted, folders)
        paths = (Path(folder, name) for name in filter(wanted, names))
        files += [(p.relative_to(root).as_posix(), p) for p in paths if p.is_file()]
    return sorted(files)
