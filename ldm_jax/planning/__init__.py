"""What a training step would need on a TPU slice; `python -m ldm_jax.plan` is its command."""
