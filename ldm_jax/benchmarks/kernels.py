"""What the hand-written kernels cost on a TPU, from the schedules that its compiler makes for them.

    python -m ldm_jax.benchmarks.kernels
    python -m ldm_jax.benchmarks.kernels --chip v5e --only read fold --json

libtpu compiles every kernel here, on any CPU, and nothing is run: all figures are modelled.
Cycles are the bundles of operations that one core issues, every turn of every loop counted; what a
core may wait for beside transfers is not seen.  Bytes are those of the transfers that the kernel
starts, all cores together, and once for each operand or result that XLA has put on the chip
beforehand.  The floor is the time in which the main memory could read every operand once and write
every result once; the ratio is the larger of compute and transfer over that floor: 1 is perfect.
Attention is limited by its products and far from it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ldm_jax.benchmarks.cases import Case, cases
from ldm_jax.command_line import command_parser, run_command
from ldm_jax.config import MeshConfig
from ldm_jax.errors import InputError
from ldm_jax.hlo.costs import is_kernel
from ldm_jax.hlo.program import executed, parse
from ldm_jax.hlo.schedule import KernelCost, ScheduleDump
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import CHIPS, Chip, topology_devices

SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:2x2x1"}  # whose clock is known


class Row(NamedTuple):
  """One kernel of a case on a chip.

  grid: of its blocks.
  cost: by its schedule.
  moved_bytes: its transfers, and operands and results that are on the chip already, once.
  floor_bytes: operands and results once.
  """

  case: str
  kernel: str
  chip: Chip
  grid: tuple[int, ...]
  cost: KernelCost
  moved_bytes: float
  floor_bytes: int

  @property
  def floor(self) -> float:
    """Seconds that the main memory needs at least."""
    return self.floor_bytes / self.chip.hbm_rate

  @property
  def seconds(self) -> tuple[float, float]:
    """Of computing and of transfers."""
    return self.cost.compute_seconds(self.chip), self.moved_bytes / self.chip.hbm_rate

  @property
  def ratio(self) -> float:
    """How many times the floor the kernel takes."""
    return max(self.seconds) / self.floor


def main(argv: Sequence[str] | None = None) -> int:
  """Compiles and reads all cases, prints a table or JSON, and returns the exit code."""
  arguments = _parse(argv)
  jax.config.update("jax_platforms", "cpu")  # a TPU that is here stays free for whoever uses it
  jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled has no schedule
  chosen = [case for case in cases() if _wanted(case, arguments.only)]
  if not chosen:
    names = ", ".join(case.name for case in cases())
    raise InputError(f"--only {' '.join(arguments.only)} fits no kernel; there are: {names}")
  with ScheduleDump() as dump:
    rows = [row for name in arguments.chip for case in chosen for row in measure(case, name, dump)]
  print(json.dumps(_object(rows)) if arguments.json else _table(rows))
  return 0


def measure(case: Case, chip_name: str, dump: ScheduleDump) -> list[Row]:
  """Compiles a case for one chip and reads its kernels.

  Args:
    case: what to compile; as a program for one chip.
    chip_name: one of `SMALLEST`.
    dump: a context that began before libtpu was loaded.

  Raises:
    ValueError: if a schedule cannot be read.
  """
  chip, devices = CHIPS[chip_name], topology_devices(SMALLEST[chip_name])
  mesh = make_mesh(MeshConfig(), devices[:1])
  sharding = NamedSharding(mesh, PartitionSpec())
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), case.arguments
  )
  with jax.set_mesh(mesh):
    traced = jax.jit(case.function).trace(*arguments)
    program = parse(traced.lower().compile().as_text())
  grids, schedules, rows = kernel_grids(traced.jaxpr.jaxpr), dump.read(), []
  for instruction, computation, _ in executed(program):
    if is_kernel(instruction):
      cost = schedules.cost(instruction.name, chip, case.conditional_share)
      arrays = [a for name in instruction.operands for a in computation[name].arrays]
      arrays += instruction.arrays
      on_chip = sum(array.bytes for array in arrays if array.space)
      name = re.sub(r"\.\d+$", "", instruction.name)
      sizes = (cost.bytes + on_chip, sum(array.bytes for array in arrays))
      rows.append(Row(case.name, name, chip, grids.get(name, ()), cost, *sizes))
  return rows


def kernel_grids(jaxpr: core.Jaxpr) -> dict[str, tuple[int, ...]]:
  """The grid of every Pallas kernel in a traced function, by name."""
  calls = [equation.params for equation in pallas_calls(jaxpr)]
  return {str(call["name"]): tuple(call["grid_mapping"].grid) for call in calls}


def pallas_calls(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  """Every call of a kernel in a traced function, as often as it is called."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "pallas_call":
      yield equation
    else:
      for inner in inner_jaxprs(equation):
        yield from pallas_calls(inner)


def inner_jaxprs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
  """The functions that an equation calls."""
  values = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
  return [getattr(value, "jaxpr", value) for value in values if _is_jaxpr(value)]


def _is_jaxpr(value):
  return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def _wanted(case, only):
  return not only or any(word in case.name for word in only)


def _object(rows):
  return {
    "kind": "modelled",
    "kernels": [
      {
        "chip": row.chip.name,
        "case": row.case,
        "kernel": row.kernel,
        "grid": row.grid,
        "static_bundles": row.cost.static_bundles,
        "bundles": row.cost.bundles,
        "conditional_bundles": row.cost.conditional,
        "read_bytes": row.cost.read_bytes,
        "written_bytes": row.cost.written_bytes,
        "moved_bytes": row.moved_bytes,
        "floor_bytes": row.floor_bytes,
        "compute_seconds": row.seconds[0],
        "transfer_seconds": row.seconds[1],
        "floor_seconds": row.floor,
        "ratio": row.ratio,
        "busy": row.cost.busy,
        "limit": row.cost.limit if row.seconds[0] > row.seconds[1] else "HBM",
      }
      for row in rows
    ],
  }


def _table(rows):
  lines = [
    "modelled: schedules of libtpu's compiler, one run of each kernel",
    f"{'':5} {'case':<32} {'kernel':<24} {'grid':>15} {'bundles':>10} {'MB':>7} {'floor':>7} "
    f"{'compute':>8} {'transfer':>8} {'ratio':>6}  limit",
  ]
  for row in rows:
    compute, transfer = (1e6 * seconds for seconds in row.seconds)
    unit = row.cost.limit
    limit = f"{unit} {row.cost.busy[unit]:.0%}" if compute > transfer else f"HBM ({unit})"
    grid = "x".join(map(str, row.grid))
    lines.append(
      f"{row.chip.name:5} {row.case:<32} {row.kernel[:24]:<24} {grid:>15} "
      f"{row.cost.bundles:10,.0f} {row.moved_bytes / 1e6:7.1f} {1e6 * row.floor:7.1f} "
      f"{compute:8.1f} {transfer:8.1f} {row.ratio:6.2f}  {limit}"
    )
  lines.append("floor, compute, transfer in microseconds; limit: the busiest unit, and its share")
  return "\n".join(lines)


def _parse(argv):
  parser = command_parser("ldm_jax.benchmarks.kernels", __doc__)
  add = parser.add_argument
  add("--chip", nargs="+", choices=SMALLEST, default=["v5e", "v5p"], help="(default v5e v5p)")
  add("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these")
  add("--json", action="store_true", help="print one JSON object")
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
