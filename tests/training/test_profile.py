"""The profiler's window opens once, closes whatever happens, and says what is wrong."""

from types import SimpleNamespace

import jax
import pytest

from ldm_jax.errors import TrainingError
from ldm_jax.training.profile import ProfileWindow
from ldm_jax.training.run import Run


@pytest.fixture
def calls(monkeypatch):
  """What the profiler was asked, instead of profiling."""
  asked = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: asked.append(folder))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: asked.append("stop"))
  return asked


def steps_under_trace(window, first, last):
  traced = []
  for done in range(first, last):
    if window.begins_after(done):
      window.begin()
    traced += [done + 1] if window._tracing else []
    if window.ends_after(done + 1):
      window.end()
  return traced


def test_the_window_covers_the_steps_it_was_asked_for(calls, tmp_path):
  assert steps_under_trace(ProfileWindow(tmp_path / "profile", 2, 3), 0, 10) == [3, 4, 5]
  assert calls == [str(tmp_path / "profile"), "stop"]
  assert steps_under_trace(ProfileWindow(tmp_path, 0, 1), 0, 3) == [1]
  assert steps_under_trace(ProfileWindow(tmp_path, 0, 0), 0, 3) == []


def test_a_run_that_resumes_after_its_start_is_not_traced(calls, tmp_path):
  window = ProfileWindow(tmp_path, 2, 3)
  assert window.missed(3)
  assert steps_under_trace(window, 3, 10) == []
  assert not window.missed(2)
  assert not ProfileWindow(tmp_path, 0, 0).missed(3)
  assert calls == []


def test_only_the_first_host_traces(calls, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  assert steps_under_trace(ProfileWindow(tmp_path, 0, 2), 0, 4) == []
  assert calls == []


def test_a_run_that_ends_inside_the_window_writes_its_trace(calls, tmp_path):
  """Also if closing something else fails."""

  def fail():
    raise OSError("disk")

  window = ProfileWindow(tmp_path, 0, 2)
  window.begin()
  fine, broken = SimpleNamespace(close=lambda: None), SimpleNamespace(close=fail)
  run = SimpleNamespace(checkpointer=broken, best=None, writer=fine, progress=fine, profile=window)
  with pytest.raises(OSError, match="disk"):
    Run.close(run)
  assert calls == [str(tmp_path), "stop"]
  window.end()
  assert len(calls) == 2


def test_a_profiler_that_refuses_ends_the_run_with_words(tmp_path, monkeypatch):
  def refuse(folder):
    raise RuntimeError("Only one profile may be run at a time.")

  monkeypatch.setattr(jax.profiler, "start_trace", refuse)
  with pytest.raises(TrainingError, match=r"Only one profile.*--train.profile_steps 0"):
    ProfileWindow(tmp_path, 0, 1).begin()
