"""Tokens per second of decoding with mixers and forms against a baseline, measured on this machine.

    python -m ldm_jax.benchmarks.decode
    python -m ldm_jax.benchmarks.decode --mixers ldm --forms auto reference history --rows 8
    python -m ldm_jax.benchmarks.decode --config configs/ldm_tiny.py --width 256

All decoders continue an empty document with random parameters, in turn in one process, so that
whatever else the machine does falls on all alike.  A ratio is that of the medians: above 1 is
faster than the baseline.  --mixers put another mixer into the baseline, --config are whole files;
without either, all mixers are measured.
"""

import json
import statistics
import time
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from ldm_jax.benchmarks.steps import comparison_parser, configs_of, measure_in_turn
from ldm_jax.command_line import run_command
from ldm_jax.config import Config
from ldm_jax.decoding import Decoder, Sampling
from ldm_jax.environment import check_platform
from ldm_jax.errors import InputError
from ldm_jax.training.step import make_model

_BOUNDARY = 0  # any id will do


def main(argv: Sequence[str] | None = None) -> int:
  """Measures, prints a table or JSON, and returns the exit code."""
  arguments = _parse(argv)
  for option in ("rounds", "rows", "tokens"):
    if getattr(arguments, option) < 1:
      raise InputError(f"--{option} must be at least 1, got {getattr(arguments, option)}")
  check_platform()
  configs = configs_of(arguments)
  timers = {name: DecodeTimer(c, arguments.rows, arguments.tokens) for name, c in configs.items()}
  medians, shared = measure_in_turn(timers, arguments)
  result = {
    **shared,
    "rows": arguments.rows,
    "tokens": arguments.tokens,
    "tokens_per_second": medians,
  }
  print(json.dumps(result) if arguments.json else _table(result))
  return 0


class DecodeTimer:
  """One config's decoder, and its tokens per second at each call so far."""

  def __init__(self, config: Config, rows: int, tokens: int):
    """Compiles the decoder and calls it once to warm up.

    Raises:
      InputError: if so many tokens do not fit into the config's context.
    """
    model = make_model(config)
    empty = jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), empty)["params"])
    self._decoder = Decoder(model, params, config.data.sequence_length)
    self._rows, self._tokens = rows, tokens
    self._rates = []
    self.measure()
    self._rates.clear()

  def measure(self) -> float:
    """Continues the rows and notes how many tokens per second that was, over all rows."""
    start = time.perf_counter()
    self._decoder.generate([[_BOUNDARY]] * self._rows, self._tokens, Sampling(1.0))
    self._rates.append(self._rows * self._tokens / (time.perf_counter() - start))
    return self._rates[-1]

  @property
  def median(self) -> float:
    """Tokens per second of the median call since the warm-up."""
    return statistics.median(self._rates)


def _table(result):
  lines = [
    f"decoding measured on {result['measured_on']}: {result['rows']} rows of {result['tokens']} "
    f"tokens, median of {result['rounds']}"
  ]
  for name, rate in result["tokens_per_second"].items():
    lines.append(f"  {name:<16} {rate:10,.0f} tokens/s   ratio {result['ratios'][name]:.2f}")
  return "\n".join(lines)


def _parse(argv):
  parser = comparison_parser("ldm_jax.benchmarks.decode", __doc__)
  add = parser.add_argument
  add("--rounds", type=int, default=20, help="timed texts of each (default 20)")
  add("--rows", type=int, default=1, help="texts at once (default 1)")
  add("--tokens", type=int, default=200, help="new tokens of each (default 200)")
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
