"""What a process runs on, and where it keeps compiled programs."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as _cache


@contextlib.contextmanager
def compilation_cache(folder: Path) -> Iterator[None]:
  """Keeps compiled programs in `folder` inside the context: seeds differ only in their inputs.

  A cache that the user has chosen (JAX_COMPILATION_CACHE_DIR) is used instead.
  """
  if jax.config.jax_compilation_cache_dir:
    yield
    return
  jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
  _cache.reset_cache()  # it looks at the setting only once
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", None)
    _cache.reset_cache()


@functools.cache
def environment() -> dict[str, str]:
  """What this process runs on: "device", "jax", "python" and, in a checkout, "git_commit"."""
  found = {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
    "python": ".".join(map(str, sys.version_info[:3])),
  }
  commit = _git("describe", "--always", "--dirty", "--exclude", "*")
  # A checkout of something else may hold the environment that this package is installed in.
  if commit and _git("ls-files", "--error-unmatch", "__init__.py"):
    found["git_commit"] = commit
  return found


def _git(*arguments):
  try:
    done = subprocess.run(
      ("git", *arguments),
      cwd=Path(__file__).parent,
      capture_output=True,
      text=True,
      check=False,
      timeout=10,
    )
  except (OSError, subprocess.TimeoutExpired):
    return ""
  return done.stdout.strip() if done.returncode == 0 else ""
