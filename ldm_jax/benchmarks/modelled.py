"""What one more block costs in a train step on a TPU chip, by its compiled program.

    python -m ldm_jax.benchmarks.modelled
    python -m ldm_jax.benchmarks.modelled --chip v5e --blocks 1 2 --config configs/*_1_5b.py

The real train step is compiled for one chip at two depths, 4 rows of 2,048 tokens, and the
difference is that of the blocks in between; the head costs the same at any depth and is made small.
libtpu compiles on any CPU and nothing is run: all figures are modelled, but for the seconds that
compiling takes here.

An operation takes the larger of its products at the peak and of its traffic at the full rate of the
main memory, and one follows the other.  For a hand-written kernel the schedule that the compiler
makes for it counts instead of the peak; of what splash attention does on conditions on data, the
share of blocks that the causal mask leaves.  Beside it stands the sum with XLA's own estimates of
everything but the kernels.  On a v5e, PreLN's fusions by their schedules take as long as this says
where products limit them and 1.2 times as long where the memory does; XLA's estimates are 1.2 and
2.1 times as long as the schedules.  Kept are the activations of one block that the forward pass
leaves to the backward pass, counted in vectors of the width.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ldm_jax.benchmarks.kernels import SMALLEST
from ldm_jax.benchmarks.residuals import kept_bytes_per_token
from ldm_jax.benchmarks.step_model import Kernel, Rest, chip_config, chip_mesh, model_steps
from ldm_jax.command_line import CONFIGS, command_parser, run_command
from ldm_jax.config import Config, load_config
from ldm_jax.errors import InputError

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
  jax.config.update("jax_enable_compilation_cache", False)  # compiling is timed
  configs = {path.stem: load_config(path) for path in arguments.config}
  rows = [
    {"chip": chip, "config": name, **per_block(config, chip, arguments.blocks)}
    for chip in arguments.chip
    for name, config in configs.items()
  ]
  result = {"kind": "modelled", "blocks": arguments.blocks, "per_block": _with_ratios(rows)}
  print(json.dumps(result) if arguments.json else _table(result))
  return 0


def per_block(config: Config, chip_name: str, depths: Sequence[int]) -> dict[str, Any]:
  """All figures of one more block of a config on a chip, in seconds and bytes."""
  configs = [chip_config(config, depth) for depth in depths]
  steps = model_steps(configs, chip_name)
  mesh = chip_mesh(chip_name)
  kept = [kept_bytes_per_token(changed, mesh) for changed in configs]

  def each(values):
    return (values[1] - values[0]) / (depths[1] - depths[0])

  names = sorted({name for step in steps for name in step.kernels})
  nothing = Kernel(0.0, 0.0, 0.0)
  kernels = {
    name: Kernel(*map(each, zip(*(step.kernels.get(name, nothing) for step in steps), strict=True)))
    for name in names
  }
  rest = Rest(*map(each, zip(*(step.rest for step in steps), strict=True)))
  in_kernels = sum(kernel.seconds for kernel in kernels.values())
  return {
    "seconds": in_kernels + rest.least,
    "estimated_seconds": in_kernels + rest.estimated,
    "kernels": {name: kernel._asdict() for name, kernel in kernels.items()},
    "kernel_seconds": in_kernels,
    "moved_bytes": rest.bytes + sum(kernel.bytes for kernel in kernels.values()),
    "temporary_bytes": each([step.temporary_bytes for step in steps]),
    "kept_bytes_per_token": each(kept),
    "kept_vectors": each(kept) / (2 * config.model.width),
    "compile_seconds_measured": each([step.compile_seconds for step in steps]),
  }


def _with_ratios(rows):
  """Adds what every row is of the first config's on the same chip."""
  for row in rows:
    baseline = next(other for other in rows if other["chip"] == row["chip"])
    for name in ("seconds", "estimated_seconds"):
      row[f"{name}_ratio"] = row[name] / baseline[name]
  return rows


def _table(result):
  lines = [
    "modelled, one block of a train step with 8,192 tokens on a chip, from the difference of "
    f"{' and '.join(map(str, result['blocks']))} blocks; compiling is measured",
    f"{'':5} {'config':<20} {'ms':>7} {'ratio':>6} {'kernels':>8} {'by XLA':>8} {'ratio':>6} "
    f"{'GB':>6} {'temporary':>10} {'kept':>6} {'compile':>8}",
  ]
  for row in result["per_block"]:
    lines.append(
      f"{row['chip']:5} {row['config']:<20} {1e3 * row['seconds']:7.2f} "
      f"{row['seconds_ratio']:6.2f} {1e3 * row['kernel_seconds']:8.2f} "
      f"{1e3 * row['estimated_seconds']:8.2f} {row['estimated_seconds_ratio']:6.2f} "
      f"{row['moved_bytes'] / 1e9:6.2f} {row['temporary_bytes'] / 2**20:6.0f} MiB "
      f"{row['kept_vectors']:4.1f} D {row['compile_seconds_measured']:6.0f} s"
    )
  lines.append(
    "kernels: the part of ms in them; by XLA: with its estimates of the rest; GB: moved; kept: "
    "activations from forward to backward, in bfloat16"
  )
  return "\n".join(lines)


def _parse(argv):
  parser = command_parser("ldm_jax.benchmarks.modelled", __doc__)
  add = parser.add_argument
  add("--chip", nargs="+", choices=SMALLEST, default=["v5e", "v5p"], help="(default v5e v5p)")
  add("--config", type=Path, nargs="+", default=_DEFAULT, help="files, the baseline first")
  add("--blocks", type=int, nargs=2, default=[2, 4], help="depths to compile (default 2 4)")
  add("--json", action="store_true", help="print one JSON object")
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
