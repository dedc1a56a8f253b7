"""A workdir in gs:// holds a run as a folder does; the bucket is one in this process."""

import importlib
import json
import signal
import sys
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

from ldm_jax import compare
from ldm_jax.config import to_json
from ldm_jax.environment import compilation_cache
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.training import loop
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.metrics import MetricsWriter
from ldm_jax.training.profile import ProfileWindow
from ldm_jax.training.run import Run
from ldm_jax.training.step import TrainState
from ldm_jax.training.workdir import save_config
from tests import bucket
from tests.rig import final_state, signal_at, tiny_config, trace, with_model

# After a save that failed, TensorStore's writes still report to orbax's event loop, a closed one.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
  with bucket.serve() as (content, variables), pytest.MonkeyPatch.context() as patch:
    for name, value in variables.items():
      patch.setenv(name, value)
    importlib.import_module("gcsfs")  # reads one of them when it is imported
    with compilation_cache(tmp_path_factory.mktemp("cache")):
      yield content


@pytest.fixture(scope="module")
def straight(served, tmp_path_factory):
  """An undisturbed run in a folder."""
  workdir = tmp_path_factory.mktemp("straight")
  assert loop.train(small_config(), workdir) == 0
  return workdir


def small_config(**train):
  settings = dict(steps=8, eval_every=4, checkpoint_every=2, keep=2, keep_best=True)
  return with_model(tiny_config("preln", **{**settings, **train}), blocks=1)


def lines(text):
  kept = [json.loads(line) for line in text.splitlines()]
  return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in kept]


def metrics_in(served, run):
  return lines(served.objects[f"runs/{run}/metrics.jsonl"][0].decode())


def test_a_run_in_a_bucket_ends_as_one_in_a_folder_after_a_stop_and_a_damage(
  served, straight, capsys
):
  config, workdir = small_config(), "gs://bucket/runs/one"
  save, present = Checkpointer.save, []

  def watched(self, state, record):
    steps = [line["step"] for line in metrics_in(served, "one") if line["split"] == "train"]
    present.append((int(state.step), steps))
    save(self, state, record)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Checkpointer, "save", watched)
    signal_at(patch, 5, signal.SIGTERM)
    assert loop.train(config, workdir) == 75
  # Before a step is saved, the bucket has every line up to it.
  assert [step for step, _ in present] == [2, 4, 4, 6]
  assert all(steps == list(range(1, step + 1)) for step, steps in present)

  for name in list(served.objects):
    if name.startswith("runs/one/checkpoints/6/state/"):
      served.put(name, b"x")
  assert loop.train(config, workdir) == 0
  printed = capsys.readouterr()
  assert f"checkpoint 6 in {workdir}/checkpoints does not load" in printed.err
  assert f"resuming {workdir} after step 4" in printed.out
  assert served.objects["runs/one/config.json"][0].decode() == to_json(config)
  assert metrics_in(served, "one") == trace(straight)
  chex.assert_trees_all_equal(final_state(config, workdir), final_state(config, straight))
  names = [name.removeprefix("runs/one/") for name in served.objects]
  assert len([name for name in names if name.startswith("events.out.tfevents")]) == 2
  committed = [name.split("/") for name in names if name.endswith("/commit_success.txt")]
  steps = {parts[0]: set() for parts in committed}
  for folder, step, *_ in committed:
    steps[folder].add(step)
  assert steps == {"checkpoints": {"6", "8", "6.damaged"}, "best": {"8"}}


def test_lines_after_the_newest_checkpoint_are_dropped_and_written_again(served):
  writer = MetricsWriter("gs://bucket/runs/lines", 0)
  for step in (1, 2):
    writer.write(step, "train", {"loss": float(step)})
  writer.close()
  writer = MetricsWriter("gs://bucket/runs/lines", 1)
  assert writer.has(1, "train")
  assert not writer.has(2, "train")
  writer.write(2, "train", {"loss": 5.0})
  writer.upload()
  assert [line["loss"] for line in metrics_in(served, "lines")] == [1.0, 5.0]
  writer.close()


def test_what_ends_a_process_at_once_leaves_the_metrics_in_the_bucket(served):
  run = types.SimpleNamespace(writer=MetricsWriter("gs://bucket/runs/ended", 0))
  run.writer.write(1, "train", {"loss": 1.0})
  with pytest.raises(RuntimeError, match="ended"), Run.keeping_metrics(run):
    raise RuntimeError("ended")
  assert [line["step"] for line in metrics_in(served, "ended")] == [1]
  run.writer.close()


def run_save(manager, state):
  manager.save(state, {})
  manager.wait()


def test_a_bucket_that_takes_nothing_ends_the_run_with_one_line(served, monkeypatch):
  with pytest.raises(InputError, match=r"workdir gs://nowhere/run: cannot write there: .*nowhere"):
    loop.train(small_config(), "gs://nowhere/run")
  for wrong in ("gs:/bucket/run", "s3://bucket/run"):
    with pytest.raises(InputError, match=f"workdir {wrong}: only gs://"):
      loop.train(small_config(), wrong)
  writer = MetricsWriter("gs://bucket/runs/full", 0)
  writer.write(1, "train", {"loss": 1.0})
  manager = Checkpointer("gs://bucket/runs/full", 1)
  state = TrainState(jnp.int32(1), {"w": jnp.ones(4)}, ())
  monkeypatch.setattr(served, "full", True)
  with pytest.raises(TrainingError, match=r"metrics to gs://bucket/runs/full failed: Forbidden.*"):
    writer.upload()
  with pytest.raises(InputError, match="workdir gs://bucket/runs/full: cannot write there: "):
    save_config("gs://bucket/runs/full", small_config())
  with pytest.raises(TrainingError, match=r"saving a checkpoint in gs://bucket/runs/full/check.*"):
    run_save(manager, state)
  monkeypatch.undo()
  writer.close()


def test_a_profile_reaches_the_bucket_when_it_ends(served, monkeypatch):
  def start(folder):  # a real one is as large as all that this process has compiled
    path = Path(folder) / "plugins" / "profile" / "now"
    path.mkdir(parents=True)
    (path / "host.xplane.pb").write_bytes(b"trace")

  monkeypatch.setattr(jax.profiler, "start_trace", start)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
  window = ProfileWindow("gs://bucket/runs/profile", 0, 1)
  window.begin()
  assert not any(name.startswith("runs/profile/") for name in served.objects)
  window.end()
  assert served.objects["runs/profile/plugins/profile/now/host.xplane.pb"][0] == b"trace"


def test_a_comparison_is_not_kept_in_a_bucket(monkeypatch):
  monkeypatch.setattr(sys, "argv", ["compare", "--out", "gs://bucket/compare"])
  with pytest.raises(InputError, match="on disks, not in buckets"):
    compare.main()
