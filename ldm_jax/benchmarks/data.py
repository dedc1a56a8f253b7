"""Tokens per second of the input pipeline alone, against what training consumes.

    python -m ldm_jax.benchmarks.data
    python -m ldm_jax.benchmarks.data --prepared data/NAME --consumption 2300 --workers 0 2

Loads batches ahead as `train.py` does and counts real tokens until the time is over.  The
consumption is what a training run prints as tokens/s.
"""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

from ldm_jax.command_line import CONFIGS, run_command
from ldm_jax.config import Config, load_config
from ldm_jax.data import load_dataset
from ldm_jax.errors import InputError

_WARM_UP = 5  # batches
_MANY = 2**40  # steps, more than any measurement asks for


def main() -> int:
  """Measures, prints a table or JSON, and returns the exit code."""
  arguments = _parse()
  if arguments.seconds <= 0:
    raise InputError(f"--seconds must be positive, got {arguments.seconds}")
  config = load_config(arguments.config)
  rates = {}
  for name, data in _sources(config.data, arguments.prepared).items():
    for workers in arguments.workers:
      changed = dataclasses.replace(config, data=dataclasses.replace(data, workers=workers))
      rates[f"{name}, {workers} workers"] = tokens_per_second(changed, arguments.seconds)
  result = {
    "measured_on": f"{os.cpu_count()} CPU cores",
    "batch": [config.data.batch_size, config.data.sequence_length],
    "tokens_per_second": rates,
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
    lines.append(f"  {name:<40} {rate:12,.0f} tokens/s{times}")
  return "\n".join(lines)


def _parse():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
  add = parser.add_argument
  add("--config", type=Path, default=CONFIGS / "ldm_tiny.py", help="for the batch's shape")
  add("--prepared", nargs="*", default=[], help="folders of prepared data sets")
  add("--workers", type=int, nargs="+", default=[0], help="values of data.workers (default 0)")
  add("--seconds", type=float, default=5.0, help="of each measurement (default 5)")
  add("--consumption", type=float, help="tokens/s of training, to compare with")
  add("--json", action="store_true", help="print one JSON object")
  return parser.parse_args()


if __name__ == "__main__":
  run_command(main)
