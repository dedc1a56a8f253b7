"""A run that is stopped and killed at random moments ends as if nothing had happened."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time

import chex
import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data.prepare import main as prepare
from tests.rig import ROOT, final_state, tiny_config, trace, with_model, write_config

STEPS = 150


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """An undisturbed run over many small epochs: dropout, batches in two parts, frequent saves."""
  folder = tmp_path_factory.mktemp("straight")
  rng = random.Random(0)
  for number in range(40):
    text = " ".join(rng.choices(["sun", "moon", "star", "tide"], k=rng.randrange(1, 60)))
    (folder / f"{number}.txt").write_text(text)
  arguments = ["--input", f"{folder}/*.txt", "--output", f"{folder}/data"]
  assert prepare([*arguments, "--held-out-one-in", "5"]) == 0
  config = tiny_config("preln", steps=STEPS, accumulate=2, eval_every=7, checkpoint_every=3, keep=2)
  config = with_model(config, dropout=0.1, blocks=1)
  data = DataConfig(source="prepared", path=f"{folder}/data", sequence_length=32, batch_size=8)
  config = dataclasses.replace(config, data=data)
  write_config(folder, config)
  assert run_until_done(folder, folder / "run", []) == [0]
  return folder, config


def start(folder, workdir, *settings):
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
  environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compilation_cache")
  environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  command = [sys.executable, ROOT / "train.py", "--config", folder / "config.py"]
  return subprocess.Popen(
    [*command, "--workdir", workdir, *settings],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


def run_until_done(folder, workdir, kills):
  """Starts the command again and again; the n-th process gets the n-th (wait, delay, signal).

  `wait` says whether the delay counts from the first step of the process or from its start.
  Returns the exit codes.
  """
  codes = []
  while not codes or codes[-1] != 0:
    process = start(folder, workdir)
    if len(codes) < len(kills):
      wait, delay, number = kills[len(codes)]
      lines = process.stdout
      while wait and process.poll() is None and "compiled the train step" not in lines.readline():
        pass
      time.sleep(delay)
      process.send_signal(number)
    output = process.communicate(timeout=300)[0]
    codes.append(process.returncode)
    assert process.returncode in (0, 75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT), output
  return codes


@pytest.mark.parametrize(
  ("seed", "count"), [(0, 4), pytest.param(1, 20, marks=pytest.mark.slow)], ids=str
)
def test_a_run_killed_at_random_moments_leaves_the_trace_of_a_straight_one(
  straight, seed, count, tmp_path
):
  folder, config = straight
  rng, left, run = random.Random(seed), count, 0
  while left > 0:
    kills = []
    for _ in range(left):
      wait = rng.random() < 0.8  # most of a short process is its start
      kills.append(
        (wait, rng.uniform(0, 1.5 if wait else 8), rng.choice([signal.SIGTERM, signal.SIGKILL]))
      )
    run += 1
    workdir = tmp_path / str(run)
    codes = run_until_done(folder, workdir, kills)
    left -= len(codes) - 1
    assert trace(workdir) == trace(folder / "run")
    chex.assert_trees_all_equal(final_state(config, workdir), final_state(config, folder / "run"))


def test_a_signal_to_the_whole_group_while_workers_start_is_a_stop(straight, tmp_path):
  folder, _ = straight
  process = start(folder, tmp_path, "--data.workers", "1", "--train.steps", "100000")
  while process.poll() is None and "compiled the train step" not in process.stdout.readline():
    pass
  time.sleep(0.7)  # a worker takes seconds to start
  os.killpg(process.pid, signal.SIGTERM)
  output = process.communicate(timeout=120)[0]
  assert process.returncode == 75, output
  assert "stopped by SIGTERM" in output
