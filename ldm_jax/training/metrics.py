"""Where numbers go: metrics.jsonl, TensorBoard, and a progress line for the person watching."""

import contextlib
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from ldm_jax import processes
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.files import is_remote, store_errors, upload, write_atomically
from ldm_jax.typing import PathLike


class MetricsWriter:
  """Appends to `workdir/metrics.jsonl` and TensorBoard; a resume leaves no duplicates.

  Nothing can be appended to an object in a bucket.  If the workdir is in one, both are written to
  a temporary folder and put into the bucket whole by `upload`.  Called before a checkpoint is
  saved, it makes sure that the bucket lacks no line of a step up to the newest checkpoint; a kill
  loses later ones, whose steps run again.
  """

  def __init__(self, workdir: PathLike, resumed_step: int):
    """Opens both, dropping lines of steps after `resumed_step`: those steps will run again.

    Where several processes train together, only the first writes; what the others are given they
    drop.

    Raises:
      InputError: if the folder or the file cannot be written.
    """
    self._written = set()
    self._writes = processes.is_first()
    if not self._writes:
      return
    self._workdir, self._temporary = epath.Path(workdir), None
    if is_remote(workdir):
      self._temporary = tempfile.TemporaryDirectory(prefix="ldm_jax_metrics_")
    folder = Path(self._temporary.name if self._temporary else workdir)
    path = folder / "metrics.jsonl"
    try:
      with store_errors(workdir):
        kept = _lines_up_to(self._workdir / "metrics.jsonl", resumed_step)
      if kept is not None:
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
      self._file = path.open("a", encoding="utf-8")
    except OSError as error:
      raise InputError(f"cannot write {path}: {error.strerror}") from error
    self._written = {(line["step"], line["split"]) for line in kept or ()}
    # Written in this thread: tensorboardX's own writer has one that dies silently on a full disk.
    self._events = EventsWriter(str(folder / "events"))
    # TensorBoard hides later events that an earlier process left.
    restart = SessionLog(status=SessionLog.START)
    self._events.write_event(Event(step=resumed_step + 1, session_log=restart))

  def has(self, step: int, split: str) -> bool:
    """Whether a line for this step and split is there, also from before a resume."""
    return (step, split) in self._written

  def write(self, step: int, split: str, values: dict[str, Any]) -> None:
    """One line of JSON, and one TensorBoard scalar for each number.

    Args:
      step: finished optimizer steps.
      split: "train", "eval" or "depth".
      values: names to numbers, or to lists and dictionaries of them, whose scalars are tagged
        split/name/key with list indices of equal length (00, 01, …); strings and None go to the
        JSON only.

    Raises:
      TrainingError: if the disk does not take them.
    """
    if not self._writes:
      return
    try:
      self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
      self._file.flush()
      for tag, number in _scalars(split, values):
        event = Event(step=step, wall_time=time.time(), summary=scalar(tag, number))
        self._events.write_event(event)
      self._events.flush()
    except OSError as error:
      raise TrainingError(
        f"writing metrics to {self._file.name} failed: {error.strerror}; free space or choose "
        "another --workdir, then run the same command again"
      ) from error
    self._written.add((step, split))

  def upload(self) -> None:
    """Brings the files in a bucket up to date; nothing to do where the workdir is on a disk.

    Raises:
      TrainingError: if the bucket does not take them.
    """
    if not self._writes or self._temporary is None:
      return
    try:
      upload(self._temporary.name, self._workdir)
    except OSError as error:
      raise TrainingError(
        f"writing metrics to {self._workdir} failed: {error.strerror}; mend that, then run the "
        "same command again"
      ) from error

  def close(self) -> None:
    """Closes both; on a disk, what `write` was given is there already.

    Raises:
      TrainingError: see `upload`.
    """
    if not self._writes:
      return
    for closing in (self._file.close, self._events.close):
      with contextlib.suppress(OSError):
        closing()
    self.upload()
    if self._temporary is not None:
      self._temporary.cleanup()


def _lines_up_to(path, step):
  """The lines of the file without later ones and without one cut short by a kill.

  None if there is no file.
  """
  if not path.exists():
    return None
  text = path.read_bytes().decode("utf-8", "replace")
  return [line for line in map(_parse, text.splitlines()) if line and line["step"] <= step]


def _parse(line):
  try:
    values = json.loads(line)
  except json.JSONDecodeError:
    return None
  return values if isinstance(values, dict) and {"step", "split"} <= values.keys() else None


def _scalars(tag, value):
  """Tag and number of every number in nested values."""
  if isinstance(value, list):
    digits = len(str(len(value) - 1))
    value = {f"{index:0{digits}}": item for index, item in enumerate(value)}
  if isinstance(value, dict):
    for name, item in value.items():
      yield from _scalars(f"{tag}/{name}", item)
  elif value is not None and not isinstance(value, str):
    yield tag, value


def batch_hash(tokens: np.ndarray) -> str:
  """Names a batch by its token ids: 16 hex digits."""
  return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=8).hexdigest()


class Throughput:
  """Tokens per second of finished work: count tokens when a step's results are on the host."""

  def __init__(self):
    self._tokens = 0
    self._since = time.perf_counter()

  def add(self, tokens: int) -> None:
    """Counts the real targets of a finished step."""
    self._tokens += tokens

  def skip(self, seconds: float) -> None:
    """Leaves time out that was not training, such as an evaluation."""
    self._since += seconds

  def take(self) -> float:
    """Tokens per second since the last call."""
    now = time.perf_counter()
    rate = self._tokens / max(now - self._since, 1e-9)
    self._tokens, self._since = 0, now
    return rate


class Progress:
  """Step, loss, tokens/s and time left: a live line on a terminal, plain lines elsewhere.

  Only the first of several processes prints.
  """

  def __init__(self, steps: int, done: int):
    """Starts at `done` of `steps`."""
    self._steps, self._done, self._start = steps, done, time.perf_counter()
    self._first, self._skipped = done, 0.0
    self._bar = None
    self._prints = processes.is_first()
    if self._prints and sys.stdout.isatty():
      self._bar = tqdm.tqdm(
        total=steps,
        initial=done,
        file=sys.stdout,
        dynamic_ncols=True,
        bar_format="step {n_fmt}/{total_fmt} |{bar}|{postfix}",
      )

  def step(self, done: int, loss: float, rate: float | None, mfu: float | None = None) -> None:
    """Reports a finished step; `rate` (tokens/s) is None except at a logged step.

    `mfu` is a fraction, or None where it is not known; nothing is said about it then.
    """
    self._done = done
    if rate is None:
      if self._bar is not None:
        self._bar.update(done - self._bar.n)
      return
    if not self._prints:
      return
    share = "" if mfu is None else f"MFU {mfu:.1%}  "
    text = f"loss {loss:.4f}  {rate:,.0f} tokens/s  {share}{self._time_left()} left"
    if self._bar is None:
      print(f"step {done}/{self._steps}  {text}", flush=True)
    else:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(done - self._bar.n)

  def say(self, text: str) -> None:
    """Prints a line without breaking the bar."""
    if not self._prints:
      return
    if self._bar is None:
      print(text, flush=True)
    else:
      self._bar.write(text)

  def skip(self, seconds: float) -> None:
    """Leaves time out of the estimate that was not training."""
    self._skipped += seconds

  def close(self) -> None:
    """Ends the live line."""
    if self._bar is not None:
      self._bar.close()

  def _time_left(self):
    spent = time.perf_counter() - self._start - self._skipped
    done = max(self._done - self._first, 1)
    return tqdm.tqdm.format_interval(spent / done * (self._steps - self._done))
