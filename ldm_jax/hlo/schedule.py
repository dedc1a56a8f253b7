"""What kernels cost by the schedule that libtpu made for them: cycles, transfers, the busiest unit.

Where the compiler places every operation, it writes it down if it is asked to:

    with ScheduleDump() as dump:        # before anything loads libtpu
      compiled = jax.jit(function).lower(*abstract_arrays).compile()
      schedules = dump.read()
      schedules.cost("name_of_the_custom_call", chip)

A TPU core issues one bundle of operations a cycle and does not look ahead, so the bundles that it
runs are its cycles, but for waits on transfers; those go on beside it.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ldm_jax.hlo.bundles import parse_schedule
from ldm_jax.hlo.scalar import follow
from ldm_jax.tpu import Chip


class KernelCost(NamedTuple):
  """One run of a kernel on a chip.

  static_bundles: length of its schedule.
  bundles: that one core issues; the larger number where cores differ.
  conditional: the part of `bundles` that hangs on data, counted in by the share that was given.
  read_bytes: that its transfers take from main memory, all cores together, this part included.
  written_bytes: that they put there.
  busy: of each unit, the share of its slots that these bundles use.
  """

  static_bundles: int
  bundles: float
  conditional: float
  read_bytes: float
  written_bytes: float
  busy: Mapping[str, float]

  @property
  def limit(self) -> str:
    """The busiest unit; spills and fills are part of stores and loads."""
    units = {unit: share for unit, share in self.busy.items() if ":" not in unit}
    return max(units, key=units.get)

  @property
  def bytes(self) -> float:
    """Read and written."""
    return self.read_bytes + self.written_bytes

  def compute_seconds(self, chip: Chip) -> float:
    """Time that a core takes to issue its bundles."""
    return self.bundles / chip.clock

  def transfer_seconds(self, chip: Chip) -> float:
    """Time that the transfers take at the rate of the main memory."""
    return self.bytes / chip.hbm_rate

  def seconds(self, chip: Chip) -> float:
    """The larger of both: transfers go on while a core computes on what is there."""
    return max(self.compute_seconds(chip), self.transfer_seconds(chip))


def parse_utilization(text: str) -> tuple[Mapping[str, int], list[list[int]]]:
  """Parses a `*final_hlo-static-per-bundle-utilization.txt`.

  Returns:
    The slots that a bundle has of each unit, and how many of each every bundle uses.

  Raises:
    ValueError: if it is something else.
  """
  match = re.search(r"^([A-Z][A-Z:, ]+)\n([\d ]+)\n== UTILIZATION:\n([\d \n]*)", text, re.MULTILINE)
  if match is None:
    raise ValueError("the text is not the utilization of a schedule as libtpu writes it")
  units, slots = match[1].split(", "), map(int, match[2].split())
  used = [list(map(int, line.split())) for line in match[3].strip().splitlines()]
  return dict(zip(units, slots, strict=True)), used


def kernel_cost(
  bundles_text: str, utilization_text: str, cores: int = 1, conditional_share: float = 1.0
) -> KernelCost:
  """What one run of a kernel costs by libtpu's two texts about it.

  Args:
    bundles_text: its `*final_bundles.txt`.
    utilization_text: its `*final_hlo-static-per-bundle-utilization.txt`.
    cores: of the chip.
    conditional_share: how much of what hangs on data is done; 1 for the most that may be.

  Raises:
    ValueError: if the number of rounds of a loop, or the size of a transfer, cannot be read.
  """
  schedule = parse_schedule(bundles_text)
  slots, used = parse_utilization(utilization_text)
  if len(used) != len(schedule.bundles):
    raise ValueError(f"{len(schedule.bundles)} bundles, but the utilization of {len(used)}")
  split = any("core_id" in operation.attributes for b in schedule.bundles for operation in b)
  runs = [follow(schedule, core) for core in range(cores if split else 1)]
  totals = [sum(run.bundles) + conditional_share * sum(run.conditional) for run in runs]
  longest = runs[totals.index(max(totals))]
  times = [
    sure + conditional_share * unsure
    for sure, unsure in zip(longest.bundles, longest.conditional, strict=True)
  ]
  busy = {
    unit: sum(n * row[place] for n, row in zip(times, used, strict=True)) / (max(totals) * count)
    for place, (unit, count) in enumerate(slots.items())
  }
  return KernelCost(
    len(schedule.bundles),
    max(totals),
    conditional_share * sum(longest.conditional),
    sum(run.bytes_read + conditional_share * run.conditional_read for run in runs),
    sum(run.bytes_written + conditional_share * run.conditional_written for run in runs),
    busy,
  )


class Schedules:
  """The texts about one or more compiled programs, by the name of the instruction."""

  def __init__(self, texts: Mapping[str, tuple[str, str]]):
    self._texts = texts

  def __iter__(self):
    return iter(self._texts)

  def cost(self, name: str, chip: Chip, conditional_share: float = 1.0) -> KernelCost:
    """The cost of the kernel that an instruction of the HLO program is; see `kernel_cost`.

    Raises:
      ValueError: if there is no such instruction, or its schedule cannot be read.
    """
    if name not in self._texts:
      raise ValueError(f"libtpu wrote no schedule of {name}; there are {', '.join(self._texts)}")
    try:
      return kernel_cost(*self._texts[name], chip.cores, conditional_share)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error


class ScheduleDump:
  """Has libtpu write its schedules into a folder, which is there as long as the context lasts.

  libtpu takes its options when it is loaded, once in a process.
  """

  def __enter__(self) -> "ScheduleDump":
    self._folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    self._before = os.environ.get("LIBTPU_INIT_ARGS")
    # Only the texts that are read here; all of a step's would take gigabytes.
    options = (
      f"--xla_jf_dump_to={self._folder} --xla_jf_dump_llo_text=true "
      "--xla_jf_dump_llo_pass_label_regex=final_(bundles|hlo)"
    )
    os.environ["LIBTPU_INIT_ARGS"] = f"{self._before or ''} {options}".strip()
    return self

  def __exit__(self, *exception) -> None:
    shutil.rmtree(self._folder)
    if self._before is None:
      del os.environ["LIBTPU_INIT_ARGS"]
    else:
      os.environ["LIBTPU_INIT_ARGS"] = self._before

  def read(self) -> Schedules:
    """The schedules of all that was compiled since the last call.

    Raises:
      RuntimeError: if there are none, because libtpu was loaded before the context began.
    """
    found = {}
    for path in sorted(self._folder.iterdir()):
      match = re.fullmatch(r"\d+-(.+)-\d+-final_(bundles|hlo-static.*)\.txt", path.name)
      if match and not re.match(r"<|TLP$|schedule-analysis", match[1]):
        found.setdefault(match[1], {})[match[2] == "bundles"] = path.read_text()
      if path.is_file():
        path.unlink()
    if not found:
      raise RuntimeError("libtpu wrote no schedules: it was loaded before they were asked for")
    return Schedules({name: (texts[True], texts[False]) for name, texts in found.items()})
