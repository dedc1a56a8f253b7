"""The smallest run that exercises everything: bytes, 2 blocks, width 32, 8 rows of 32 tokens."""

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax import Config, MixerConfig, ModelConfig, TransformerLM
from ldm_jax.comparison import Comparison
from ldm_jax.config import (
  DataConfig,
  OptimizerConfig,
  TrainConfig,
  to_json,
  with_mixer,
  with_section,
)
from ldm_jax.data import Dataset
from ldm_jax.sharding import make_mesh
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.step import abstract_state
from ldm_jax.training.workdir import save_config
from ldm_jax.typing import PyTree

__all__ = [
  "ABLATIONS",
  "MECHANISMS",
  "ROOT",
  "VARIANTS",
  "ablations",
  "final_state",
  "needs_libtpu",
  "random_params",
  "refusal",
  "save_run",
  "signal_at",
  "tiny_comparison",
  "tiny_config",
  "trace",
  "with_kind",
  "with_mixer",
  "with_model",
  "with_section",
  "write_config",
]

# The compiler for TPUs has wheels for this platform only, and the test extra brings it there.
needs_libtpu = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu is for x86-64 Linux"
)

ROOT = Path(__file__).resolve().parent.parent


def tiny_config(kind: str = "ldm", **train) -> Config:
  mixer = MixerConfig(kind=kind, groups=4, key_dim=4, latent_dim=8)
  return Config(
    model=ModelConfig(width=32, blocks=2, heads=4, mlp_width=64, vocab_size=257, mixer=mixer),
    data=DataConfig(sequence_length=32, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    train=TrainConfig(
      **dict(
        dict(
          steps=6, log_every=1, eval_every=3, eval_batches=2, checkpoint_every=4, sample_tokens=0
        ),
        **train,
      )
    ),
  )


def final_state(config: Config, workdir: Path):
  """The train state and the record of the newest checkpoint."""
  mesh = make_mesh(config.mesh)
  checkpointer = Checkpointer(workdir, 1)
  state, record = checkpointer.restore_newest(abstract_state(config, mesh))
  checkpointer.close()
  return jax.device_get(state), record


def write_config(folder: Path, config: Config) -> Path:
  """A config file for the command line."""
  path = folder / "config.py"
  path.write_text(
    "from ldm_jax.config import from_json\n"
    f"def get_config():\n  return from_json({to_json(config)!r})\n"
  )
  return path


def trace(workdir: Path) -> list[dict]:
  """metrics.jsonl without what depends on the clock."""
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def signal_at(monkeypatch, step: int, number: signal.Signals) -> None:
  """Training gets the signal when it asks for the batch of a step."""
  original = Dataset.train_batches

  @contextlib.contextmanager
  def train_batches(self, first, stop, rows):
    def signalled(batches):
      for at, batch in enumerate(batches, first):
        if at == step:
          os.kill(os.getpid(), number)
        yield batch

    with original(self, first, stop, rows) as batches:
      yield signalled(batches)

  monkeypatch.setattr(Dataset, "train_batches", train_batches)


def random_params(model: TransformerLM, scale: float = 0.3) -> PyTree:
  """Parameters of which nothing is zero: every gate is open and every query says something."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
  rng = np.random.default_rng(1)
  draw = lambda leaf: jnp.asarray(rng.normal(0.0, scale, leaf.shape), leaf.dtype)
  return jax.tree.map(draw, nn.unbox(shapes["params"]))


def save_run(workdir: Path, config: Config) -> Path:
  """A workdir with a checkpoint of step 0, whose parameters are `random_params`."""
  workdir.mkdir(exist_ok=True)
  save_config(workdir, config)
  mesh = make_mesh(config.mesh)
  state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_state(config, mesh))
  checkpointer = Checkpointer(workdir, 1)
  params = random_params(TransformerLM(config.model))
  checkpointer.save(state.replace(params=params), {"tokens": 0})
  checkpointer.close()
  return workdir


def with_model(config: Config, **changes) -> Config:
  return with_section(config, "model", **changes)


_LDM = MixerConfig(kind="ldm", groups=4, key_dim=3, latent_dim=8, gain_init=0.5)
# One of each mechanism, with the gain of the memory open so that it takes part from the start.
MECHANISMS = {
  "preln": MixerConfig(kind="preln"),
  "rls": _LDM,
  "attnres": MixerConfig(kind="attnres", block_size=2),
  "hc": MixerConfig(kind="hc", streams=3),
  "mhc": MixerConfig(kind="mhc", streams=3),
}
# What each ablation of the depth memory changes.
ABLATIONS = {
  "outer": {"rule": "outer"},
  "delta": {"rule": "delta"},
  "no_forgetting": {"forgetting": False},
  "no_importance": {"importance": False},
  "one_group": {"groups": 1},
  "shared_key": {"shared_key": True},
  "memory_only": {"readout": "memory_only"},
  "no_residual": {"residual": False},
  "block_writes": {"write_every": 2},
}


def ablations(ldm: MixerConfig) -> dict[str, MixerConfig]:
  return {name: dataclasses.replace(ldm, **changes) for name, changes in ABLATIONS.items()}


VARIANTS = {
  **MECHANISMS,
  **ablations(_LDM),
  "memory_only_embedding": dataclasses.replace(
    _LDM, readout="memory_only", write_embedding=True, key_bias_init=1.0
  ),
  "key_dim_1": dataclasses.replace(_LDM, key_dim=1),
  "more_keys_than_writes": dataclasses.replace(_LDM, key_dim=9),
  "bfloat16_memory": dataclasses.replace(_LDM, memory_dtype="bfloat16"),
  "attnres_full": MixerConfig(kind="attnres", block_size=1),
  "attnres_one_block": MixerConfig(kind="attnres", block_size=9),
  "hc_static": MixerConfig(kind="hc", streams=3, dynamic=False),
  "hc_one_stream": MixerConfig(kind="hc", streams=1),
  "mhc_one_stream": MixerConfig(kind="mhc", streams=1),
}


def with_kind(name: str, **train) -> Config:
  """The tiny run with one of `VARIANTS`."""
  config = tiny_config(**train)
  return with_model(config, mixer=VARIANTS[name])


def tiny_comparison(**changes) -> Comparison:
  base = tiny_config("preln", steps=4, eval_every=2, eval_batches=1, checkpoint_every=2)
  mixer = base.model.mixer
  settings = dict(
    base=with_model(base, blocks=1),
    mixers={"preln": mixer, "ldm": dataclasses.replace(mixer, kind="ldm")},
    seeds=(0, 1),
    learning_rates=(1e-2,),
    timing_rounds=1,
  )
  return Comparison(**{**settings, **changes})


def refusal(*command, cwd=None) -> str:
  """Runs a Python command that must exit with 2 and one line, before any work; returns the line."""
  result = subprocess.run(
    [sys.executable, *map(str, command)],
    cwd=cwd,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 2
  assert result.stdout == ""
  (line,) = result.stderr.strip().splitlines()
  return line
