"""What one more block costs in a train step on a TPU chip, from the compiler's own schedules.

    python -m ldm_jax.benchmarks.modelled
    python -m ldm_jax.benchmarks.modelled --chip v5e --blocks 1 2 --config configs/*_1_5b.py

The real train step is compiled for one chip at two depths, 4 rows of 2,048 tokens, and the
difference is that of the blocks in between; the head costs the same at any depth and is made small.
libtpu compiles on any CPU and nothing is run: all figures are modelled, but for the seconds that
compiling takes here.

An operation takes the larger of the time in which a core issues its bundles and the time of its
transfers at the full rate of the main memory, and one follows the other.  Hand-written kernels and
XLA's fusions are read from their schedules alike.  Of what splash attention does on conditions on
data, the share of blocks that the causal mask leaves is counted.  Beside it stands the sum with
XLA's own estimates of everything but the kernels, which are several times as high for operations
that the memory limits, and the least that products and traffic need.  Kept are the activations of
one block that the forward pass leaves to the backward pass, counted in vectors of the width.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from ldm_jax.benchmarks.kernels import SMALLEST
from ldm_jax.benchmarks.residuals import kept_bytes_per_token
from ldm_jax.benchmarks.step_model import chip_config, model_step
from ldm_jax.command_line import CONFIGS, run_command
from ldm_jax.config import load_config
from ldm_jax.errors import InputError
from ldm_jax.hlo.schedule import ScheduleDump
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import CHIPS, topology_devices

_DEFAULT = [CONFIGS / f"{kind}_1_5b.py" for kind in ("preln", "ldm")]


def main(argv: Sequence[str] | None = None) -> int:
  """Compiles, prints a table or JSON, and returns the exit code."""
  arguments = _parse(argv)
  if not 0 < arguments.blocks[0] < arguments.blocks[1]:
    raise InputError(f"--blocks {arguments.blocks}: give two depths, the smaller one first")
  names = [path.stem for path in arguments.config]
  if len(set(names)) < len(names):
    raise InputError("--config gives two files of the same name")
  jax.config.update("jax_platforms", "cpu")  # a TPU that is here stays free for whoever uses it
  jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled has no schedule
  configs = {path.stem: load_config(path) for path in arguments.config}
  rows = []
  with ScheduleDump() as dump:
    for chip in arguments.chip:
      for name, config in configs.items():
        rows.append({"chip": chip, "config": name, **per_block(config, chip, arguments, dump)})
  result = {"kind": "modelled", "blocks": arguments.blocks, "per_block": _with_ratios(rows)}
  print(json.dumps(result) if arguments.json else _table(result))
  return 0


def per_block(config, chip_name, arguments, dump) -> dict:
  """All figures of one more block of a config on a chip, in seconds and bytes."""
  chip, depths = CHIPS[chip_name], arguments.blocks
  mesh = make_mesh(chip_config(config, depths[0]).mesh, topology_devices(SMALLEST[chip_name])[:1])
  steps, kept = [], []
  for depth in depths:
    changed = chip_config(config, depth)
    kept.append(kept_bytes_per_token(changed, mesh))
    steps.append(model_step(changed, chip_name, dump))

  def each(values):
    return (values[1] - values[0]) / (depths[1] - depths[0])

  def field(name):
    return each([getattr(step, name) for step in steps])

  kernels = {
    name: each([step.kernels.get(name, 0.0) for step in steps]) for name in steps[1].kernels
  }
  in_kernels = sum(kernels.values())
  return {
    "seconds": in_kernels + field("scheduled"),
    "kernel_seconds": kernels,
    "unread_seconds": field("unread"),
    "estimated_seconds": in_kernels + field("estimated"),
    "least_seconds": max(field("flops") / chip.flops, field("hbm_bytes") / chip.hbm_rate),
    "flops": field("flops"),
    "hbm_bytes": field("hbm_bytes"),
    "temporary_bytes": field("temporary_bytes"),
    "kept_bytes_per_token": each(kept),
    "kept_vectors": each(kept) / (2 * config.model.width),
    "compile_seconds_measured": field("compile_seconds"),
  }


def _with_ratios(rows):
  """Adds what every row is of the first config's on the same chip."""
  for row in rows:
    baseline = next(other for other in rows if other["chip"] == row["chip"])
    for name in ("seconds", "estimated_seconds", "least_seconds"):
      row[f"{name}_ratio"] = row[name] / baseline[name]
  return rows


def _table(result):
  lines = [
    "modelled, one block of a train step with 8,192 tokens on a chip, from the difference of "
    f"{' and '.join(map(str, result['blocks']))} blocks; compiling is measured",
    f"{'':5} {'config':<20} {'ms':>7} {'ratio':>6} {'kernels':>8} {'by XLA':>8} {'ratio':>6} "
    f"{'least':>7} {'ratio':>6} {'GB':>6} {'temporary':>10} {'kept':>6} {'compile':>8}",
  ]
  for row in result["per_block"]:
    milli = {name: 1e3 * row[name] for name in ("seconds", "estimated_seconds", "least_seconds")}
    lines.append(
      f"{row['chip']:5} {row['config']:<20} {milli['seconds']:7.2f} {row['seconds_ratio']:6.2f} "
      f"{1e3 * sum(row['kernel_seconds'].values()):8.2f} {milli['estimated_seconds']:8.2f} "
      f"{row['estimated_seconds_ratio']:6.2f} {milli['least_seconds']:7.2f} "
      f"{row['least_seconds_ratio']:6.2f} {row['hbm_bytes'] / 1e9:6.2f} "
      f"{row['temporary_bytes'] / 2**20:6.0f} MiB {row['kept_vectors']:4.1f} D "
      f"{row['compile_seconds_measured']:6.0f} s"
    )
  lines.append(
    "ms: by schedules, of which kernels; by XLA: with its estimates instead; least: by products "
    "and traffic; GB: moved; kept: activations from forward to backward, in bfloat16"
  )
  return "\n".join(lines)


def _parse(argv):
  parser = argparse.ArgumentParser(
    prog="python -m ldm_jax.benchmarks.modelled",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--chip", nargs="+", choices=SMALLEST, default=["v5e", "v5p"], help="(default v5e v5p)")
  add("--config", type=Path, nargs="+", default=_DEFAULT, help="files, the baseline first")
  add("--blocks", type=int, nargs=2, default=[2, 4], help="depths to compile (default 2 4)")
  add("--json", action="store_true", help="print one JSON object")
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
