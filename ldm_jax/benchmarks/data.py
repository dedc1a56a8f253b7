"""Tokens per second of the input pipeline alone, against what training consumes.

    python -m ldm_jax.benchmarks.data
    python -m ldm_jax.benchmarks.data --prepared data/NAME --consumption 2300 --workers 0 2
    python -m ldm_jax.benchmarks.data --rounds 10

Loads batches ahead as `train.py` does and counts real tokens until the time is over.  The
consumption is what a training run prints as tokens/s.  With --rounds it also trains the config,
ten steps on loaded batches and ten on one that stays on the device in turn, and prints the ratio.
"""

import dataclasses
import json
import os
import statistics
import time
from pathlib import Path

from ldm_jax.benchmarks.steps import StepTimer
from ldm_jax.command_line import CONFIGS, command_parser, run_command
from ldm_jax.config import Config, load_config
from ldm_jax.data import load_dataset
from ldm_jax.errors import InputError

_WARM_UP = 5  # batches
_TURN = 10  # steps on loaded batches before as many on a repeated one
_MANY = 2**40  # steps, more than any measurement asks for


def main() -> int:
  """Measures, prints a table or JSON, and returns the exit code."""
  arguments = _parse()
  if arguments.seconds <= 0:
    raise InputError(f"--seconds must be positive, got {arguments.seconds}")
  if arguments.rounds < 0:
    raise InputError(f"--rounds must be at least 0, got {arguments.rounds}")
  config = load_config(arguments.config)
  rates, ratios = {}, {}
  for name, data in _sources(config.data, arguments.prepared).items():
    for workers in arguments.workers:
      changed = dataclasses.replace(config, data=dataclasses.replace(data, workers=workers))
      label = f"{name}, {workers} workers"
      rates[label] = tokens_per_second(changed, arguments.seconds)
      if arguments.rounds:
        ratios[label] = training_ratio(changed, arguments.rounds)
  result = {
    "measured_on": f"{os.cpu_count()} CPU cores",
    "batch": [config.data.batch_size, config.data.sequence_length],
    "tokens_per_second": rates,
    "training_ratio": ratios,
    "consumption": arguments.consumption,
  }
  print(json.dumps(result) if arguments.json else _table(result))
  return 0


def tokens_per_second(config: Config, seconds: float) -> float:
  """Real target tokens a second that the config's data section delivers.

  Raises:
    InputError: if its data cannot be opened.
  """
  with load_dataset(config.validate()).train_batches(0, _MANY) as batches:
    for _ in range(_WARM_UP):
      next(batches)
    tokens, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
      tokens += int(next(batches).loss_mask.sum())
  return tokens / spent


def training_ratio(config: Config, rounds: int) -> float:
  """Time of a train step on loaded batches over that on a batch that stays on the device.

  Args:
    config: what to train.
    rounds: each takes ten steps of either kind in turn; the ratio is that of the medians.

  Raises:
    InputError: if its data cannot be opened.
  """
  timer, loaded, repeated = StepTimer(config), [], []
  with load_dataset(config.validate()).train_batches(0, _MANY) as batches:
    for _ in range(rounds):
      loaded += [timer.measure(batches) for _ in range(_TURN)]
      repeated += [timer.measure() for _ in range(_TURN)]
  return statistics.median(loaded) / statistics.median(repeated)


def _sources(data, prepared):
  plain = dataclasses.replace(data, path=None, tokenizer=None)
  sources = {name: dataclasses.replace(plain, source=name) for name in ("stdlib", "synthetic")}
  for path in prepared:
    sources[f"prepared {path}"] = dataclasses.replace(plain, source="prepared", path=path)
  return sources


def _table(result):
  lines = [f"batches of {result['batch']} measured on {result['measured_on']}"]
  for name, rate in result["tokens_per_second"].items():
    times = f"   {rate / result['consumption']:,.0f} x" if result["consumption"] else ""
    ratio = result["training_ratio"].get(name)
    training = f"   train step x {ratio:.3f}" if ratio else ""
    lines.append(f"  {name:<40} {rate:12,.0f} tokens/s{times}{training}")
  return "\n".join(lines)


def _parse():
  parser = command_parser("ldm_jax.benchmarks.data", __doc__)
  add = parser.add_argument
  add("--config", type=Path, default=CONFIGS / "ldm_tiny.py", help="for the batch's shape")
  add("--prepared", nargs="*", default=[], help="folders of prepared data sets")
  add("--workers", type=int, nargs="+", default=[0], help="values of data.workers (default 0)")
  add("--seconds", type=float, default=5.0, help="of each measurement (default 5)")
  add("--consumption", type=float, help="tokens/s of training, to compare with")
  add("--rounds", type=int, default=0, help="of training with and without the pipeline (default 0)")
  add("--json", action="store_true", help="print one JSON object")
  return parser.parse_args()


if __name__ == "__main__":
  run_command(main)
