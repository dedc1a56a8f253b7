"""Makes a prepared data set: text, JSON lines or Parquet to shards of token ids.

    python -m ldm_jax.data.prepare --input 'texts/*.jsonl' --tokenizer tok.json --output data/NAME

Run the same command again after a stop: inputs that are done are kept, and the result is the same
to the bit, whatever the number of workers and of interruptions.

Exit codes: 0 done, 1 failed (a full disk), 2 bad arguments or input, 75 stopped by a signal.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from etils import epath

from ldm_jax.command_line import command_parser, run_command
from ldm_jax.data.inputs import FORMATS, find_inputs
from ldm_jax.data.jobs import Settings, remove_leftovers, split_into_jobs
from ldm_jax.data.prepared import (
  CHUNK,
  FORMAT_VERSION,
  META_FILE,
  PARTS,
  TOKENIZER_FILE,
  PreparedData,
  fingerprint,
)
from ldm_jax.data.progress import ByteProgress
from ldm_jax.data.shards import writing
from ldm_jax.data.tokenizer import Tokenizer, load_tokenizer
from ldm_jax.data.workers import run_jobs
from ldm_jax.errors import InputError
from ldm_jax.files import write_atomically
from ldm_jax.training.signals import STOPPED_EXIT_CODE, StopRequest

UNFINISHED = "unfinished"  # folder inside the output, gone when the data set is complete
_SHOWN = 20  # problems of one input in the printed report


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the arguments, prepares, prints the report; returns the exit code."""
  arguments = _parse(argv)
  settings = Settings(arguments.field, arguments.column, arguments.held_out_one_in)
  with StopRequest() as stop:
    meta = prepare(
      arguments.input,
      arguments.output,
      tokenizer=load_tokenizer(arguments.tokenizer, arguments.boundary),
      settings=settings,
      format=arguments.format,
      workers=arguments.workers,
      stop=stop,
    )
  if meta is None:
    print(
      f"stopped by {stop.signal.name}; the same command goes on where it stopped", file=sys.stderr
    )
    return STOPPED_EXIT_CODE
  print(json.dumps(meta) if arguments.json else report(meta, arguments.output))
  return 0


def prepare(
  inputs: Sequence[str],
  output: str,
  tokenizer: Tokenizer,
  settings: Settings = Settings(),  # noqa: B008 frozen
  format: str = "auto",
  workers: int = 1,
  stop: StopRequest | None = None,
) -> dict[str, Any] | None:
  """Prepares a data set, or what is left of it.

  Args:
    inputs: files, folders and globs, local or gs://.
    output: folder of the data set, local or gs://.
    tokenizer: for every document.
    settings: which text to take and how to split.
    format: of the inputs, see `find_inputs`.
    workers: processes that read at once; 1 reads in this one.
    stop: becomes true when a signal asks to end.

  Returns:
    The contents of `meta.json` plus "fingerprint"; None if it was stopped.

  Raises:
    InputError: if the arguments, the inputs or what is in `output` already do not fit.
    TrainingError: if the output cannot be written.
  """
  if settings.held_out_one_in < 2:
    raise InputError(f"--held-out-one-in must be at least 2, got {settings.held_out_one_in}")
  if workers < 1:
    raise InputError(f"--workers must be at least 1, got {workers}")
  files, ignored = find_inputs(inputs, format, output)
  plan = _plan(files, tokenizer, settings, format)
  folder, jobs = epath.Path(output), split_into_jobs(files)
  old = _open_output(folder, plan)
  finished = {0: old} if old is not None else _finished_jobs(folder)
  with ByteProgress(sum(item.size for item in files)) as progress:
    records = run_jobs(
      jobs if old is None else [],
      finished,
      os.fspath(folder),
      tokenizer,
      settings,
      workers,
      keep=functools.partial(_keep, folder),
      progress=progress,
      stop=stop,
    )
  if records is None:
    return None
  meta = old if old is not None else _finish(folder, plan, records, ignored, tokenizer)
  if "://" not in output:
    PreparedData(folder)  # all it names is there and whole
  return meta | {"fingerprint": fingerprint(meta)}


