"""What a process runs on, and where it keeps compiled programs."""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as _cache

from ldm_jax.errors import InputError
from ldm_jax.tpu import quiet_libtpu

_TPU_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"


def has_tpu() -> bool:
  """Whether this machine has TPU chips, whether or not JAX can use them."""
  # Other accelerators have such device nodes too, and Google makes other PCI devices.
  return any(map(glob.glob, _TPU_NODES)) and any(
    Path(path).read_text().strip() == _GOOGLE for path in glob.glob(_PCI_VENDORS)
  )


def check_platform(wanted: str = "any") -> None:
  """Makes sure that JAX runs on what was asked for, and not on the CPU of a machine with a TPU.

  Args:
    wanted: "cpu", "gpu" or "tpu"; with "any", only a TPU that JAX silently leaves unused counts.

  Raises:
    InputError: saying why, as far as that is known, and what helps.
  """
  asked = jax.config.jax_platforms or ""
  try:
    # Without a TPU, libtpu would look for one in vain and say so at length.
    with contextlib.nullcontext() if has_tpu() else quiet_libtpu():
      found = jax.default_backend()
  except (RuntimeError, AssertionError) as error:  # the second for a platform without its plugin
    reason = (str(error) or "its plugin is not installed").splitlines()[0]
    way_out = _way_out() if "tpu" in asked.split(",") else "set another or none"
    raise InputError(f"JAX_PLATFORMS={asked} cannot be used here: {reason}; {way_out}") from None
  if wanted not in ("any", found):
    raise InputError(
      f"train.platform = {wanted}, but JAX runs on {found} here (JAX_PLATFORMS="
      f"{asked or '(not set)'}); {_way_out() if wanted == 'tpu' else 'change one of them'}"
    )
  if wanted == "any" and found == "cpu" and "cpu" not in asked.split(",") and has_tpu():
    raise InputError(
      f"this machine has a TPU, but JAX runs on its CPU: {_way_out()}; to run on the CPU all the "
      "same, set JAX_PLATFORMS=cpu"
    )


def _way_out():
  """What helps where JAX finds no TPU, as far as can be told from here."""
  if not importlib.util.find_spec("libtpu"):
    return "libtpu is not installed, see to it with: pip install -e '.[tpu]'"
  if not has_tpu():
    return "this machine has no TPU chips that it shows to this process"
  return (
    "libtpu is installed, so another process may hold the chips (sudo lsof -t /dev/accel* "
    "/dev/vfio/* lists them); JAX_PLATFORMS=tpu makes JAX say what is wrong"
  )


@functools.cache
def source_digest() -> str:
  """Names the source files of this package by their contents: 16 hex digits."""
  digest, folder = hashlib.sha256(), Path(__file__).parent
  for path in sorted(folder.rglob("*.py")):
    digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
  return digest.hexdigest()[:16]


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
