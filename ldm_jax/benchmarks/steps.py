"""Step time of configs against a baseline, measured on this machine.

    python -m ldm_jax.benchmarks.steps
    python -m ldm_jax.benchmarks.steps --config configs/ldm_tiny.py --baseline configs/preln_tiny.py

All train steps are compiled as `train.py` compiles them and run in turn in one process, so that
whatever else the machine does falls on all alike.  A ratio is that of the medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from ldm_jax.command_line import CONFIGS, run_command
from ldm_jax.config import Config, load_config
from ldm_jax.data.packing import Batch
from ldm_jax.errors import InputError
from ldm_jax.sharding import make_mesh
from ldm_jax.training.step import compile_train_step, init_state, put_batch


def main() -> int:
  """Measures, prints a table or JSON, and returns the exit code."""
  arguments = _parse()
  if arguments.rounds < 1:
    raise InputError(f"--rounds must be at least 1, got {arguments.rounds}")
  paths = (arguments.baseline, *arguments.config)
  if len({path.stem for path in paths}) < len(paths):
    raise InputError(
      "--config and --baseline give two files of the same name; choose ones with names of their own"
    )
  timers = {path.stem: StepTimer(load_config(path)) for path in paths}
  for _ in range(arguments.rounds):
    for timer in timers.values():
      timer.measure()
  baseline = timers[arguments.baseline.stem].median
  result = {
    "measured_on": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "rounds": arguments.rounds,
    "seconds": {name: timer.median for name, timer in timers.items()},
    "temporary_bytes": {name: timer.temporary_bytes for name, timer in timers.items()},
    "ratios": {name: timer.median / baseline for name, timer in timers.items()},
  }
  print(json.dumps(result) if arguments.json else _table(result))
  return 0


class StepTimer:
  """One config's compiled train step with a state of its own, and the seconds of each call so far.

  Attributes:
    temporary_bytes: memory that the compiled step needs beside its arguments and results.
  """

  def __init__(self, config: Config):
    """Compiles the step for the config's shapes, on random tokens, and calls it once to warm up.

    Raises:
      InputError: if the devices here cannot be split as `mesh` says.
    """
    mesh = make_mesh(config.mesh)
    shape = (config.data.batch_size, config.data.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    ones = np.ones(shape, np.int32)
    with jax.set_mesh(mesh):
      self._mesh = mesh
      self._batch = put_batch(mesh, Batch(tokens, tokens, positions, ones, ones.astype(bool)))
      self._state = init_state(config, mesh)
      self._step = compile_train_step(config, self._state, self._batch)
    self.temporary_bytes = self._step.memory_analysis().temp_size_in_bytes
    self._seconds = []
    self.measure()
    self._seconds.clear()

  def measure(self, batches: Iterator[Batch] | None = None) -> float:
    """Takes one step and notes how long it took, in seconds.

    Args:
      batches: where to take the batch from, within that time; without, the same one every time,
        which is on the device already.
    """
    start = time.perf_counter()
    batch = self._batch if batches is None else put_batch(self._mesh, next(batches))
    self._state, metrics = self._step(self._state, batch)
    jax.block_until_ready((self._state, metrics))
    self._seconds.append(time.perf_counter() - start)
    return self._seconds[-1]

  @property
  def median(self) -> float:
    """Seconds of the median call since the warm-up."""
    return statistics.median(self._seconds)


def _table(result):
  lines = [f"train steps measured on {result['measured_on']}, median of {result['rounds']}"]
  for name, seconds in result["seconds"].items():
    megabytes = result["temporary_bytes"][name] / 2**20
    lines.append(
      f"  {name:<14} {seconds * 1e3:8.1f} ms   {megabytes:8.1f} MiB temporary   "
      f"ratio {result['ratios'][name]:.2f}"
    )
  return "\n".join(lines)


def _parse():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
  parser.add_argument(
    "--config", type=Path, nargs="+", default=[CONFIGS / "ldm_tiny.py"], help="one file or more"
  )
  parser.add_argument("--baseline", type=Path, default=CONFIGS / "preln_tiny.py")
  parser.add_argument("--rounds", type=int, default=20, help="timed steps of each (default 20)")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  return parser.parse_args()


if __name__ == "__main__":
  run_command(main)
