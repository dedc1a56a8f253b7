"""Preparing: every good document once, every bad one named, the same bits however it is run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from etils import epath

from ldm_jax import files
from ldm_jax.data import jobs, load_tokenizer
from ldm_jax.data.jobs import Settings, is_held_out
from ldm_jax.data.prepare import main, prepare
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import InputError, TrainingError
from tests.data.corpora import hostile_folder, read_documents, train_bpe, write_lines

ONE_IN_5 = Settings(held_out_one_in=5)


def contents(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in sorted(Path(folder).rglob("*"))
    if path.is_file()
  }


def prepare_here(folder, output, tokenizer=None, settings=ONE_IN_5, **more):
  return prepare([str(folder)], str(output), tokenizer or ByteTokenizer(), settings, **more)


@pytest.fixture
def texts(tmp_path):
  (tmp_path / "in").mkdir()
  return [
    text
    for name in "abcd"
    for text in write_lines(tmp_path / "in" / f"{name}.jsonl", 40, ord(name))
  ]


@pytest.fixture
def small_jobs(monkeypatch):
  monkeypatch.setattr(jobs, "JOB_BYTES", 1)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_documents_in_are_documents_out(texts, tmp_path, kind):
  tokenizer = ByteTokenizer() if kind == "bytes" else load_tokenizer(train_bpe(tmp_path / "t.json"))
  meta = prepare_here(tmp_path / "in", tmp_path / "out", tokenizer)
  parts = read_documents(tmp_path / "out")
  as_text = lambda text: text.decode() if kind == "bytes" else text
  for part, documents in parts.items():
    wanted = [text for text in texts if is_held_out(text.encode(), 5) == (part == "held_out")]
    assert [as_text(document) for document in documents] == wanted
    assert meta["documents"][part] == len(wanted) > 10
    assert meta["text_bytes"][part] == sum(len(text.encode()) for text in wanted)
  ids = sum(len(tokenizer.encode(text)) + 1 for text in texts)
  assert sum(meta["tokens"].values()) == ids


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_hostile_folder_loses_nothing_and_names_all(tmp_path, capsys, kind):
  good, problems = hostile_folder(tmp_path / "in")
  tokenizer = "bytes"
  if kind == "bpe":
    tokenizer = str(train_bpe(tmp_path / "t.json"))
    problems |= {("repaired", "latin.txt", "byte 3"), ("repaired", "cut.txt", "byte 10")}
    problems.discard(("repaired", "l.jsonl", ""))
  arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
  arguments += ["--tokenizer", tokenizer, "--held-out-one-in", "9"]
  assert main([*arguments, "--json"]) == 0
  meta = json.loads(capsys.readouterr().out)
  documents = [document for part in read_documents(tmp_path / "out").values() for document in part]
  if kind == "bpe":
    good = [document.decode("utf-8", "replace") for document in good]
  assert Counter(documents) == Counter(good)
  found = {
    (problem["what"], Path(item["path"]).name, problem["where"])
    for item in meta["inputs"]
    for problem in item["problems"]
  } | {("ignored", Path(item["path"]).name, "") for item in meta["ignored"]}
  assert found == problems
  assert (meta["skipped"], meta["repaired"], meta["empty"]) == tuple(
    sum(what == problem[0] for problem in problems) for what in ("skipped", "repaired", "empty")
  )
  assert main(arguments) == 0
  printed = capsys.readouterr().out
  for _, name, where in problems:
    assert f"{name}, {where}: " in printed if where else f"{name}: " in printed


def test_equal_documents_land_in_the_same_part(tmp_path):
  (tmp_path / "in").mkdir()
  for copy in range(3):
    write_lines(tmp_path / "in" / "a.jsonl", 30)
    os.rename(tmp_path / "in" / "a.jsonl", tmp_path / "in" / f"{copy}.jsonl")
  prepare_here(tmp_path / "in", tmp_path / "out")
  for documents in read_documents(tmp_path / "out").values():
    assert set(Counter(documents).values()) == {3}


def test_workers_and_job_sizes_keep_the_result(texts, tmp_path, small_jobs):
  one = prepare_here(tmp_path / "in", tmp_path / "one")
  two = prepare_here(tmp_path / "in", tmp_path / "two", workers=2)
  assert contents(tmp_path / "one") == contents(tmp_path / "two")
  assert one == two
  assert len(one["shards"]["train"]) == 4


def test_a_killed_run_is_no_data_set_and_goes_on_to_the_same_bits(texts, tmp_path, small_jobs):
  whole = prepare_here(tmp_path / "in", tmp_path / "whole")
  program = (
    "import sys, time; from ldm_jax.data import jobs, prepare, workers; jobs.JOB_BYTES = 1\n"
    "real = workers.run_job\n"
    "def slow(job, *rest):\n"
    "  record = real(job, *rest)\n"
    "  print('job', job.number, flush=True)\n"
    "  time.sleep(60 * (job.number == int(sys.argv[1])))\n"
    "  return record\n"
    "workers.run_job = slow\n"
    "sys.exit(prepare.main(sys.argv[2:]))\n"
  )
  arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
  arguments += ["--held-out-one-in", "5"]
  for number in (0, 2):
    with subprocess.Popen(
      [sys.executable, "-c", program, str(number), *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
      while process.stdout.readline() != f"job {number}\n":
        assert process.poll() is None
      process.send_signal(signal.SIGKILL)
    with pytest.raises(InputError, match="not a prepared data set"):
      read_documents(tmp_path / "out")
  (tmp_path / "out" / ".train-00003.array_record.1.tmp").write_bytes(b"half")
  seen = []
  run = jobs.run_job
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      "ldm_jax.data.workers.run_job",
      lambda job, *rest: (seen.append(job.number), run(job, *rest))[1],
    )
    assert prepare_here(tmp_path / "in", tmp_path / "out") == whole
  assert seen == [2, 3]
  assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_stops_with_75_and_the_same_command_finishes(texts, tmp_path, workers, capsys):
  arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
  arguments += ["--held-out-one-in", "5", "--workers", str(workers)]
  program = (
    "import os, signal, sys; from ldm_jax.data import prepare\n"
    "real = prepare._plan\n"
    "def plan(*args):\n"
    "  os.kill(os.getpid(), signal.SIGTERM)\n"
    "  return real(*args)\n"
    "prepare._plan = plan\n"
    "if __name__ == '__main__': sys.exit(prepare.main(sys.argv[1:]))\n"
  )
  (tmp_path / "program.py").write_text(program)
  command = [sys.executable, str(tmp_path / "program.py"), *arguments]
  process = subprocess.run(command, capture_output=True, text=True)
  assert process.returncode == 75, process.stderr
  assert "stopped by SIGTERM; the same command goes on" in process.stderr
  assert main(arguments) == 0
  assert "is ready" in capsys.readouterr().out


def test_a_finished_set_is_left_alone_and_other_requests_are_refused(texts, tmp_path):
  meta = prepare_here(tmp_path / "in", tmp_path / "out")
  before = contents(tmp_path / "out")
  assert prepare_here(tmp_path / "in", tmp_path / "out") == meta
  with pytest.raises(InputError, match="held_out_one_in was 5 and is now 6"):
    prepare_here(tmp_path / "in", tmp_path / "out", settings=Settings(held_out_one_in=6))
  bpe = load_tokenizer(train_bpe(tmp_path / "t.json"))
  with pytest.raises(InputError, match="tokenizer kind was 'bytes' and is now 'tokenizers'"):
    prepare_here(tmp_path / "in", tmp_path / "out", bpe)
  changed = tmp_path / "in" / "b.jsonl"
  text = changed.read_text()
  changed.write_text(text.replace("document 3", "document 4"))
  with pytest.raises(InputError, match=r"b\.jsonl has changed since it was prepared"):
    prepare_here(tmp_path / "in", tmp_path / "out")
  changed.write_text(text + "\n")
  with pytest.raises(InputError, match=r"with changed input .*b\.jsonl"):
    prepare_here(tmp_path / "in", tmp_path / "out")
  changed.unlink()
  with pytest.raises(InputError, match=r"without input .*b\.jsonl"):
    prepare_here(tmp_path / "in", tmp_path / "out")
  assert contents(tmp_path / "out") == before


def test_a_finished_set_that_lost_a_shard_is_not_called_ready(texts, tmp_path):
  prepare_here(tmp_path / "in", tmp_path / "out")
  (tmp_path / "out" / "train-00000.array_record").unlink()
  with pytest.raises(InputError, match=r"train-00000\.array_record is missing"):
    prepare_here(tmp_path / "in", tmp_path / "out")


def test_an_empty_part_is_refused_and_leaves_the_folder_free(tmp_path):
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "a.txt").write_text("only one")
  (tmp_path / "in" / "b.parquet").write_text("bad")
  with pytest.raises(InputError, match=r"no document for the held-out part: of 1 .*\n.*b\.parquet"):
    prepare_here(tmp_path / "in", tmp_path / "out", settings=Settings(held_out_one_in=1000))
  assert not contents(tmp_path / "out")
  write_lines(tmp_path / "in" / "c.jsonl", 40)
  assert prepare_here(tmp_path / "in", tmp_path / "out")["documents"]["held_out"]


def test_bad_arguments_end_with_the_way_out(texts, tmp_path):
  with pytest.raises(InputError, match=r"nothing\*\.jsonl: no such file"):
    prepare([str(tmp_path / "nothing*.jsonl")], str(tmp_path / "out"), ByteTokenizer())
  with pytest.raises(InputError, match="at least 2"):
    prepare_here(tmp_path / "in", tmp_path / "out", settings=Settings(held_out_one_in=1))
  with pytest.raises(InputError, match="--workers must be at least 1"):
    prepare_here(tmp_path / "in", tmp_path / "out", workers=0)
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "notes").touch()
  with pytest.raises(InputError, match=r"is not empty and no data set \(it has notes\)"):
    prepare_here(tmp_path / "in", tmp_path / "mine")
  with pytest.raises(InputError, match="no field 'body'"):
    prepare_here(tmp_path / "in", tmp_path / "out", settings=Settings(field="body"))
  (tmp_path / "pictures").mkdir()
  (tmp_path / "pictures" / "a.png").touch()
  with pytest.raises(InputError, match=r"no file to read .*--format"):
    prepare_here(tmp_path / "pictures", tmp_path / "out")


def test_overlapping_inputs_count_once_and_a_glob_skips_folders(texts, tmp_path):
  (tmp_path / "in" / "e.jsonl").mkdir()
  patterns = [str(tmp_path / "in"), str(tmp_path / "in" / "*.jsonl"), str(tmp_path / "in/a.jsonl")]
  os.symlink(tmp_path / "in" / "a.jsonl", tmp_path / "in" / "same.jsonl")
  meta = prepare(patterns, str(tmp_path / "out"), ByteTokenizer(), ONE_IN_5)
  assert sum(meta["documents"].values()) == len(texts)
  assert {Path(item["path"]).name: item["reason"].split(" ")[0] for item in meta["ignored"]} == {
    "e.jsonl": "a",
    "same.jsonl": "the",
  }


def test_a_full_disk_is_a_failure_not_bad_input(texts, tmp_path, monkeypatch):
  def full(path):
    if "array_record" in str(path):
      raise OSError(28, "No space left on device")

  monkeypatch.setattr("ldm_jax.files.sync", full)
  with pytest.raises(TrainingError, match=r"No space left .* run the same command again"):
    prepare_here(tmp_path / "in", tmp_path / "out")
  monkeypatch.undo()
  assert prepare_here(tmp_path / "in", tmp_path / "out")["skipped"] == 0


def test_a_bucket_gets_whole_files_through_epath(tmp_path, monkeypatch):
  """A shard for a bucket is written locally and handed to epath whole."""
  uploaded = []

  class Target:
    name = "train-00000.array_record"

    def __fspath__(self):
      return "gs://bucket/train-00000.array_record"

  monkeypatch.setattr(
    type(epath.Path(tmp_path)),
    "copy",
    lambda self, target, overwrite: uploaded.append((self.read_bytes(), os.fspath(target))),
  )
  with files.replacing(Target()) as path:
    Path(path).write_bytes(b"shard")
  assert uploaded == [(b"shard", "gs://bucket/train-00000.array_record")]


@pytest.mark.slow
def test_a_line_of_200_mb_stays_below_1_gib(tmp_path):
  (tmp_path / "in").mkdir()
  with (tmp_path / "in" / "long.jsonl").open("wb") as file:
    file.write(b'{"text": "before"}\n{"text": "')
    for _ in range(1000):
      file.write(rb"caf\u00e9 \ud83d\ude00 \n" + "é 😀 ".encode() * 10 + b"x y " * 50_000)
    file.write(b'"}\n{"text": "after"}\n')
  with (tmp_path / "in" / "long.txt").open("wb") as file:
    for _ in range(500):
      file.write(b"no newline " * 40_000)
  for number in range(100):
    (tmp_path / "in" / f"{number}.txt").write_text(f"small {number}")
  for tokenizer in ("bytes", train_bpe(tmp_path / "t.json")):  # BPE takes some minutes
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / f"out{tokenizer == 'bytes'}"]
    arguments += ["--tokenizer", tokenizer, "--held-out-one-in", "20", "--json"]
    program = (
      "import resource, sys; from ldm_jax.data.prepare import main; main(sys.argv[1:]); "
      "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    out = subprocess.check_output([sys.executable, "-c", program, *map(str, arguments)], text=True)
    meta, kilobytes = out.splitlines()
    print(f"{tokenizer}: {int(kilobytes) / 1024:.0f} MiB")
    assert sum(json.loads(meta)["documents"].values()) == 104
    assert int(kilobytes) < 2**20


def test_no_workers_are_left_when_the_command_is_killed(texts, tmp_path):
  program = (
    "import sys, time; from ldm_jax.data import prepare, workers\n"
    "def slow(*rest, **more):\n"
    "  print('working', __import__('os').getpid(), flush=True)\n"
    "  time.sleep(120)\n"
    "workers.run_job = slow\n"
    "if __name__ == '__main__': sys.exit(prepare.main(sys.argv[1:]))\n"
  )
  (tmp_path / "program.py").write_text(program)
  command = [sys.executable, str(tmp_path / "program.py"), "--input", str(tmp_path / "in")]
  command += ["--output", str(tmp_path / "out"), "--workers", "2"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    worker = int(process.stdout.readline().split()[1])
    process.send_signal(signal.SIGKILL)
  for _ in range(100):
    try:
      os.kill(worker, 0)
    except ProcessLookupError:
      return
    time.sleep(0.1)
  raise AssertionError("the worker lives on")
