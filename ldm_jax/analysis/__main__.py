"""Looks inside a trained model, on held-out rows of its own data.

    python -m ldm_jax.analysis --workdir runs/ldm_tiny --out figures

--out then holds analysis.json, every number, and figures of what each read draws on and of sizes
and gradients along the depth; for the depth memory also of its depth attention, its controls, its
keys and how well it recalls.  Files of these names are replaced, others stay.

Exit codes: 0 done, 1 failed, 2 bad input.
"""

import dataclasses
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from ldm_jax.analysis.figures import draw
from ldm_jax.analysis.measure import Analysis, analyse
from ldm_jax.analysis.report import as_json, summary
from ldm_jax.command_line import add_checkpoint_options, command_parser, run_command
from ldm_jax.config import Config, MeshConfig
from ldm_jax.data import load_dataset
from ldm_jax.data.packing import Batch
from ldm_jax.environment import check_platform
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.files import check_free_to_write, is_remote, write_atomically
from ldm_jax.joining import check_alone
from ldm_jax.sharding import make_mesh
from ldm_jax.trained import check_knows_data, load_trained


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line, measures, draws, and returns the exit code."""
  arguments = _parse(sys.argv[1:] if argv is None else argv)
  check_alone()
  check_platform()
  check_free_to_write("--out", arguments.out, folder=True)
  start = time.perf_counter()
  devices = jax.devices()[: math.gcd(arguments.rows, jax.device_count())]
  check_knows_data(arguments.workdir, "give the workdir of the run")
  mesh = make_mesh(MeshConfig(), devices)
  trained = load_trained(arguments.workdir, arguments.step, arguments.folder, mesh)
  batch = held_out_rows(trained.config, arguments.rows)
  analysis = analyse(
    trained.model, trained.params, batch, arguments.tokens, arguments.seed, trained.mesh
  )
  found = {
    "schema": 1,
    "workdir": arguments.workdir,
    "checkpoint": {"folder": arguments.folder, "step": trained.step},
    "rows": arguments.rows,
    "seed": arguments.seed,
    **as_json(analysis),
  }
  heading = f"{analysis.kind}, step {trained.step}; {arguments.rows} held-out rows"
  figures = _write(arguments.out, found, analysis)
  seconds = time.perf_counter() - start
  lines = (
    f"{heading}, {analysis.tokens} of their tokens",
    *summary(analysis),
    f"{arguments.out}: analysis.json, {', '.join(figures)} ({seconds:.0f} s)",
  )
  print(json.dumps(found, allow_nan=False) if arguments.json else "\n".join(lines))
  return 0


def held_out_rows(config: Config, rows: int) -> Batch:
  """The first held-out rows of a run's data, in the order of its evaluations.

  Raises:
    InputError: if there are not so many.
  """
  dataset = dataclasses.replace(load_dataset(config), batch_size=rows)
  there = len(dataset.held_out_rows)
  if rows > there:
    raise InputError(
      f"--rows {rows}: the data have {there} held-out rows; set --rows to at most that"
    )
  return dataset.held_out_batches(1)[0]


def _write(out, found, analysis: Analysis):
  """Everything into the folder `out`; returns the names of the figures."""
  names = []
  try:
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "analysis.json", json.dumps(found, allow_nan=False) + "\n")
    for name, figure in draw(analysis):
      file = io.BytesIO()
      figure.savefig(file, format="png")
      write_atomically(out / name, file.getvalue())
      names.append(name)
  except OSError as error:
    raise TrainingError(f"--out {out}: cannot write there: {error.strerror}") from error
  return names


def _parse(argv):
  parser = command_parser("ldm_jax.analysis", __doc__)
  parser.add_argument("--workdir", required=True, help="of the run, may be gs://")
  parser.add_argument("--out", required=True, help="folder for figures and numbers")
  add_checkpoint_options(parser)
  parser.add_argument("--rows", type=int, default=4, help="held-out rows (default: 4)")
  parser.add_argument(
    "--tokens", type=int, default=512, help="tokens of them to look at one by one (default: 512)"
  )
  parser.add_argument("--seed", type=int, default=0, help="which tokens (default: 0)")
  parser.add_argument(
    "--json", action="store_true", help="print analysis.json instead of a summary"
  )
  arguments = parser.parse_args(argv)
  if is_remote(arguments.out):
    raise InputError(f"--out {arguments.out}: figures are kept on disks, not in buckets")
  arguments.out = Path(arguments.out)
  for name in ("rows", "tokens"):
    if getattr(arguments, name) < 1:
      raise InputError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
  if arguments.seed < 0:
    raise InputError(f"--seed must be at least 0, got {arguments.seed}")
  return arguments


if __name__ == "__main__":
  run_command(main)
