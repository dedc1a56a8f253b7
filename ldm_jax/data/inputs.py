"""Which files an `--input` means, and which of them are not documents."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from etils import epath

from ldm_jax.errors import InputError
from ldm_jax.typing import PathLike

FORMATS = ("auto", "text", "jsonl", "parquet")
_JSON_LINES = {".jsonl", ".ndjson"}
_PARQUET = {".parquet", ".pq"}
_TEXT = {
  # prose, tables and markup
  *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".csv", ".tsv", ".html", ".htm", ".xml"),
  *(".yaml", ".yml", ".toml", ".ini", ".cfg", ".log", ".ipynb"),
  # code
  *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".java", ".kt"),
  *(".scala", ".go", ".rs", ".rb", ".pl", ".php", ".js", ".jsx", ".ts", ".tsx", ".css", ".sh"),
  *(".bash", ".sql", ".r", ".jl", ".hs", ".ml", ".lua", ".swift", ".cs", ".f90", ".asm", ".s"),
  *(".el", ".lisp", ".clj"),
}
_COMPRESSED = {".gz", ".zst"}
_BACKUP = re.compile(r".*~|#.*#|.*\.(bak|orig|old|swp|swo|tmp|temp|part|partial|crdownload)", re.I)
_GLOB = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Input:
  """One file to read: its path as given, its bytes, and "text", "jsonl" or "parquet"."""

  path: str
  size: int
  format: str


@dataclasses.dataclass(frozen=True)
class Ignored:
  """A path that an `--input` matched and that is not read, with the reason."""

  path: str
  reason: str


def find_inputs(
  patterns: Sequence[str], format: str = "auto", output: PathLike | None = None
) -> tuple[list[Input], list[Ignored]]:
  """All files that the patterns mean, each once, in order of their paths.

  A pattern is a file, a folder (all files below it) or a glob, local or gs://.  Hidden files,
  backup files, folders, what is not a regular file, and, with format "auto", names that do not tell
  a format are ignored.

  Args:
    patterns: what `--input` was given.
    format: of all files; "auto" goes by their names.
    output: a folder whose files are left out without a word.

  Raises:
    InputError: for a pattern that matches nothing, or if no file is left.
  """
  inputs, ignored, seen = {}, {}, {}
  for pattern in patterns:
    matches = list(_expand(pattern))
    if not matches:
      raise InputError(f"--input {pattern}: no such file")
    for path, below, wanted_folder in matches:
      if output is not None and _is_below(path, output):
        continue
      name = os.fspath(path)
      found = _classify(path, below, format, wanted_folder)
      if isinstance(found, Input):
        real = name if "://" in name else os.path.realpath(name)
        if seen.setdefault(real, name) != name:
          found = Ignored(name, f"the same file as {seen[real]}")
      if isinstance(found, Input):
        inputs[name] = found
      elif found is not None:
        ignored[name] = found
  if not inputs:
    reasons = "; ".join(f"{item.path}: {item.reason}" for item in list(ignored.values())[:5])
    raise InputError(f"--input {' '.join(patterns)}: no file to read ({reasons})")
  return [inputs[name] for name in sorted(inputs)], [ignored[name] for name in sorted(ignored)]


def _expand(pattern: str) -> Iterator[tuple[epath.Path, Sequence[str], bool]]:
  """Yields path, its parts below what the user named, and whether a folder there is expected."""
  path = epath.Path(pattern)
  if path.is_dir():
    for found in _walk(path):
      yield found, found.relative_to(path).parts, True
  elif path.exists() or not _GLOB.search(pattern):
    if path.exists() or os.path.islink(pattern):
      yield path, (), False
  else:
    parts = path.parts
    first = next(i for i, part in enumerate(parts) if _GLOB.search(part))
    base = epath.Path(*parts[:first]) if first else epath.Path(".")
    try:
      for found in base.glob("/".join(parts[first:])):
        yield found, found.relative_to(base).parts, False
    except NotImplementedError as error:  # ** would ask an object store for every folder
      raise InputError(f"--input {pattern}: name the folder instead of **") from error


def _walk(folder):
  """Everything below a folder; linked folders are not entered, so there is no endless loop."""
  # epath leaves some names out on a local disk, such as those that end with ~.
  local = "://" not in os.fspath(folder)
  names = os.listdir(folder) if local else [path.name for path in folder.iterdir()]
  for path in (folder / name for name in sorted(names)):
    yield path
    if path.is_dir() and not os.path.islink(path):
      yield from _walk(path)


def _classify(path, below, format, folders_expected):
  name = os.fspath(path)
  guessed = _format(path.name)
  if any(part.startswith(".") for part in below or (path.name,)):
    # Files inside a hidden folder go with it.
    return Ignored(name, "hidden") if not path.is_dir() else None
  if path.is_dir():
    if folders_expected and guessed is None:
      return None
    return Ignored(name, "a folder")
  if _BACKUP.fullmatch(path.name):
    return Ignored(name, "a backup or unfinished file")
  if not path.is_file():
    return Ignored(name, "not a regular file" if path.exists() else "a broken link")
  if format == "auto" and guessed is None:
    return Ignored(name, "its name tells no format; give --format text, jsonl or parquet")
  return Input(name, path.stat().length, guessed if format == "auto" else format)


def _format(name):
  stem, suffix = os.path.splitext(name.lower())
  if suffix in _COMPRESSED:
    suffix = os.path.splitext(stem)[1]
    return _by_suffix(suffix, (("jsonl", _JSON_LINES), ("text", _TEXT)))
  return _by_suffix(suffix, (("jsonl", _JSON_LINES), ("parquet", _PARQUET), ("text", _TEXT)))


def _by_suffix(suffix: str, known: Iterable[tuple[str, set[str]]]) -> str | None:
  return next((format for format, suffixes in known if suffix in suffixes), None)


def _is_below(path, folder):
  try:
    path.resolve().relative_to(epath.Path(folder).resolve())
  except (ValueError, OSError):
    return False
  return True
