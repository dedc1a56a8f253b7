"""Runs end, stop, resume and fail as they say they do."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import MeshConfig, OptimizerConfig, to_json
from ldm_jax.data import load_dataset
from ldm_jax.environment import compilation_cache
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.sharding import make_mesh
from ldm_jax.training import loop, run
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.flops import model_flops_per_token
from ldm_jax.training.metrics import MetricsWriter
from ldm_jax.training.step import (
  StepMetrics,
  abstract_state,
  compile_train_step,
  init_state,
  put_batch,
)
from tests.rig import ROOT, final_state, signal_at, tiny_config, trace, with_model, write_config


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory):
  """Every start of a run compiles the same programs."""
  with compilation_cache(tmp_path_factory.mktemp("cache")):
    yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """An undisturbed run of 6 steps, with dropout and accumulation."""
  config = with_model(tiny_config(accumulate=2), dropout=0.1)
  config = dataclasses.replace(config, mesh=MeshConfig(data=4, sequence=2))
  workdir = tmp_path_factory.mktemp("straight")
  assert loop.train(config, workdir) == 0
  return config, workdir


def test_a_run_leaves_config_metrics_events_and_checkpoints(straight):
  config, workdir = straight
  assert (workdir / "config.json").read_text() == to_json(config)
  lines = trace(workdir)
  train = [line for line in lines if line["split"] == "train"]
  assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
  for line in train:
    assert {"loss", "grad_norm", "learning_rate", "tokens", "batch_hash"} < line.keys()
    assert line["tokens"] == 8 * 32 * line["step"]
    int(line["batch_hash"], 16)
  assert len({line["batch_hash"] for line in train}) == 6
  np.testing.assert_allclose([train[0]["learning_rate"], train[2]["learning_rate"]], [5e-3, 1e-2])
  evaluations = [line for line in lines if line["split"] == "eval"]
  assert [line["step"] for line in evaluations] == [3, 6]
  assert all(line["bits_per_byte"] >= line["loss"] / np.log(2) for line in evaluations)
  assert evaluations[-1]["loss"] < evaluations[0]["loss"] < np.log(257) + 0.1
  assert list(workdir.glob("events.out.tfevents*"))
  state, record = final_state(config, workdir)
  assert state.step == 6
  assert record["tokens"] == 8 * 32 * 6


@pytest.mark.slow
def test_watching_a_run_does_not_change_it(straight, tmp_path, monkeypatch, capsys):
  """Depth metrics, a profile and MFU from step 4 on: the same parameters to the bit."""
  config, reference = straight
  assert not any("mfu" in line for line in trace(reference))
  assert not (reference / "profile").exists()
  workdir = tmp_path / "run"
  shutil.copytree(reference, workdir)
  shutil.rmtree(workdir / "checkpoints" / "6")
  watched = dict(depth_metrics_every=3, profile_start=4, profile_steps=1)
  config = dataclasses.replace(config, train=dataclasses.replace(config.train, **watched))
  flops = model_flops_per_token(config.model, config.data.sequence_length)
  monkeypatch.setattr(loop, "mesh_peak_flops", lambda mesh: 1e6 * flops)
  compile_depth_step, compiled = loop.compile_depth_step, []
  monkeypatch.setattr(
    loop, "compile_depth_step", lambda *args: compiled.append(args) or compile_depth_step(*args)
  )
  assert loop.train(config, workdir) == 0
  chex.assert_trees_all_equal(final_state(config, workdir), final_state(config, reference))
  assert len(compiled) == 1
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  for line in lines:
    if line["split"] == "train" and line["step"] > 4:
      assert line.pop("mfu") == pytest.approx(line["tokens_per_second"] / 1e6)
    line.pop("tokens_per_second", None)
  assert [line for line in lines if line["split"] != "depth"] == trace(reference)
  (depth,) = (line for line in lines if line["split"] == "depth")
  assert depth["step"] == 6
  assert set(depth["stream_rms"]) == {"x", "M", "P"}
  assert [len(numbers) for numbers in depth["stream_rms"].values()] == [5] * 3
  assert len(depth["output_rms"]) == len(depth["output_gradient_norm"]) == 4
  (train,) = (line for line in lines if line["split"] == "train" and line["step"] == 6)
  total = np.linalg.norm(list(depth["parameter_gradient_norm"].values()))
  np.testing.assert_allclose(total, train["grad_norm"], rtol=1e-5)
  assert len(list((workdir / "profile").rglob("*.xplane.pb"))) == 1
  assert "compiled the depth metrics in" in capsys.readouterr().out


@pytest.mark.parametrize("stops", [pytest.param((2,), marks=pytest.mark.slow), (0, 3, 4)], ids=str)
def test_stopped_and_resumed_runs_end_at_the_same_parameters(straight, stops, tmp_path, capsys):
  config, reference = straight
  for number, stop in zip((signal.SIGTERM, signal.SIGINT, signal.SIGTERM), stops, strict=False):
    with pytest.MonkeyPatch.context() as patch:
      signal_at(patch, stop, number)
      assert loop.train(config, tmp_path) == 75
    assert f"stopped by {number.name} after step" in capsys.readouterr().out
  assert loop.train(config, tmp_path) == 0
  assert trace(tmp_path) == trace(reference)
  chex.assert_trees_all_equal(final_state(config, tmp_path), final_state(config, reference))


def test_a_stop_during_evaluation_saves_and_the_evaluation_is_made_up_for(
  straight, tmp_path, monkeypatch
):
  config, reference = straight
  evaluate = loop.evaluate

  def stop_there(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*args)

  monkeypatch.setattr(loop, "evaluate", stop_there)
  assert loop.train(config, tmp_path) == 75
  assert [line["split"] for line in trace(tmp_path)] == ["train"] * 3
  monkeypatch.setattr(loop, "evaluate", evaluate)
  assert loop.train(config, tmp_path) == 0
  assert trace(tmp_path) == trace(reference)


@pytest.mark.slow
def test_the_best_evaluation_is_kept_apart_if_asked_for(straight, tmp_path, monkeypatch):
  config, reference = straight
  config = dataclasses.replace(
    config, train=dataclasses.replace(config.train, keep_best=True, eval_every=1, keep=1)
  )
  losses = iter([3.0, 2.0, 2.5, 2.0, 1.5, 4.0])
  evaluate = loop.evaluate

  def of_these_losses(*args):
    result = evaluate(*args)
    return result and {**result, "loss": next(losses)}

  reads, newest_record = [], Checkpointer.newest_record

  def counted(self):
    reads.append(self)
    return newest_record(self)

  monkeypatch.setattr(Checkpointer, "newest_record", counted)
  monkeypatch.setattr(loop, "evaluate", of_these_losses)
  signal_at(monkeypatch, 3, signal.SIGTERM)
  best = []
  for code in (75, 0):
    assert loop.train(config, tmp_path) == code
    (folder,) = (tmp_path / "best").iterdir()
    best.append(folder.name)
  assert best == ["2", "5"]
  assert len(reads) == 2  # at each start: a disk that fails later must not cost the best state
  kept = Checkpointer(tmp_path, 1, "best")
  assert kept.newest_record() == {
    "tokens": 5 * 256,
    "data_fingerprint": final_state(config, reference)[1]["data_fingerprint"],
    "loss": 1.5,
    "eval_batches": 2,
  }
  kept.close()
  assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["6"]
  chex.assert_trees_all_equal(
    final_state(config, tmp_path)[0].params, final_state(config, reference)[0].params
  )


def test_a_best_state_of_another_run_or_measure_is_refused(straight, tmp_path):
  config, reference = straight
  config = dataclasses.replace(config, train=dataclasses.replace(config.train, keep_best=True))
  shutil.copytree(reference, tmp_path / "run")
  best = Checkpointer(tmp_path / "run", 1, "best")
  with jax.set_mesh(make_mesh(config.mesh)):
    state = init_state(config, make_mesh(config.mesh))
  for step in (9, 6):  # a later one gives way
    best.replace(state.replace(step=state.step + step), {"loss": 9.0, "eval_batches": 7})
    assert best.steps() == [step]
  best.close()
  with pytest.raises(InputError, match=r"best was measured with train.eval_batches = 7, now 2"):
    loop.train(config, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints")
  with pytest.raises(InputError, match=r"best holds the best state of a run whose checkpoints"):
    loop.train(config, tmp_path / "run")


def test_lines_of_steps_that_run_again_are_replaced(straight, tmp_path):
  config, reference = straight
  shutil.copytree(reference, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
  with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
    file.write('{"step": 7, "split": "tr')
  assert loop.train(config, tmp_path / "run") == 0
  assert trace(tmp_path / "run") == trace(reference)


def test_a_finished_run_does_nothing_and_says_so(straight, capsys):
  config, workdir = straight
  before = trace(workdir)
  assert loop.train(config, workdir) == 0
  assert "nothing left to train" in capsys.readouterr().out
  assert trace(workdir) == before


def test_damaged_checkpoints_are_skipped_by_name_and_kept(straight, tmp_path, capsys):
  config, reference = straight
  workdir = tmp_path / "run"
  shutil.copytree(reference, workdir)
  damaged = workdir / "checkpoints" / "6"
  for path in sorted(damaged.rglob("*")):
    if path.is_file() and path.name != "_CHECKPOINT_METADATA":
      path.write_bytes(b"")
  assert loop.train(config, workdir) == 0
  printed = capsys.readouterr()
  assert re.search("checkpoint 6 in .* does not load, skipping it", printed.err)
  assert "resuming" in printed.out
  assert (damaged.with_name("6.damaged")).exists()
  chex.assert_trees_all_equal(final_state(config, workdir), final_state(config, reference))


def test_other_settings_are_refused_by_name(straight, capsys):
  config, workdir = straight
  changed = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=1))
  with pytest.raises(InputError, match=r"data.seed was 0 and is now 1.*another --workdir"):
    loop.train(changed, workdir)
  assert (workdir / "config.json").read_text() == to_json(config)


def test_other_data_are_refused(straight, monkeypatch):
  config, workdir = straight
  load = run.load_dataset
  monkeypatch.setattr(
    run, "load_dataset", lambda config: dataclasses.replace(load(config), fingerprint="other")
  )
  with pytest.raises(InputError, match="was trained on other data"):
    loop.train(config, workdir)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
  config = tiny_config("preln", checkpoint_every=1)
  config = dataclasses.replace(
    config, optimizer=OptimizerConfig(learning_rate=1e25, warmup_steps=0, weight_decay=0.0)
  )
  message = r"step 2: .* that is not finite: .*last good checkpoint is step 1 .*Lower optimizer"
  with pytest.raises(TrainingError, match=message):
    loop.train(config, tmp_path)
  state, _ = final_state(config, tmp_path)
  assert state.step == 1
  chex.assert_tree_all_finite(state)


def test_the_first_bad_leaf_is_the_one_that_was_poisoned(tmp_path, monkeypatch):
  def poisoned(config, mesh):
    state = init_state(config, mesh)
    kernel = state.params["block_1"]["mlp"]["up"]["kernel"]
    state.params["block_1"]["mlp"]["up"]["kernel"] = kernel.at[0, 0].set(jnp.nan)
    return state

  monkeypatch.setattr(run, "init_state", poisoned)
  message = r"step 1: loss nan.*parameter that is not finite: block_1/mlp/up/kernel \(1 are not\)"
  with pytest.raises(TrainingError, match=message + ".*No checkpoint was saved yet"):
    loop.train(tiny_config("preln"), tmp_path)
  names = ["a_10/x", "a_2/x", "b/x"]
  metrics = StepMetrics(0.0, np.nan, 1, np.array([np.nan, np.inf, 1.0]), np.ones(3, bool))
  assert "first gradient that is not finite: a_2/x (2" in loop._first_bad(names, metrics)


@pytest.mark.slow
def test_a_stop_during_the_last_evaluation_asks_to_be_run_again(straight, tmp_path, monkeypatch):
  config, reference = straight
  shutil.copytree(reference, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
  evaluate = loop.evaluate

  def stop_there(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*args)

  monkeypatch.setattr(loop, "evaluate", stop_there)
  assert loop.train(config, tmp_path / "run") == 75
  assert trace(tmp_path / "run") == trace(reference)[:-1]
  monkeypatch.setattr(loop, "evaluate", evaluate)
  assert loop.train(config, tmp_path / "run") == 0
  assert trace(tmp_path / "run") == trace(reference)


def test_fewer_steps_than_done_and_a_lost_config_are_refused(straight, tmp_path):
  config, reference = straight
  shutil.copytree(reference, tmp_path / "run")
  shorter = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
  with pytest.raises(InputError, match=r"already at step 6, beyond train.steps = 5"):
    loop.train(shorter, tmp_path / "run")
  assert (tmp_path / "run" / "config.json").read_text() == to_json(config)
  (tmp_path / "run" / "config.json").unlink()
  with pytest.raises(InputError, match=r"config.json.*restore the file or choose another"):
    loop.train(config, tmp_path / "run")


def test_a_full_disk_under_the_metrics_ends_the_run_naming_the_file(tmp_path):
  writer = MetricsWriter(tmp_path, 0)
  writer.write(1, "train", {"loss": 1.0})
  writer._file.close()
  writer._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
  with pytest.raises(TrainingError, match=r"writing metrics to /dev/full failed: No space left"):
    writer.write(2, "train", {"loss": 1.0})
  writer.close()


def test_unreadable_metrics_lines_are_dropped(tmp_path):
  good = '{"step": 1, "split": "train", "loss": 2.0}\n'
  (tmp_path / "metrics.jsonl").write_bytes(good.encode() + b'3\n{"step": 1}\n\xff\xfe\n{"st')
  writer = MetricsWriter(tmp_path, 1)
  assert writer.has(1, "train")
  writer.close()
  assert (tmp_path / "metrics.jsonl").read_text() == good


def test_an_unusable_workdir_is_refused(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(InputError, match="cannot write"):
    loop.train(tiny_config(), tmp_path / "file")


@pytest.mark.slow  # tests/training/test_meshes.py has the quick ones
def test_saved_on_one_mesh_resumes_on_another(straight, tmp_path):
  config, reference = straight
  shutil.copytree(reference, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
  other = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
  assert loop.train(other, tmp_path / "run") == 0
  for line, expected in zip(trace(tmp_path / "run"), trace(reference), strict=True):
    assert line["step"] == expected["step"]
    np.testing.assert_allclose(line["loss"], expected["loss"], rtol=1e-6)
  (state, record), (straight_state, straight_record) = (
    final_state(config, tmp_path / "run"),
    final_state(config, reference),
  )
  assert record == straight_record
  differences = [
    np.abs(one - other).max()
    for one, other in zip(
      jax.tree.leaves(state.params), jax.tree.leaves(straight_state.params), strict=True
    )
  ]
  assert max(differences) < 1e-6


def test_a_restored_state_is_donated_as_a_fresh_one(straight, tmp_path):
  config, reference = straight
  shutil.copytree(reference, tmp_path / "run")
  mesh = make_mesh(config.mesh)
  checkpointer = Checkpointer(tmp_path / "run", 1)
  rows = load_dataset(config).train_batch(0)
  with jax.set_mesh(mesh):
    fresh = init_state(config, mesh)
    restored, _ = checkpointer.restore_newest(abstract_state(config, mesh))
    assert jax.tree.map(lambda x: x.format, restored) == jax.tree.map(lambda x: x.format, fresh)
    step = compile_train_step(config, fresh, put_batch(mesh, rows))
    for state in (fresh, restored):
      step(state, put_batch(mesh, rows))
      assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  checkpointer.close()


@pytest.mark.slow  # test_kills has shorter real processes
@pytest.mark.slow
def test_the_command_survives_a_real_interrupt(tmp_path):
  """The process gets SIGINT while it trains; the same command ends the run."""
  write_config(tmp_path, tiny_config("preln", steps=400))
  workdir = tmp_path / "run"
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
  command = [sys.executable, ROOT / "train.py", "--config", tmp_path / "config.py"]
  command += ["--workdir", workdir, "--train.sample_tokens", "20"]
  process = subprocess.Popen(
    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  metrics = workdir / "metrics.jsonl"
  deadline = time.monotonic() + 300
  while not (metrics.exists() and metrics.stat().st_size > 1000) and time.monotonic() < deadline:
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  output = process.communicate(timeout=120)[0]
  assert process.returncode == 75, output
  assert "the same command resumes" in output
  again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert again.returncode == 0, again.stderr
  assert "resuming" in again.stdout
  assert "a sample at temperature" in again.stdout
  steps = [line["step"] for line in trace(workdir) if line["split"] == "train"]
  assert steps == list(range(1, 401))
