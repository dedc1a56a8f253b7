"""The training loop: dispatch step n, then report step n − 1, so the device never waits."""

import contextlib
import functools
import re
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ldm_jax import processes
from ldm_jax.config import Config, to_json
from ldm_jax.data import ByteTokenizer
from ldm_jax.decoding import Sampling, continue_texts, text_decoder
from ldm_jax.environment import check_platform
from ldm_jax.errors import DivergedError
from ldm_jax.model import check_mesh
from ldm_jax.sharding import make_mesh
from ldm_jax.training.depth_metrics import compile_depth_step, depth_values
from ldm_jax.training.evaluation import evaluate
from ldm_jax.training.flops import mesh_peak_flops, mfu, model_flops_per_token
from ldm_jax.training.metrics import Throughput, batch_hash
from ldm_jax.training.optimizer import learning_rate_schedule
from ldm_jax.training.run import Run, open_run
from ldm_jax.training.signals import STOPPED_EXIT_CODE, StopRequest
from ldm_jax.training.step import (
  compile_train_step,
  compiler_options,
  make_eval_step,
  make_model,
  put_batch,
)
from ldm_jax.training.workdir import without_local_settings
from ldm_jax.typing import PathLike

_SAMPLE_PROMPT, _SAMPLE_TEMPERATURE = "def ", 0.8


def train(config: Config, workdir: PathLike) -> int:
  """Trains what `config` describes in `workdir`, from its newest checkpoint if it has one.

  Returns:
    The exit code: 0 when the last step is reached and saved, 75 when a signal stopped the run and
    its state is saved.

  Raises:
    InputError: before any work, if config, data or workdir cannot be used.
    DivergedError: if the loss stops being finite.
    TrainingError: if a checkpoint or a metric cannot be written.
  """
  with processes.failing_at_once(), StopRequest() as stop:
    config.validate()
    check_platform(config.train.platform)
    processes.check_program()
    processes.check_agreement("configuration", to_json(without_local_settings(config)))
    processes.check_agreement("workdir", str(workdir))
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    run = open_run(config, workdir, mesh)
    # Closing waits for the other processes, so an error has to end this one before that.
    with (
      contextlib.closing(run),
      processes.failing_at_once(),
      run.keeping_metrics(),
      jax.set_mesh(mesh),
    ):
      finished = _train_steps(run, stop)
    if not finished:
      run.progress.say(
        f"stopped by {stop.signal.name} after step {int(run.state.step)}, state saved in "
        f"{workdir}; the same command resumes"
      )
      return STOPPED_EXIT_CODE
    if jax.process_count() == 1:  # sampling reads parameters that may lie on other machines
      _show_sample(run)
  return 0


def _train_steps(run: Run, stop: StopRequest) -> bool:
  """Runs the remaining steps; returns whether all are done (False: stopped and saved)."""
  config, first = run.config.train, int(run.state.step)
  eval_step = jax.jit(
    make_eval_step(run.config),
    out_shardings=NamedSharding(run.mesh, PartitionSpec()),
    compiler_options=compiler_options(run.mesh),
  )
  _evaluate_if_due(run, first, eval_step, stop)
  if first == config.steps:
    run.progress.say(f"nothing left to train: {run.workdir} is at step {first} of {config.steps}")
    return _has_evaluation(run, first)
  stop.agree(first)
  if stop:
    run.save()
    return False

  train_step = _compile(
    run, "train step", functools.partial(compile_train_step, run.config, run.state)
  )
  depth_step = None
  if config.depth_metrics_every:
    compile_for = functools.partial(compile_depth_step, run.config, run.mesh, run.state)
    depth_step = _compile(run, "depth metrics", compile_for)
  throughput, pending = Throughput(), None
  with run.dataset.train_batches(first, config.steps, run.own_rows) as batches:
    for done, rows in zip(range(first + 1, config.steps + 1), batches, strict=True):
      batch, depth = _put(run, rows), None
      if run.profile.begins_after(done - 1):
        with _outside_training(run, throughput):
          run.profile.begin()
      if depth_step and done % config.depth_metrics_every == 0:
        with _outside_training(run, throughput):
          depth = jax.device_get(depth_step(run.state, batch))
      run.state, metrics = train_step(run.state, batch)
      if pending:
        _report(run, throughput, *pending)
      pending = (done, metrics, batch, depth)
      if run.profile.ends_after(done):
        with _outside_training(run, throughput):
          run.profile.end()
      stop.agree(done)
      evaluating = _due(done, config.eval_every, config.steps)
      if not (evaluating or stop or _due(done, config.checkpoint_every, config.steps)):
        continue
      _report(run, throughput, *pending)
      pending = None
      with _outside_training(run, throughput):
        run.save()
        _evaluate_if_due(run, done, eval_step, stop)
      if stop:
        break
  return _has_evaluation(run, config.steps)


