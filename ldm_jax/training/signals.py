"""Stopping politely: SIGTERM and SIGINT ask for a checkpoint and an exit, at any moment."""

import os
import signal
from types import TracebackType

import jax
from jax.experimental import multihost_utils

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: run the same command again


class StopRequest:
  """A context in which the first SIGTERM or SIGINT sets a flag instead of ending the process.

  A second SIGINT (Ctrl-C twice) ends it at once.

  Where several processes train together they must stop after the same step.  There a signal is only
  passed on to JAX's preemption service, and `agree` sets the flag in all of them at once.
  """

  def __init__(self):
    self.signal: signal.Signals | None = None
    self._previous = {}
    self._together, self._interrupts = jax.distributed.is_initialized(), 0

  def __enter__(self) -> "StopRequest":
    """Installs the handlers."""
    numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)
    for number in numbers:  # the preemption service has a handler of its own for SIGTERM
      self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(
    self, kind: type | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    """Puts the old handlers back; a request around this one hears of the signal too."""
    for number, handler in self._previous.items():
      signal.signal(number, handler)
      outer = getattr(handler, "__self__", None)
      if isinstance(outer, StopRequest) and self.signal == number:
        outer.signal = outer.signal or self.signal

  def __bool__(self) -> bool:
    """Whether a stop was asked for."""
    return self.signal is not None

  def agree(self, step: int) -> None:
    """Takes note of a stop that all processes have agreed on; to be called after every step."""
    if self._together and multihost_utils.reached_preemption_sync_point(step):
      self.signal = signal.SIGTERM

  def _handle(self, number, frame):
    del frame
    if self._together:
      self._interrupts += 1
      if self._interrupts > 1:
        raise KeyboardInterrupt
      os.kill(os.getpid(), signal.SIGTERM)
      return
    if self.signal is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.signal = signal.Signals(number)
