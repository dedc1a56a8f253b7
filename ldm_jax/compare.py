"""Trains a list of depth mixers under equal conditions and says how they compare.

    python -m ldm_jax.compare --config configs/compare_tiny.py --out runs/compare

Every mixer is trained at every peak learning rate with every seed, on the same tokens and otherwise
the same model.  --out then holds

  results.json  every number, curves included
  table.md      one line for each mixer at its best rate
  loss.png      held-out loss against tokens
  runs/         one workdir for each run, as train.py leaves it
  compilation_cache/   compiled programs, which runs that differ in the seed share

Interrupt it whenever you like: the same command goes on, and does not touch what is finished.  A
run whose loss stops being finite counts as diverged and is not tried again; delete its folder under
runs/ to have it tried again.  More mixers, rates or seeds can be added to the file at any time.

Exit codes: 0 done, 1 failed, 2 bad configuration or input, 75 stopped by a signal after saving.
"""

import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import tqdm

from ldm_jax.benchmarks.steps import StepTimer
from ldm_jax.command_line import CONFIGS, command_parser, run_command
from ldm_jax.comparison import Comparison, Run, load_comparison, naming
from ldm_jax.comparison_report import draw_plot, markdown_table, missing_runs, summarise
from ldm_jax.config import flatten, from_json
from ldm_jax.data import load_dataset
from ldm_jax.environment import check_platform, compilation_cache, environment
from ldm_jax.errors import DivergedError, InputError, TrainingError
from ldm_jax.files import write_atomically
from ldm_jax.joining import check_alone
from ldm_jax.model import check_mesh, parameter_count
from ldm_jax.sharding import make_mesh
from ldm_jax.training.loop import train
from ldm_jax.training.signals import STOPPED_EXIT_CODE, StopRequest
from ldm_jax.training.step import abstract_state
from ldm_jax.training.workdir import settings_in_use
from ldm_jax.typing import PathLike

__all__ = ["Comparison", "compare", "load_comparison", "main"]

_SCHEMA = 1


def compare(comparison: Comparison, out: PathLike) -> tuple[int, dict[str, Any]]:
  """Does what is left of a comparison in the folder `out`, printing progress.

  `results.json`, `table.md` and `loss.png` are brought up to date after every run.

  Returns:
    The exit code, 0 or 75 when a signal stopped it, and the results: what `results.json` holds.
      schema: 1.
      comparison: the settings, `Comparison` as nested dicts.
      runs: for each run "mixer", "learning_rate", "seed", "folder" under `out`, "status" ("done",
        "diverged" or "unfinished"), "loss" after the last step (nats per token, None unless done),
        "curve" (a list of "step", "tokens", "loss", "bits_per_byte" of each evaluation, the last
        None unless tokens are bytes), "seconds" of wall time or None if unknown, "message" of a
        divergence or None, and "environment" that the run ended in or None: "device", "jax",
        "python", "data_fingerprint" and, in a checkout, "git_commit".
      parameters: their number for each mixer.
      timing: "measured_on", "rounds", "median_seconds" and "temporary_bytes" of a train step for
        each mixer; None until all runs have ended.
      summary: see `comparison_report.summarise`.
      wall_seconds: sum over the runs, as far as known.

  Raises:
    InputError: before any training, if the comparison is not valid, the folder cannot be written,
      or it holds a run of the same name with other settings or runs on other data.
    TrainingError: if a checkpoint or a result cannot be written.
  """
  comparison.validate()
  mesh = make_mesh(comparison.base.mesh)
  for run in comparison.runs():
    with naming(run.mixer):
      check_mesh(comparison.config(run), mesh)
  session = _Session(comparison, Path(out))
  with StopRequest() as stop, compilation_cache(session.out / "compilation_cache"):
    stages = (session.count_parameters, session.train_all, session.time_steps)
    finished = all(stage(stop) for stage in stages)
    results = session.write()
  if not finished:
    print(f"stopped, results so far are in {out}; the same command resumes", flush=True)
    return STOPPED_EXIT_CODE, results
  print(f"done, see {session.out / 'table.md'}", flush=True)
  return 0, results


