"""Processes on this machine train as one does, stop together, and none outlives another."""

import dataclasses
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from ldm_jax import joining, processes
from ldm_jax.config import MeshConfig, to_json
from ldm_jax.data import load_dataset
from ldm_jax.environment import source_digest
from ldm_jax.errors import InputError
from ldm_jax.sharding import make_mesh
from ldm_jax.training.loop import train
from tests.rig import ROOT, final_state, refusal, tiny_config, trace, with_model

# Trains, keeps the rows that this process loaded, and has something happen before a given step.
CHILD = """
import contextlib, os, resource, signal, sys, time
import numpy as np
from ldm_jax import joining
from ldm_jax.command_line import run_command
from ldm_jax.config import from_json
from ldm_jax.data import Dataset
from ldm_jax.training.loop import train

config, workdir, rows, heartbeat, event, at = sys.argv[1:]
joining._HEARTBEAT_SECONDS = int(heartbeat)
joining.join()
original = Dataset.train_batches

def happen():
  open(f"{rows}/event", "w").close()
  if event == "full disk":  # for this process alone: no file of it may grow beyond this
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
  elif event:
    os.kill(os.getpid(), signal.Signals[event])

@contextlib.contextmanager
def train_batches(self, first, stop, own):
  def kept(batches):
    for step, batch in enumerate(batches, first):
      np.save(f"{rows}/{step}-{'_'.join(map(str, own))}.npy", batch.tokens)
      if step == int(at):
        happen()
      if int(at) >= 0:
        time.sleep(0.3)  # the notice of a signal takes a second to reach the others
      yield batch
  with original(self, first, stop, own) as batches:
    yield kept(batches)

Dataset.train_batches = train_batches
run_command(lambda: train(from_json(open(config).read()), workdir))
"""


def free_port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def start_all(
  folder, config=None, *, count=2, event="", at=-1, to=1, heartbeat=3, timeout=300, variables=None
):
  """Runs `count` processes with eight CPU devices together; returns their codes and outputs.

  The event and other environment variables are for process `to`; `config` may be a list.
  """
  (folder / "rows").mkdir(exist_ok=True)
  port, running = free_port(), []
  for number in range(count):
    own = config[number] if isinstance(config, list) else config
    (folder / f"config_{number}.json").write_text(to_json(own))
    environment = {
      **os.environ,
      "PYTHONPATH": str(ROOT),
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // count} "
      "--xla_backend_optimization_level=0",
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": str(count),
      "JAX_PROCESS_ID": str(number),
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compilation_cache"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      **(variables if variables and number == to else {}),
    }
    arguments = [folder / f"config_{number}.json", folder / "run", folder / "rows", heartbeat]
    arguments += [event if number == to else "", at]
    running.append(
      subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    )
  try:
    outputs = [process.communicate(timeout=timeout)[0] for process in running]
  finally:
    for process in running:
      process.kill()
  return [process.returncode for process in running], outputs


def run_config(kind="preln", **mesh):
  config = with_model(tiny_config(kind, steps=24, eval_every=12, checkpoint_every=9), blocks=1)
  return dataclasses.replace(config, mesh=MeshConfig(**mesh))


def assert_as_alone(config, folder):
  """The run in `folder` left the trace and the parameters of one process that did all the work."""
  assert train(config, folder / "alone") == 0
  for line, expected in zip(trace(folder / "run"), trace(folder / "alone"), strict=True):
    exact = {"step", "split", "tokens", "batch_hash", "learning_rate"} & expected.keys()
    assert {key: line[key] for key in exact} == {key: expected[key] for key in exact}
    np.testing.assert_allclose(line["loss"], expected["loss"], rtol=1e-5)
  (state, record), (alone, alone_record) = (
    final_state(config, folder / name) for name in ("run", "alone")
  )
  assert record == alone_record
  for leaf, expected in zip(*map(jax.tree.leaves, (state.params, alone.params)), strict=True):
    np.testing.assert_allclose(leaf, expected, rtol=0, atol=1e-5)


def test_two_processes_that_are_stopped_killed_and_out_of_disk_train_as_one(tmp_path):
  config = run_config()
  codes, outputs = start_all(tmp_path, config, event="SIGTERM", at=3)
  assert codes == [75, 75], outputs
  assert "stopped by SIGTERM after step" in outputs[0]
  assert "step" not in outputs[1]  # one of them speaks for both
  (stopped,) = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()][-1:]
  assert 3 < stopped < 9

  split = run_config(fsdp=4, tensor=2, data=1)  # another mesh: parameters across processes
  codes, outputs = start_all(tmp_path, split, event="SIGKILL", at=12)
  assert codes[1] == -signal.SIGKILL, outputs
  assert codes[0] != 0, outputs
  assert "resuming" in outputs[0]

  codes, outputs = start_all(tmp_path, split, event="full disk", at=15)
  assert codes[1] == 1, outputs
  assert codes[0] != 0, outputs
  (line,) = [line for line in outputs[1].splitlines() if line.startswith("error:")]
  assert "/run/checkpoints failed" in line
  assert "make room or mend the disk, then run the same command again" in line

  codes, outputs = start_all(tmp_path, split)
  assert codes == [0, 0], outputs
  assert f"resuming {tmp_path / 'run'} after step 12" in outputs[0]
  assert_as_alone(config, tmp_path)
  assert_loaded(config, tmp_path, [4, 4])


