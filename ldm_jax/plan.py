"""Says what a training step would need on a TPU slice, without one.

    python -m ldm_jax.plan --config FILE --topology v5p:4x4x4 [--section.key VALUE ...]

libtpu's compiler, which runs on any x86-64 Linux machine, compiles the real train step for the
slice.  Its memory, matrix products, traffic and exchanges are read from the program, and the least
times follow from the chip's data sheet.  Nothing is run or timed: all figures are modelled.

Two depths are compiled and the config's own is extrapolated; --full compiles it, and takes long.  A
run that does not fit is changed until it does (ldm_jax/planning/search.py has the order), and the
settings to add are printed.

Exit codes: 0 the run fits as it is, 1 it does not, 2 bad configuration or input.
"""

import json
import sys
from collections.abc import Sequence
from typing import NamedTuple, get_args, get_type_hints

import jax

from ldm_jax.command_line import command_parser, parse_config_arguments, run_command
from ldm_jax.config import Config, MixerConfig, with_mixer
from ldm_jax.errors import InputError
from ldm_jax.planning.plans import Plan, plan, state_bytes
from ldm_jax.planning.report import array_lines, as_arguments, as_json, heading, table, verdict
from ldm_jax.planning.search import changed_settings, cheapest_fit

__all__ = ["Plan", "main", "plan"]

_PROG = "python -m ldm_jax.plan"
_KINDS = get_args(get_type_hints(MixerConfig)["kind"])


class _Options(NamedTuple):
  config: Config
  name: str
  topology: str
  blocks: tuple[int, ...] | None
  compare: str | None
  json: bool


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line, plans, prints, and returns the exit code."""
  options = _parse(sys.argv[1:] if argv is None else argv)
  jax.config.update("jax_platforms", "cpu")  # a TPU that is here stays free for whoever uses it

  def evaluate(config):
    return plan(config, options.topology, options.blocks, _say)

  first, other, fitting = evaluate(options.config), None, None
  if options.compare:
    other = evaluate(with_mixer(options.config, kind=options.compare))
  if not first.fits:
    _say(f"{verdict(first)}; looking for the cheapest change that fits")

    def attempt(config):
      _say(f"trying {as_arguments(changed_settings(options.config, config))}")
      return evaluate(config)

    fitting = cheapest_fit(first, attempt, lambda config: state_bytes(config, options.topology))
  if options.json:
    print(json.dumps(_object(first, other, fitting)))
  else:
    _print(options, first, other, fitting)
  return 0 if first.fits else 1


def _say(line):
  print(line, file=sys.stderr, flush=True)


def _object(first, other, fitting):
  suggestion = fitting and {
    "settings": changed_settings(first.config, fitting.config),
    "plan": as_json(fitting),
  }
  return {**as_json(first), "suggestion": suggestion, "compare": other and as_json(other)}


def _print(options, first, other, fitting):
  plans = {options.name: first}
  if other:
    plans[options.compare] = other
  _print_plans(plans)
  if first.fits:
    return
  if fitting is None:
    print("no change of train.remat, train.accumulate, mesh.fsdp or mesh.tensor makes it fit")
    return
  arguments = as_arguments(changed_settings(first.config, fitting.config))
  print(f"the cheapest change that fits: {arguments}\n")
  _print_plans({options.name: fitting})


def _print_plans(plans):
  first = next(iter(plans.values()))
  for line in (*heading(first), "", *table(plans), "", *array_lines(first), verdict(first)):
    print(line)


def _parse(argv) -> _Options:
  parser = command_parser("ldm_jax.plan", __doc__, "train.py --help lists the settings.")
  parser.add_argument("--topology", help="chip and slice shape, such as v5e:4x4 or v5p:4x4x4")
  parser.add_argument(
    "--blocks",
    help="two or three depths to compile and extrapolate from (default: 2,4); three for costs that "
    "grow faster than the depth",
  )
  parser.add_argument("--full", action="store_true", help="compile the real depth instead")
  parser.add_argument("--compare", metavar="KIND", help="a mixer to show beside, such as preln")
  parser.add_argument("--json", action="store_true", help="print one JSON object instead")
  parser.add_argument("--config", help="Python file with get_config() (configs/ldm_tiny.py)")
  own, rest = parser.parse_known_args(argv)
  if own.config is not None:
    rest = ["--config", own.config, *rest]
  names = [name for name in vars(own) if name != "config"]
  config, path = parse_config_arguments(rest, _PROG, names)
  if own.topology is None:
    raise InputError("--topology is missing: the chip and slice shape, such as v5e:4x4")
  if own.compare is not None and own.compare not in _KINDS:
    raise InputError(f"--compare {own.compare}: known mixers are {', '.join(_KINDS)}")
  if own.full and own.blocks is not None:
    raise InputError("--full compiles the real depth, so --blocks has no use; leave one out")
  blocks = None if own.full else _depths("2,4" if own.blocks is None else own.blocks)
  return _Options(config, path.stem, own.topology, blocks, own.compare, own.json)


def _depths(text):
  try:
    return tuple(map(int, text.split(",")))
  except ValueError:
    raise InputError(f"--blocks {text}: give depths such as 2,4") from None


if __name__ == "__main__":
  run_command(main)
