"""Trains a language model.

python train.py [--config FILE] [--workdir DIR] [--section.key VALUE ...]
"""

import sys

from ldm_jax.command_line import parse_train_arguments, run_command
from ldm_jax.joining import join
from ldm_jax.training.loop import train


def main() -> int:
  """Parses the command line and trains; returns the exit code."""
  config, workdir = parse_train_arguments(sys.argv[1:])
  join()
  return train(config, workdir)


if __name__ == "__main__":
  run_command(main)
