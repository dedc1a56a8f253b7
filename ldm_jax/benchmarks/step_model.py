"""A train step compiled for one TPU chip, and the time it would take by its schedules."""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ldm_jax.benchmarks.cases import causal_share
from ldm_jax.benchmarks.kernels import SMALLEST
from ldm_jax.config import Config, MeshConfig, with_section
from ldm_jax.hlo.costs import attention_kernel_flops, hbm_bytes, is_kernel, product_flops
from ldm_jax.hlo.program import Program, executed, instruction_cycles, parse
from ldm_jax.hlo.schedule import ScheduleDump, Schedules
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import CHIPS, Chip, topology_devices
from ldm_jax.training.step import compile_train_step_for

ROWS, TOKENS = 4, 2048  # of a chip
_VOCABULARY = 1024  # the head costs the same at any depth, but its compilation takes long
_OVERLAPPED = re.compile(r"(copy|slice|dynamic-slice|async)-(start|done|update)$")


class StepModel(NamedTuple):
  """One train step on one chip.

  kernels: seconds of the hand-written kernels, by name, all runs together, from their schedules.
  scheduled: seconds of everything else, from the schedules of XLA's fusions.
  estimated: seconds of everything else by XLA's own estimates.
  unread: the part of `scheduled` whose schedule could not be read, by XLA's estimate.
  flops: of matrix products, and those of attention.
  hbm_bytes: moved, see `hlo.costs.hbm_bytes`.
  temporary_bytes: that live within the step.
  compile_seconds: on this machine, measured.
  """

  kernels: Mapping[str, float]
  scheduled: float
  estimated: float
  unread: float
  flops: float
  hbm_bytes: float
  temporary_bytes: float
  compile_seconds: float


def chip_config(config: Config, blocks: int) -> Config:
  """The same model with another depth, at 4 rows of 2,048 tokens on one chip."""
  config = with_section(config, "model", blocks=blocks, vocab_size=_VOCABULARY)
  config = with_section(config, "data", batch_size=ROWS, sequence_length=TOKENS)
  config = with_section(config, "train", accumulate=1)
  return dataclasses.replace(config, mesh=MeshConfig()).validate()


def model_step(config: Config, chip_name: str, dump: ScheduleDump) -> StepModel:
  """Compiles a train step for one chip and adds up its schedules.

  Args:
    config: see `chip_config`.
    chip_name: one of `SMALLEST`.
    dump: a context that began before libtpu was loaded.

  Raises:
    ValueError: if the schedule of a hand-written kernel cannot be read.
  """
  chip = CHIPS[chip_name]
  mesh = make_mesh(config.mesh, topology_devices(SMALLEST[chip_name])[:1])
  start = time.perf_counter()
  compiled = compile_train_step_for(config, mesh)
  compile_seconds = time.perf_counter() - start
  program, schedules = parse(compiled.as_text()), dump.read()
  kernels, scheduled, estimated, unread = add_up(program, schedules, chip)
  return StepModel(
    kernels=kernels,
    scheduled=scheduled,
    estimated=estimated,
    unread=unread,
    flops=product_flops(program) + attention_kernel_flops(program),
    hbm_bytes=hbm_bytes(program),
    temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    compile_seconds=compile_seconds,
  )


def add_up(
  program: Program, schedules: Schedules, chip: Chip
) -> tuple[Mapping[str, float], float, float, float]:
  """Seconds of a program's kernels by name, and of the rest; see `StepModel`.

  One operation follows the other; copies that XLA starts ahead cost nothing.
  """
  kernels, scheduled, estimated, unread = Counter(), 0.0, 0.0, 0.0
  for instruction, _, runs in executed(program):
    if is_kernel(instruction):
      cost = schedules.cost(instruction.name, chip, _share(instruction))
      kernels[re.sub(r"\.\d+$", "", instruction.name)] += runs * cost.seconds(chip)
    elif not _OVERLAPPED.search(instruction.opcode):
      seconds = runs * instruction_cycles(instruction) / chip.clock
      estimated += seconds
      if instruction.name not in schedules:
        unread, scheduled = unread + seconds, scheduled + seconds
        continue
      try:
        scheduled += runs * schedules.cost(instruction.name, chip).seconds(chip)
      except ValueError:
        unread, scheduled = unread + seconds, scheduled + seconds
  return kernels, scheduled, estimated, unread


def _share(instruction):
  """Splash attention skips blocks above the diagonal; what other kernels do hangs on no data."""
  return causal_share(TOKENS) if instruction.name.startswith("splash") else 1.0
