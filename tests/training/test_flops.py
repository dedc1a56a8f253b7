"""FLOPs against hand-computed numbers and the compiler's count; MFU only where it is known."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ldm_jax.config import MeshConfig
from ldm_jax.data.packing import Batch
from ldm_jax.sharding import make_mesh
from ldm_jax.training import run
from ldm_jax.training.flops import (
  mesh_peak_flops,
  mfu,
  mixer_flops_per_token,
  model_flops_per_token,
  peak_flops,
)
from ldm_jax.training.metrics import Progress
from ldm_jax.training.step import abstract_state, compile_train_step, make_model
from tests.rig import MECHANISMS, tiny_config, with_mixer, with_model


def measured_config():
  """Large enough for products to dominate, a vocabulary without padding, grouped keys."""
  config = with_model(
    tiny_config("preln"), width=64, blocks=1, kv_heads=2, mlp_width=192, vocab_size=256
  )
  return dataclasses.replace(
    config, data=dataclasses.replace(config.data, sequence_length=64, batch_size=4)
  )


def test_hand_computed_numbers_of_the_tiny_model():
  # Per block 2 · 32² for queries and output, 2 · 32² for keys and values, 3 · 32 · 64 for the MLP;
  # head 32 · 257; attention 12 · 2 blocks · 32 · 32.
  model = tiny_config("ldm").model
  weights = 2 * (2048 + 2048 + 6144) + 8224
  assert weights == 28_704
  assert model_flops_per_token(model, 32) == 6 * weights + 24_576 == 196_800
  # Four reads, sublayers 1 to 3 and the head, and four writes.
  read = 32 * 8 + 8 * 4 * 4 + 8 * 4 + 32 * 4
  write = 32 * 8 + 8 * 4 * 4 + 8 * 4 + 2 * 32 * 4 + 2 * 4 * 4 * 4
  assert mixer_flops_per_token(model) == 6 * (4 * read + 4 * write) == 32_256
  assert mixer_flops_per_token(tiny_config("preln").model) == 0


def test_every_mixer_carries_the_same_model_flops():
  flops = {
    model_flops_per_token(with_mixer(tiny_config(), kind=kind).model, 32)
    for kind in ("preln", "ldm", "attnres", "hc", "mhc")
  }
  assert len(flops) == 1


def test_the_compiler_counts_the_same_for_a_train_step():
  config = measured_config()
  shape = (config.data.batch_size, config.data.sequence_length)
  ids, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  with jax.set_mesh(mesh):
    state = abstract_state(config, mesh)
    step = compile_train_step(config, state, Batch(ids, ids, ids, ids, mask))
  expected = model_flops_per_token(config.model, shape[1]) * shape[0] * shape[1]
  assert step.cost_analysis()["flops"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", sorted(set(MECHANISMS) - {"preln"}))
def test_the_compiler_counts_about_the_same_for_the_mixers(name):
  """Norms, gates and sums come on top of the products: up to 64 % at this size."""
  config = measured_config()
  tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)

  def forward_flops(config):
    model = make_model(config)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return jax.jit(model.apply).lower(params, tokens).cost_analysis()["flops"]

  # Of the depth memory those of the recursion are counted, whichever form computes it.
  mixed = with_model(config, mixer=dataclasses.replace(MECHANISMS[name], form="reference"))
  extra = (forward_flops(mixed) - forward_flops(config)) / (4 * 64)
  assert 1 < extra / (mixer_flops_per_token(mixed.model) / 3) < 1.7


def device(kind, **attributes):
  return SimpleNamespace(device_kind=kind, **attributes)


def test_peaks_of_known_devices_and_none_for_others():
  peaks = {
    ("TPU v4", 2): 275e12,
    ("TPU v5 lite", 1): 197e12,
    ("TPU v5", 2): 459e12,
    ("TPU v5p", 1): 229.5e12,  # a chip whose two cores are devices of their own
    ("TPU v6 lite", 1): 918e12,
    ("TPU7x", 1): 1153.5e12,
  }
  for (kind, cores), peak in peaks.items():
    assert peak_flops(device(kind, num_cores=cores)) == peak
  for unknown in (device("cpu"), device("TPU v9", num_cores=1), device("TPU v4")):
    assert peak_flops(unknown) is None
  assert mesh_peak_flops(make_mesh(MeshConfig())) is None
  assert mfu(1000.0, 10**9, None) is None
  assert mfu(197.0 * 2, 10**11, 2 * 197e12) == pytest.approx(0.1)


def test_the_summary_says_once_what_mfu_is_a_share_of(monkeypatch):
  config, mesh = tiny_config(), make_mesh(MeshConfig())
  work = "work: 0.20 MFLOP to train a token, mixers 0.03 more (16.39%); MFU "
  assert run._work(config, mesh) == work + "n/a (no peak known for cpu)"
  monkeypatch.setattr(run, "mesh_peak_flops", lambda mesh: 8 * 197e12)
  assert run._work(config, mesh) == work + "of 1,576 TFLOP/s"
  assert "mixers" not in run._work(tiny_config("preln"), mesh)


def test_the_progress_line_shows_the_share(capsys):
  progress = Progress(steps=10, done=0)
  progress.step(5, 1.5, 2000.0, 0.4123)
  progress.step(6, 1.5, 2000.0)
  with_share, without = capsys.readouterr().out.splitlines()
  assert "2,000 tokens/s  MFU 41.2%  " in with_share
  assert "MFU" not in without
