"""Compiled for a TPU, the depth memory talks to no other chip: it is local to its token."""

import collections
import math
import re

import jax
import pytest

from ldm_jax.config import Config, DataConfig, MeshConfig, MixerConfig, ModelConfig, TrainConfig
from ldm_jax.hlo.collectives import collectives
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import topology_devices
from ldm_jax.training.step import compile_train_step_for
from tests.rig import needs_libtpu

pytestmark = needs_libtpu
WIDTH, LENGTH, ROWS = 256, 256, 16
MIXERS = {
  "preln": MixerConfig(kind="preln"),
  "ldm": MixerConfig(groups=8, key_dim=8, latent_dim=16, gain_init=1.0, memory_dtype="bfloat16"),
}


def large_exchanges(name, mesh):
  """How often a step exchanges an array at least as large as one stream on one chip, by kind."""
  config = Config(
    model=ModelConfig(
      width=WIDTH, blocks=1, heads=4, mlp_width=512, vocab_size=257, mixer=MIXERS[name]
    ),
    data=DataConfig(sequence_length=LENGTH, batch_size=ROWS),
    train=TrainConfig(compute_dtype="bfloat16", remat="full"),
    mesh=mesh,
  )
  devices = make_mesh(mesh, topology_devices("v5e:2x4"))
  with jax.default_matmul_precision("default"):  # the attention kernel knows no other in bfloat16
    text = compile_train_step_for(config.validate(), devices).as_text()
  assert "splash_mha_dkv" in text
  limit = ROWS * LENGTH * WIDTH // devices.size
  found = collections.Counter()
  for collective in collectives(text):
    # The compiler may write the same sum over chips either way.
    kind = {"all-reduce": "sum", "reduce-scatter": "sum"}.get(collective.kind, collective.kind)
    for shape in collective.shapes:
      if math.prod(map(int, re.findall(r"\d+", shape.split("[")[1]))) >= limit:
        found[kind, shape] += collective.runs
  return found


@pytest.mark.parametrize(
  "mesh",
  [
    MeshConfig(data=1, fsdp=2, tensor=2, sequence=2),
    pytest.param(MeshConfig(data=1, fsdp=8), marks=pytest.mark.slow),
    pytest.param(MeshConfig(data=1, fsdp=4, sequence=2), marks=pytest.mark.slow),
    pytest.param(MeshConfig(data=2, tensor=4), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_the_memory_adds_no_exchange_of_its_size_or_that_of_an_activation(mesh):
  plain, memory = large_exchanges("preln", mesh), large_exchanges("ldm", mesh)
  assert plain  # of weights or activations, so that there is something to compare
  assert not memory - plain