def _plan(files, tokenizer, settings, format):
  """What two runs must agree on to make the same data set."""
  return {
    "format_version": FORMAT_VERSION,
    "tokenizer": {
      "kind": tokenizer.kind,
      "vocab_size": tokenizer.vocab_size,
      "boundary": tokenizer.boundary,
      "boundary_token": getattr(tokenizer, "boundary_token", None),
      "sha256": tokenizer.sha256,
    },
    "settings": dataclasses.asdict(settings) | {"format": format, "chunk": CHUNK},
    "files": [[item.path, item.size, item.format] for item in files],
  }


def _open_output(folder, plan):
  """Creates the folder or checks that it holds this data set; returns its meta if complete."""
  meta, begun = _read_json(folder / META_FILE), _read_json(folder / UNFINISHED / "plan.json")
  if meta is not None:
    _check_same(folder, plan, meta.get("plan", {}))
    return meta
  if begun is not None:
    _check_same(folder, plan, begun)
    remove_leftovers(os.fspath(folder))
    remove_leftovers(os.fspath(folder / UNFINISHED))
    return None
  try:
    strange = [path.name for path in folder.iterdir() if path.name != UNFINISHED]
  except FileNotFoundError:
    strange = []
  except OSError as error:
    raise InputError(f"--output {folder}: {error.strerror}; give another --output") from error
  if strange:
    raise InputError(
      f"--output {folder} is not empty and no data set (it has {sorted(strange)[0]}); give a new "
      "folder"
    )
  try:
    (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f"--output {folder}: cannot write there: {error.strerror}") from error
  with writing(folder):
    write_atomically(folder / UNFINISHED / "plan.json", json.dumps(plan))
  return None


def _read_json(path):
  """A file's contents, or None if there is none."""
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as error:
    raise InputError(
      f"{path} is damaged ({error}); delete the folder or give another --output"
    ) from error


def _check_same(folder, wanted, had):
  if wanted == had:
    return
  differences = []
  for section in ("tokenizer", "settings"):
    old, new = had.get(section, {}), wanted[section]
    differences += [
      f"{section} {key} was {old.get(key)!r} and is now {new[key]!r}"
      for key in new
      if old.get(key) != new[key]
    ]
  old, new = ({name: size for name, size, _ in plan.get("files", [])} for plan in (had, wanted))
  for words, names in (
    ("without", sorted(old.keys() - new.keys())),
    ("with new", sorted(new.keys() - old.keys())),
    ("with changed", sorted(name for name in old.keys() & new.keys() if old[name] != new[name])),
  ):
    if names:
      differences.append(f"{words} input {names[0]} (and {len(names) - 1} more)")
  raise InputError(
    f"--output {folder} holds another data set: {'; '.join(differences) or 'another format'}. "
    "Give the arguments it was made with, or another --output"
  )


def _job_file(folder, number):
  return folder / UNFINISHED / f"job-{number:05d}.json"


def _keep(folder, number, record):
  with writing(folder):
    write_atomically(_job_file(folder, number), json.dumps(record))


def _finished_jobs(folder):
  finished = {}
  for path in (folder / UNFINISHED).glob("job-*.json"):
    finished[int(path.stem.removeprefix("job-"))] = _read_json(path)
  return finished


