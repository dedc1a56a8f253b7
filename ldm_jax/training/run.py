"""A run: its workdir, data, state and metrics, opened together before anything is compiled."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh, PartitionSpec

from ldm_jax import processes
from ldm_jax.config import Config
from ldm_jax.data import Dataset, load_dataset
from ldm_jax.errors import DivergedError, InputError, TrainingError
from ldm_jax.model import (
  attention_form,
  memory_form,
  mixer_parameter_count,
  parameter_count,
)
from ldm_jax.sharding_report import mesh_words, sharding_lines
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.flops import mesh_peak_flops, mixer_flops_per_token, model_flops_per_token
from ldm_jax.training.metrics import MetricsWriter, Progress
from ldm_jax.training.profile import ProfileWindow
from ldm_jax.training.step import TrainState, abstract_state, init_state
from ldm_jax.training.workdir import open_workdir, save_config
from ldm_jax.typing import PathLike, PyTree


@dataclasses.dataclass
class Run:
  """What the loop works on.  Close it after use.

  Attributes:
    config: of the whole run.
    mesh: devices of all processes.
    dataset: rows to train on and to evaluate on.
    checkpointer: of the folder checkpoints/.
    best: of the folder best/; None without `train.keep_best`.
    best_loss: of the state in it; None if there is none.
    writer: of metrics.
    progress: what the person watching sees.
    state: after the newest finished step.
    tokens: real targets up to there.
    workdir: folder of the run.
    own_rows: which rows of a batch this process loads, see `processes.own_rows`.
    profile: the steps to trace.
  """

  config: Config
  mesh: Mesh
  dataset: Dataset
  checkpointer: Checkpointer
  best: Checkpointer | None
  best_loss: float | None
  writer: MetricsWriter
  progress: Progress
  state: TrainState
  tokens: int
  workdir: epath.Path
  own_rows: tuple[int, ...]
  profile: ProfileWindow

  def save(self) -> None:
    """Starts a checkpoint of the current state.

    Raises:
      DivergedError: if the state is not finite.
      TrainingError: if the checkpoint, or the metrics of the steps up to it, cannot be written.
    """
    if not _all_finite(self.state):
      raise DivergedError(
        f"step {int(self.state.step)} left parameters or moments that are not finite; not saved. "
        + self.last_good()
      )
    self.writer.upload()
    self.checkpointer.save(self.state, self._record())

  def save_if_best(self, loss: float) -> None:
    """Saves in best/ if no evaluation had a lower loss; durable before the loss is on record."""
    if self.best is None or not math.isfinite(loss):
      return
    if self.best_loss is None or loss < self.best_loss:
      measure = {"loss": loss, "eval_batches": self.config.train.eval_batches}
      self.best.replace(self.state, self._record() | measure)
      self.best_loss = loss

  def _record(self):
    return {"tokens": self.tokens, "data_fingerprint": self.dataset.fingerprint}

  def last_good(self) -> str:
    """Which checkpoint a run that diverged can go back to, and what to change."""
    self.checkpointer.wait()
    steps = self.checkpointer.steps()
    kept = (
      f"The last good checkpoint is step {steps[-1]}" if steps else "No checkpoint was saved yet"
    )
    return (
      f"{kept} in {self.workdir}. Lower optimizer.learning_rate or optimizer.clip_norm, or raise "
      "optimizer.warmup_steps, in a new workdir"
    )

  @contextlib.contextmanager
  def keeping_metrics(self) -> Iterator[None]:
    """Brings the metrics in a bucket up to date if the block fails: the process may end at once."""
    try:
      yield
    except Exception:
      with contextlib.suppress(TrainingError):
        self.writer.upload()
      raise

  def close(self) -> None:
    """Waits for saves and closes every part."""
    with contextlib.ExitStack() as stack:  # each is closed even if another fails
      for part in (self.checkpointer, self.best, self.writer, self.progress):
        if part is not None:
          stack.callback(part.close)
      stack.callback(self.profile.end)


def open_run(config: Config, workdir: PathLike, mesh: Mesh) -> Run:
  """Everything up to the first compilation: workdir, data, fresh or restored state.

  Raises:
    InputError: if data or workdir cannot be used, or hold another run.
    TrainingError: if no checkpoint of the workdir loads.
  """
  own_rows = processes.own_rows(mesh, config.data.batch_size)
  workdir = epath.Path(workdir)
  notes = open_workdir(workdir, config)
  processes.check_shared(workdir)
  dataset = load_dataset(config)
  processes.check_agreement("data set", dataset.fingerprint)
  checkpointer = Checkpointer(workdir, config.train.keep)
  restored = bool(checkpointer.steps())
  best, best_loss = None, None
  if config.train.keep_best:
    best, best_loss = _open_best(workdir, config, restored)
  if not restored:
    state, record = init_state(config, mesh), {"tokens": 0}
  else:
    state, record = checkpointer.restore_newest(abstract_state(config, mesh))
    if record["data_fingerprint"] != dataset.fingerprint:
      raise InputError(
        f"{workdir} was trained on other data (fingerprint {record['data_fingerprint']}, now "
        f"{dataset.fingerprint}): run it with the same data and Python version, or choose another "
        "--workdir"
      )
  step = int(state.step)
  if step > config.train.steps:
    raise InputError(
      f"{workdir} is already at step {step}, beyond train.steps = {config.train.steps}; raise "
      "train.steps or choose another --workdir"
    )
  save_config(workdir, config)
  progress = Progress(config.train.steps, step)
  for line in (*notes, *_summary(config, mesh, dataset, state)):
    progress.say(line)
  if restored:
    progress.say(f"resuming {workdir} after step {step}")
  profile = ProfileWindow(
    workdir / "profile", config.train.profile_start, config.train.profile_steps
  )
  if profile.missed(step):
    progress.say(f"no profile: step {step} is beyond train.profile_start")
  writer = MetricsWriter(workdir, step)
  return Run(
    config=config,
    mesh=mesh,
    dataset=dataset,
    checkpointer=checkpointer,
    best=best,
    best_loss=best_loss,
    writer=writer,
    progress=progress,
    state=state,
    tokens=record["tokens"],
    workdir=workdir,
    own_rows=own_rows,
    profile=profile,
  )


def _open_best(workdir, config, restored):
  best = Checkpointer(workdir, 1, "best")
  record = best.newest_record()
  if record is not None and not restored:
    raise InputError(
      f"{best.directory} holds the best state of a run whose checkpoints are gone; move it away, "
      "or choose another --workdir"
    )
  if record is not None and record["eval_batches"] != config.train.eval_batches:
    raise InputError(
      f"the loss of {best.directory} was measured with train.eval_batches = "
      f"{record['eval_batches']}, now {config.train.eval_batches}; set it back, or move it "
      "away"
    )
  return best, record and record["loss"]


def _summary(config, mesh, dataset, state):
  model, rows = config.model, dataset.train_rows
  epochs = config.train.steps * config.data.batch_size / len(rows)
  shape = mesh_words(mesh.shape)
  total, extra = parameter_count(state.params), mixer_parameter_count(state.params)
  overhead = f" (mixers {extra:,}, {extra / (total - extra):.2%} over preln)" if extra else ""
  yield (
    f"model: {model.mixer.kind}, {total:,} parameters{overhead}, "
    f"{model.blocks} blocks of width {model.width}"
  )
  yield (
    f"data: {config.data.source}, {rows.pairs:,} training and {dataset.held_out_rows.pairs:,} "
    f"held-out tokens; {config.train.steps} steps are {epochs:.2f} epochs"
  )
  yield f"devices: {mesh.size} x {mesh.devices.flat[0].device_kind}" + (
    f" ({shape})" if shape else ""
  )
  form, reason = attention_form(config, mesh)
  on_tpu = mesh.devices.flat[0].platform == "tpu"  # elsewhere nothing else is to be had
  yield f"attention: {form}" + (f" ({reason})" if reason and on_tpu else "")
  memory = memory_form(config, mesh)
  if memory is not None:
    put_off = f", at most {memory.chunk} writes put off" if memory.chunk else ""
    yield f"depth memory: {memory.name}{put_off}"
  yield _work(config, mesh)
  if mesh.size > 1:
    yield from sharding_lines(state.params, state.optimizer_state)


def _work(config, mesh):
  """FLOPs of a token, and whether the run can say what share of the hardware's peak they are."""
  flops = model_flops_per_token(config.model, config.data.sequence_length)
  extra = mixer_flops_per_token(config.model)
  mixers = f", mixers {extra / 1e6:,.2f} more ({extra / flops:.2%})" if extra else ""
  peak, kind = mesh_peak_flops(mesh), mesh.devices.flat[0].device_kind
  share = f"n/a (no peak known for {kind})" if peak is None else f"of {peak / 1e12:,.4g} TFLOP/s"
  return f"work: {flops / 1e6:,.2f} MFLOP to train a token{mixers}; MFU {share}"


@functools.partial(jax.jit, out_shardings=PartitionSpec())
def _all_finite(tree: PyTree) -> Any:
  floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
  return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()
