"""Upload to the hub, against a local server that speaks as much of its protocol as a commit needs."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.core.errors import StageFailed, UserError


class Hub(BaseHTTPRequestHandler):
    """One model repository in memory: creation, upload mode, LFS objects, commits."""

    def log_message(self, *args):
        pass

    def _answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self):
        self._answer({"name": "owner", "siblings": [], "sha": "0" * 40, "id": "owner/draft", "private": True})

    def do_POST(self):
        body, server = self._body(), self.server
        server.tokens.add(self.headers.get("Authorization"))
        if server.refuse:
            return self._answer({"error": "no write access"}, 403)
        if self.path == "/api/repos/create":
            server.created = json.loads(body)
            return self._answer({"url": f"{server.url}/owner/draft"})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = {f["path"]: "lfs" if f["path"].endswith((".safetensors", ".png")) else "regular" for f in files}
            return self._answer(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in mode.items()]}
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for o in objects:
                o["actions"] = {"upload": {"href": f"{server.url}/lfs/{o['oid']}", "header": {}}}
            return self._answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    server.files[entry["value"]["path"]] = server.lfs[entry["value"]["oid"]]
            url = f"{server.url}/owner/draft/commit/{'a' * 40}"
            return self._answer({"commitUrl": url, "commitOid": "a" * 40, "success": True})
        return self._answer({})

    def do_PUT(self):
        content = self._body()
        self.server.lfs[hashlib.sha256(content).hexdigest()] = content
        self._answer({})


@pytest.fixture
def hub(monkeypatch):
    """A running hub; `huggingface_hub` reads its address when it is imported, so its constants are set too."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.lfs, server.tokens, server.created, server.refuse = {}, {}, set(), None, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    yield server
    server.shutdown()


@pytest.fixture
def exported(tmp_path):
    """`exported(passed, served)`: an export folder."""

    def make(passed=True, served="checked"):
        folder = tmp_path / "export"
        folder.mkdir()
        for name in ("config.json", "README.md", "model.safetensors", "manifest.json", "acceptance.png"):
            (folder / name).write_bytes(name.encode() * 7)
        (folder / "verification.json").write_text(json.dumps({"passed": passed, "served": served}))
        return folder

    return make


def test_a_proven_export_is_uploaded_whole_and_alone(hub, exported):
    from draftsmith.export.hub import push_to_hub

    folder = exported()
    url = push_to_hub(folder, "owner/draft")
    assert url.endswith("a" * 40)
    names = ["README.md", "acceptance.png", "config.json", "model.safetensors", "verification.json"]
    assert sorted(hub.files) == names  # the manifest names paths of this machine
    assert all(hub.files[name] == (folder / name).read_bytes() for name in names)
    assert (hub.created["name"], hub.created["organization"]) == ("draft", "owner")
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    assert hub.tokens == {"Bearer hf_test"}


@pytest.mark.parametrize(
    ("passed", "served"), [(True, "not run: vLLM is not installed"), (None, "not run"), (False, "checked")]
)
def test_an_unproven_one_is_not_uploaded_without_force(hub, exported, passed, served):
    from draftsmith.export.hub import push_to_hub

    folder = exported(passed, served)
    with pytest.raises(UserError, match=r"is not proven on a server.*--force"):
        push_to_hub(folder, "owner/draft")
    assert not hub.files and hub.created is None
    push_to_hub(folder, "owner/draft", force=True)
    assert "model.safetensors" in hub.files


def test_a_folder_without_verification_is_unproven(hub, exported):
    from draftsmith.export.hub import push_to_hub

    folder = exported()
    (folder / "verification.json").unlink()
    with pytest.raises(UserError, match="is not proven"):
        push_to_hub(folder, "owner/draft")


def test_the_hubs_refusal_is_said(hub, exported):
    from draftsmith.export.hub import push_to_hub

    hub.refuse = True
    with pytest.raises(StageFailed, match=r"owner/draft was not uploaded .*403.*the export itself is in"):
        push_to_hub(exported(), "owner/draft")


def test_a_name_that_is_none(hub, exported):
    from draftsmith.export.hub import push_to_hub

    with pytest.raises(UserError, match=r"--push-to-hub a/b/c"):
        push_to_hub(exported(), "a/b/c")


def test_the_command_line(hub, trained_run, config_file):
    from typer.testing import CliRunner

    from draftsmith.core.cli import app

    line = ["export", "--config", config_file(trained_run), "--checkpoint", "step-8", "--push-to-hub", "owner/draft"]
    done = CliRunner().invoke(app, line)
    assert isinstance(done.exception, UserError) and "served: not run: export.verify is offline" in str(done.exception)
    assert not hub.files
    done = CliRunner().invoke(app, [*line, "--force"], catch_exceptions=False)
    assert done.exit_code == 0 and "uploaded: " in done.output
    assert json.loads(hub.files["config.json"])["eagle_aux_hidden_state_layer_ids"] == [3, 4, 5]
    assert b"test, step-0000008" in hub.files["README.md"]