def _finish(folder, plan, records, ignored, tokenizer):
  """Writes `meta.json`, which makes the folder a data set."""
  inputs = [item for record in records for item in record["inputs"]]
  shards = {part: [r["shards"][part] for r in records if r["shards"][part]] for part in PARTS}
  documents = {part: sum(shard["documents"] for shard in shards[part]) for part in PARTS}
  if not all(documents.values()):
    _discard(folder, shards)
    one_in = plan["settings"]["held_out_one_in"]
    raise InputError(
      f"no document for the {'training' if not documents['train'] else 'held-out'} part: of "
      f"{sum(documents.values())} documents one in {one_in} is held out, by a hash of its text. "
      "Give more documents or another --held-out-one-in"
      + "".join(f"\n  {line}" for line in _problem_lines(inputs, ignored))
    )
  meta = {
    "format_version": FORMAT_VERSION,
    "tokenizer": plan["tokenizer"],
    "documents": documents,
    "tokens": {part: sum(shard["ids"] for shard in shards[part]) for part in PARTS},
    "text_bytes": {part: sum(shard["text_bytes"] for shard in shards[part]) for part in PARTS},
    "empty": sum(item["empty"] for item in inputs),
    "skipped": sum(item["skipped"] for item in inputs),
    "repaired": sum(item["repaired"] for item in inputs),
    "split": "held out if the first 8 bytes of SHA-256 of the text's first 65,536 bytes, as a "
    "big-endian number, are divisible by held_out_one_in",
    "shards": shards,
    "inputs": inputs,
    "ignored": [dataclasses.asdict(item) for item in ignored],
    "plan": plan,
  }
  with writing(folder):
    if tokenizer.sha256 is not None:
      write_atomically(folder / TOKENIZER_FILE, tokenizer.json)
    write_atomically(folder / META_FILE, json.dumps(meta, indent=1) + "\n")
    (folder / UNFINISHED).rmtree()
  return meta


def _discard(folder, shards):
  """Removes what can become no data set, so that another try may use the folder."""
  with writing(folder):
    for part in PARTS:
      for shard in shards[part]:
        (folder / shard["name"]).unlink(missing_ok=True)
    (folder / UNFINISHED).rmtree()


def report(meta: dict[str, Any], output: str) -> str:
  """The printed report: counts, and every input that was skipped or repaired, with its place."""
  counts = [
    f"{part}: {meta['documents'][part]:,} documents, {meta['tokens'][part]:,} tokens, "
    f"{meta['text_bytes'][part]:,} bytes of text, {len(meta['shards'][part])} shards"
    for part in PARTS
  ]
  lines = _problem_lines(meta["inputs"], [argparse.Namespace(**item) for item in meta["ignored"]])
  totals = f"{meta['skipped']:,} skipped, {meta['repaired']:,} repaired, {meta['empty']:,} empty"
  return "\n".join([*lines, *counts, f"{totals}; {output} is ready"])


def _problem_lines(inputs, ignored):
  for item in ignored:
    yield f"ignored {item.path}: {item.reason}"
  for item in inputs:
    shown = item["problems"][:_SHOWN]
    for problem in shown:
      place = f", {problem['where']}" if problem["where"] else ""
      yield f"{problem['what']} {item['path']}{place}: {problem['reason']}"
    more = item["empty"] + item["skipped"] + item["repaired"] - len(shown)
    if more:
      yield f"… and {more:,} more in {item['path']}, see {META_FILE}"


def _parse(argv):
  parser = command_parser(
    "ldm_jax.data.prepare",
    "Makes a prepared data set of text, JSON lines or Parquet files. The same command goes on\n"
    "after a stop.",
    "Exit codes: 0 done, 1 failed, 2 bad arguments or input, 75 stopped by a signal.",
  )
  add = parser.add_argument
  add("--input", nargs="+", required=True, help="files, folders or globs, local or gs://")
  add("--output", required=True, help="folder of the data set, local or gs://")
  add("--tokenizer", default="bytes", help="'bytes' or a tokenizers JSON file (default bytes)")
  add("--boundary", help="the tokenizer's token between documents (default: its end-of-text token)")
  add("--format", choices=FORMATS, default="auto", help="of the inputs (default: by file name)")
  add("--field", default="text", help="key of the text in JSON lines (default text)")
  add("--column", default="text", help="column of the text in Parquet files (default text)")
  add(
    "--held-out-one-in", type=int, default=200, help="documents per held-out document (default 200)"
  )
  add("--workers", type=int, default=1, help="processes that read at once (default 1)")
  add("--json", action="store_true", help="print meta.json as one line instead of a report")
  return parser.parse_args(argv)


if __name__ == "__main__":
  run_command(main)
