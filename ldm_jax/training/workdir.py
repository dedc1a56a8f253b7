"""The workdir of a run: its saved config, and what may change between a stop and a resume."""

import contextlib
import dataclasses
import re
from typing import Any

from etils import epath

from ldm_jax import processes
from ldm_jax.config import Config, flatten, from_json, to_json
from ldm_jax.errors import InputError
from ldm_jax.files import store_errors, write_atomically
from ldm_jax.mixers import settings_of
from ldm_jax.typing import PathLike

# Settings that change neither the model, nor the data, nor what a step computes but for rounding.
_FREE = {
  "model.attention",
  "data.path",  # the same data in another place; other data are told by their fingerprint
  "data.tokenizer",
  "data.workers",
  "train.log_every",
  "train.eval_every",
  "train.eval_batches",
  "train.checkpoint_every",
  "train.depth_metrics_every",
  "train.profile_start",
  "train.profile_steps",
  "train.keep",
  "train.keep_best",
  "train.platform",
  "train.accumulate",
  "train.remat",
  "train.sample_tokens",
  "mesh.data",
  "mesh.fsdp",
  "mesh.tensor",
  "mesh.sequence",
}
# train.steps may change too, to train longer, but the learning rate then follows another cosine.
_ANNOUNCED = {"train.steps"}
_MIXER = "model.mixer."


def settings_in_use(config: Config) -> dict[str, Any]:
  """Every setting by its dotted name, without those of other mixers than the run's."""
  mixer = {"kind", *settings_of(config.model.mixer.kind)}
  return {
    key: value
    for key, value in flatten(config).items()
    if not key.startswith(_MIXER) or key.removeprefix(_MIXER) in mixer
  }


def without_local_settings(config: Config) -> Config:
  """The config without what may differ between the hosts of a run: where the data lie on each."""
  data = dataclasses.replace(config.data, path=None, tokenizer=None, workers=0)
  return dataclasses.replace(config, data=data)


def open_workdir(workdir: PathLike, config: Config) -> list[str]:
  """Creates the folder, or checks that `config` continues the run in it.

  Args:
    workdir: folder of the run; without checkpoints in it, a new config simply replaces the old.
    config: what this command asks for.

  Returns:
    Notes for the user about changes that are allowed but matter.

  Raises:
    InputError: if the folder cannot be used, or naming each setting that differs from the run's.
  """
  if re.match("[a-z0-9]+:/", str(workdir)) and not str(workdir).startswith("gs://"):
    raise InputError(
      f"workdir {workdir}: only gs://BUCKET/FOLDER and folders on a disk can hold a run"
    )
  workdir = epath.Path(workdir)
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = workdir / "checkpoints"
    resuming = checkpoints.is_dir() and any(checkpoints.iterdir())
  return _check_same_run(workdir / "config.json", config) if resuming else []


def save_config(workdir: PathLike, config: Config) -> None:
  """Writes `config.json`, once everything else about the run is known to fit (first process only).

  Raises:
    InputError: if the folder cannot be written.
  """
  if processes.is_first():
    with _writing(workdir):
      write_atomically(epath.Path(workdir) / "config.json", to_json(config))


@contextlib.contextmanager
def _writing(workdir):
  try:
    with store_errors(workdir):
      yield
  except OSError as error:
    raise InputError(f"workdir {workdir}: cannot write there: {error.strerror}") from error


def _check_same_run(path, config):
  try:
    saved = flatten(from_json(path.read_text()))
  except (InputError, OSError, UnicodeDecodeError) as error:
    raise InputError(f"{path}: {error}; restore the file or choose another --workdir") from error
  wanted = settings_in_use(config)
  changed = {key for key in wanted if wanted[key] != saved[key]}
  refused = sorted(changed - _FREE - _ANNOUNCED)
  if refused:
    lines = ", ".join(f"{key} was {saved[key]} and is now {wanted[key]}" for key in refused)
    raise InputError(
      f"{path.parent} holds a run with other settings: {lines}. "
      "Use the same settings to resume it, or another --workdir for a new run"
    )
  return [
    f"note: {key} changed from {saved[key]} to {wanted[key]}; "
    "the learning rate now follows the schedule of the new length"
    for key in sorted(changed & _ANNOUNCED)
  ]
