"""The smallest run that exercises everything: bytes, 2 blocks, width 32, 8 rows of 32 tokens."""

import dataclasses
from pathlib import Path

from ldm_jax import Config, MixerConfig, ModelConfig
from ldm_jax.config import DataConfig, OptimizerConfig, TrainConfig

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


def with_model(config: Config, **changes) -> Config:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def with_mixer(config: Config, **changes) -> Config:
  return with_model(config, mixer=dataclasses.replace(config.model.mixer, **changes))
