"""Step time of mixers, forms and configs against a baseline, measured on this machine.

    python -m ldm_jax.benchmarks.steps
    python -m ldm_jax.benchmarks.steps --mixers ldm --forms reference state chunked history
    python -m ldm_jax.benchmarks.steps --blocks 12 --width 256
    python -m ldm_jax.benchmarks.steps --config configs/ldm_tiny.py --baseline configs/preln_tiny.py

All train steps are compiled as `train.py` compiles them and run in turn in one process, so that
whatever else the machine does falls on all alike.  A ratio is that of the medians.  --mixers put
another mixer into the baseline, --config are whole files; without either, all mixers are measured.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import numpy as np

from ldm_jax.command_line import CONFIGS, command_parser, run_command
from ldm_jax.config import Config, MixerConfig, load_config, with_mixer, with_section
from ldm_jax.data.packing import Batch
from ldm_jax.environment import check_platform
from ldm_jax.errors import InputError
from ldm_jax.sharding import make_mesh
from ldm_jax.training.step import compile_train_step, init_state, put_batch

_HINTS = get_type_hints(MixerConfig)
_KINDS, _FORMS = get_args(_HINTS["kind"]), get_args(_HINTS["form"])


def main() -> int:
  """Measures, prints a table or JSON, and returns the exit code."""
  arguments = _parse()
  if arguments.rounds < 1:
    raise InputError(f"--rounds must be at least 1, got {arguments.rounds}")
  check_platform()
  timers = {name: StepTimer(config) for name, config in configs_of(arguments).items()}
  medians, shared = measure_in_turn(timers, arguments)
  result = {
    **shared,
    "seconds": medians,
    "temporary_bytes": {name: timer.temporary_bytes for name, timer in timers.items()},
  }
  print(json.dumps(result) if arguments.json else _table(result))
  return 0


def measure_in_turn(
  timers: Mapping[str, Any], arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
  """Calls every timer's `measure` in each of the rounds.

  Returns:
    The median of each, and what all such measurements report: where, how often, and ratios to the
    baseline.
  """
  for _ in range(arguments.rounds):
    for timer in timers.values():
      timer.measure()
  medians = {name: timer.median for name, timer in timers.items()}
  baseline = medians[arguments.baseline.stem]
  return medians, {
    "measured_on": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "rounds": arguments.rounds,
    "ratios": {name: median / baseline for name, median in medians.items()},
  }


def configs_of(arguments: argparse.Namespace) -> Mapping[str, Config]:
  """What the options of `comparison_parser` say to measure, by name, the baseline first.

  Raises:
    InputError: if the options do not fit each other.
  """
  paths = (arguments.baseline, *arguments.config)
  if len({path.stem for path in paths}) < len(paths):
    raise InputError(
      "--config and --baseline give two files of the same name; choose ones with names of their own"
    )
  configs = {path.stem: resized(load_config(path), arguments) for path in paths}
  baseline = configs[arguments.baseline.stem]
  mixers = arguments.mixers
  if mixers is None:
    others = [kind for kind in _KINDS if kind != baseline.model.mixer.kind]
    mixers = [] if arguments.config else others
  if arguments.forms != ["auto"] and "ldm" not in mixers:
    raise InputError("--forms are of the mixer ldm; add --mixers ldm")
  for kind in mixers:
    for form in arguments.forms if kind == "ldm" else ["auto"]:
      name = kind if form == "auto" else f"{kind} {form}"
      configs[name] = with_mixer(baseline, kind=kind, form=form).validate()
  return configs


def resized(config: Config, arguments: argparse.Namespace) -> Config:
  """The same run with `blocks` and `width` of the arguments, where they are given.

  The MLP grows with the width.

  Raises:
    InputError: if another setting does not fit them.
  """
  model, changes = config.model, {}
  if arguments.blocks is not None:
    changes["blocks"] = arguments.blocks
  if arguments.width is not None:
    mlp_width = model.mlp_width * arguments.width // model.width
    changes |= {"width": arguments.width, "mlp_width": mlp_width}
  return with_section(config, "model", **changes).validate()


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
      f"  {name:<16} {seconds * 1e3:8.1f} ms   {megabytes:8.1f} MiB temporary   "
      f"ratio {result['ratios'][name]:.2f}"
    )
  return "\n".join(lines)


def comparison_parser(module: str, description: str) -> argparse.ArgumentParser:
  """A parser of options that say which configs, mixers and forms to measure."""
  parser = command_parser(module, description)
  add = parser.add_argument
  add("--config", type=Path, nargs="+", default=[], help="files to measure")
  add("--baseline", type=Path, default=CONFIGS / "preln_tiny.py")
  add("--mixers", nargs="+", choices=_KINDS, help="to put into the baseline (default: all others)")
  add("--forms", nargs="+", choices=_FORMS, default=["auto"], help="of ldm (default auto)")
  add("--blocks", type=int, help="instead of those of the configs")
  add("--width", type=int, help="instead of that of the configs; the MLP grows with it")
  add("--json", action="store_true", help="print one JSON object")
  return parser


def _parse():
  parser = comparison_parser("ldm_jax.benchmarks.steps", __doc__)
  parser.add_argument("--rounds", type=int, default=20, help="timed steps of each (default 20)")
  return parser.parse_args()


if __name__ == "__main__":
  run_command(main)
