"""Command lines: `--config FILE --workdir DIR --section.key VALUE`, with types and `--help`."""

import argparse
import dataclasses
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import tyro
from etils import epath

from ldm_jax.config import Config, flatten, load_config, nearest
from ldm_jax.errors import InputError, TrainingError, report

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclasses.dataclass(frozen=True)
class ConfigArguments(Config):
  """Every setting of a run."""

  config: Path = CONFIGS / "ldm_tiny.py"
  """Python file with get_config(); its values are the defaults shown here."""


@dataclasses.dataclass(frozen=True)
class TrainArguments(ConfigArguments):
  """Trains a language model. The same command in the same workdir resumes.

  Exit codes: 0 done, 1 failed, 2 bad configuration or input, 75 stopped by a signal after saving.
  """

  workdir: str | None = None
  """Where the run lives, may be gs://; runs/<name of the config file> if not given."""


def parse_train_arguments(argv: Sequence[str]) -> tuple[Config, epath.Path]:
  """Parses the command line of `train.py`.

  Returns:
    The checked config with all overrides, and the workdir.

  Raises:
    InputError: for an unknown setting or an invalid config.
    SystemExit: 0 after `--help`; 2, with a message, for a value of the wrong type.
  """
  config, parsed = _parse(TrainArguments, argv, "train.py")
  return config, epath.Path(parsed.workdir or f"runs/{parsed.config.stem}")


class OneLineParser(argparse.ArgumentParser):
  """A parser whose refusals are `InputError`s, one line without the usage."""

  def error(self, message: str) -> NoReturn:
    """Refuses."""
    raise InputError(f"{message}; {self.prog} --help lists the options")


def command_parser(module: str, description: str, epilog: str | None = None) -> OneLineParser:
  """A parser for `python -m MODULE` that shows the description as it is written."""
  return OneLineParser(
    prog=f"python -m {module}",
    description=description,
    epilog=epilog,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
  """`--step` and `--best`: the attributes `step` and `folder`, as `load_trained` wants them."""
  parser.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
  parser.add_argument(
    "--best",
    dest="folder",
    action="store_const",
    const="best",
    default="checkpoints",
    help="the state of the lowest held-out loss (train.keep_best, folder best/)",
  )


def parse_config_arguments(
  argv: Sequence[str], prog: str, others: Sequence[str] = ()
) -> tuple[Config, Path]:
  """Parses `--config FILE --section.key VALUE`, what is left of a command's own options.

  Args:
    argv: the arguments that are left.
    prog: the command.
    others: names of the command's own options, which a misspelt one may have meant.

  Returns:
    The checked config, and the file that it came from.

  Raises:
    InputError, SystemExit: as `parse_train_arguments`.
  """
  config, parsed = _parse(ConfigArguments, argv, prog, others)
  return config, parsed.config


def _parse(arguments_class, argv, prog, others=()):
  before = OneLineParser(prog=prog, add_help=False, allow_abbrev=False)
  before.add_argument("--config", default=str(ConfigArguments.config))
  config_path = Path(before.parse_known_args(argv)[0].config)
  config = load_config(config_path)
  own = {field.name for field in dataclasses.fields(arguments_class)} - set(vars(config))
  _check_names(argv, {*flatten(config), *own, *others, "help"})
  parsed = tyro.cli(
    arguments_class,
    args=list(argv),
    default=arguments_class(**vars(config), config=config_path),
    prog=prog,
    config=(tyro.conf.FlagConversionOff,),
  )
  chosen = Config(
    **{field.name: getattr(parsed, field.name) for field in dataclasses.fields(Config)}
  )
  return chosen.validate(), parsed


def run_command(main: Callable[[], int]) -> None:
  """Runs a command and exits with its code; bad input and failed runs end in one line, not a trace.

  Exits with what `main` returns, 2 for `InputError`, 1 for `TrainingError` and for files and
  streams that fail, 130 for Ctrl-C, 141 where the reader of its output has gone, as other commands
  do.  Characters that the output's encoding lacks are written as escapes.
  """
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
  try:
    code = main()
    sys.stdout.flush()
  except (InputError, TrainingError) as error:
    code = report(error)
  except BrokenPipeError:
    code = 128 + signal.SIGPIPE
    _discard_output()
  except OSError as error:
    _discard_output()
    code = report(TrainingError(str(error)))
  except KeyboardInterrupt:
    code = 128 + signal.SIGINT
    print("interrupted", file=sys.stderr)
  sys.exit(code)


def _discard_output():
  """What is still to be written would fail again when Python ends."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_names(argv, known):
  for argument in argv:
    if not argument.startswith("--"):
      continue
    written = argument[2:].split("=", 1)[0]
    name = written.replace("-", "_")
    if name not in known:
      raise InputError(
        f"unknown setting --{written}; did you mean --{nearest(name, known)}? "
        "(--help lists all settings)"
      )
