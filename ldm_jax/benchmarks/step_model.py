"""A train step compiled for one TPU chip, and the time that it would take there."""

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ldm_jax.benchmarks.cases import causal_share
from ldm_jax.benchmarks.kernels import SMALLEST, pallas_calls
from ldm_jax.config import Config, MeshConfig, with_section
from ldm_jax.hlo.costs import instruction_bytes, instruction_flops, is_kernel, kernels
from ldm_jax.hlo.program import Program, executed, instruction_cycles, parse
from ldm_jax.hlo.schedule import ScheduleDump
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import CHIPS, Chip, topology_devices
from ldm_jax.training.step import (
  abstract_batch,
  abstract_state,
  compile_train_step_for,
  make_train_step,
)

ROWS, TOKENS = 4, 2048  # of a chip
_VOCABULARY = 1024  # the head costs the same at any depth, but its compilation takes long


class Kernel(NamedTuple):
  """All runs of the kernels of one name in a step: their number, seconds and bytes."""

  runs: float
  seconds: float
  bytes: float


class Rest(NamedTuple):
  """All other operations of a step, one after the other, in seconds.

  estimated: by XLA's own estimates.
  least: each the larger of its products at the peak and its traffic at the memory's full rate.
  bytes: moved.
  """

  estimated: float
  least: float
  bytes: float


class StepModel(NamedTuple):
  """One train step on one chip.

  kernels: hand-written ones, by name.
  rest: everything else.
  temporary_bytes: that live within the step.
  compile_seconds: on this machine, measured.
  """

  kernels: Mapping[str, Kernel]
  rest: Rest
  temporary_bytes: float
  compile_seconds: float


def chip_config(config: Config, blocks: int) -> Config:
  """The same model with another depth, at 4 rows of 2,048 tokens on one chip."""
  config = with_section(config, "model", blocks=blocks, vocab_size=_VOCABULARY)
  config = with_section(config, "data", batch_size=ROWS, sequence_length=TOKENS)
  config = with_section(config, "train", accumulate=1)
  return dataclasses.replace(config, mesh=MeshConfig()).validate()


def chip_mesh(chip_name: str) -> jax.sharding.Mesh:
  """One device of a chip."""
  return make_mesh(MeshConfig(), topology_devices(SMALLEST[chip_name])[:1])


def model_steps(configs: Sequence[Config], chip_name: str) -> list[StepModel]:
  """Compiles train steps for one chip and adds up what their operations take.

  Kernels are compiled once more, alone and in another process, as libtpu takes several times as
  long where it writes down schedules.

  Args:
    configs: see `chip_config`.
    chip_name: one of `SMALLEST`.

  Raises:
    ValueError: if the schedule of a kernel cannot be read.
  """
  chip, mesh, steps = CHIPS[chip_name], chip_mesh(chip_name), []
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
    found = pool.submit(kernel_costs, configs, chip_name).result()
  for config, costs in zip(configs, found, strict=True):
    start = time.perf_counter()
    compiled = compile_train_step_for(config, mesh)
    seconds = time.perf_counter() - start
    program = parse(compiled.as_text())
    temporary = compiled.memory_analysis().temp_size_in_bytes
    steps.append(
      StepModel(as_run(costs, kernels(program)), add_up(program, chip), temporary, seconds)
    )
  return steps


def as_run(costs: Mapping[str, Kernel], runs: Mapping[str, int]) -> dict[str, Kernel]:
  """Costs of traced kernels, scaled to how often the compiled program runs them."""
  scaled = {}
  for name, count in runs.items():
    if name not in costs:
      raise ValueError(f"the program runs a kernel {name} that was not traced")
    share = count / costs[name].runs
    scaled[name] = Kernel(*(share * value for value in costs[name]))
  return scaled


def kernel_costs(configs: Sequence[Config], chip_name: str) -> list[dict[str, Kernel]]:
  """What the kernels of train steps cost by their schedules, each compiled alone.

  Only for a process in which nothing has loaded libtpu.  Arguments and raises as `model_steps`.
  """
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled has no schedule
  costs, results = {}, []
  with ScheduleDump() as dump:
    mesh = chip_mesh(chip_name)
    for config in configs:
      totals = {}
      for equation in pallas_calls(_traced_step(config, mesh)):
        key, name = _key(equation), equation.params["name"]
        if key not in costs:
          costs[key] = _cost_alone(equation, mesh, CHIPS[chip_name], dump)
        before = totals.get(name, Kernel(0, 0.0, 0.0))
        more = (1, *costs[key])
        totals[name] = Kernel(*(a + b for a, b in zip(before, more, strict=True)))
      results.append(totals)
  return results


def add_up(program: Program, chip: Chip) -> Rest:
  """Everything in a program but kernels; copies that XLA starts ahead cost their traffic only."""
  estimated, least, moved = 0.0, 0.0, 0.0
  for instruction, computation, runs in executed(program):
    if is_kernel(instruction):
      continue
    traffic = instruction_bytes(program, instruction, computation)
    products = instruction_flops(program, instruction)
    moved += runs * traffic
    least += runs * max(products / chip.flops, traffic / chip.hbm_rate)
    if not instruction.opcode.endswith(("-start", "-done")):
      estimated += runs * instruction_cycles(instruction) / chip.clock
  return Rest(estimated, least, moved)


def _traced_step(config, mesh):
  with jax.set_mesh(mesh):
    step = jax.jit(make_train_step(config))
    return step.trace(abstract_state(config, mesh), abstract_batch(config, mesh)).jaxpr.jaxpr


def _key(equation):
  """The same for calls that compile to the same kernel."""
  shapes = [variable.aval.str_short() for variable in equation.invars]
  return str((shapes, equation.params["jaxpr"], equation.params["grid_mapping"]))


def _cost_alone(equation, mesh, chip, dump):
  """Seconds and bytes of one run of a kernel, compiled with nothing beside it."""
  sharding = NamedSharding(mesh, PartitionSpec())
  arguments = [
    jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype, sharding=sharding)
    for variable in equation.invars
  ]
  call = jax.jit(lambda *arrays: equation.primitive.bind(*arrays, **equation.params))
  with jax.set_mesh(mesh):
    program = parse(call.lower(*arguments).compile().as_text())
  (name,) = (i.name for i, _, _ in executed(program) if is_kernel(i))
  # Splash attention skips blocks above the diagonal; what other kernels do hangs on no data.
  splash = str(equation.params["name"]).startswith("splash")
  share = causal_share(TOKENS) if splash else 1.0
  cost = dump.read().cost(name, chip, share)
  return cost.seconds(chip), cost.bytes
