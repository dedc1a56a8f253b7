"""What a training step would need on a TPU slice: memory, work, traffic and exchanges.

Every number comes from the program that libtpu's compiler makes of the real train step for that
slice, or from the chip's data sheet.  They are models: nothing is run or timed.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ldm_jax.config import Config, with_section
from ldm_jax.errors import InputError
from ldm_jax.model import check_mesh
from ldm_jax.planning.measure import StepCost, extrapolate, measure
from ldm_jax.sharding import make_mesh
from ldm_jax.sharding_report import bytes_per_device
from ldm_jax.tpu import Chip, chip_of, topology_devices
from ldm_jax.training.step import abstract_state

# Share of the memory that programs can take which a plan leaves free: for the evaluation program,
# batches on their way in, and holes between arrays.
RESERVE = 0.05


@dataclasses.dataclass(frozen=True)
class Plan:
  """A config on a slice.  Bytes, FLOPs and seconds are those of one device in one step.

  Attributes:
    config: the run.
    topology: the slice.
    chip: its data sheet.
    mesh_shape: sizes of the mesh axes.
    parameter_bytes: exact.
    optimizer_bytes: exact.
    needed_bytes: all that the step needs.
    usable_bytes: what the chip has for it; `RESERVE` of that stays free.
    cost: of the step; None if even the shallow models do not fit.
    compiled_blocks: depths that were compiled; the config's own, or those it is extrapolated from.
  """

  config: Config
  topology: str
  chip: Chip
  mesh_shape: Mapping[str, int]
  parameter_bytes: int
  optimizer_bytes: int
  needed_bytes: float
  usable_bytes: float
  cost: StepCost | None
  compiled_blocks: tuple[int, ...]

  @property
  def chips(self) -> int:
    """How many the slice has."""
    return math.prod(self.mesh_shape.values()) // self.chip.devices

  @property
  def limit_bytes(self) -> float:
    """What a step may take."""
    return (1 - RESERVE) * self.usable_bytes

  @property
  def fits(self) -> bool:
    """Whether the step needs no more than `limit_bytes`."""
    return self.needed_bytes <= self.limit_bytes

  @property
  def seconds(self) -> dict[str, float]:
    """The least time for a step's "products", "HBM" and "exchanges" at data sheet rates."""
    if self.cost is None:
      return {}
    chip = self.chip
    amounts = {
      "products": (self.cost.flops, chip.flops),
      "HBM": (self.cost.hbm_bytes, chip.hbm_rate),
      "exchanges": (self.received_bytes, chip.ici_rate),
    }
    return {name: amount / (rate / chip.devices) for name, (amount, rate) in amounts.items()}

  @property
  def received_bytes(self) -> float:
    """What a device receives from others; 0 if not known."""
    return sum(e.received_bytes for e in self.cost.exchanges.values()) if self.cost else 0

  @property
  def most_tokens_per_second(self) -> float | None:
    """Of the whole slice, if the slowest of `seconds` hid the others; None if not known."""
    data = self.config.data
    tokens = data.batch_size * data.sequence_length
    return tokens / max(self.seconds.values()) if self.cost else None


Say = Callable[[str], Any]


def plan(
  config: Config,
  topology: str,
  blocks: Sequence[int] | None = (2, 4),
  say: Say = lambda line: None,
) -> Plan:
  """Compiles the train step for a slice and adds up what it needs.

  Args:
    config: the run; its mesh is laid over the devices of the slice.
    topology: such as "v5e:4x4", see `tpu.topology_devices`.
    blocks: depths to compile, from which the config's own depth is extrapolated: along a line
      through two, a parabola through three.  None compiles the config's depth.
    say: takes lines about what is being done.

  Raises:
    InputError: for a slice that does not exist, a mesh that does not fit it, or sizes that the mesh
      cannot split.
  """
  mesh = _mesh(config, topology)
  chip = chip_of(mesh.devices.flat[0])
  depth = config.model.blocks
  depths = check_depths(blocks, depth)
  state = abstract_state(config, mesh)
  measures = [
    _measure(with_section(config, "model", blocks=blocks), mesh, say) for blocks in depths
  ]
  needed, cost = extrapolate(depths, measures, depth)
  return Plan(
    config=config,
    topology=topology,
    chip=chip,
    mesh_shape=dict(mesh.shape),
    parameter_bytes=bytes_per_device(state.params),
    optimizer_bytes=bytes_per_device(state.optimizer_state),
    needed_bytes=needed,
    usable_bytes=min(chip.usable_bytes, chip.hbm_bytes) / chip.devices,
    cost=cost,
    compiled_blocks=depths,
  )


def state_bytes(config: Config, topology: str) -> int:
  """Bytes of parameters and optimizer state on one device; compiles nothing.

  Raises:
    InputError: as `plan`.
  """
  mesh = _mesh(config, topology)
  state = abstract_state(config, mesh)
  return bytes_per_device((state.params, state.optimizer_state))


def _mesh(config, topology):
  mesh = make_mesh(config.mesh, topology_devices(topology))
  check_mesh(config, mesh)
  return mesh


def check_depths(blocks: Sequence[int] | None, depth: int) -> tuple[int, ...]:
  """The depths to compile for a model of `depth` blocks.

  Raises:
    InputError: unless they are two or three different ones.
  """
  if blocks is None:
    return (depth,)
  if len(blocks) not in (2, 3) or list(blocks) != sorted({*blocks}) or min(blocks) < 1:
    raise InputError(
      f"--blocks {','.join(map(str, blocks))}: give two or three rising depths, such as 2,4, or "
      "--full for the real one"
    )
  return (depth,) if depth <= max(blocks) else tuple(blocks)


def _measure(config, mesh, say):
  start = time.perf_counter()
  result = measure(config, mesh)
  say(f"compiled {config.model.blocks} blocks in {time.perf_counter() - start:.0f} s")
  return result
