"""A bucket in this process: as much of Cloud Storage's JSON interface as one run needs.

gcsfs finds it by STORAGE_EMULATOR_HOST, and TensorStore by TENSORSTORE_GCS_HTTP_URL.
"""

import contextlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

NAME = "bucket"


class Bucket:
  """Objects by name, each with its bytes and its generation; `full` refuses uploads."""

  def __init__(self):
    self.objects: dict[str, tuple[bytes, int]] = {}
    self.uploads: dict[str, bytes] = {}
    self.full = False
    self.lock = threading.Lock()
    self.generations = itertools.count(1)

  def put(self, name: str, data: bytes, condition: str | None = None) -> int:
    """Stores an object unless its generation is another than the condition; returns the status."""
    with self.lock:
      if self.full:
        return 403
      if condition is not None and int(condition) != self.objects.get(name, (b"", 0))[1]:
        return 412
      self.objects[name] = (data, next(self.generations))
      return 200

  def describe(self, name: str) -> dict:
    data, generation = self.objects[name]
    return {
      "kind": "storage#object",
      "bucket": NAME,
      "name": name,
      "size": str(len(data)),
      "generation": str(generation),
      "updated": "2026-01-01T00:00:00.000Z",
      "timeCreated": "2026-01-01T00:00:00.000Z",
    }

  def listing(self, query: dict[str, str]) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items, folders = [], set()
    for name in sorted(self.objects):
      end = query.get("endOffset")
      if (
        not name.startswith(prefix) or name < query.get("startOffset", "") or (end and name >= end)
      ):
        continue
      rest = name[len(prefix) :]
      if delimiter and delimiter in rest:
        folders.add(prefix + rest.split(delimiter)[0] + delimiter)
      else:
        items.append(self.describe(name))
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, format, *arguments):
    pass

  def _answer(self, status, body=b"", **headers):
    if isinstance(body, dict):
      body = json.dumps(body).encode()
    self.send_response(status)
    for name, value in {"Content-Length": len(body), **headers}.items():
      self.send_header(name.replace("_", "-"), str(value))
    self.end_headers()
    self.wfile.write(body)

  def _parse(self):
    """Sets the query, and the object's name or "" for the whole bucket; False if neither."""
    url = urllib.parse.urlsplit(self.path)
    self.query = dict(urllib.parse.parse_qsl(url.query))
    match = re.fullmatch(rf"(?:/\w+)?/storage/v1/b/{NAME}(/o(?:/(.+))?)?", url.path)
    if not match:
      return False
    self.inside = match[1] is not None
    self.name = urllib.parse.unquote(match[2] or "")
    return True

  def do_GET(self):
    bucket = self.server.bucket
    if not self._parse():
      return self._answer(404, {"error": {"code": 404, "message": "The bucket does not exist"}})
    if not self.inside:
      return self._answer(200, {"kind": "storage#bucket", "name": NAME})
    with bucket.lock:
      if not self.name:
        return self._answer(200, bucket.listing(self.query))
      if self.name not in bucket.objects:
        return self._answer(404, {"error": {"code": 404, "message": "No such object"}})
      data, generation = bucket.objects[self.name]
      description = bucket.describe(self.name)
    if self.query.get("alt") != "media":
      return self._answer(200, description)
    headers = {"x_goog_generation": generation, "x_goog_stored_content_length": len(data)}
    if self.query.get("ifGenerationNotMatch") == str(generation):
      return self._answer(304, **headers)
    if "Range" not in self.headers:
      return self._answer(200, data, **headers)
    first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"]).groups()
    first, last = int(first), min(int(last or len(data)), len(data) - 1)
    if first >= len(data):
      return self._answer(416, **headers)
    headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
    return self._answer(206, data[first : last + 1], **headers)

  def do_POST(self):
    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    if "chunked" in self.headers.get("Transfer-Encoding", ""):
      raise NotImplementedError("chunked upload")
    bucket = self.server.bucket
    moved = re.search(rf"/o/([^/]+)/(moveTo|rewriteTo/b/{NAME})/o/([^/?]+)", self.path)
    if moved:
      source, name = (urllib.parse.unquote(moved[index]) for index in (1, 3))
      if source not in bucket.objects:
        return self._answer(404, {"error": {"code": 404, "message": "No such object"}})
      status = bucket.put(name, bucket.objects[source][0])
      if moved[2] == "moveTo":
        del bucket.objects[source]
      return self._answer(status, {"done": True, "resource": bucket.describe(name)})
    if not self._parse():
      return self._answer(404, {"error": {"code": 404, "message": "The bucket does not exist"}})
    name = self.query.get("name")
    if self.query["uploadType"] == "resumable":
      if "upload" not in self.query:
        here = f"http://{self.headers['Host']}{self.path}"
        upload = next(bucket.generations)
        bucket.uploads[str(upload)] = b""
        return self._answer(200, Location=f"{here}&upload={upload}")
      so_far = bucket.uploads[self.query["upload"]] + body
      bucket.uploads[self.query["upload"]] = so_far
      if self.headers["Content-Range"].endswith("/*"):
        return self._answer(308, Range=f"bytes=0-{len(so_far) - 1}")
      body = so_far
    if self.query["uploadType"] == "multipart":
      boundary = re.search('boundary="(.+)"', self.headers["Content-Type"])[1].encode()
      _, about, content, _ = re.split(rb"\r?\n?--" + re.escape(boundary), body)
      name = json.loads(re.split(rb"\r?\n\r?\n", about, maxsplit=1)[1])["name"]
      body = re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]
    status = bucket.put(name, body, self.query.get("ifGenerationMatch"))
    if status != 200:
      return self._answer(status, {"error": {"code": status, "message": "over quota"}})
    return self._answer(status, bucket.describe(name))

  def do_DELETE(self):
    bucket = self.server.bucket
    if not self._parse() or bucket.objects.pop(self.name, None) is None:
      return self._answer(404, {"error": {"code": 404, "message": "No such object"}})
    return self._answer(204)


@contextlib.contextmanager
def serve(port: int = 0) -> Iterator[tuple[Bucket, dict[str, str]]]:
  """Serves an empty bucket; yields it and the variables by which clients find it."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler)
  server.bucket = Bucket()
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  url = f"http://127.0.0.1:{server.server_address[1]}"
  try:
    yield (
      server.bucket,
      {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
      },
    )
  finally:
    server.shutdown()
    thread.join()
    server.server_close()