def _due(step, every, last):
  return step > 0 and (step % every == 0 or step == last)


def _compile(run: Run, what: str, compile_for: Callable) -> jax.stages.Compiled:
  """Calls `compile_for(batch)` and says how long it took."""
  start = time.perf_counter()
  compiled = compile_for(_put(run, run.dataset.train_batch(0, run.own_rows)))
  run.progress.say(f"compiled the {what} in {time.perf_counter() - start:.1f} s")
  run.progress.skip(time.perf_counter() - start)
  return compiled


def _put(run, rows):
  return put_batch(run.mesh, rows, run.own_rows, run.config.data.batch_size)


@contextlib.contextmanager
def _outside_training(run, throughput):
  """Waits for the steps so far; the time that the block then takes is not counted as training."""
  jax.block_until_ready(run.state)
  since = time.perf_counter()
  yield
  throughput.skip(time.perf_counter() - since)
  run.progress.skip(time.perf_counter() - since)


def _report(run, throughput, step, metrics, batch, depth):
  """Takes a finished step's numbers off the device; stops the run if they are not finite."""
  metrics = jax.device_get(metrics)
  _check_finite(run, step, metrics)
  run.tokens += int(metrics.tokens)
  throughput.add(int(metrics.tokens))
  rate = share = None
  if _due(step, run.config.train.log_every, run.config.train.steps):
    rate = throughput.take()
    flops = model_flops_per_token(run.config.model, run.config.data.sequence_length)
    share = mfu(rate, flops, mesh_peak_flops(run.mesh))
    schedule = learning_rate_schedule(run.config.optimizer, run.config.train.steps)
    values = {
      "loss": float(metrics.loss),
      "grad_norm": float(metrics.grad_norm),
      "learning_rate": float(schedule(step - 1)),
      "tokens": run.tokens,
      "tokens_per_second": rate,
      "batch_hash": batch_hash(processes.gather(batch.tokens)),
    }
    if share is not None:
      values["mfu"] = share
    run.writer.write(step, "train", values)
  if depth is not None:
    run.writer.write(step, "depth", depth_values(depth, metrics, run.state.params))
  run.progress.step(step, float(metrics.loss), rate, share)


def _check_finite(run, step, metrics):
  if np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm):
    return
  names = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(run.state.params)
  ]
  raise DivergedError(
    f"step {step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}; "
    f"{_first_bad(names, metrics)}. {run.last_good()}"
  )


def _first_bad(names, metrics):
  """Where the trouble starts: a parameter if one was bad before the step, else a gradient."""
  finite_gradients = np.isfinite(metrics.gradient_norms)
  for what, finite in (("parameter", metrics.finite_parameters), ("gradient", finite_gradients)):
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
      return (
        f"first {what} that is not finite: {min(bad, key=_in_model_order)} ({len(bad)} are not)"
      )
  return "all parameters and gradients are finite one by one"


def _in_model_order(name):
  """Sorts block_2 before block_10."""
  return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _evaluate_if_due(run, step, eval_step, stop):
  """Evaluates once per due step, also when an earlier process was stopped before it could."""
  config = run.config.train
  if not _due(step, config.eval_every, config.steps) or _has_evaluation(run, step):
    return
  batches = run.dataset.held_out_batches(config.eval_batches)
  tokenizer = run.dataset.tokenizer
  boundary = tokenizer.boundary if isinstance(tokenizer, ByteTokenizer) else None
  result = evaluate(
    lambda batch: eval_step(run.state.params, put_batch(run.mesh, batch)),
    batches,
    boundary,
    stop,
  )
  if result is None:
    return
  run.save_if_best(result["loss"])
  run.writer.write(step, "eval", result)
  run.writer.upload()
  bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
  run.progress.say(f"step {step}  held-out loss {result['loss']:.4f} nats per token{bits}")


def _has_evaluation(run, step):
  return processes.ask_first(run.writer.has(step, "eval"))


def _show_sample(run: Run) -> None:
  config, tokenizer = run.config, run.dataset.tokenizer
  if not config.train.sample_tokens or tokenizer is None:
    return
  context = config.data.sequence_length
  length = min(config.train.sample_tokens, context - len(tokenizer.encode(_SAMPLE_PROMPT)))
  if length < 1:
    return
  decoder = text_decoder(make_model(config), run.state.params, tokenizer, context)
  sampling = Sampling(_SAMPLE_TEMPERATURE)
  (sample,) = continue_texts(
    decoder, tokenizer, [_SAMPLE_PROMPT], length, sampling, config.train.seed
  )
  print(
    f"--- a sample at temperature {_SAMPLE_TEMPERATURE} ---\n{_SAMPLE_PROMPT}{sample.text}\n---"
  )
