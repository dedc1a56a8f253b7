"""The embedded corpus: the Python standard library's own source files.

Real text that every Python installation carries, so a run needs no download.  About 11 MB in some
650 files; which files exist depends on the Python version, nothing else is left to chance.
"""

import hashlib
import sysconfig
from pathlib import Path

from ldm_jax.errors import InputError
from ldm_jax.typing import PathLike

# Tests, installed packages and generated build descriptions are not the library's text.
_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_EXCLUDED_PREFIX = "_sysconfigdata"
_HELD_OUT_ONE_IN = 20


def stdlib_documents(
  root: PathLike | None = None,
) -> tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]]:
  """Reads the corpus as (training, held-out) lists of (relative path, contents).

  Both are in order of the relative path, with "/" between folders.  Empty files are left out.

  Args:
    root: folder to read instead of the running Python's standard library.

  Raises:
    InputError: if the folder has no source files, as in a Python that ships only bytecode, or too
      few of them to hold any out.
  """
  root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
  train, held_out = [], []
  for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
    relative = path.relative_to(root)
    if _EXCLUDED & set(relative.parts) or relative.name.startswith(_EXCLUDED_PREFIX):
      continue
    try:
      contents = path.read_bytes()
    except OSError as error:
      raise InputError(f"data.source = stdlib: cannot read {path}: {error.strerror}") from error
    if contents:
      name = relative.as_posix()
      (held_out if is_held_out(name) else train).append((name, contents))
  if not train or not held_out:
    raise InputError(
      f"data.source = stdlib: {root} has {len(train)} training and {len(held_out)} held-out .py "
      "files; use a Python installation that includes its library's source"
    )
  return train, held_out


def is_held_out(relative_path: str) -> bool:
  """Whether a file belongs to the held-out part: one in 20, by a hash of its relative path."""
  digest = hashlib.sha256(relative_path.encode()).digest()
  return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0
