"""Joining the other processes of a run, as the environment or the TPU slice says."""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator

import jax

from ldm_jax.environment import has_tpu
from ldm_jax.errors import InputError, first_line

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
  settings = asked_for()
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
        f"cannot join {awaited}: {first_line(error)}; is the port of process 0 free, and did all "
        "start the same command?"
      ) from error
  # One host, such as that of a v5e-8, has nobody to agree with.
  if _is_one_host() if settings is None else count == 1:
    jax.distributed.shutdown()


def _is_one_host():
  try:
    return jax.process_count() == 1
  except (RuntimeError, AssertionError):  # no backend; `environment.check_platform` says why
    return False


def check_alone() -> None:
  """Makes sure that a command which knows one process only was not started as one of several.

  Raises:
    InputError: if it was.
  """
  settings = asked_for()
  if settings is not None and settings[1] > 1:
    raise InputError(
      f"this command runs in one process only; start it once, without {' '.join(_VARIABLES)} "
      f"({_given()})"
    )


def asked_for() -> tuple[str, int, int] | None:
  """What the environment says: address, number of processes, number of this one; None if nothing.

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
  asked = jax.config.jax_platforms
  wanted = not asked or "tpu" in asked.split(",")
  return wanted and bool(importlib.util.find_spec("libtpu")) and has_tpu()


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
