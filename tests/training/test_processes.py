"""Two processes on this machine train as one does, and stop together when either is told to."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from ldm_jax import processes
from ldm_jax.config import MeshConfig, to_json
from ldm_jax.data import load_dataset
from ldm_jax.errors import InputError
from ldm_jax.sharding import make_mesh
from ldm_jax.training.loop import train
from tests.rig import ROOT, tiny_config, trace, with_model

# Trains, keeps the rows that this process loaded, and gets SIGTERM before the given step.
CHILD = """
import contextlib, os, signal, sys, time
import numpy as np
from ldm_jax import processes
from ldm_jax.command_line import run_command
from ldm_jax.config import from_json
from ldm_jax.data import Dataset
from ldm_jax.training.loop import train

config, workdir, rows, stop_at = sys.argv[1:]
processes.join()
original = Dataset.train_batches

@contextlib.contextmanager
def train_batches(self, first, stop, *part):
  def kept(batches):
    for step, batch in enumerate(batches, first):
      np.save(f"{rows}/{step}-{part[0]}-of-{part[1]}.npy", batch.tokens)
      if step == int(stop_at):
        os.kill(os.getpid(), signal.SIGTERM)
      if int(stop_at) >= 0:
        time.sleep(0.3)  # the notice takes a second to reach the others
      yield batch
  with original(self, first, stop, *part) as batches:
    yield kept(batches)

Dataset.train_batches = train_batches
run_command(lambda: train(from_json(open(config).read()), workdir))
"""


def start_both(folder, stop_at, config="config.json"):
  """Both processes with four CPU devices each; `stop_at` holds for process 1."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  running = []
  for number in range(2):
    environment = {
      **os.environ,
      "PYTHONPATH": str(ROOT),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": "2",
      "JAX_PROCESS_ID": str(number),
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compilation_cache"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = [folder / config.format(number=number), folder / "run", folder / "rows"]
    arguments.append(stop_at if number or stop_at < 0 else 10**6)
    running.append(
      subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    )
  outputs = [process.communicate(timeout=300)[0] for process in running]
  return [process.returncode for process in running], outputs


def test_two_processes_train_as_one_and_stop_together(tmp_path):
  config = with_model(tiny_config("preln", steps=24, eval_every=12, checkpoint_every=9), blocks=1)
  (tmp_path / "rows").mkdir()
  (tmp_path / "config.json").write_text(to_json(config))

  codes, outputs = start_both(tmp_path, stop_at=3)
  assert codes == [75, 75], outputs
  assert "stopped by SIGTERM after step" in outputs[0]
  assert "step" not in outputs[1]  # one of them speaks for both
  (stopped,) = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()][-1:]
  assert 3 < stopped < 24
  codes, outputs = start_both(tmp_path, stop_at=-1)
  assert codes == [0, 0], outputs
  assert "resuming" in outputs[0]

  assert train(config, tmp_path / "alone") == 0
  for line, expected in zip(trace(tmp_path / "run"), trace(tmp_path / "alone"), strict=True):
    exact = {"step", "split", "tokens", "batch_hash", "learning_rate"} & expected.keys()
    assert {key: line[key] for key in exact} == {key: expected[key] for key in exact}
    np.testing.assert_allclose(line["loss"], expected["loss"], rtol=1e-5)
  dataset = load_dataset(config)
  for step in range(24):
    halves = [np.load(tmp_path / "rows" / f"{step}-{part}-of-2.npy") for part in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), dataset.train_batch(step).tokens)


def test_settings_that_differ_between_processes_are_refused_by_all(tmp_path):
  (tmp_path / "rows").mkdir()
  for number, seed in enumerate((0, 1)):
    config = tiny_config("preln", seed=seed)
    (tmp_path / f"config_{number}.json").write_text(to_json(config))
  codes, outputs = start_both(tmp_path, stop_at=-1, config="config_{number}.json")
  assert codes == [2, 2], outputs
  for output in outputs:
    assert output.count("error: process 1 has another configuration than process 0") == 1
  assert not (tmp_path / "run").exists()


def test_a_process_that_nobody_joins_ends_with_one_line():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  alone = subprocess.run(
    [sys.executable, "-c", "from ldm_jax import processes; processes.join(patience=3)"],
    env={
      **os.environ,
      "PYTHONPATH": str(ROOT),
      "JAX_COORDINATOR_ADDRESS": address,
      "JAX_NUM_PROCESSES": "2",
      "JAX_PROCESS_ID": "0",
    },
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert alone.returncode == 1
  (line,) = alone.stderr.splitlines()
  assert line.startswith(
    f"error: waited 3 s for the other processes (JAX_COORDINATOR_ADDRESS={address}"
  )


def test_on_a_tpu_vm_processes_join_without_settings(monkeypatch):
  calls = []
  monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: calls.append(settings))
  processes.join()
  assert not calls
  monkeypatch.setattr(processes, "_on_tpu_vm", lambda: True)
  processes.join()
  assert [set(call) for call in calls] == [{"initialization_timeout", "heartbeat_timeout_seconds"}]


@pytest.mark.parametrize(
  "mesh", [{}, {"data": 2, "tensor": 4}, {"data": 1, "fsdp": 2, "sequence": 4}], ids=str
)
def test_one_process_loads_everything(mesh):
  assert processes.own_rows(make_mesh(MeshConfig(**mesh)), 8) == (0, 1)


@pytest.mark.parametrize(
  ("variables", "message"),
  [
    ({"JAX_NUM_PROCESSES": "2"}, r"JAX_COORDINATOR_ADDRESS=\(not set\), JAX_NUM_PROCESSES=2"),
    (
      {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "JAX_NUM_PROCESSES": "two",
        "JAX_PROCESS_ID": "0",
      },
      "JAX_NUM_PROCESSES=two",
    ),
    (
      {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
      "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2",
    ),
  ],
)
def test_half_a_set_of_process_settings_is_refused(variables, message, monkeypatch):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(InputError, match=message):
    processes.join()
