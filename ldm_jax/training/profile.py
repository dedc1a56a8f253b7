"""A window of steps under the JAX profiler."""

import tempfile

import jax
from etils import epath

from ldm_jax import processes
from ldm_jax.errors import TrainingError
from ldm_jax.files import is_remote, upload
from ldm_jax.typing import PathLike


class ProfileWindow:
  """Traces steps start + 1 … start + steps into a folder that TensorBoard and xprof read.

  The loop asks `begins_after` and `ends_after` at every step, and waits for the device before
  `begin` and `end`, so that the trace holds exactly the work of its steps.  Only the first host
  traces.  A folder in a bucket gets the trace at its end.
  """

  def __init__(self, folder: PathLike, start: int, steps: int):
    """Nothing is traced, and no folder made, before `begin`; never where `steps` is 0."""
    self._folder = epath.Path(folder)
    self._start, self._end = start, start + steps
    self._wanted = steps > 0 and processes.is_first()
    self._tracing, self._temporary = False, None

  def begins_after(self, done: int) -> bool:
    """Whether the window begins when `done` steps are finished."""
    return self._wanted and done == self._start

  def ends_after(self, done: int) -> bool:
    """Whether an open window ends when `done` steps are finished."""
    return self._tracing and done == self._end

  def missed(self, done: int) -> bool:
    """Whether a run that goes on after `done` steps is too late for the window to begin."""
    return self._wanted and done > self._start

  def begin(self) -> None:
    """Starts the trace.

    Raises:
      TrainingError: if the profiler refuses, such as when the process is being traced already.
    """
    if is_remote(self._folder):  # JAX writes to disks only
      self._temporary = tempfile.TemporaryDirectory(prefix="ldm_jax_profile_")
    folder = self._temporary.name if self._temporary else str(self._folder)
    self._call(jax.profiler.start_trace, folder)
    self._tracing = True

  def end(self) -> None:
    """Writes the trace, if one is open; also called when a run stops or fails inside the window.

    Raises:
      TrainingError: if it cannot be written.
    """
    if self._tracing:
      self._tracing = False
      self._call(jax.profiler.stop_trace)
      if self._temporary is not None:
        self._call(upload, self._temporary.name, self._folder)
        self._temporary.cleanup()

  def _call(self, function, *arguments):
    try:
      function(*arguments)
    except (RuntimeError, OSError) as error:
      raise TrainingError(
        f"profiling into {self._folder} failed: {error}; run the same command with "
        "--train.profile_steps 0 to go on without"
      ) from error
