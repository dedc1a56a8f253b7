"""Reading an exported model: a folder of safetensors files that says all there is to know of it.

    config.json                       what the model is, and size and SHA-256 of every other file
    model.safetensors                 the parameters; or, of a large model,
    model-00001-of-00003.safetensors  … and model.safetensors.index.json, which names the file of
                                      each parameter as Hugging Face's tools expect it
    tokenizer.json                    unless the tokenizer is bytes or unknown

A parameter is called by its path in the tree of `TransformerLM`, with dots:
`block_0.attention.query.kernel`.  Shapes are those of the tree.  `config.json` holds

    format, format_version  "ldm_jax" and 1
    step                    finished optimizer steps
    dtype                   "float32" means all; "bfloat16" means what is called kernel or
                            embedding, and the rest, which is small and delicate, stays float32
    compute_dtype           dtype of activations in the run
    sequence_length         T in the run
    tokenizer               kind ("bytes" or "tokenizers"), vocab_size, boundary (id between
                            documents), boundary_token, sha256; null where ids were random
    model                   the section `model` of the run's config
    files                   {name: {bytes, sha256}}
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from ldm_jax.config import Config, from_json
from ldm_jax.config_checks import nearest
from ldm_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from ldm_jax.errors import InputError
from ldm_jax.files import is_remote
from ldm_jax.training.step import abstract_state
from ldm_jax.typing import PathLike, PyTree

FORMAT, FORMAT_VERSION = "ldm_jax", 1
CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
INDEX_FILE = "model.safetensors.index.json"
_KEYS = {
  "format": str,
  "format_version": int,
  "step": int,
  "dtype": str,
  "compute_dtype": str,
  "sequence_length": int,
  "tokenizer": (dict, type(None)),
  "model": dict,
  "files": dict,
}

_AGAIN = "export it again with python -m ldm_jax.export"
_DTYPES = {"F32", "BF16"}


def is_export(folder: PathLike) -> bool:
  """Whether the `config.json` in a folder is one of an exported model."""
  if is_remote(folder):
    return False
  try:
    about = json.loads((Path(folder) / CONFIG_FILE).read_text("utf-8"))
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(about, dict) and about.get("format") == FORMAT


def files_of(folder: PathLike) -> set[str]:
  """Names of all files of an export.

  Raises:
    InputError: as `read_export`, for what `config.json` says.
  """
  return {CONFIG_FILE, *_read_about(Path(folder))["files"]}


def read_export(folder: PathLike, mesh: Mesh) -> tuple[Config, PyTree, int]:
  """Reads an exported model, and checks every byte of its files.

  Args:
    folder: on a disk.
    mesh: devices to lay the parameters out on.

  Returns:
    The config, of which an export knows `model`, `train.compute_dtype` and `data.sequence_length`
    (the rest are defaults); the parameters, float32; the step.

  Raises:
    InputError: naming the file, setting or parameter that is missing, damaged, or does not fit.
  """
  folder = Path(folder)
  about = _read_about(folder)
  config = _config(folder, about)
  for name, entry in about["files"].items():
    _check_file(folder / name, entry)
  expected = {
    ".".join(path): (path, leaf)
    for path, leaf in flatten_dict(abstract_state(config, mesh).params).items()
  }
  with contextlib.ExitStack() as stack:
    held = _open(folder, about, stack)
    _check_tensors(folder, held, {name: leaf for name, (_, leaf) in expected.items()})
    params = {path: _load(*held[name], name, leaf) for name, (path, leaf) in expected.items()}
  return config, unflatten_dict(params), about["step"]


def read_exported_config(folder: PathLike) -> Config:
  """The config alone, see `read_export`.

  Raises:
    InputError: as `read_export`, for what `config.json` says.
  """
  folder = Path(folder)
  return _config(folder, _read_about(folder))


def read_exported_tokenizer(folder: PathLike) -> Tokenizer | None:
  """The tokenizer of an exported model; None if it was trained on random ids.

  Raises:
    InputError: if there is no export in the folder, or its tokenizer is damaged.
  """
  folder = Path(folder)
  about = _read_about(folder)
  tokenizer, path = about["tokenizer"], folder / TOKENIZER_FILE
  if tokenizer is None:
    return None
  if tokenizer.get("kind") == ByteTokenizer.kind:
    return ByteTokenizer()
  if TOKENIZER_FILE not in about["files"] or "boundary_token" not in tokenizer:
    raise InputError(f"{folder / CONFIG_FILE}: no {TOKENIZER_FILE} or boundary_token; {_AGAIN}")
  _check_file(path, about["files"][TOKENIZER_FILE])
  return HuggingFaceTokenizer(path.read_text("utf-8"), tokenizer["boundary_token"], str(path))


def _read_about(folder):
  path = folder / CONFIG_FILE
  try:
    about = json.loads(path.read_text("utf-8"))
  except FileNotFoundError:
    raise InputError(f"{folder} is no exported model: it has no {CONFIG_FILE}; {_AGAIN}") from None
  except (OSError, ValueError, RecursionError) as error:
    raise InputError(f"{path}: {error}; {_AGAIN}") from error
  if not isinstance(about, dict) or about.get("format") != FORMAT:
    raise InputError(f"{path} is not of an exported model: its format is not {FORMAT}; {_AGAIN}")
  version = about.get("format_version")
  if version != FORMAT_VERSION:
    raise InputError(f"{path} has format_version {version!r}, this ldm_jax reads {FORMAT_VERSION}")
  for key in about:
    if key not in _KEYS:
      raise InputError(f"{path}: unknown key {key!r} (nearest: {nearest(key, _KEYS)}); {_AGAIN}")
  for key, kind in _KEYS.items():
    if not isinstance(about.get(key, ...), kind) or isinstance(about[key], bool):
      raise InputError(f"{path}: {key} is missing or of the wrong type; {_AGAIN}")
  if about["step"] < 0:
    raise InputError(f"{path}: step must be at least 0, got {about['step']}; {_AGAIN}")
  for name, entry in about["files"].items():
    if name != os.path.basename(name) or not isinstance(entry, dict):
      raise InputError(f"{path}: files has a bad entry {name!r}; {_AGAIN}")
  return about


def _config(folder, about):
  """The config that the export's settings stand for, checked."""
  byte_ids = (about["tokenizer"] or {}).get("kind") == ByteTokenizer.kind
  settings = {
    "model": about["model"],
    "data": {
      "sequence_length": about["sequence_length"],
      "source": "stdlib" if byte_ids else "synthetic",  # no data set that would not fit
    },
    "train": {"compute_dtype": about["compute_dtype"]},
  }
  try:
    return from_json(json.dumps(settings))
  except InputError as error:
    raise InputError(f"{folder / CONFIG_FILE}: {error}; {_AGAIN}") from error


