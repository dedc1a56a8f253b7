"""Stopping politely: SIGTERM and SIGINT ask for a checkpoint and an exit, at any moment."""

import signal
from types import TracebackType

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: run the same command again


class StopRequest:
  """A context in which the first SIGTERM or SIGINT sets a flag instead of ending the process.

  A second SIGINT (Ctrl-C twice) ends it at once.
  """

  def __init__(self):
    self.signal: signal.Signals | None = None
    self._previous = {}

  def __enter__(self) -> "StopRequest":
    """Installs the handlers."""
    for number in (signal.SIGTERM, signal.SIGINT):
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

  def _handle(self, number, frame):
    del frame
    if self.signal is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.signal = signal.Signals(number)
