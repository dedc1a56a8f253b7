"""One job of a preparation: a few neighbouring input files become one shard of each part."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from ldm_jax.data.encoding import encode_document
from ldm_jax.data.inputs import Input
from ldm_jax.data.prepared import PARTS
from ldm_jax.data.reading import Document, Reader, Skipped, translated_errors
from ldm_jax.data.shards import ShardWriter, writing
from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.errors import DocumentError, InputError

JOB_BYTES = 2**26  # of input files; a larger file is a job of its own
_JOB_FILES = 4096
SPLIT_BYTES = 2**16  # how much of a document decides its part
_LISTED = 10_000  # problems of one input that are kept one by one
_HASH_BLOCK = 2**22


class Stopped(Exception):
  """A signal asked the command to end."""


@dataclasses.dataclass(frozen=True)
class Settings:
  """What decides which documents are read and where they go.

  Attributes:
    field: key of the text in JSON lines.
    column: of the text in Parquet files.
    held_out_one_in: N; one document in N is held out.
  """

  field: str = "text"
  column: str = "text"
  held_out_one_in: int = 200


@dataclasses.dataclass(frozen=True)
class Job:
  """Files that become the shards with one number."""

  number: int
  inputs: tuple[Input, ...]


def split_into_jobs(inputs: Sequence[Input]) -> list[Job]:
  """Neighbours up to `JOB_BYTES` together; depends on the inputs alone, never on the workers."""
  groups, size = [[]], 0
  for item in inputs:
    if groups[-1] and (size + item.size > JOB_BYTES or len(groups[-1]) == _JOB_FILES):
      groups.append([])
      size = 0
    groups[-1].append(item)
    size += item.size
  return [Job(number, tuple(group)) for number, group in enumerate(groups)]


def is_held_out(head: bytes, one_in: int) -> bool:
  """Whether a document is held out, by a hash of the first `SPLIT_BYTES` of its text.

  Equal documents, and long ones that begin alike, land in the same part.
  """
  digest = hashlib.sha256(head[:SPLIT_BYTES]).digest()
  return int.from_bytes(digest[:8], "big") % one_in == 0


def check_unchanged(record: dict[str, Any], progress: Callable[[int], None]) -> None:
  """Compares the inputs of a finished job with what they were.

  Args:
    record: what `run_job` returned.
    progress: called with the bytes read since the last call; may raise `Stopped`.

  Raises:
    InputError: naming the file that changed.
  """
  for item in record["inputs"]:
    if _sha256(item["path"], progress) != item["sha256"]:
      raise InputError(
        f"{item['path']} has changed since it was prepared; give another --output, or delete the "
        "old folder"
      )


def run_job(
  job: Job,
  output: str,
  tokenizer: Tokenizer,
  settings: Settings,
  progress: Callable[[int], None],
) -> dict[str, Any]:
  """Reads the job's files and writes its shards.

  Args:
    job: which files.
    output: folder of the data set.
    tokenizer: for every document.
    settings: of the data set.
    progress: called with the bytes read since the last call; may raise `Stopped`.

  Returns:
    "inputs": for each file its path, size, sha256 (None if it could not be read), format, number of
    documents, of empty ones, of skipped and repaired places, and the "problems" themselves;
    "shards": for each part the entry of `meta.json`, or None if no document fell into it.

  Raises:
    TrainingError: if the output cannot be written.
  """
  local = None if "://" in output else output
  with contextlib.ExitStack() as stack:
    writers = {}
    with writing(local or tempfile.gettempdir()):
      for part in PARTS:
        writer = ShardWriter(local, tokenizer.boundary, tokenizer.dtype)
        writers[part] = stack.enter_context(contextlib.closing(writer))
    inputs = [_read_input(item, writers, tokenizer, settings, progress) for item in job.inputs]
    with writing(output):
      shards = {
        part: writer.write(output, f"{part}-{job.number:05d}.array_record")
        if writer.documents
        else None
        for part, writer in writers.items()
      }
  return {"inputs": inputs, "shards": shards}


@dataclasses.dataclass
class _Report:
  """What became of one input."""

  path: str
  size: int
  sha256: str | None
  format: str
  documents: int = 0
  empty: int = 0
  skipped: int = 0
  repaired: int = 0
  problems: list[dict[str, str]] = dataclasses.field(default_factory=list)

  def note(self, what: str, where: str, reason: str) -> None:
    """Counts a problem ("empty", "skipped" or "repaired") and keeps it while there are few."""
    setattr(self, what, getattr(self, what) + 1)
    if len(self.problems) < _LISTED:
      self.problems.append({"what": what, "where": where, "reason": reason})


def _read_input(item, writers, tokenizer, settings, progress):
  report = _Report(item.path, item.size, _sha256(item.path, lambda _: progress(0)), item.format)
  reader = Reader(item.path, item.format, settings.field, settings.column)
  done, found, last = 0, 0, ""

  def advance():
    nonlocal done
    step, done = reader.position() - done, reader.position()
    progress(step)

  try:
    for document in reader.documents():
      found += 1
      last = document.where
      if isinstance(document, Skipped):
        report.note("skipped", document.where, document.reason)
      else:
        _take(document, writers, tokenizer, settings, report, advance)
      advance()
  except DocumentError as error:
    report.note("skipped", f"after {last}" if last else "", str(error))
  if not found and not report.skipped:
    report.note("empty", "", "no documents in the file")
  progress(max(item.size - done, 0))
  return dataclasses.asdict(report)


def _take(document: Document, writers, tokenizer, settings, report, advance):
  """Writes one document to the part its text belongs to, or says why not."""
  writer, size = None, 0

  def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
    nonlocal size
    for piece in pieces:
      advance()
      size += len(piece)
      yield piece

  def add(ids):
    with writing("the temporary file of a shard"):
      writer.add(ids)

  try:
    head = _head(document.pieces)
    if not head:
      report.note("empty", document.where, "an empty document")
      return
    writer = writers[PARTS[is_held_out(head, settings.held_out_one_in)]]
    with writing("the temporary file of a shard"):
      writer.begin()
    encoder = encode_document(tokenizer, counted(itertools.chain([head], document.pieces)), add)
  except (DocumentError, InputError) as error:
    if writer:
      writer.take_back()
    report.note("skipped", document.where, str(error))
    return
  writer.end(size)
  report.documents += 1
  if encoder.replaced:
    place = f"byte {encoder.first_replaced}"
    where = f"{document.where}, {place}" if document.where else place
    report.note("repaired", where, f"{encoder.replaced} invalid UTF-8 sequences became U+FFFD")
  elif document.repaired:
    report.note("repaired", document.where, "what is no Unicode text became U+FFFD")


def _head(pieces):
  """The first pieces, up to the bytes that decide the part."""
  head = b""
  while len(head) < SPLIT_BYTES and (piece := next(pieces, None)) is not None:
    head += piece
  return head


def _sha256(path, progress):
  """Of a file, or None if it cannot be read."""
  digest = hashlib.sha256()
  try:
    with translated_errors(), epath.Path(path).open("rb") as file:
      while block := file.read(_HASH_BLOCK):
        digest.update(block)
        progress(len(block))
  except DocumentError:
    return None
  return digest.hexdigest()


def remove_leftovers(folder: str) -> None:
  """Deletes the temporary files that a killed run left in a local folder."""
  if "://" not in folder and os.path.isdir(folder):
    for name in os.listdir(folder):
      if name.startswith(".") and name.endswith(".tmp"):
        os.remove(os.path.join(folder, name))
