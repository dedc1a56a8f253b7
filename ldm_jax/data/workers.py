"""Jobs in this process or in several, with one way to stop them all."""

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ldm_jax.data.jobs import Job, Settings, Stopped, check_unchanged, run_job
from ldm_jax.data.progress import ByteProgress
from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.errors import TrainingError

_POLL = 0.2  # seconds


def run_jobs(
  jobs: Sequence[Job],
  finished: Mapping[int, dict[str, Any]],
  output: str,
  tokenizer: Tokenizer,
  settings: Settings,
  workers: int,
  keep: Callable[[int, dict[str, Any]], None],
  progress: ByteProgress,
  stop: object = None,
) -> list[dict[str, Any]] | None:
  """Checks the finished jobs' inputs and runs the others.

  Args:
    jobs: all of them.
    finished: records of those done earlier, by number.
    output: folder of the data set.
    tokenizer: for every document.
    settings: of the data set.
    workers: processes; 1 works in this one.
    keep: called with the number and record of each job when it is done.
    progress: told the bytes read.
    stop: becomes true when all should end.

  Returns:
    The records in the order of the jobs; None if stopped.

  Raises:
    InputError: if an input of a finished job has changed.
    TrainingError: if the output cannot be written, or a worker was killed.
  """
  tasks = {number: functools.partial(_check, record) for number, record in finished.items()}
  for job in jobs:
    if job.number not in finished:
      tasks[job.number] = functools.partial(_run, job, output, settings)
  run = _run_here if workers == 1 else functools.partial(_run_in_processes, workers)
  records = dict(finished)
  try:
    for number, record in run(tasks, tokenizer, progress, stop):
      if number not in finished:
        keep(number, record)
        records[number] = record
  except Stopped:
    return None
  return [records[number] for number in sorted(records)]


def _check(record, tokenizer, count):
  del tokenizer
  check_unchanged(record, count)
  return record


def _run(job, output, settings, tokenizer, count):
  return run_job(job, output, tokenizer, settings, count)


def _run_here(tasks, tokenizer, progress, stop):
  done = 0

  def count(step):
    nonlocal done
    if stop:
      raise Stopped
    done += step
    progress.set(done)

  for number, task in tasks.items():
    yield number, task(tokenizer, count)


def _run_in_processes(workers, tasks, tokenizer, progress, stop):
  context = multiprocessing.get_context("spawn")
  counter, stopping = context.Value("q", 0), context.Event()
  pool = concurrent.futures.ProcessPoolExecutor(
    min(workers, len(tasks)) or 1, context, _start_worker, (tokenizer, counter, stopping)
  )
  with pool:
    waiting = {pool.submit(_work, task): number for number, task in tasks.items()}
    try:
      while waiting:
        done, _ = concurrent.futures.wait(waiting, _POLL, concurrent.futures.FIRST_COMPLETED)
        progress.set(counter.value)
        for future in done:
          yield waiting.pop(future), future.result()
        if stop:
          raise Stopped
    except concurrent.futures.process.BrokenProcessPool as error:
      raise TrainingError(
        "a worker process was killed, perhaps for memory; run the same command again, with fewer "
        "--workers"
      ) from error
    finally:
      stopping.set()
      pool.shutdown(wait=True, cancel_futures=True)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer, counter, stopping):
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent passes it on
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  _worker.update(tokenizer=tokenizer, counter=counter, stopping=stopping)
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
  """A killed parent leaves no workers behind."""
  multiprocessing.parent_process().join()
  os._exit(1)


def _work(task):
  def count(step):
    if _worker["stopping"].is_set():
      raise Stopped
    if step:
      with _worker["counter"].get_lock():
        _worker["counter"].value += step

  return task(_worker["tokenizer"], count)
