"""TPU chips by their data sheets, and slices of them that programs can be compiled for anywhere.

libtpu holds the compiler that a TPU uses, and it runs on any x86-64 Linux machine.  So the program
that a slice would run can be made, and read, without one.  Nothing here runs anything on a TPU.
"""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from ldm_jax.errors import InputError

_GIB = 2**30


class Chip(NamedTuple):
  """A kind of chip, by its page in the Cloud TPU documentation (docs.cloud.google.com/tpu/docs).

  name: what a topology calls it.
  device_kinds: what `jax.Device.device_kind` may say.
  cores: TensorCores.
  devices: that JAX sees for one chip.
  hbm_bytes: memory by the data sheet.
  usable_bytes: what libtpu's compiler lets one program take, by its message for one that is too
    large (libtpu 0.0.42); the rest is the system's.
  hbm_rate: bytes/s between memory and cores.
  flops: dense bfloat16 peak, FLOP/s.
  clock: cycles/s of a core, None where it is not known.  It follows from the peak: four arrays of
    128 x 128 multiply-adds a core, 131,072 FLOP a cycle.
  ici_rate: bytes/s that a chip receives over all its links to other chips.
  slices: shapes of the slices that are rented out; with three axes any multiples of 4 as well.
  largest: chips in the largest slice.
  """

  name: str
  device_kinds: tuple[str, ...]
  cores: int
  devices: int
  hbm_bytes: float
  usable_bytes: float
  hbm_rate: float
  flops: float
  clock: float | None
  ici_rate: float
  slices: tuple[str, ...]
  largest: int


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")

_FOUR_SMALL_ARRAYS = ("v4", "v5e", "v5p")


def _chip(name, kinds, cores, hbm, usable, rate, teraflops, ici, slices, largest, devices=1):
  clock = teraflops * 1e12 / (cores * 4 * 2 * 128**2) if name in _FOUR_SMALL_ARRAYS else None
  sizes = (hbm * _GIB, usable * _GIB, rate * 1e9, teraflops * 1e12, clock, ici * 1e9)
  return Chip(name, kinds, cores, devices, *sizes, slices, largest)


# Half of the "bidirectional" ICI bandwidth of the data sheets is what a chip receives.
CHIPS = {
  chip.name: chip
  for chip in (
    _chip("v4", ("TPU v4",), 2, 32, 30.75, 1200, 275, 300, _CUBES, 4096),
    _chip("v5e", ("TPU v5 lite", "TPU v5e"), 1, 16, 15.75, 819, 197, 200, _FLAT, 256),
    _chip("v5p", ("TPU v5", "TPU v5p"), 2, 95, 95.74, 2765, 459, 600, _CUBES, 6144),
    _chip("v6e", ("TPU v6 lite", "TPU v6e"), 1, 32, 31.25, 1638, 918, 400, _FLAT, 256),
    _chip("tpu7x", ("TPU7x",), 2, 192, 189.5, 7380, 2307, 600, _CUBES, 9216, devices=2),
  )
}


def chip_of(device: jax.Device | Any) -> Chip | None:
  """The chip that a device is, or is part of; None if it is none of `CHIPS`."""
  return next((chip for chip in CHIPS.values() if device.device_kind in chip.device_kinds), None)


def topology_devices(name: str) -> Sequence[jax.Device]:
  """The devices of a slice, to build a mesh of and compile for; nothing can run on them.

  Args:
    name: chip and slice shape, such as "v5e:2x4" or "v5p:4x4x4".

  Returns:
    One device for each chip, two for each TPU7x chip.

  Raises:
    InputError: if the chip is unknown, has no such slices, or libtpu is not installed.
  """
  chip, shape = _parse(name)
  options = {}
  if chip.name == "v4":
    options["chip_config_name"] = "megacore"  # one device of two cores, as Cloud TPU VMs show it
  if math.prod(shape) == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  _check_libtpu()
  with quiet_libtpu():
    try:
      slice_ = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
      raise InputError(f"--topology {name}: libtpu says {error}; {_known(chip)}") from error
  return slice_.devices


def _parse(name):
  kind, _, size = name.partition(":")
  if kind not in CHIPS:
    raise InputError(
      f"--topology {name}: unknown chip {kind!r}; known are {', '.join(CHIPS)}, as in v5e:4x4 or "
      "v5p:4x4x4"
    )
  chip = CHIPS[kind]
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
    raise InputError(f"--topology {name}: {size!r} is not a slice shape; {_known(chip)}")
  shape = tuple(map(int, size.split("x")))
  multiples = chip.slices is _CUBES and len(shape) == 3 and not any(side % 4 for side in shape)
  if not (size in chip.slices or multiples) or math.prod(shape) > chip.largest:
    raise InputError(f"--topology {name}: there is no such slice; {_known(chip)}")
  return chip, shape


def _known(chip):
  more = ", and any three multiples of 4" if chip.slices is _CUBES else ""
  return f"{chip.name} has {', '.join(chip.slices)}{more}, up to {chip.largest:,} chips in a slice"


def _check_libtpu():
  if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
    raise InputError(
      "compiling for a TPU needs libtpu, which runs on any x86-64 Linux machine and is not "
      "installed; pip install -e '.[tpu]'"
    )


@contextlib.contextmanager
def quiet_libtpu() -> Iterator[None]:
  """Lets libtpu load inside the context without a TPU, and beside another process that has it.

  It would ask a metadata server, and complain on standard error that this is no TPU machine.  Not
  for a process that is to use a TPU.
  """
  wanted = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
  }
  before = {key: os.environ.get(key) for key in wanted}
  os.environ.update(wanted)
  try:
    yield
  finally:
    for key, value in before.items():
      if value is None:
        os.environ.pop(key, None)
      else:
        os.environ[key] = value