def assert_loaded(config, folder, sizes):
  """The processes loaded so many rows each, none twice, and together those of every batch."""
  dataset = load_dataset(config)
  for step in range(config.train.steps):
    files = list((folder / "rows").glob(f"{step}-*.npy"))
    parts = [[int(row) for row in path.stem.split("-")[1].split("_")] for path in files]
    assert list(map(len, parts)) == sizes
    whole = np.full((config.data.batch_size, config.data.sequence_length), -1, np.int32)
    for path, rows in zip(files, parts, strict=True):
      whole[rows] = np.load(path)
    np.testing.assert_array_equal(whole, dataset.train_batch(step).tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("count", "kind", "mesh", "parts"),
  [
    (2, "ldm", {"data": 1, "tensor": 2, "sequence": 4}, 1),  # both hold all rows
    (4, "preln", {"data": 8}, 4),
    (4, "ldm", {"data": 1, "fsdp": 4, "tensor": 2}, 4),
    (4, "ldm", {"data": 2, "fsdp": 1, "tensor": 4}, 2),  # pairs hold the same rows
  ],
  ids=str,
)
def test_processes_train_as_one_on_every_mesh(count, kind, mesh, parts, tmp_path):
  config = run_config(kind, **mesh)
  codes, outputs = start_all(tmp_path, config, count=count)
  assert codes == [0] * count, outputs
  assert_as_alone(config, tmp_path)
  assert_loaded(config, tmp_path, [8 // parts] * parts)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["everybody's", "process 1's"])
def test_a_damaged_checkpoint_is_skipped_by_all_or_ends_all(whose, tmp_path):
  config = run_config(data=1, fsdp=8)
  codes, outputs = start_all(tmp_path, config, event="SIGTERM", at=14)
  assert codes == [75, 75], outputs
  newest = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
  for path in (newest / "state").rglob("*" if whose == "everybody's" else "ocdbt.process_1/d/*"):
    if path.is_file():
      path.write_bytes(b"x")
  codes, outputs = start_all(tmp_path, config)
  if whose == "everybody's":
    assert codes == [0, 0], outputs
    assert f"checkpoint {newest.name} in" in outputs[0]
    assert_as_alone(config, tmp_path)
  else:
    assert codes[1] == 1, outputs
    assert codes[0] != 0, outputs
    assert f"error: checkpoint {newest.name} in" in outputs[1]
    assert "does not load in process 1, though in others" in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("event", ["SIGKILL", "full disk"])
@pytest.mark.parametrize("to", [0, 3])
def test_if_one_of_four_goes_the_others_end_within_a_minute(event, to, tmp_path):
  config = run_config()
  codes, outputs = start_all(
    tmp_path, config, count=4, event=event, at=3, to=to, heartbeat=joining._HEARTBEAT_SECONDS
  )
  assert 0 not in codes, outputs
  assert time.time() - (tmp_path / "rows" / "event").stat().st_mtime < 60
  codes, outputs = start_all(tmp_path, config, count=4)
  assert codes == [0] * 4, outputs
  assert_as_alone(config, tmp_path)


def test_settings_that_differ_between_processes_are_refused_by_all(tmp_path):
  codes, outputs = start_all(tmp_path, [tiny_config("preln", seed=seed) for seed in (0, 1)])
  assert codes == [2, 2], outputs
  for output in outputs:
    assert output.count("error: process 1 has another configuration than process 0") == 1
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_program_or_number_of_devices_in_one_process_is_refused_by_all(tmp_path):
  shutil.copytree(ROOT / "ldm_jax", tmp_path / "other" / "ldm_jax")
  (tmp_path / "other" / "ldm_jax" / "new.py").write_text("# one file more\n")
  flags = "--xla_force_host_platform_device_count=2"
  for variables, message in (
    ({"PYTHONPATH": str(tmp_path / "other")}, "process 1 has another version of ldm_jax"),
    ({"XLA_FLAGS": flags}, "process 1 has 2 devices and process 0 has 4"),
  ):
    codes, outputs = start_all(tmp_path, run_config(), variables=variables)
    assert codes == [2, 2], outputs
    assert all(output.count(f"error: {message}") == 1 for output in outputs), outputs
    assert not (tmp_path / "run").exists()


def fake_processes(monkeypatch, *devices):
  """What process 1 of several sees whose processes have so many devices each."""
  found = [types.SimpleNamespace(process_index=n) for n, m in enumerate(devices) for _ in range(m)]
  monkeypatch.setattr(jax, "devices", lambda: found)
  monkeypatch.setattr(jax, "process_count", lambda: len(devices))
  monkeypatch.setattr(jax, "process_index", lambda: 1)


def test_processes_with_other_numbers_of_devices_are_named(monkeypatch):
  fake_processes(monkeypatch, 4, 2, 4, 2)
  with pytest.raises(InputError, match="process 1, 3 has 2 devices and process 0 has 4"):
    processes.check_program()


def test_a_process_started_for_another_number_of_them_is_refused(monkeypatch):
  fake_processes(monkeypatch, 4, 4)
  set_variables(monkeypatch, "127.0.0.1:1", "3", "1")
  with pytest.raises(InputError, match=r"JAX_NUM_PROCESSES=3 in process 1, .* started with 2"):
    processes.check_program()


def test_other_versions_are_told_apart(monkeypatch):
  fake_processes(monkeypatch, 4, 4)

  def gather(digest):
    return np.stack([others.pop(0), digest])

  monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
  digests = [
    np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    for text in (f"{jax.__version__} {jax.lib.__version__}", source_digest())
  ]
  others = list(digests)
  processes.check_program()
  for index, what in enumerate(("jax", "ldm_jax")):
    others = [*digests[:index], digests[index] + 1]
    with pytest.raises(InputError, match=f"process 1 has another version of {what} than process 0"):
      processes.check_program()


def test_a_command_for_one_process_is_refused_as_one_of_several(monkeypatch):
  set_variables(monkeypatch, "127.0.0.1:1", "2", "0")
  line = refusal("-m", "ldm_jax.compare")
  assert line.startswith(
    "error: this command runs in one process only; start it once, without JAX_"
  )


def set_variables(monkeypatch, *values):
  for name, value in zip(joining._VARIABLES, values, strict=True):
    if value is not None:
      monkeypatch.setenv(name, value)


def test_a_process_that_nobody_joins_ends_with_one_line():
  address = f"127.0.0.1:{free_port()}"
  alone = subprocess.run(
    [sys.executable, "-c", "from ldm_jax import joining; joining.join(patience=3)"],
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
  calls, ends = [], []
  monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: calls.append(settings))
  monkeypatch.setattr(jax.distributed, "shutdown", lambda: ends.append(len(calls)))
  joining.join()
  monkeypatch.setattr(joining, "has_tpu", lambda: True)
  joining.join()  # JAX_PLATFORMS=cpu leaves the slice to others
  assert not calls
  monkeypatch.setattr(joining, "_on_tpu_vm", lambda: True)
  for count in (4, 1):  # one host is alone after all
    monkeypatch.setattr(jax, "process_count", lambda count=count: count)
    joining.join()
  assert [set(call) for call in calls] == [
    {"initialization_timeout", "heartbeat_timeout_seconds"}
  ] * 2
  assert ends == [2]


@pytest.mark.parametrize(
  "error",
  [RuntimeError("no route\n to host"), ValueError("num_processes must be defined")],
  ids=str,
)
def test_a_tpu_vm_that_cannot_join_says_so_in_one_line(error, monkeypatch):
  def fail(**settings):
    raise error

  monkeypatch.setattr(jax.distributed, "initialize", fail)
  monkeypatch.setattr(joining, "_on_tpu_vm", lambda: True)
  with pytest.raises(InputError, match="cannot join the other hosts of this TPU slice: ") as raised:
    joining.join()
  assert str(error).splitlines()[0] in str(raised.value)
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  "mesh", [{}, {"data": 2, "tensor": 4}, {"data": 1, "fsdp": 2, "sequence": 4}], ids=str
)
def test_one_process_loads_everything(mesh):
  assert processes.own_rows(make_mesh(MeshConfig(**mesh)), 8) == tuple(range(8))


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ((None, "2", None), r"JAX_COORDINATOR_ADDRESS=\(not set\), JAX_NUM_PROCESSES=2"),
    (("127.0.0.1:1", "two", "0"), "JAX_NUM_PROCESSES=two"),
    (("127.0.0.1", "2", "0"), "JAX_COORDINATOR_ADDRESS=127.0.0.1 must be HOST:PORT"),
    (("127.0.0.1:1", "2", "2"), "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2"),
  ],
)
def test_half_a_set_of_process_settings_is_refused(values, message, monkeypatch):
  set_variables(monkeypatch, *values)
  with pytest.raises(InputError, match=message):
    joining.join()
