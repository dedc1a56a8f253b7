"""A run says so when it would not run on what it was meant for."""

import os
import subprocess
import sys

import jax
import pytest

from ldm_jax import environment
from ldm_jax.config import TrainConfig
from ldm_jax.environment import check_platform, has_tpu, source_digest
from ldm_jax.errors import InputError
from ldm_jax.training.loop import train
from ldm_jax.training.workdir import open_workdir, save_config
from tests.rig import ROOT, tiny_config, write_config


@pytest.fixture
def tpu_machine(tmp_path, monkeypatch):
  """Has the device nodes and PCI devices of a TPU VM, under another root, and no JAX_PLATFORMS."""
  (tmp_path / "accel0").touch()
  for number, vendor in enumerate(("0x8086", "0x1ae0")):
    (tmp_path / f"pci{number}").mkdir()
    (tmp_path / f"pci{number}" / "vendor").write_text(f"{vendor}\n")
  monkeypatch.setattr(environment, "_TPU_NODES", (f"{tmp_path}/accel*", f"{tmp_path}/vfio*"))
  monkeypatch.setattr(environment, "_PCI_VENDORS", f"{tmp_path}/pci*/vendor")
  before = jax.config.jax_platforms
  jax.config.update("jax_platforms", None)
  yield tmp_path
  jax.config.update("jax_platforms", before)


def test_a_tpu_that_cannot_be_had_ends_the_command_with_one_line(tmp_path):
  config = write_config(tmp_path, tiny_config())
  done = subprocess.run(
    [sys.executable, ROOT / "train.py", "--config", config, "--workdir", tmp_path / "run"],
    env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "tpu,cpu"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert "Traceback" not in done.stderr
  line = done.stderr.splitlines()[-1]  # libtpu, where it is installed, logs a few before it
  assert line.startswith("error: JAX_PLATFORMS=tpu,cpu cannot be used here: Unable to initialize")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("installed", [True, False])
def test_a_tpu_left_unused_is_refused_with_the_way_out(installed, tpu_machine, monkeypatch):
  monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: installed or None)
  way_out = "another process may hold the chips" if installed else r"pip install -e '.\[tpu\]'"
  with pytest.raises(InputError, match=f"has a TPU, but JAX runs on its CPU: .*{way_out}"):
    check_platform()
  with pytest.raises(InputError, match=f"train.platform = tpu, but JAX runs on cpu .*{way_out}"):
    check_platform("tpu")
  check_platform("cpu")
  jax.config.update("jax_platforms", "cpu")
  check_platform()


def test_other_accelerators_and_other_devices_of_the_vendor_are_no_tpu(tpu_machine):
  assert has_tpu()
  (tpu_machine / "pci1" / "vendor").write_text("0x10de\n")
  assert not has_tpu()
  (tpu_machine / "pci1" / "vendor").write_text("0x1ae0\n")
  (tpu_machine / "accel0").rename(tpu_machine / "vfio7")
  assert has_tpu()
  (tpu_machine / "vfio7").unlink()
  assert not has_tpu()


def test_a_run_refuses_another_platform_than_its_own(tmp_path):
  assert TrainConfig().platform == "any"
  with pytest.raises(InputError, match=r"train.platform = gpu, but JAX runs on cpu"):
    train(tiny_config(platform="gpu"), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_the_program_is_told_by_its_sources(monkeypatch, tmp_path):
  digests = []
  for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
    (tmp_path / "module.py").write_text(text)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    source_digest.cache_clear()
    digests.append(source_digest())
  source_digest.cache_clear()
  assert digests[0] == digests[2] != digests[1]


def test_a_run_may_resume_on_another_platform(tmp_path):
  save_config(tmp_path, tiny_config())
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  assert open_workdir(tmp_path, tiny_config(platform="cpu")) == []
