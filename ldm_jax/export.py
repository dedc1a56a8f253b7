"""Writes a trained model's parameters to safetensors files, with all that is needed to use them.

    python -m ldm_jax.export --workdir RUN --output FOLDER [--step N] [--best] [--dtype bfloat16]

FOLDER must not exist or be empty, and be on a disk (copy it to gs:// afterwards); it appears when
it is complete.  Parameters are called by their paths, such as block_0.attention.query.kernel; the
beginning of ldm_jax/exported.py describes every file.

Exit codes: 0 done, 1 failed (a full disk, say), 2 bad configuration or input.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ldm_jax import exported
from ldm_jax.command_line import add_checkpoint_options, command_parser, run_command
from ldm_jax.config import MeshConfig
from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.errors import InputError, TrainingError, first_line
from ldm_jax.files import check_free_to_write, is_remote, sync
from ldm_jax.model import parameter_count
from ldm_jax.sharding import make_mesh
from ldm_jax.trained import TrainedModel, load_run_config, load_trained, run_tokenizer, with_data
from ldm_jax.typing import PathLike

DTYPES = ("float32", "bfloat16")

_CAST = ("kernel", "embedding")  # ends of the names of the large matrices


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line, exports, prints, and returns the exit code."""
  options = _parse(sys.argv[1:] if argv is None else argv)
  jax.config.update("jax_platforms", "cpu")  # a TPU that is here stays free for whoever uses it
  output = _check_output(options.output, options.overwrite)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  if exported.is_export(options.workdir):
    raise InputError(f"--workdir {options.workdir} is an export; give the workdir of a run")
  tokenizer = _tokenizer(options.workdir, options.data)
  trained = load_trained(options.workdir, options.step, options.folder, mesh)
  limit = int(options.shard_gib * 2**30)
  files = save_exported(output, trained, tokenizer, options.dtype, limit, options.overwrite)
  weights = [size for name, size in files.items() if name.endswith(".safetensors")]
  print(
    f"exported step {trained.step} of {options.workdir}: {parameter_count(trained.params):,} "
    f"parameters, {options.dtype}, {sum(weights):,} bytes in {len(weights)} "
    f"file{'s' * (len(weights) > 1)}, to {output}"
  )
  return 0


