"""A 1.46M-parameter Linear Depth Memory byte model on the Python standard library.

python train.py                # this file is the default
"""

from ldm_jax import Config, MixerConfig, ModelConfig
from ldm_jax.config import DataConfig, OptimizerConfig, TrainConfig


def get_config() -> Config:
  """The smallest useful run: two CPU cores, a few minutes."""
  return Config(
    model=ModelConfig(
      width=128,
      blocks=6,
      heads=4,
      mlp_width=352,
      vocab_size=257,
      mixer=MixerConfig(kind="ldm", rule="rls", groups=8, key_dim=8, gain_init=1.0, latent_dim=32),
    ),
    data=DataConfig(source="stdlib", sequence_length=256, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50),
    train=TrainConfig(steps=300, log_every=10, eval_every=100, checkpoint_every=100),
  )
