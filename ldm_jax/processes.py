"""Several processes that train one model: joining, which rows are whose, and taking one branch.

A process that takes another branch than the others leaves them waiting for ever in a collective.
So whatever only one of them can know, such as what its disk holds, is asked of the first.
"""

import collections
import contextlib
import hashlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from ldm_jax.environment import has_tpu, source_digest
from ldm_jax.errors import InputError, TrainingError, report
from ldm_jax.sharding import partition_spec

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_HEARTBEAT_SECONDS = 30  # after which the others end if one of them is gone


def join(patience: int = 300) -> None:
  """Joins the other processes of the run, if there are any; before anything asks for devices.

  On a Cloud TPU VM nothing needs to be set.  Elsewhere JAX_COORDINATOR_ADDRESS (host:port of
  process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set in each; without any of them the
  process is alone.  If one of the processes ends, the others end with an error within a minute.

  Args:
    patience: seconds to wait for the others.  After that the process ends with exit code 1.

  Raises:
    InputError: if only some of the variables are set, or one of them is not a number.
  """
  settings = _settings()
  if settings is None and not _on_tpu_vm():
    return
  if settings is None:
    awaited = "the other hosts of this TPU slice"
    found_by = {}
  else:
    awaited = f"the other processes ({_given()})"
    address, count, number = settings
    found_by = {"coordinator_address": address, "num_processes": count, "process_id": number}
  with _ending_after(patience, awaited):
    try:
      jax.distributed.initialize(**found_by, **_timeouts(patience))
    except (RuntimeError, ValueError) as error:  # the second where a TPU VM does not say its place
      raise InputError(
        f"cannot join {awaited}: {_first_line(error)}; is the port of process 0 free, and did all "
        "start the same command?"
      ) from error


def alone() -> None:
  """Makes sure that a command which knows one process only was not started as one of several.

  Raises:
    InputError: if it was.
  """
  settings = _settings()
  if settings is not None and settings[1] > 1:
    raise InputError(
      f"this command runs in one process only; start it once, without {' '.join(_VARIABLES)} "
      f"({_given()})"
    )


def _settings():
  """Address, number of processes and number of this one by the environment; None if not set.

  Raises:
    InputError: if only some of the variables are set, or one of them makes no sense.
  """
  values = [os.environ.get(name) for name in _VARIABLES]
  if not any(values):
    return None
  address, *numbers = values
  if not all(values) or not all(number.isdecimal() for number in numbers):
    raise InputError(
      f"several processes need an address HOST:PORT and two numbers in {' '.join(_VARIABLES)}; "
      f"got {_given()}"
    )
  count, number = map(int, numbers)
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal():
    raise InputError(f"JAX_COORDINATOR_ADDRESS={address} must be HOST:PORT of process 0")
  if not number < count:
    raise InputError(f"JAX_PROCESS_ID={number} must be below JAX_NUM_PROCESSES={count}")
  return address, count, number


def _given():
  return ", ".join(f"{name}={os.environ.get(name) or '(not set)'}" for name in _VARIABLES)


def _on_tpu_vm():
  return bool(importlib.util.find_spec("libtpu")) and has_tpu()


def _timeouts(patience):
  return {
    "initialization_timeout": patience + 60,
    "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS,
  }


@contextlib.contextmanager
def _ending_after(seconds: int, awaited: str) -> Iterator[None]:
  """Ends the process with one line if the block takes longer; JAX itself would abort in C++."""

  def end():
    print(
      f"error: waited {seconds} s for {awaited}; start the same command in all of them at about "
      "the same time, and see that process 0 can be reached from the others",
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)

  timer = threading.Timer(seconds, end)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


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
    InputError: in all of them, naming those that do not see what the first one writes there.
  """
  if jax.process_count() == 1:
    return
  token = str(multihost_utils.broadcast_one_to_all(np.random.SeedSequence().entropy % 2**31))
  path = folder / ".shared"
  if is_first():
    path.write_text(token)
  wait_for_all("shared folder written")
  try:
    seen = path.read_text() == token
  except OSError:
    seen = False
  blind = _numbers(~multihost_utils.process_allgather(np.asarray(seen)))
  if is_first():
    path.unlink()
  if blind:
    raise InputError(
      f"process {blind} does not see what process 0 writes to {folder}; choose "
      "a --workdir on a disk that all hosts share"
    )


def all_agree(value: bool) -> bool:
  """Whether the value is true in all processes, which must call it together."""
  if jax.process_count() == 1:
    return value
  return bool(multihost_utils.process_allgather(np.asarray(value)).all())


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
  settings, count = _settings(), jax.process_count()
  if settings is not None and settings[1] != count:
    raise InputError(
      f"JAX_NUM_PROCESSES={settings[1]} in process {jax.process_index()}, but process 0 was "
      f"started with {count}; set the same in all of them"
    )
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


def _first_line(error):
  return (str(error).strip() or type(error).__name__).splitlines()[0]


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
