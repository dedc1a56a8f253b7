"""Several processes that train one model: joining, which rows are whose, and taking one branch.

A process that takes another branch than the others leaves them waiting for ever in a collective.
So whatever only one of them can know, such as what its disk holds, is asked of the first.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from ldm_jax.errors import InputError
from ldm_jax.sharding import partition_spec

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join() -> None:
  """Joins the other processes of the run, if the environment says that there are any.

  JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set
  in each, before anything asks for devices.  Without any of them the process is alone.

  Raises:
    InputError: if only some of the variables are set, or one of them is not a number.
  """
  values = [os.environ.get(name) for name in _VARIABLES]
  if not any(values):
    return
  address, *numbers = values
  if not all(values) or not all(number.isdecimal() for number in numbers):
    given = ", ".join(f"{n}={v or '(not set)'}" for n, v in zip(_VARIABLES, values, strict=True))
    raise InputError(
      f"several processes need an address HOST:PORT and two numbers in {' '.join(_VARIABLES)}; "
      f"got {given}"
    )
  count, number = map(int, numbers)
  if not number < count:
    raise InputError(f"JAX_PROCESS_ID={number} must be below JAX_NUM_PROCESSES={count}")
  jax.distributed.initialize(address, count, number)


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


def own_rows(mesh: Mesh, rows: int) -> tuple[int, int]:
  """Which part of a batch this process loads: (part, parts), equal and contiguous.

  Processes that share rows, because a mesh axis that splits something else runs across them, get
  the same part.

  Args:
    mesh: over the devices of all processes.
    rows: of the global batch.

  Raises:
    InputError: if its devices hold rows that are not one such part.
  """
  sharding = NamedSharding(mesh, partition_spec(("batch",)))
  slices = sharding.addressable_devices_indices_map((rows,)).values()
  ranges = {piece.indices(rows)[:2] for (piece,) in slices}
  start, stop = min(r[0] for r in ranges), max(r[1] for r in ranges)
  size = stop - start
  if sum(b - a for a, b in ranges) != size or rows % size or start % size:
    raise InputError(
      f"the devices of process {jax.process_index()} hold rows that are not one part of the batch; "
      "make mesh.data x mesh.fsdp a multiple or a divisor of the number of processes"
    )
  return start // size, rows // size
