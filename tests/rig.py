"""The smallest run that exercises everything: bytes, 2 blocks, width 32, 8 rows of 32 tokens."""

import contextlib
import dataclasses
import os
import signal
from pathlib import Path

from ldm_jax import Config, MixerConfig, ModelConfig
from ldm_jax.config import DataConfig, OptimizerConfig, TrainConfig, with_mixer
from ldm_jax.data import Dataset

__all__ = [
  "MECHANISMS",
  "ROOT",
  "VARIANTS",
  "signal_at",
  "tiny_config",
  "with_kind",
  "with_mixer",
  "with_model",
]

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


def signal_at(monkeypatch, step: int, number: signal.Signals) -> None:
  """Training gets the signal when it asks for the batch of a step."""
  original = Dataset.train_batches

  @contextlib.contextmanager
  def train_batches(self, first, stop):
    def signalled(batches):
      for at, batch in enumerate(batches, first):
        if at == step:
          os.kill(os.getpid(), number)
        yield batch

    with original(self, first, stop) as batches:
      yield signalled(batches)

  monkeypatch.setattr(Dataset, "train_batches", train_batches)


def with_model(config: Config, **changes) -> Config:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


_LDM = MixerConfig(kind="ldm", groups=4, key_dim=3, latent_dim=8, gain_init=0.5)
# One of each mechanism, with the gain of the memory open so that it takes part from the start.
MECHANISMS = {
  "preln": MixerConfig(kind="preln"),
  "rls": _LDM,
  "attnres": MixerConfig(kind="attnres", block_size=2),
  "hc": MixerConfig(kind="hc", streams=3),
  "mhc": MixerConfig(kind="mhc", streams=3),
}
VARIANTS = {
  **MECHANISMS,
  "delta": dataclasses.replace(_LDM, rule="delta"),
  "outer": dataclasses.replace(_LDM, rule="outer"),
  "one_group": dataclasses.replace(_LDM, groups=1),
  "shared_key": dataclasses.replace(_LDM, shared_key=True),
  "key_dim_1": dataclasses.replace(_LDM, key_dim=1),
  "more_keys_than_writes": dataclasses.replace(_LDM, key_dim=9),
  "memory_only": dataclasses.replace(_LDM, readout="memory_only"),
  "no_residual": dataclasses.replace(_LDM, residual=False),
  "no_forgetting": dataclasses.replace(_LDM, forgetting=False),
  "no_importance": dataclasses.replace(_LDM, importance=False),
  "block_writes": dataclasses.replace(_LDM, write_every=2),
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
