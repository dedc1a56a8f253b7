"""Writing the shards of a prepared data set; see `ldm_jax.data.prepared` for what is in them."""

import contextlib
import hashlib
import json
import os
import tempfile
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from ldm_jax.data.prepared import CHUNK
from ldm_jax.errors import TrainingError
from ldm_jax.files import replacing
from ldm_jax.typing import PathLike

# Of 16,384 byte ids, read one by one: 0.40 bytes an id and 0.1 ms a record; without compression
# 2.02 bytes and 0.03 ms.  Higher levels are slower and no smaller.
_OPTIONS = "group_size:1,zstd:1"


class ShardWriter:
  """Collects the documents of one shard in a temporary file, so that one can be taken back."""

  def __init__(self, folder: PathLike, boundary: int, dtype: np.dtype):
    """Starts empty.

    Args:
      folder: for the temporary file.
      boundary: the id before each document.
      dtype: of the ids.
    """
    self.documents, self.text_bytes = 0, 0
    self._edge = np.array([boundary], dtype)
    self._dtype = dtype.newbyteorder("<")
    self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 closed by close()
    self._begun = 0

  def begin(self) -> None:
    """Starts a document."""
    self._begun = self._file.tell()
    self.add(self._edge)

  def add(self, ids: np.ndarray) -> None:
    """Adds ids [n] to the document."""
    self._file.write(np.ascontiguousarray(ids, self._dtype))

  def end(self, text_bytes: int) -> None:
    """Keeps the document, of so many bytes of text."""
    self.documents += 1
    self.text_bytes += text_bytes

  def take_back(self) -> None:
    """Drops the document begun last."""
    self._file.seek(self._begun)
    self._file.truncate()

  def write(self, folder: PathLike, name: str) -> dict[str, Any]:
    """Writes the shard under its final name, whole or not at all; returns its `meta.json` entry."""
    size = self._file.tell() // self._dtype.itemsize
    entry = {
      "name": name,
      "ids": size,
      "documents": self.documents,
      "text_bytes": self.text_bytes,
      "sha256": self._sha256(),
    }
    with replacing(epath.Path(folder) / name) as path:
      writer = ArrayRecordWriter(path, _OPTIONS)
      self._file.seek(0)
      while chunk := self._file.read(CHUNK * self._dtype.itemsize):
        writer.write(chunk)
      writer.write(json.dumps(entry).encode())
      writer.close()
      return entry | {"file_bytes": os.path.getsize(path)}

  def close(self) -> None:
    """Deletes the temporary file."""
    self._file.close()

  def _sha256(self):
    self._file.seek(0)
    return hashlib.file_digest(self._file, "sha256").hexdigest()


@contextlib.contextmanager
def writing(folder: PathLike):
  """What writing to `folder` can raise, as `TrainingError`.

  Raises:
    TrainingError: naming the folder.
  """
  try:
    yield
  except (OSError, RuntimeError) as error:  # array_record has no errors of its own
    raise TrainingError(
      f"writing to {folder} failed: {error}; free space, then run the same command again"
    ) from error
