"""The two ways a command can end badly, and what each means to a script."""


class InputError(ValueError):
  """A setting, file or argument is wrong.  Raised before any work starts; commands exit with 2.

  The message names the setting or the file and what to change.
  """


class TrainingError(RuntimeError):
  """A run could not go on, such as a loss that is not finite.  Commands exit with 1."""
