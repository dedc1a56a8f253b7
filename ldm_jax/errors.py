"""The ways a command can end badly, and what each means to a script."""

import sys


class InputError(ValueError):
  """A setting, file or argument is wrong.  Raised before any work starts; commands exit with 2.

  The message names the setting or the file and what to change.
  """


class TrainingError(RuntimeError):
  """A run could not go on, such as a disk that is full.  Commands exit with 1."""


class DivergedError(TrainingError):
  """The numbers of a run ended it: a loss, parameter or moment is not finite."""


class DocumentError(ValueError):
  """A document, or the rest of a file of documents, cannot be read; the message says why."""


def first_line(error: BaseException) -> str:
  """What an error says, on one line; its kind if it says nothing."""
  return (str(error).strip() or type(error).__name__).splitlines()[0]


def report(error: InputError | TrainingError) -> int:
  """Prints an error as one line on standard error; returns the exit code that it stands for."""
  sys.stdout.flush()
  print(f"error: {error}", file=sys.stderr, flush=True)
  return 2 if isinstance(error, InputError) else 1