class _Session:
  """A comparison and its folder.  Each stage returns whether it is complete (False: stopped)."""

  def __init__(self, comparison, out):
    self.comparison, self.out = comparison, out
    self._check_folders()
    self._settings = json.loads(json.dumps(dataclasses.asdict(comparison)))
    kept = self._kept_measurements()
    self._parameters, self._timing = kept.get("parameters") or {}, kept.get("timing")
    try:
      out.mkdir(parents=True, exist_ok=True)
      self._write_files(self.results())
    except OSError as error:
      raise InputError(f"--out {out}: cannot write there: {error.strerror}") from error

  def _check_folders(self):
    """Refuses runs that are there under the same name with other settings."""
    for run in self.comparison.runs():
      folder = self.out / "runs" / run.folder
      if not (_has_checkpoints(folder) or (folder / "outcome.json").exists()):
        continue
      try:
        saved = flatten(from_json((folder / "config.json").read_text("utf-8")))
      except (InputError, OSError, UnicodeDecodeError) as error:
        raise InputError(
          f"{folder / 'config.json'}: {error}; restore the file or delete the folder"
        ) from error
      wanted = settings_in_use(self.comparison.config(run))
      changed = [
        f"{k} was {saved[k]} and is now {wanted[k]}" for k in wanted if saved[k] != wanted[k]
      ]
      if changed:
        raise InputError(
          f"{folder} holds a run with other settings: {', '.join(changed)}. "
          "Choose another --out, or delete the folder to train it again"
        )

  def _kept_measurements(self):
    """Parameters and timing of an earlier call, if they were of the same models."""
    try:
      saved = json.loads((self.out / "results.json").read_text("utf-8"))
      same = saved["schema"] == _SCHEMA and all(
        saved["comparison"][key] == self._settings[key]
        for key in ("base", "mixers", "timing_rounds")
      )
    except (OSError, ValueError, KeyError, TypeError):
      return {}
    return saved if same else {}

  def results(self):
    """The results object, from what is in the folders now."""
    results = {
      "schema": _SCHEMA,
      "comparison": self._settings,
      "runs": [self._entry(run) for run in self.comparison.runs()],
      "parameters": self._parameters,
      "timing": self._timing,
    }
    results["summary"] = summarise(results)
    results["wall_seconds"] = sum(run["seconds"] or 0.0 for run in results["runs"])
    return results

  def _entry(self, run):
    folder = self.out / "runs" / run.folder
    outcome = _read_outcome(folder)
    curve, status = self._curve(folder), "unfinished"
    if outcome.get("status") == "diverged":
      status = "diverged"
    elif curve and curve[-1]["step"] == self.comparison.base.train.steps:
      status = "done"
    return {
      **run._asdict(),
      "folder": f"runs/{run.folder}",
      "status": status,
      "loss": curve[-1]["loss"] if status == "done" else None,
      "curve": curve,
      "seconds": outcome.get("seconds"),
      "message": outcome.get("message"),
      "environment": outcome.get("environment"),
    }

  def _curve(self, folder):
    try:
      lines = (folder / "metrics.jsonl").read_text("utf-8", "replace").splitlines()
    except OSError:
      return []
    data, points = self.comparison.base.data, []
    for line in lines:
      with contextlib.suppress(json.JSONDecodeError):  # a line cut short by a kill
        point = json.loads(line)
        if point["split"] == "eval" and math.isfinite(point["loss"]):
          tokens = point["step"] * data.batch_size * data.sequence_length
          loss, bits = point["loss"], point.get("bits_per_byte")
          points.append(
            {"step": point["step"], "tokens": tokens, "loss": loss, "bits_per_byte": bits}
          )
    return points

  def write(self):
    """Brings the three files up to date and returns the results."""
    results = self.results()
    try:
      self._write_files(results)
    except OSError as error:
      raise TrainingError(
        f"writing results in {self.out} failed: {error.strerror}; free space, then run the same "
        "command again"
      ) from error
    return results

  def _write_files(self, results):
    _write(self.out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    _write(self.out / "table.md", markdown_table(results).encode())
    picture = draw_plot(results)
    if picture:
      _write(self.out / "loss.png", picture)

  def count_parameters(self, stop):
    """Traces each mixer's model; computes nothing."""
    mesh = make_mesh(self.comparison.base.mesh)
    for mixer in self.comparison.mixers:
      if stop:
        return False
      if mixer not in self._parameters:
        config = self.comparison.config(self._first_run(mixer))
        with jax.set_mesh(mesh):
          self._parameters[mixer] = parameter_count(abstract_state(config, mesh).params)
    return True

  def _first_run(self, mixer):
    return Run(mixer, self.comparison.learning_rates[0], self.comparison.seeds[0])

  def train_all(self, stop):
    """Trains what has not ended yet."""
    results, runs = self.results(), self.comparison.runs()
    missing = missing_runs(results)
    if missing:
      self._environment = environment() | {"data_fingerprint": self._fingerprint(results)}
    if missing < len(runs):
      print(f"{len(runs) - missing} of {len(runs)} runs have ended already", flush=True)
    for number, run in enumerate(runs):
      if results["runs"][number]["status"] != "unfinished":
        continue
      if stop:
        return False
      name = f"{run.mixer}, rate {run.learning_rate:g}, seed {run.seed}"
      print(f"[{number + 1}/{len(runs)}] {name}{_time_left(results)}", flush=True)
      status = self._train_one(run)
      results = self.write()
      if status == "stopped":
        return False
    return True

  def _fingerprint(self, results):
    """Names the data; refuses to go on with other data than the runs that have ended saw."""
    fingerprint = load_dataset(self.comparison.base).fingerprint
    for run in results["runs"]:
      seen = (run["environment"] or {}).get("data_fingerprint", fingerprint)
      if seen != fingerprint:
        raise InputError(
          f"{self.out / run['folder']} was trained on other data (fingerprint {seen}, now "
          f"{fingerprint}): go on with the Python version it was trained with, or choose another "
          "--out"
        )
    return fingerprint

  def _train_one(self, run):
    """Trains one run, from its checkpoint if it has one, and records how it ended."""
    folder = self.out / "runs" / run.folder
    outcome = _read_outcome(folder)
    seconds = outcome.get("seconds") if outcome or _has_checkpoints(folder) else 0.0
    # If this process is killed, the time that it spent on the run is not known.
    (folder / "outcome.json").unlink(missing_ok=True)
    start, message = time.perf_counter(), None
    try:
      status = "stopped" if train(self.comparison.config(run), folder) else "done"
      if status == "done" and self._entry(run)["status"] != "done":
        status, message = "diverged", "the held-out loss after the last step is not finite"
    except DivergedError as error:
      status, message = "diverged", str(error)
    if message:
      print(f"diverged: {message}", flush=True)
    if seconds is not None:
      seconds += time.perf_counter() - start
    outcome = {
      "status": status,
      "seconds": seconds,
      "message": message,
      "environment": self._environment,
    }
    try:
      _write(folder / "outcome.json", (json.dumps(outcome, indent=1) + "\n").encode())
    except OSError as error:
      raise TrainingError(f"writing {folder / 'outcome.json'} failed: {error.strerror}") from error
    jax.clear_caches()  # the next run compiles its own programs; a hundred runs' would add up
    return status

  def time_steps(self, stop):
    """Times the train steps of all mixers in turn, so that other load falls on all alike."""
    if self._timing:
      return True
    timers, rounds = {}, self.comparison.timing_rounds
    for number, mixer in enumerate(self.comparison.mixers):
      if stop:
        return False
      print(f"timing: compiling {number + 1}/{len(self.comparison.mixers)}, {mixer}", flush=True)
      timers[mixer] = StepTimer(self.comparison.config(self._first_run(mixer)))
    print(f"timing: {rounds} steps of each", flush=True)
    for _ in range(rounds):
      for timer in timers.values():
        if stop:
          return False
        timer.measure()
    self._timing = {
      "measured_on": environment()["device"],
      "rounds": rounds,
      "median_seconds": {mixer: timer.median for mixer, timer in timers.items()},
      "temporary_bytes": {mixer: timer.temporary_bytes for mixer, timer in timers.items()},
    }
    return True


def _has_checkpoints(folder):
  return (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())


def _read_outcome(folder):
  try:
    outcome = json.loads((folder / "outcome.json").read_text("utf-8"))
  except (OSError, ValueError):
    return {}
  return outcome if isinstance(outcome, dict) else {}


def _write(path, data):
  """Replaces a file in one go; leaves it alone if that would change nothing."""
  if path.exists() and path.read_bytes() == data:
    return
  write_atomically(path, data)


def _time_left(results):
  """An estimate for the unfinished runs: by the mixer's own finished runs, or else by all."""
  seconds = {}
  for run in results["runs"]:
    if run["status"] == "done" and run["seconds"] is not None:
      seconds.setdefault(run["mixer"], []).append(run["seconds"])
  known = [value for values in seconds.values() for value in values]
  if not known:
    return ""
  left = sum(
    statistics.mean(seconds.get(run["mixer"], known))
    for run in results["runs"]
    if run["status"] == "unfinished"
  )
  return f", about {tqdm.tqdm.format_interval(left)} of training left"


def main() -> int:
  """Parses the command line, runs the comparison, and returns the exit code."""
  arguments = _parse()
  check_alone()
  check_platform()
  comparison = load_comparison(arguments.config)
  out = arguments.out or Path("runs") / arguments.config.stem
  if str(out).startswith("gs:"):
    raise InputError(f"--out {arguments.out}: comparisons are kept on disks, not in buckets")
  if not arguments.json:
    return compare(comparison, out)[0]
  with contextlib.redirect_stdout(sys.stderr):
    code, results = compare(comparison, out)
  print(json.dumps(results))
  return code


def _parse():
  parser = command_parser("ldm_jax.compare", __doc__)
  parser.add_argument(
    "--config",
    type=Path,
    default=CONFIGS / "compare_tiny.py",
    help="Python file with get_comparison() (default: configs/compare_tiny.py)",
  )
  parser.add_argument(
    "--out",
    type=Path,
    help="where everything goes (default: runs/<name of the config file>)",
  )
  parser.add_argument(
    "--json", action="store_true", help="print the results as one JSON object, progress on stderr"
  )
  return parser.parse_args()


if __name__ == "__main__":
  run_command(main)