def _check_file(path, entry):
  try:
    size = path.stat().st_size
    if size != entry.get("bytes"):
      raise InputError(
        f"{path} has {size:,} bytes and should have {entry.get('bytes')}: it was cut or replaced; "
        "restore it"
      )
    with open(path, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise InputError(f"{path} cannot be read: {error.strerror}; restore it") from error
  if digest != entry.get("sha256"):
    raise InputError(f"{path} is damaged or another export's: its SHA-256 differs; restore it")


def _open(folder, about, stack):
  """Of every parameter on disk, the opened file that holds it, and its path."""
  held = {}
  for name in about["files"]:
    path = folder / name
    if path.suffix != ".safetensors":
      continue
    try:
      reader = stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
      raise InputError(f"{path} is no safetensors file: {error}; restore it") from error
    for parameter in reader.keys():  # noqa: SIM118 (it has no iterator)
      if parameter in held:
        raise InputError(f"{path}: {parameter} is in {held[parameter][1].name} too; {_AGAIN}")
      held[parameter] = reader, path
  return held


def _check_tensors(folder, held, expected):
  missing, extra = [name for name in expected if name not in held], held.keys() - expected.keys()
  if missing:
    raise InputError(
      f"{folder}: {len(missing)} parameters of the model are missing, the first {missing[0]}; "
      + _AGAIN
    )
  if extra:
    raise InputError(
      f"{folder}: {len(extra)} parameters are none of the model's, the first {min(extra)}; {_AGAIN}"
    )
  for name, leaf in expected.items():
    reader, path = held[name]
    tensor = reader.get_slice(name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != leaf.shape:
      raise InputError(
        f"{path}: {name} has shape {shape}, and {CONFIG_FILE} makes it {leaf.shape}; {_AGAIN}"
      )
    if dtype not in _DTYPES:
      raise InputError(f"{path}: {name} is {dtype} and must be F32 or BF16; {_AGAIN}")


def _load(reader, path, name, leaf):
  """One parameter, each device's part of it read for itself."""
  tensor = reader.get_slice(name)

  def part(index: Any) -> np.ndarray:
    values = tensor[index] if index else reader.get_tensor(name)
    return values.astype(leaf.dtype)

  try:
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)
  except SafetensorError as error:
    raise InputError(f"{path}: {name} cannot be read: {error}; restore it") from error
