"""Continues prompts with the model of a run.

    python -m ldm_jax.generate --workdir runs/ldm_tiny --prompt "def "

A prompt is a new document of which the model has seen the beginning.  One prompt's text is printed
as it comes, those of several when all are done.  Prompt and new tokens together must fit into the
context, data.sequence_length of the run.

Exit codes: 0 done, 1 failed, 2 bad configuration or input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ldm_jax.command_line import add_checkpoint_options, command_parser, run_command
from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.decoding import (
  Continuation,
  Sampling,
  check_numbers,
  continue_texts,
  prompt_ids,
  stream_texts,
  text_decoder,
)
from ldm_jax.environment import check_platform
from ldm_jax.errors import InputError
from ldm_jax.model import TransformerLM
from ldm_jax.trained import load_run_config, load_trained, run_tokenizer
from ldm_jax.typing import PyTree

__all__ = ["Continuation", "generate", "main"]

_NEW_TOKENS = 200
_STRIDE = 8  # tokens between two looks at a text that is printed as it comes


def generate(
  model: TransformerLM,
  params: PyTree,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  max_new_tokens: int,
  *,
  context: int,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  seed: int = 0,
) -> list[Continuation]:
  """Continues each prompt, all in one batch, with the cache of keys and values.

  Programs are compiled once for a number of prompts and lengths up to the next power of two.

  Args:
    model: the language model.
    params: its parameters, on any mesh.
    tokenizer: of the model.
    prompts: texts, each the start of a new document; may be empty.
    max_new_tokens: at least 1; fewer come where a document ends.
    context: the most tokens of a prompt and what is new, `data.sequence_length` of the run.
    temperature: 0 takes the most likely token.
    top_k: keep only so many of the most likely tokens.
    top_p: then keep only as many of the most likely tokens as reach this probability.
    seed: of the random choices.

  Raises:
    InputError: before any work, naming the option that is out of range or does not fit.
  """
  decoder = text_decoder(model, params, tokenizer, context)
  sampling = Sampling(temperature, top_k, top_p)
  return continue_texts(decoder, tokenizer, prompts, max_new_tokens, sampling, seed)


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line, generates, prints, and returns the exit code."""
  arguments = _parse(argv)
  sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p).checked()
  check_numbers(arguments.max_new_tokens, arguments.seed)
  prompts = _prompts(arguments)
  check_platform()
  config = load_run_config(arguments.workdir, arguments.data)
  tokenizer = run_tokenizer(arguments.workdir, config)
  context = config.data.sequence_length
  count = _new_tokens(arguments.max_new_tokens, tokenizer, prompts, context)
  trained = load_trained(arguments.workdir, arguments.step, arguments.folder)
  decoder = text_decoder(trained.model, trained.params, tokenizer, context)
  looks = stream_texts(decoder, tokenizer, prompts, count, sampling, arguments.seed, _STRIDE)
  if arguments.json or len(prompts) > 1:
    *_, continuations = looks
    _print_all(continuations, trained.step, arguments.json)
  else:
    _print_as_it_comes(prompts[0], looks)
  return 0


def _print_all(continuations, step, as_json):
  for continuation in continuations:
    if as_json:
      print(json.dumps({"step": step, **continuation._asdict()}))
    else:
      print(f"--- {continuation.prompt}{continuation.text}")


def _print_as_it_comes(prompt, looks):
  print(prompt, end="", flush=True)
  shown = 0
  for (continuation,) in looks:
    print(continuation.text[shown:], end="", flush=True)
    shown = len(continuation.text)
  print()


def _new_tokens(asked, tokenizer, prompts, context):
  """How many; refuses prompts and numbers that do not fit before the model is loaded."""
  longest = max(len(prompt_ids(tokenizer, prompt)) - 1 for prompt in prompts)
  room = context - longest
  if room < 1 or (asked is not None and asked > room):
    raise InputError(
      f"a prompt of {longest} tokens and --max-new-tokens {asked or 1} are more than the context "
      f"of {context} tokens, data.sequence_length of the run; ask for fewer or shorten the prompt"
    )
  return min(_NEW_TOKENS, room) if asked is None else asked


def _prompts(arguments):
  """The texts of the options, in their order; "-" is the standard input."""
  prompts = []
  for option, value in arguments.prompts or ():
    text = _given(value) if option == "--prompt" and value != "-" else _read(option, value)
    if not text:
      raise InputError(f"{option} {value}: the prompt is empty; give the beginning of a text")
    prompts.append(text)
  if not prompts:
    raise InputError("--prompt is missing: the beginning of a text, or - to read it from the input")
  return prompts


def _given(text):
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise InputError(
      f"--prompt: character {error.start} is a byte that is not UTF-8; give a text in that encoding"
    ) from None
  return text


def _read(option, value):
  if option == "--prompt" and sys.stdin is None:
    raise InputError("--prompt -: the standard input is closed; give a text")
  try:
    data = sys.stdin.buffer.read() if option == "--prompt" else Path(value).read_bytes()
  except OSError as error:
    raise InputError(f"{option} {value}: {error.strerror}; give another file") from error
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise InputError(
      f"{option} {value}: byte {error.start} is not UTF-8; give a text in that encoding"
    ) from None


class _Prompt(argparse.Action):
  """Keeps prompts of all options in the order in which they were given."""

  def __call__(self, parser, namespace, value, option_string=None):
    namespace.prompts = [*(namespace.prompts or ()), (option_string, value)]


def _parse(argv):
  parser = command_parser("ldm_jax.generate", __doc__)
  add = parser.add_argument
  add("--workdir", default="runs/ldm_tiny", help="of the run, or an export (default runs/ldm_tiny)")
  add_checkpoint_options(parser)
  add(
    "--prompt",
    action=_Prompt,
    dest="prompts",
    metavar="TEXT",
    help="beginning of a text, - for the standard input; may be repeated",
  )
  add(
    "--prompt-file",
    action=_Prompt,
    dest="prompts",
    metavar="FILE",
    help="a file whose whole text is a prompt; may be repeated",
  )
  add("--max-new-tokens", type=int, help="at most so many (default 200, or what fits)")
  add("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
  add("--top-k", type=int, help="keep only so many of the most likely tokens (default: all)")
  add("--top-p", type=float, help="then keep only those that reach this probability (default: all)")
  add("--seed", type=int, default=0, help="of the random choices (default 0)")
  add("--data", metavar="FOLDER", help="the prepared data of the run, if the folder has moved")
  add("--json", action="store_true", help="print one JSON object for each prompt")
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
