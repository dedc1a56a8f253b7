"""Files that are there whole or not at all."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from ldm_jax.errors import InputError, first_line
from ldm_jax.typing import PathLike


def is_remote(path: PathLike) -> bool:
  """Whether a path is in an object store, such as gs://, and not on a disk."""
  return "://" in os.fspath(path)


def check_free_to_write(option: str, path: PathLike, folder: bool) -> None:
  """Refuses a local path that could not be made or replaced, and leaves everything as it is.

  Args:
    option: what gave the path, for the message.
    path: a file or a folder to write to; any of an object store is taken.
    folder: which of the two.

  Raises:
    InputError: saying what is in the way.
  """
  if is_remote(path):
    return
  wanted = Path(path).absolute()
  try:
    there = next(place for place in (wanted, *wanted.parents) if place.exists())
  except OSError as error:
    raise InputError(f"{option} {path}: {error.strerror}; choose another") from error
  if there == wanted and there.is_dir() and not folder:
    raise InputError(f"{option} {path} is a folder; give a file")
  if not there.is_dir() and (folder or there != wanted):
    raise InputError(f"{option} {path}: {there} is a file; give a folder")
  where = there if there.is_dir() else there.parent
  if not os.access(where, os.W_OK | os.X_OK):
    raise InputError(f"{option} {path}: {where} cannot be written to; give another folder")


def upload(source: PathLike, target: PathLike) -> None:
  """Puts all files below a local folder into `target`, under the same names, over older ones.

  Raises:
    OSError: if they cannot be written there.
  """
  with store_errors(target):
    for path in sorted(Path(source).rglob("*")):
      if path.is_file():
        epath.Path(path).copy(epath.Path(target) / path.relative_to(source), overwrite=True)


@contextlib.contextmanager
def store_errors(path: PathLike) -> Iterator[None]:
  """Turns the errors of an object store's client, which are of many kinds, into OSError."""
  try:
    yield
  except Exception as error:
    if not is_remote(path) or getattr(error, "strerror", None):
      raise
    raise OSError(errno.EIO, first_line(error)) from error


@contextlib.contextmanager
def replacing(target: epath.Path) -> Iterator[str]:
  """A local path to write to; what it holds at the end appears at `target` (may be gs://) at once.

  Raises:
    OSError: if the disk or the bucket does not take it; `target` is as it was.
  """
  if is_remote(target):  # object stores show a file when its upload is complete
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, target.name)
      yield path
      with store_errors(target):
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
