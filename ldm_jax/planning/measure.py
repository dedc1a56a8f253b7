"""What one compilation of a train step says of its cost, and the cost at another depth."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from ldm_jax.config import Config
from ldm_jax.errors import TrainingError, first_line
from ldm_jax.hlo.collectives import collectives
from ldm_jax.hlo.costs import (
  PaddedArray,
  attention_kernel_flops,
  hbm_bytes,
  kernels,
  largest_arrays,
  product_flops,
)
from ldm_jax.hlo.program import estimated_cycles, parse
from ldm_jax.training.step import compile_train_step_for


class Exchanges(NamedTuple):
  """All exchanges of one kind in a step, on one device; see `hlo.collectives.Collective`."""

  count: float
  bytes: float
  received_bytes: float


class StepCost(NamedTuple):
  """What a compiled train step needs on one device.

  temporary_bytes: activations, gradients and everything else that lives within a step.
  state_bytes: the train state and a batch, and padding of both.
  code_bytes: the program itself.
  flops: of all matrix products, recomputation included, elementwise work and kernels other than
    attention not; see `hlo.costs.product_flops` and `attention_kernel_flops`.
  hbm_bytes: moved between main memory and cores, see `hlo.costs.hbm_bytes`.
  cycles: the compiler's own estimates, summed; hand-written kernels have none.
  exchanges: by kind.
  arrays: the largest, as they lie in memory.
  kernels: runs of each hand-written kernel.
  """

  temporary_bytes: float
  state_bytes: float
  code_bytes: float
  flops: float
  hbm_bytes: float
  cycles: float
  exchanges: Mapping[str, Exchanges]
  arrays: Sequence[PaddedArray]
  kernels: Mapping[str, float]


class Measure(NamedTuple):
  """What one compilation says: `needed_bytes` of a device's memory, and the rest if it fits."""

  needed_bytes: float
  cost: StepCost | None


def measure(config: Config, mesh: Mesh) -> Measure:
  """Compiles the train step for the devices of a mesh and reads what it needs.

  Raises:
    TrainingError: if the compiler fails for another reason than memory.
  """
  try:
    compiled = compile_train_step_for(config, mesh)
  except jax.errors.JaxRuntimeError as error:
    needed = _needed(str(error))
    if needed is None:
      raise TrainingError(f"libtpu cannot compile this step: {first_line(error)}") from error
    return Measure(needed, None)
  memory, program = compiled.memory_analysis(), parse(compiled.as_text())
  cost = StepCost(
    temporary_bytes=memory.temp_size_in_bytes,
    state_bytes=memory.argument_size_in_bytes
    + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
    code_bytes=memory.generated_code_size_in_bytes,
    flops=product_flops(program) + attention_kernel_flops(program),
    hbm_bytes=hbm_bytes(program),
    cycles=estimated_cycles(program),
    exchanges=_by_kind(collectives(program)),
    arrays=largest_arrays(program),
    kernels=kernels(program),
  )
  return Measure(cost.temporary_bytes + cost.state_bytes + cost.code_bytes, cost)


def _needed(message):
  """Bytes that the compiler says a program would take which is too large for the main memory.

  None if the message is about something else, such as memory on the chip.
  """
  size = r"(\d+(?:\.\d+)?)([KMGT]?)"
  found = re.search(rf"\({size}\) exceeds|Used {size} of [\d.]+[KMGT]? hbm", message)
  if "RESOURCE_EXHAUSTED" not in message or found is None:
    return None
  amount, unit = [part for part in found.groups() if part is not None]
  return float(amount) * 1024 ** " KMGT".index(unit or " ")


def _by_kind(found):
  kinds = {}
  for one in found:
    before = kinds.get(one.kind, Exchanges(0, 0, 0))
    more = (one.runs, one.runs * one.bytes, one.received_bytes)
    kinds[one.kind] = Exchanges(*(a + b for a, b in zip(before, more, strict=True)))
  return kinds


def extrapolate(
  depths: Sequence[int], measures: Sequence[Measure], depth: int
) -> tuple[float, StepCost | None]:
  """Needed bytes and costs at `depth`, along the polynomial through those of other depths.

  The largest arrays are those of the deepest measure.
  """
  weights = [
    math.prod((depth - other) / (own - other) for other in depths if other != own) for own in depths
  ]

  def combine(*values):
    return max(0.0, sum(weight * value for weight, value in zip(weights, values, strict=True)))

  needed = combine(*(one.needed_bytes for one in measures))
  costs = [one.cost for one in measures]
  if None in costs:
    return needed, None
  kinds = {kind: None for cost in costs for kind in cost.exchanges}
  names = {name: None for cost in costs for name in cost.kernels}
  nothing = Exchanges(0, 0, 0)
  merged = {
    field: combine(*(getattr(cost, field) for cost in costs))
    for field in StepCost._fields
    if field not in ("exchanges", "arrays", "kernels")
  }
  exchanges = {
    kind: Exchanges(*map(combine, *(cost.exchanges.get(kind, nothing) for cost in costs)))
    for kind in kinds
  }
  runs = {name: combine(*(cost.kernels.get(name, 0) for cost in costs)) for name in names}
  return needed, StepCost(**merged, exchanges=exchanges, arrays=costs[-1].arrays, kernels=runs)
