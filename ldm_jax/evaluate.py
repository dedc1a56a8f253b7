"""Loss, perplexity and bits per byte of the model of a run.

    python -m ldm_jax.evaluate --workdir runs/ldm_tiny

On the held-out part of the run's own data, or of a prepared data set made with the same tokenizer
(--data).  All of it, unless --batches limits it to the first batches that training evaluates on.

  --per-position   the loss by the number of tokens that the model saw before, which in packed rows
                   is the position in the document's piece of its row
  --per-document   the sum over each document, boundary included, as JSON lines in --output; a
                   document that is longer than its row goes on in the next without what was before

Exit codes: 0 done, 1 failed, 2 bad configuration or input.
"""

import json
import math
from collections.abc import Sequence

from etils import epath

from ldm_jax.command_line import add_checkpoint_options, command_parser, run_command
from ldm_jax.data import ByteTokenizer, Dataset, PreparedData, load_dataset
from ldm_jax.data.pipeline import batches_of
from ldm_jax.environment import check_platform
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.files import check_free_to_write, store_errors, write_atomically
from ldm_jax.scoring import Scorer, Tally, score_batches
from ldm_jax.sharding import parts_of
from ldm_jax.trained import (
  TrainedModel,
  check_knows_data,
  load_run_config,
  load_trained,
)

__all__ = ["evaluate_run", "main"]


def evaluate_run(
  trained: TrainedModel, dataset: Dataset, part: str = "held_out", batches: int | None = None
) -> tuple[dict[str, float | int], Tally]:
  """Scores a part of a data set.

  Args:
    trained: the model, on any mesh that divides the sequence length.
    dataset: from `load_dataset`.
    part: "held_out" or "train".
    batches: as many as `train.eval_batches` counts, of the run's batch size; None for all rows, in
      their order.

  Returns:
    {"loss", "tokens", "perplexity"}, also "bits_per_byte" where tokens are bytes; and the sums by
    position and, without `batches`, by document.
  """
  config, mesh, tokenizer = trained.config, trained.mesh, dataset.tokenizer
  of_bytes = isinstance(tokenizer, ByteTokenizer)
  boundary = None if tokenizer is None else tokenizer.boundary
  rows = dataset.held_out_rows if part == "held_out" else dataset.train_rows
  limit = len(rows)
  if batches is not None:
    rows, limit = dataset.evaluation_rows(part), batches * config.data.batch_size
  parts = parts_of(mesh, "batch")
  size = parts * math.ceil(config.data.batch_size // config.train.accumulate / parts)
  tally = Tally(boundary if batches is None else None)
  scorer = Scorer(trained.model, trained.params, mesh)
  return score_batches(scorer, batches_of(rows, limit, size), boundary, of_bytes, tally), tally


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line, evaluates, prints, and returns the exit code."""
  arguments = _parse(argv)
  check_platform()
  if arguments.data is None:
    check_knows_data(arguments.workdir, "give --data FOLDER")
  if arguments.output is not None:
    check_free_to_write("--output", arguments.output, folder=False)
  config = load_run_config(arguments.workdir, arguments.data)
  dataset = _dataset(config)
  if arguments.per_document and dataset.tokenizer is None:
    raise InputError("--per-document: data.source = synthetic has no documents; leave it out")
  trained = load_trained(arguments.workdir, arguments.step, arguments.folder)
  result, tally = evaluate_run(trained, dataset, arguments.part, arguments.batches)
  if not math.isfinite(result["loss"]):
    raise TrainingError(
      f"step {trained.step} of {arguments.workdir} has a loss of {result['loss']}: its parameters "
      "are damaged or its training diverged; evaluate an earlier --step"
    )
  if "bits_per_byte" not in result and config.data.source == "prepared" and not arguments.batches:
    text_bytes = PreparedData(config.data.path).meta["text_bytes"][arguments.part]
    result["bits_per_byte"] = result["loss"] * result["tokens"] / max(text_bytes, 1) / math.log(2)
  if arguments.per_document:
    _write_documents(arguments.output, tally)
  if arguments.per_position:
    result["per_position"] = _by_position(tally)
  data = config.data.path or config.data.source
  result = {"step": trained.step, "part": arguments.part, "data": data, **result}
  print(json.dumps(result) if arguments.json else _words(result, arguments))
  return 0


def _dataset(config):
  try:
    return load_dataset(config)
  except InputError as error:
    if config.data.source != "prepared":
      raise
    raise InputError(
      f"{error}; if the data of the run have moved, give them with --data"
    ) from error


def _by_position(tally):
  """Mean losses and counts by position; null where there is no target."""
  pairs = zip(tally.position_nats.tolist(), tally.position_tokens.tolist(), strict=True)
  losses = [nats / tokens if tokens else None for nats, tokens in pairs]
  return {"loss": losses, "tokens": tally.position_tokens.tolist()}


def _write_documents(path, tally):
  lines = [
    json.dumps({"document": number, "tokens": tokens, "nats": nats, "loss": nats / max(tokens, 1)})
    for number, (tokens, nats) in enumerate(
      zip(tally.document_tokens, tally.document_nats, strict=True)
    )
  ]
  try:
    with store_errors(path):
      write_atomically(epath.Path(path), "".join(f"{line}\n" for line in lines))
  except OSError as error:
    raise InputError(f"--output {path}: cannot write there: {error.strerror}") from error


def _words(result, arguments):
  part = "held-out" if result["part"] == "held_out" else "training"
  bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
  lines = [
    f"{arguments.workdir} at step {result['step']}, {part} part of {result['data']}: "
    f"{result['tokens']:,} tokens",
    f"loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.3f}{bits}",
  ]
  if "per_position" in result:
    pairs = zip(*result["per_position"].values(), strict=True)
    lines += [
      f"  position {at:>6}  loss {loss:.4f}  {tokens:,} tokens"
      for at, (loss, tokens) in enumerate(pairs)
      if tokens
    ]
  return "\n".join(lines)


def _parse(argv):
  parser = command_parser("ldm_jax.evaluate", __doc__)
  add = parser.add_argument
  add("--workdir", default="runs/ldm_tiny", help="of the run, or an export (default runs/ldm_tiny)")
  add_checkpoint_options(parser)
  add("--data", metavar="FOLDER", help="a prepared data set with the tokenizer of the run")
  add("--part", choices=("held_out", "train"), default="held_out", help="default held_out")
  add("--batches", type=int, help="of the run's batch size (default: all rows)")
  add("--per-position", action="store_true", help="also the loss by position")
  add("--per-document", action="store_true", help="also that of each document, in --output")
  add("--output", metavar="FILE", help="JSON lines, one for each document, may be gs://")
  add("--json", action="store_true", help="print one JSON object")
  arguments = parser.parse_args(argv)
  if arguments.batches is not None and arguments.batches < 1:
    raise InputError(f"--batches {arguments.batches}: give at least 1, or leave it out for all")
  if arguments.per_document and arguments.batches is not None:
    raise InputError("--batches takes rows out of their order; leave it out with --per-document")
  if arguments.per_document != (arguments.output is not None):
    raise InputError("--per-document and --output FILE, where it is written, go together")
  return arguments


if __name__ == "__main__":
  run_command(main)