def save_exported(
  folder: PathLike,
  trained: TrainedModel,
  tokenizer: Tokenizer | None,
  dtype: str = "float32",
  shard_bytes: int = 4 * 2**30,
  overwrite: bool = False,
) -> dict[str, int]:
  """Writes a model as `ldm_jax.exported` describes it.

  All files are on the disk before the folder gets its name.

  Args:
    folder: on a disk; must not exist or be empty.
    trained: model, config and parameters.
    tokenizer: what the ids mean; None if they were random.
    dtype: of the large matrices, "float32" or "bfloat16".
    shard_bytes: the most that one file of parameters holds, unless a single one is larger.
    overwrite: replaces an export that is in the folder, once the new one is written.

  Returns:
    The size of every file.

  Raises:
    InputError: if the folder is not free, or the tokenizer not the model's.
    TrainingError: if the disk does not take it.
  """
  folder = _check_output(folder, overwrite)
  ids = trained.config.model.vocab_size
  if tokenizer is not None and tokenizer.vocab_size > ids:
    raise InputError(
      f"the tokenizer has {tokenizer.vocab_size} ids and the model {ids}, so it is another one's; "
      "give --data, the folder of the data set that the run was trained on"
    )
  with _appearing(folder, overwrite) as partial:
    _write_parameters(partial, trained.params, dtype, shard_bytes)
    about = _about(trained, tokenizer, dtype)
    if getattr(tokenizer, "json", None):
      (partial / exported.TOKENIZER_FILE).write_text(tokenizer.json, "utf-8")
    about["files"] = {path.name: _describe(path) for path in sorted(partial.iterdir())}
    (partial / exported.CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
  return {path.name: path.stat().st_size for path in folder.iterdir()}


def load_exported(folder: PathLike, mesh: Mesh | None = None) -> TrainedModel:
  """Loads an exported model; see `exported.read_export`, and `load_trained`, which takes both.

  Raises:
    InputError: naming what is missing or damaged.
  """
  mesh = make_mesh(MeshConfig()) if mesh is None else mesh
  if not exported.is_export(folder):
    exported.read_export(folder, mesh)  # says why not
  return load_trained(folder, mesh=mesh)


def _write_parameters(folder, params, dtype, shard_bytes):
  named = {".".join(path): leaf for path, leaf in flatten_dict(params).items()}
  dtypes = {name: _stored_dtype(name, leaf, dtype) for name, leaf in named.items()}
  sizes = {name: leaf.size * dtypes[name].itemsize for name, leaf in named.items()}
  shards = _shards(sizes, shard_bytes)
  places = {}
  for number, names in enumerate(shards, 1):
    of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
    # The library writes memory as it lies, so it must lie in order.
    arrays = {
      name: np.asarray(jax.device_get(named[name]), dtypes[name], order="C") for name in names
    }
    save_file(arrays, folder / f"model{of}.safetensors", {"format": "flax"})
    places |= dict.fromkeys(names, f"model{of}.safetensors")
  if len(shards) > 1:
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    (folder / exported.INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _stored_dtype(name, leaf, dtype):
  cast = dtype == "bfloat16" and name.endswith(_CAST)
  return np.dtype(ml_dtypes.bfloat16 if cast else leaf.dtype)


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
  """Cuts the parameters, in order, into files of at most `limit` bytes, or of one parameter."""
  shards, room = [], 0
  for name, size in sizes.items():
    if not shards or size > room:
      shards.append([])
      room = limit
    shards[-1].append(name)
    room -= size
  return shards


def _about(trained, tokenizer, dtype) -> dict[str, Any]:
  config = trained.config
  return {
    "format": exported.FORMAT,
    "format_version": exported.FORMAT_VERSION,
    "step": trained.step,
    "dtype": dtype,
    "compute_dtype": config.train.compute_dtype,
    "sequence_length": config.data.sequence_length,
    "tokenizer": tokenizer and _about_tokenizer(tokenizer),
    "model": dataclasses.asdict(config.model),
  }


def _about_tokenizer(tokenizer):
  about = {name: getattr(tokenizer, name) for name in ("kind", "vocab_size", "boundary", "sha256")}
  return about | {"boundary_token": getattr(tokenizer, "boundary_token", None)}


def _describe(path):
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"bytes": path.stat().st_size, "sha256": digest}


def _tokenizer(workdir: PathLike, elsewhere: str | None) -> Tokenizer | None:
  """The tokenizer of a run's data, which may lie elsewhere by now; None for random ids."""
  config = load_run_config(workdir)
  source = config.data.source
  if source != "prepared" and elsewhere is not None:
    raise InputError(f"--data {elsewhere}: the run's data.source is {source}; leave it out")
  if source == "synthetic":
    return None
  if elsewhere is not None:
    config = with_data(config, elsewhere, workdir)
  return run_tokenizer(workdir, config)


def _check_output(folder, overwrite) -> Path:
  """Refuses a folder that is not free; `overwrite` frees only one that holds an export."""
  if is_remote(folder):
    raise InputError(f"--output {folder}: give a folder on a disk, and copy it there afterwards")
  path = Path(os.path.realpath(folder))
  check_free_to_write("--output", path, folder=True)
  try:
    held = {file.name for file in path.iterdir()} if path.exists() else set()
  except OSError as error:
    raise InputError(f"--output {folder}: {error.strerror}; choose another") from error
  if not held:
    return path
  if not overwrite:
    raise InputError(f"--output {folder} is not empty; choose another, or add --overwrite")
  if not exported.is_export(path):
    raise InputError(f"--output {folder} holds something else than an export; choose another")
  others = held - exported.files_of(path)
  if others:
    raise InputError(
      f"--output {folder} holds more than an export, such as {min(others)}; move that away, or "
      "choose another"
    )
  return path


@contextlib.contextmanager
def _appearing(folder: Path, overwrite: bool) -> Iterator[Path]:
  """A new folder to write to, which gets its name at the end; an older one is removed then."""
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
  except OSError as error:
    raise TrainingError(f"--output {folder}: cannot write there: {error.strerror}") from error
  partial, old = work / "new", work / "old"
  try:
    partial.mkdir()
    yield partial
    for path in partial.iterdir():
      path.chmod(partial.stat().st_mode & 0o666)  # safetensors lets nobody else read its files
      sync(path)
    sync(partial)
    if overwrite and folder.exists():
      folder.rename(old)
    partial.rename(folder)  # refused if another export has filled it in the meantime
    sync(folder.parent)
  except (OSError, SafetensorError) as error:
    reason = getattr(error, "strerror", None) or first_line(error)
    raise TrainingError(f"--output {folder}: cannot write there: {reason}") from error
  finally:
    if old.exists() and not folder.exists():
      old.rename(folder)
    shutil.rmtree(work, ignore_errors=True)


def _gib(text):
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not (math.isfinite(value * 2**30) and value > 0):
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
  return value


def _parse(argv) -> argparse.Namespace:
  parser = command_parser("ldm_jax.export", __doc__)
  parser.add_argument("--workdir", required=True, help="of the run, may be gs://")
  parser.add_argument("--output", required=True, help="folder to write, on a disk")
  add_checkpoint_options(parser)
  parser.add_argument(
    "--dtype",
    choices=DTYPES,
    default="float32",
    help="of the large matrices (float32, as trained); norms, biases, gains stay float32",
  )
  parser.add_argument(
    "--shard-gib", type=_gib, default=4.0, help="most GiB of parameters in one file (4)"
  )
  parser.add_argument("--data", help="where the run's prepared data are, for their tokenizer")
  parser.add_argument(
    "--overwrite", action="store_true", help="replace the export that is in the output folder"
  )
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
