"""A trained model, loaded from the workdir of its run or from an export of it."""

import dataclasses

from etils import epath
from jax.sharding import Mesh

from ldm_jax.config import Config, MeshConfig, from_json
from ldm_jax.data import PreparedData, load_tokenizer_of
from ldm_jax.data.prepared import TOKENIZER_FILE
from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.exported import (
  is_export,
  read_export,
  read_exported_config,
  read_exported_tokenizer,
)
from ldm_jax.files import store_errors
from ldm_jax.model import TransformerLM
from ldm_jax.sharding import make_mesh
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.step import abstract_state, make_model
from ldm_jax.typing import PathLike, PyTree


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """What a checkpoint holds beside the optimizer's state.

  Attributes:
    config: of the run; an export knows less, see `exported.read_export`.
    model: the network, in the run's compute dtype.
    params: its parameters, float32, laid out on `mesh`.
    step: finished optimizer steps.
    mesh: the devices.
  """

  config: Config
  model: TransformerLM
  params: PyTree
  step: int
  mesh: Mesh


def load_trained(
  workdir: PathLike, step: int | None = None, folder: str = "checkpoints", mesh: Mesh | None = None
) -> TrainedModel:
  """Loads the parameters of a checkpoint, whatever devices they were saved on.

  Args:
    workdir: of the run, may be gs://; or a folder that `python -m ldm_jax.export` wrote.
    step: which checkpoint; None for the newest that loads.  An export has one step only.
    folder: "checkpoints", or "best" for the state of the lowest held-out loss.
    mesh: devices to lay the parameters out on; None for all there are, with whole parameters on
      each.

  Raises:
    InputError: if there is no run in the folder, or no such checkpoint: what there is instead; if
      an export is damaged.
    TrainingError: if a checkpoint cannot be read for lack of memory or permission.
  """
  workdir = epath.Path(workdir)
  mesh = make_mesh(MeshConfig()) if mesh is None else mesh
  if is_export(workdir):
    return _load_export(workdir, step, folder, mesh)
  config = load_run_config(workdir)
  _check_folder(workdir, folder)
  checkpointer = Checkpointer(workdir, 1, folder)
  try:
    steps = checkpointer.steps()
    if not steps or step not in (None, *steps):
      wanted = "a checkpoint" if step is None else f"step {step}"
      held = f"steps {', '.join(map(str, steps))}" if steps else "nothing"
      raise InputError(f"--workdir {workdir}: {wanted} is not in {folder}, which holds {held}")
    restored = checkpointer.restore_parameters(abstract_state(config, mesh), step)
  finally:
    checkpointer.close()
  if restored is None:
    others = [other for other in steps if other != step]
    if step is None or not others:
      raise InputError(f"--workdir {workdir}: no checkpoint loads; restore one from a copy")
    raise InputError(
      f"--workdir {workdir}: checkpoint {step} does not load; restore it from a copy, or set "
      f"--step to one of {', '.join(map(str, others))}"
    )
  params, step = restored
  return TrainedModel(config, make_model(config), params, step, mesh)


def _check_folder(workdir, folder):
  """Refuses a workdir without a folder of checkpoints that can be read; opening would create it."""
  try:
    there = (workdir / folder).is_dir()
    if there:
      next((workdir / folder).iterdir(), None)
  except PermissionError as error:
    raise TrainingError(f"{workdir / folder}: {error.strerror}; let it be read") from error
  if not there:
    other, more = "best", ", add --best for its best/"
    if folder == "best":
      other, more = "checkpoints", ", leave out --best"
    more = more if (workdir / other).is_dir() else ""
    raise InputError(
      f"{workdir} has no folder {folder}: let its run reach a checkpoint{more}, or give another "
      "--workdir"
    )


def _load_export(folder, step, part, mesh):
  config, params, held = read_export(folder, mesh)
  if step not in (None, held) or part != "checkpoints":
    raise InputError(f"{folder} is an export of step {held} and holds nothing else")
  return TrainedModel(config, make_model(config), params, held, mesh)


def with_data(config: Config, folder: PathLike, workdir: PathLike) -> Config:
  """The config of a run with another prepared data set, or the same one in another place.

  Raises:
    InputError: if the folder is no prepared data set, or its tokenizer is not that of the run.
  """
  data = dataclasses.replace(config.data, source="prepared", path=str(folder), tokenizer=None)
  other, theirs = dataclasses.replace(config, data=data), PreparedData(folder)
  try:
    own = run_tokenizer(workdir, config)
  except InputError:
    if is_export(workdir):
      raise
    # Where the run's data are gone, its checkpoints still say which they were.
    record = _newest_record(epath.Path(workdir))
    if record is None or record.get("data_fingerprint") != theirs.fingerprint:
      raise InputError(
        f"--data {folder} is not what the run was made with, data.path = {config.data.path}, and "
        "that is not there to compare tokenizers with; restore it"
      ) from None
    return other
  if (own.kind, own.sha256) != (theirs.tokenizer.kind, theirs.tokenizer.sha256):
    raise InputError(
      f"--data {folder} was made with another tokenizer than the run; prepare it with --tokenizer "
      + ("bytes" if own.sha256 is None else f"{config.data.path or workdir}/{TOKENIZER_FILE}")
    )
  return other


def _newest_record(workdir):
  if not (workdir / "checkpoints").is_dir():
    return None
  checkpointer = Checkpointer(workdir, 1)
  try:
    return checkpointer.newest_record()
  finally:
    checkpointer.close()


def run_tokenizer(workdir: PathLike, config: Config) -> Tokenizer:
  """The tokenizer of a run's data, or of an export.

  Args:
    workdir: of the run, or an export.
    config: of the run, see `with_data`.

  Raises:
    InputError: if the data cannot be read, or their ids stand for no text.
  """
  if not is_export(workdir):
    return load_tokenizer_of(config)
  tokenizer = read_exported_tokenizer(workdir)
  if tokenizer is None:
    raise InputError(f"{workdir}: the model was trained on random ids, which stand for no text")
  return tokenizer


def check_knows_data(workdir: PathLike, way_out: str) -> None:
  """Refuses an export, which does not say what it was trained on, where that is asked for.

  Raises:
    InputError: with the way out.
  """
  if is_export(workdir):
    raise InputError(f"--workdir {workdir}: an export does not say what data it is of; {way_out}")


def load_run_config(workdir: PathLike, data: PathLike | None = None) -> Config:
  """The config of the run in a workdir, or of an export as far as that knows it.

  Args:
    workdir: of the run, or an export.
    data: a prepared data set to use instead of the run's, see `with_data`.

  Raises:
    InputError: if there is no run, its `config.json` is damaged, or the data do not fit.
  """
  config = read_exported_config(workdir) if is_export(workdir) else _saved_config(workdir)
  return config if data is None else with_data(config, data, workdir)


def _saved_config(workdir):
  path = epath.Path(workdir) / "config.json"
  try:
    with store_errors(workdir):
      return from_json(path.read_text())
  except FileNotFoundError:
    raise InputError(f"--workdir {workdir}: no run there, {path.name} is missing") from None
  except (InputError, OSError, UnicodeDecodeError) as error:
    raise InputError(f"{path}: {error}; restore the file") from error
