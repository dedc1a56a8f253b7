"""Slices that programs can be compiled for without a TPU, and the settings they refuse."""

import os

import pytest

from ldm_jax import tpu
from ldm_jax.errors import InputError
from ldm_jax.tpu import CHIPS, chip_of, topology_devices
from tests.rig import needs_libtpu

pytestmark = needs_libtpu


@pytest.mark.parametrize(
  ("name", "count", "cores"),
  [
    ("v4:2x2x1", 4, 2),
    ("v5e:1x1", 1, 1),
    ("v5e:2x4", 8, 1),
    ("v5p:4x4x4", 64, 2),
    ("v6e:16x16", 256, 1),
    ("tpu7x:2x2x1", 8, 1),
  ],
)
def test_devices_of_a_slice(name, count, cores):
  before = dict(os.environ)
  devices = topology_devices(name)
  assert dict(os.environ) == before
  chip = chip_of(devices[0])
  assert (len(devices), devices[0].num_cores, chip.name) == (count, cores, name.split(":")[0])
  assert chip.cores == chip.devices * cores
  assert devices[0].platform == "tpu"


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("v9:2x2", "unknown chip 'v9'; known are v4, v5e, v5p, v6e, tpu7x"),
    ("v5e", "'' is not a slice shape; v5e has 1x1, 2x2"),
    ("v5e:2*4", "'2.4' is not a slice shape"),
    ("v5e:3x5", "there is no such slice; v5e has 1x1, 2x2, 2x4"),
    ("v5e:32x32", "up to 256 chips"),
    ("v5p:0x4x4", "not a slice shape"),
    ("v5p:4x4", "no such slice; v5p has 2x2x1, .*, and any three multiples of 4, up to 6,144"),
    ("v5p:32x32x32", "no such slice"),
  ],
)
def test_slices_that_do_not_exist(name, words):
  with pytest.raises(InputError, match=words):
    topology_devices(name)


def test_without_libtpu_the_message_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
  monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
  with pytest.raises(InputError, match=r"needs libtpu.*pip install -e '.\[tpu\]'"):
    topology_devices("v5e:2x4")


def test_what_libtpu_refuses_is_one_of_our_errors(monkeypatch):
  monkeypatch.setattr(tpu, "_parse", lambda name: (CHIPS["v5e"], (3, 5)))
  with pytest.raises(InputError, match=r"--topology v5e:3x5: libtpu says .*not divisible"):
    topology_devices("v5e:3x5")
