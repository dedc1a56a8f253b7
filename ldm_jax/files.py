"""Files that are there whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from etils import epath

from ldm_jax.typing import PathLike


@contextlib.contextmanager
def replacing(target: epath.Path) -> Iterator[str]:
  """A local path to write to; what it holds at the end appears at `target` (may be gs://) at once.

  Raises:
    OSError: if the disk does not take it; `target` is as it was.
  """
  if "://" in os.fspath(target):  # object stores show a file when its upload is complete
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, target.name)
      yield path
      epath.Path(path).copy(target, overwrite=True)
    return
  path = os.fspath(target.parent / f".{target.name}.{os.getpid()}.tmp")
  try:
    yield path
    sync(path)
    os.replace(path, target)
  finally:
    with contextlib.suppress(OSError):
      os.remove(path)


def write_atomically(target: PathLike, contents: str | bytes) -> None:
  """Writes a small file, text as UTF-8; see `replacing`."""
  data = contents.encode() if isinstance(contents, str) else contents
  with replacing(epath.Path(target)) as path, open(path, "wb") as file:
    file.write(data)


def sync(path: PathLike) -> None:
  """Has the disk take a file's contents before its name counts."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
