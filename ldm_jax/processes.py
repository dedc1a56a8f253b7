"""Several processes that train one model: which rows are whose, and taking one branch.

A process that takes another branch than the others leaves them waiting for ever in a collective.
So whatever only one of them can know, such as what its disk holds, is asked of the first.
"""

import collections
import contextlib
import hashlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import multihost

from ldm_jax.environment import source_digest
from ldm_jax.errors import InputError, TrainingError, report
from ldm_jax.files import store_errors
from ldm_jax.joining import asked_for
from ldm_jax.sharding import partition_spec


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
  """Where several processes work together, an error in the block ends this one on the spot.

  Going on to close what is open would wait for the others, which wait for this one.  The error is
  printed first; what is open must be closed outside the block.  JAX then ends the others.
  """
  try:
    yield
  except Exception as error:
    if not jax.distributed.is_initialized():  # asking for their number needs a working backend
      raise
    end_at_once(error)


def end_at_once(error: Exception) -> NoReturn:
  """Prints an error and ends the process without closing anything, from whatever thread."""
  code = 1
  if isinstance(error, InputError | TrainingError):
    code = report(error)
  else:
    traceback.print_exception(error)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def check_shared(folder: epath.Path) -> None:
  """Makes sure that a folder is the same one for all processes, which must call it together.

  Raises:
    InputError: in all of them, if the first one cannot write there, or naming those that do not see
      what it writes.
  """
  if jax.process_count() == 1:
    return
  token = str(multihost_utils.broadcast_one_to_all(np.random.SeedSequence().entropy % 2**31))
  path = folder / ".shared"
  written = True
  if is_first():
    written = _succeeds(folder, lambda: path.write_text(token) or True)
  if not ask_first(written):
    raise InputError(f"workdir {folder}: process 0 cannot write there; choose another --workdir")
  wait_for_all("shared folder written")
  seen = _succeeds(folder, lambda: path.read_text() == token)
  blind = _numbers(~multihost_utils.process_allgather(np.asarray(seen)))
  if is_first():
    path.unlink()
  if blind:
    raise InputError(
      f"process {blind} does not see what process 0 writes to {folder}; choose "
      "a --workdir on a disk that all hosts share"
    )


def _succeeds(folder, action):
  try:
    with store_errors(folder):
      return bool(action())
  except (OSError, UnicodeDecodeError):
    return False


def all_come(where: str, seconds: int = 60) -> bool:
  """Whether all processes come here within that time; True at once where there is only one.

  Unlike the other functions it needs no device, and not all have to call it.
  """
  try:
    multihost.get_barrier_sync_fn()(key=where, timeout_ms=seconds * 1000)
  except jax.errors.JaxRuntimeError:
    return False
  return True


def wait_for_all(what: str) -> None:
  """Returns when all processes have come here; `what` names the place."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def check_program() -> None:
  """Makes sure that all processes run the same program on as many devices each.

  All must call it together, before anything else that needs the others.

  Raises:
    InputError: in all of them, or in those that were started for another number of processes.
  """
  settings, count = asked_for(), jax.process_count()
  if settings is not None and settings[1] != count:
    raise InputError(
      f"JAX_NUM_PROCESSES={settings[1]} in process {jax.process_index()}, but process 0 was "
      f"started with {count}; set the same in all of them"
    )
  if count == 1:
    return
  devices = collections.Counter(device.process_index for device in jax.devices())
  others = [str(number) for number in devices if devices[number] != devices[0]]
  if others:
    raise InputError(
      f"process {', '.join(sorted(others))} has {devices[int(others[0])]} devices and process 0 "
      f"has {devices[0]}; all need the same number"
    )
  check_agreement("version of jax", f"{jax.__version__} {jax.lib.__version__}")
  check_agreement("version of ldm_jax", source_digest())


def check_agreement(what: str, text: str) -> None:
  """Compares a text between all processes, which must call it together.

  Raises:
    InputError: in all of them, naming those that do not have the first one's.
  """
  if jax.process_count() == 1:
    return
  digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  digests = multihost_utils.process_allgather(digest)
  others = _numbers((digests != digests[0]).any(axis=1))
  if others:
    raise InputError(
      f"process {others} has another {what} than process 0; start the same command with "
      "the same files in all of them"
    )


def _numbers(flags):
  """Which processes have their flag set, in words."""
  return ", ".join(map(str, np.flatnonzero(flags)))


def is_first() -> bool:
  """Whether this process is the one that prints and writes."""
  return jax.process_index() == 0


def ask_first(value: bool) -> bool:
  """What the first process was given; all must call it together."""
  if jax.process_count() == 1:
    return value
  return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def gather(array: jax.Array) -> np.ndarray:
  """The whole of an array that is split over the processes; all must call it together."""
  if jax.process_count() == 1:
    return np.asarray(array)
  return multihost_utils.process_allgather(array, tiled=True)


def own_rows(mesh: Mesh, rows: int) -> tuple[int, ...]:
  """Which rows of a batch this process loads: those that its devices hold, in rising order.

  Processes share rows where a mesh axis that splits something else runs across them.  On TPU slices
  the rows of a host need not follow each other: its chips are a square in a mesh that is a line.

  Args:
    mesh: over the devices of all processes.
    rows: of the global batch.
  """
  sharding = NamedSharding(mesh, partition_spec(("batch",)))
  slices = sharding.addressable_devices_indices_map((rows,)).values()
  return tuple(sorted({row for (piece,) in slices for row in range(*piece.indices(rows))}))
