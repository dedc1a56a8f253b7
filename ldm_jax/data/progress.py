"""Progress over bytes: a live bar on a terminal, plain lines elsewhere, on standard error."""

import sys
import time
from types import TracebackType

import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
  """Counts bytes of input."""

  def __init__(self, total: int):
    """Of `total` bytes."""
    self._total, self._done = total, 0
    self._start = self._said = time.monotonic()
    self._bar = None
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024)

  def __enter__(self) -> "ByteProgress":
    return self

  def __exit__(
    self, kind: type | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()

  def set(self, done: int) -> None:
    """Reports `done` bytes in all."""
    step, self._done = done - self._done, done
    if self._bar is not None:
      self._bar.update(step)
      return
    now = time.monotonic()
    if now - self._said >= _SECONDS_BETWEEN_LINES:
      self._said = now
      rate = done / max(now - self._start, 1e-9) / 1e6
      print(
        f"{done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB read, {rate:,.1f} MB/s",
        file=sys.stderr,
        flush=True,
      )
