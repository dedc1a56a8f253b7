"""The ways a command can end badly, and what each means to a script."""


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
