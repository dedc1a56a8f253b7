"""A prepared data set: a folder of ArrayRecord shards, `meta.json` and the tokenizer.

Part P ("train" or "held_out") is the token stream (see `TokenStream`) of the shards P-NNNNN in
order.  A shard's records are `CHUNK` ids each, little-endian, the last one shorter; one more
record ends it, the shard's own entry of `meta.json` as JSON, so that a file that was cut, swapped
or belongs to another data set is told at once.  ArrayRecord checks a hash of every record it reads.
"""

import functools
import hashlib
import json
import os
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath
from grain.sources import ArrayRecordDataSource

from ldm_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.typing import PathLike

FORMAT_VERSION = 1
PARTS = ("train", "held_out")
META_FILE, TOKENIZER_FILE = "meta.json", "tokenizer.json"
CHUNK = 16_384  # ids in a record

_REMAKE = "make it again with python -m ldm_jax.data.prepare"


class PreparedStream:
  """The token stream of one part, read from its shards by random access.

  Pickles as paths, so a worker process opens files of its own.
  """

  def __init__(self, folder: PathLike, shards: list[dict[str, Any]], boundary: int, dtype: str):
    """Opens nothing yet.

    Args:
      folder: of the data set.
      shards: entries of `meta.json`, in order.
      boundary: the id that ends the stream.
      dtype: of the stored ids, little-endian.
    """
    self._paths = [os.fspath(epath.Path(folder) / shard["name"]) for shard in shards]
    self._boundary, self._dtype = boundary, np.dtype(dtype).newbyteorder("<")
    sizes = np.array([shard["ids"] for shard in shards], np.int64)
    self._starts = np.concatenate([[0], np.cumsum(sizes)])
    records = -(-sizes // CHUNK) + 1
    self._first_records = np.concatenate([[0], np.cumsum(records)])

  def __len__(self) -> int:
    """Ids in all, with the boundary that ends the last document."""
    return int(self._starts[-1]) + 1

  def __getitem__(self, part: slice) -> np.ndarray:
    """The ids of a slice with step 1, as stored, [n].

    Raises:
      TrainingError: if a shard cannot be read, naming it.
    """
    start, stop, step = part.indices(len(self))
    if step != 1:
      raise ValueError("a prepared stream is read forwards, without steps")
    pieces, position, end = [], start, min(stop, len(self) - 1)
    while position < end:
      shard = int(np.searchsorted(self._starts, position, side="right")) - 1
      chunk, offset = divmod(position - int(self._starts[shard]), CHUNK)
      record = self._read(shard, chunk)
      piece = np.frombuffer(record, self._dtype)[offset : offset + end - position]
      pieces.append(piece)
      position += len(piece)
    if stop == len(self) and start < stop:
      pieces.append(np.array([self._boundary], self._dtype))
    return np.concatenate(pieces) if pieces else np.zeros(0, self._dtype)

  def _read(self, shard, chunk):
    try:
      return self._source[int(self._first_records[shard]) + chunk]
    except (RuntimeError, ValueError, OSError) as error:
      raise TrainingError(
        f"reading record {chunk} of {self._paths[shard]} failed: {error}; restore the file, then "
        "run the same command again"
      ) from error

  @functools.cached_property
  def _source(self):
    return ArrayRecordDataSource(self._paths)

  def __getstate__(self):
    return {name: value for name, value in vars(self).items() if name != "_source"}


class PreparedData:
  """A folder that `python -m ldm_jax.data.prepare` made.

  Attributes:
    meta: the contents of `meta.json`.
    tokenizer: the one it was made with.
    fingerprint: 16 hex digits that name tokenizer, split and every id, wherever the folder lies.
  """

  def __init__(self, folder: PathLike):
    """Opens the folder and checks every file's size, length and trailer.

    Raises:
      InputError: naming the file that is missing, damaged or of another data set.
    """
    self._folder = epath.Path(folder)
    self.meta = _read_meta(self._folder)
    self.tokenizer = _read_tokenizer(self._folder, self.meta)
    for part in PARTS:
      for shard in self.meta["shards"][part]:
        _check_shard(self._folder / shard["name"], shard, self.tokenizer.dtype.itemsize)
    self.fingerprint = fingerprint(self.meta)

  def stream(self, part: str) -> PreparedStream:
    """The token stream of "train" or "held_out"."""
    return PreparedStream(
      self._folder, self.meta["shards"][part], self.tokenizer.boundary, self.tokenizer.dtype.str
    )


def prepared_tokenizer(folder: PathLike) -> Tokenizer:
  """The tokenizer of a prepared data set, whose shards are not looked at.

  Raises:
    InputError: if there is no data set, or its tokenizer is not the one it was made with.
  """
  folder = epath.Path(folder)
  return _read_tokenizer(folder, _read_meta(folder))


def fingerprint(meta: dict[str, Any]) -> str:
  """Names a data set by what it holds, 16 hex digits; see `PreparedData`."""
  about = {key: meta["tokenizer"][key] for key in ("kind", "sha256", "boundary", "vocab_size")}
  ids = {
    part: [[shard["ids"], shard["sha256"]] for shard in meta["shards"][part]] for part in PARTS
  }
  text = json.dumps([about, ids], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_tokenizer(folder, meta) -> Tokenizer:
  about, path = meta["tokenizer"], folder / TOKENIZER_FILE
  if about["kind"] == ByteTokenizer.kind:
    return ByteTokenizer()
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f"{path}: {error}; {_REMAKE}") from error
  if hashlib.sha256(text.encode()).hexdigest() != about["sha256"]:
    raise InputError(f"{path} is not the tokenizer this data set was made with; {_REMAKE}")
  return HuggingFaceTokenizer(text, about["boundary_token"], str(path))


def _read_meta(folder):
  path = folder / META_FILE
  try:
    meta = json.loads(path.read_text(encoding="utf-8"))
    version = meta["format_version"]
    if version == FORMAT_VERSION:
      fingerprint(meta)
      _ = [meta["text_bytes"][part] for part in PARTS]
  except FileNotFoundError as error:
    raise InputError(
      f"{folder} is not a prepared data set: it has no {META_FILE}. Make one, or let an "
      "interrupted one finish, with python -m ldm_jax.data.prepare"
    ) from error
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); {_REMAKE}") from error
  if version != FORMAT_VERSION:
    raise InputError(f"{path} has format {version!r}, this version reads {FORMAT_VERSION}")
  return meta


def _check_shard(path, shard, width):
  try:
    size = path.stat().length
  except OSError as error:
    raise InputError(f"{path} is missing or cannot be read ({error}); {_REMAKE}") from error
  if size != shard["file_bytes"]:
    raise InputError(
      f"{path} has {size:,} bytes and should have {shard['file_bytes']:,}: it was cut or replaced; "
      "restore it or " + _REMAKE
    )
  try:
    reader = ArrayRecordReader(os.fspath(path))
    records = reader.num_records()
    trailer = json.loads(reader.read([records - 1])[0]) if records else None
    reader.close()
  except (RuntimeError, ValueError, IndexError) as error:
    raise InputError(f"{path} is damaged ({error}); restore it or {_REMAKE}") from error
  wanted = {key: value for key, value in shard.items() if key != "file_bytes"}
  if trailer != wanted or records != -(-shard["ids"] // CHUNK) + 1:
    raise InputError(f"{path} is a shard of another data set; restore the right one or {_REMAKE}")
