"""Documents out of files: plain text, JSON lines and Parquet, in bounded memory.

A document is an iterator of pieces of UTF-8 text.  What cannot be read is told by `DocumentError`:
raised by a document's pieces it spoils that document alone, raised by the reader the rest of the
file.
"""

import contextlib
import dataclasses
import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from ldm_jax.data.json_lines import LONGEST_LINE, LongLine, field_of_line
from ldm_jax.errors import DocumentError
from ldm_jax.typing import PathLike

if sys.version_info >= (3, 14):
  from compression import zstd
else:
  from backports import zstd

_BLOCK = 2**20
_ROWS = 64  # of Parquet, decoded at once
_READ_ERRORS = (OSError, EOFError, zlib.error, zstd.ZstdError, pa.ArrowException)


@dataclasses.dataclass
class Document:
  """One document.

  Attributes:
    where: its place in the file, such as "line 3"; "" for the whole file.
    pieces: its text as UTF-8; may raise `DocumentError`.
    repaired: becomes true when reading replaced something by U+FFFD.
  """

  where: str
  pieces: Iterator[bytes]
  repaired: bool = False


@dataclasses.dataclass
class Skipped:
  """In place of a document that cannot be read: where, and why."""

  where: str
  reason: str


class Reader:
  """The documents of one file.

  Attributes:
    format: "text", "jsonl" or "parquet".
  """

  def __init__(self, path: PathLike, format: str, field: str, column: str):
    """Opens nothing yet.

    Args:
      path: local or gs://; ".gz" and ".zst" at its end are unpacked on the way.
      format: "text", "jsonl" or "parquet".
      field: of JSON lines, the key whose value is the text.
      column: of Parquet, the one that holds the text.
    """
    self.format = format
    self._path, self._field, self._column = epath.Path(path), field, column
    self._raw, self._done = None, 0

  def position(self) -> int:
    """Bytes of the file read so far, about."""
    if self._raw is not None and not self._raw.closed:
      with contextlib.suppress(OSError, ValueError):
        self._done = max(self._done, self._raw.tell())
    return self._done

  def documents(self) -> Iterator[Document | Skipped]:
    """The documents in order; each must be used up before the next is asked for.

    Raises:
      DocumentError: if the rest of the file cannot be read.
    """
    read = {"text": self._text, "jsonl": self._json_lines, "parquet": self._parquet}[self.format]
    with translated_errors(), self._path.open("rb") as self._raw:
      yield from read(self._raw)

  def _text(self, raw):
    with self._unpack(raw) as file:
      yield Document("", _blocks(file))

  def _json_lines(self, raw):
    with self._unpack(raw) as file:
      number = 0
      while line := file.readline(LONGEST_LINE):
        number += 1
        if number == 1:
          line = line.removeprefix(b"\xef\xbb\xbf")
        where = f"line {number}"
        try:
          if len(line) >= LONGEST_LINE - 3 and not line.endswith(b"\n"):
            with contextlib.closing(LongLine(line, file, self._field)) as long:
              yield _long_document(where, long)
              continue
          if not line.strip():
            continue
          text, repaired = field_of_line(line, self._field)
        except DocumentError as error:
          yield Skipped(where, str(error))
          continue
        yield Document(where, iter((text.encode(),)), repaired)

  def _parquet(self, raw):
    file = pq.ParquetFile(raw)
    names = file.schema_arrow.names
    if self._column not in names:
      raise DocumentError(f"no column {self._column!r} (it has {', '.join(names)[:200]})")
    kind = file.schema_arrow.field(self._column).type
    if not _is_text(kind):
      raise DocumentError(f"column {self._column!r} holds {kind}, not text")
    row = 0
    for batch in file.iter_batches(_ROWS, columns=[self._column], use_threads=False):
      column = batch.column(0)
      if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
      for value in column.cast(pa.large_binary()):  # as bytes: the text may not be valid UTF-8
        row += 1
        if value.is_valid:
          yield Document(f"row {row}", iter((value.as_py(),)))
        else:
          yield Skipped(f"row {row}", "null")

  def _unpack(self, raw):
    suffix = os.path.splitext(self._path.name)[1].lower()
    if suffix == ".gz":
      return gzip.GzipFile(fileobj=raw)
    return zstd.ZstdFile(raw) if suffix == ".zst" else contextlib.nullcontext(raw)


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
  """What reading a file can raise, as `DocumentError`."""
  try:
    yield
  except _READ_ERRORS as error:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise DocumentError(f"cannot be read on: {reason[:200]}") from error


def _long_document(where, long):
  document = Document(where, iter(()), long.repaired)

  def pieces():
    for piece in long.pieces():
      document.repaired = long.repaired
      yield piece

  document.pieces = pieces()
  return document


def _blocks(file: Any) -> Iterator[bytes]:
  with translated_errors():
    while block := file.read(_BLOCK):
      yield block


def _is_text(kind):
  if pa.types.is_dictionary(kind):
    kind = kind.value_type
  tests = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
  )
  return any(test(kind) for test in tests)
