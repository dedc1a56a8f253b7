"""However a command ends, it says so in one line."""

import os
import subprocess
import sys

import pytest

from ldm_jax.command_line import command_parser, parse_train_arguments
from ldm_jax.errors import InputError
from tests.rig import ROOT

_COMMAND = """
from ldm_jax.command_line import run_command
def main():
  {}
  return 0
run_command(main)
"""


def test_a_command_refuses_its_options_in_one_line():
  parser = command_parser("ldm_jax.some", "Does something.")
  parser.add_argument("--rows", type=int)
  with pytest.raises(InputError) as refused:
    parser.parse_args(["--rows", "many"])
  assert str(refused.value) == (
    "argument --rows: invalid int value: 'many'; python -m ldm_jax.some --help lists the options"
  )
  with pytest.raises(InputError, match=r"--config: expected one argument; train\.py --help lists"):
    parse_train_arguments(["--config"])


@pytest.mark.parametrize(
  ("body", "code", "message"),
  [
    ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ("open('/nowhere/file')", 1, "error: [Errno 2] No such file or directory: '/nowhere/file'\n"),
    ("import os; os.close(1); print('x')", 1, "error: [Errno 9] Bad file descriptor\n"),
  ],
)
def test_a_command_that_is_stopped_or_cannot_write_ends_in_one_line(body, code, message):
  result = _run(body, capture_output=True)
  assert (result.returncode, result.stderr, result.stdout) == (code, message, "")


def test_a_reader_that_has_gone_ends_a_command_in_silence():
  reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
  reader.wait()
  body = "print('x' * 100_000, flush=True)"
  result = _run(body, stdout=reader.stdin, stderr=subprocess.PIPE)
  reader.stdin.close()
  assert (result.returncode, result.stderr) == (141, "")


def test_what_the_output_cannot_show_is_written_as_an_escape():
  result = _run("print('1 €')", capture_output=True, env={"PYTHONIOENCODING": "ascii"})
  assert (result.returncode, result.stdout) == (0, "1 \\u20ac\n")


def _run(body, env=None, **streams):
  return subprocess.run(
    [sys.executable, "-c", _COMMAND.format(body)],
    text=True,
    check=False,
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    **streams,
  )
