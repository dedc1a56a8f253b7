"""Saving and restoring runs with orbax: asynchronous, newest K kept, damaged ones skipped."""

import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict
from orbax.checkpoint import multihost

from ldm_jax import processes
from ldm_jax.errors import InputError, TrainingError, first_line
from ldm_jax.files import is_remote
from ldm_jax.training.step import TrainState
from ldm_jax.typing import PathLike, PyTree

# Orbax logs every file it touches, and the trace of each error that it then raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

_unraisable = sys.unraisablehook


def _hide_closed_loops(unraisable):
  """Where one array does not load, orbax leaves reads of others to end in a loop that is closed."""
  error = unraisable.exc_value
  if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
    _unraisable(unraisable)


sys.unraisablehook = _hide_closed_loops


class Checkpointer:
  """Checkpoints of one run, by finished steps.

  Beside the train state each holds a small JSON record of what lives on the host.
  """

  def __init__(self, workdir: PathLike, keep: int, folder: str = "checkpoints"):
    """Opens `workdir/folder`, creating it if need be; `keep` newest checkpoints survive a save."""
    path = epath.Path(workdir)
    self.directory = (path if is_remote(path) else path.resolve()) / folder
    # Created in the background, a folder that cannot be created would keep the process from ending.
    background = ocp.options.AsyncOptions(
      create_directories_asynchronously=False,
      barrier_sync_fn=self._barrier if jax.process_count() > 1 else None,
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, async_options=background)
    self._manager = ocp.CheckpointManager(self.directory, options=options)
    self._damaged: set[int] = set()

  def steps(self) -> list[int]:
    """Steps on disk that are not known to be damaged, oldest first."""
    return sorted(set(self._manager.all_steps()) - self._damaged)

  def save(self, state: TrainState, record: Mapping[str, Any]) -> None:
    """Starts saving; arrays are copied before this returns, so the state may be donated.

    Does nothing for a step that is already on disk: rewriting it could lose both.  Checkpoints that
    did not load are moved aside first, to `STEP.damaged`, where nothing deletes them.

    Raises:
      TrainingError: if the folder cannot be written.
    """
    step = int(state.step)
    self._guard(self._move_damaged_aside)
    if step in self.steps():
      return
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(dict(record))
    )

    def start():
      if not self._manager.save(step, args=items):
        raise RuntimeError(f"orbax refused to save step {step}")

    self._guard(start)

  def restore_newest(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest checkpoint that loads, or None if there is none at all.

    Those that do not load are reported and left alone.  In one of several processes that is an
    error unless it happens in all: the others wait for it inside orbax.

    Args:
      abstract: shapes, dtypes and shardings to restore into.

    Raises:
      TrainingError: if there are checkpoints and none of them loads, if one does not load in some
        processes only, or if memory, permissions or the device are at fault and not the checkpoint.
    """
    items = ocp.args.Composite(
      state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore()
    )
    steps, restored = self.steps(), self._newest(items)
    if restored is not None:
      return restored["state"], restored["record"]
    if steps:
      raise TrainingError(
        f"none of the checkpoints {steps} in {self.directory} loads; restore one from a copy, or "
        "choose another --workdir to start anew"
      )
    return None

  def restore_parameters(
    self, abstract: TrainState, step: int | None = None
  ) -> tuple[PyTree, int] | None:
    """The parameters and the step of one checkpoint, without the optimizer's state.

    Args:
      abstract: as for `restore_newest`.
      step: which checkpoint; None for the newest that loads.

    Returns:
      Parameters and step; None if none of the checkpoints that were asked for loads.

    Raises:
      InputError: if a checkpoint is of another model.
      TrainingError: as `restore_newest`, but not if none of them loads.
    """
    wanted = {"params": abstract.params, "step": abstract.step}
    restore = ocp.args.PyTreeRestore(
      item=wanted,
      restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
      partial_restore=True,
    )
    check = functools.partial(self._check_model, abstract.params)
    restored = self._newest(ocp.args.Composite(state=restore), step, check)
    return restored and (restored["state"]["params"], int(restored["state"]["step"]))

  def _check_model(self, params, step):
    """Refuses a checkpoint with other parameters; orbax takes of them what it finds."""
    held = ocp.PyTreeCheckpointHandler().metadata(self.directory / str(step) / "state").tree
    held = {path: leaf.shape for path, leaf in flatten_dict(held["params"]).items()}
    wanted = {path: leaf.shape for path, leaf in flatten_dict(params).items()}
    others = [path for path in {**wanted, **held} if wanted.get(path) != held.get(path)]
    if others:
      raise InputError(
        f"checkpoint {step} in {self.directory} is not of the model that config.json beside it "
        f"describes: {len(others)} parameters differ, the first {'/'.join(others[0])}; restore "
        "config.json"
      )

  def replace(self, state: TrainState, record: Mapping[str, Any]) -> None:
    """Saves instead of all that is there, also of later steps, and blocks until that is durable.

    Raises:
      TrainingError: if the folder cannot be written.
    """
    for step in self.steps():
      if step >= int(state.step):  # orbax would refuse an earlier one
        self._guard(functools.partial(self._manager.delete, step))
    self.save(state, record)
    self.wait()

  def newest_record(self) -> dict[str, Any] | None:
    """The record of the newest checkpoint, without its state; None if there is none that loads.

    Raises:
      TrainingError: as `restore_newest`, but not if none of them loads.
    """
    restored = self._newest(ocp.args.Composite(record=ocp.args.JsonRestore()))
    return restored and restored["record"]

  def wait(self) -> None:
    """Blocks until every save is durable.

    Raises:
      TrainingError: if a save failed.
    """
    self._guard(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits for saves and frees the manager's threads."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def _newest(self, items, only=None, check=lambda step: None):
    """The newest checkpoint that passes a check and whose items load, or step `only` of them."""
    for step in reversed(self.steps()):
      if only not in (None, step):
        continue
      try:
        check(step)
        return self._manager.restore(step, args=items)
      except InputError:
        raise
      except (MemoryError, PermissionError, jax.errors.JaxRuntimeError) as error:
        raise TrainingError(
          f"cannot read checkpoint {step} in {self.directory}: {error}; mend that and run the same "
          "command again"
        ) from error
      except Exception as error:  # orbax raises many kinds; any of them means "not this one"
        reason = first_line(error)
        if not processes.all_come(f"checkpoint {step} in {self.directory} does not load"):
          raise TrainingError(
            f"checkpoint {step} in {self.directory} does not load in process "
            f"{jax.process_index()}, though in others: {reason}; mend that, or move the checkpoint "
            "away, and run the same command again"
          ) from error
        self._skip(step, reason)
    return None

  def _skip(self, step, reason):
    self._damaged.add(step)
    if processes.is_first():
      print(
        f"checkpoint {step} in {self.directory} does not load, skipping it: {reason}",
        file=sys.stderr,
      )

  def _move_damaged_aside(self):
    if not self._damaged:
      return
    for step in sorted(self._damaged) if processes.is_first() else ():
      target = self.directory / f"{step}.damaged"
      while target.exists():
        target = target.with_name(target.name + "+")
      (self.directory / str(step)).rename(target)
    processes.wait_for_all("damaged checkpoints moved aside")
    self._damaged.clear()
    self._manager.reload()

  def _barrier(self, *, key, timeout_ms):
    """Orbax's barrier between its threads in all processes, where no failed write waits.

    The thread whose write failed comes here with the error under way, and would pass it on only
    when all processes are here too; but those wait for its write, in an earlier barrier.
    """
    error = sys.exception()
    if error is not None:
      processes.end_at_once(self._failure(error))
    multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

  def _guard(self, action):
    try:
      action()
    except Exception as error:
      raise self._failure(error) from error

  def _failure(self, error):
    return TrainingError(
      f"saving a checkpoint in {self.directory} failed: {first_line(error)}; make room or mend "
      "the disk, then run the same command again"
    )
