"""python -m sglang.launch_server, faked: the same addresses and fields, a rule for a model, and faults on demand.

The text: token after token, 7 t + 3 modulo 251. A verify that stands behind token t accepts t modulo (steps + 1)
drafts. `faults` is taken from the front, one a request: an HTTP status, "drop" (the connection), "slow" (no answer for
as long as the client waits), "cut" (an answer that ends too early), "mute" (nothing of drafts, as older versions),
"die" (this request and all later ones).
"""

import json
import select
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCABULARY, CONTEXT = 251, 200


def follows(token: int) -> int:
    return (7 * token + 3) % VOCABULARY


def right(token: int, steps: int) -> int:
    """Drafts that are accepted behind `token`."""
    return token % (steps + 1)


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model: str, port: int = 0, steps: int = 3, draft: str = "", faults=(), **info):
        self.model, self.draft, self.steps, self.faults, self.asked = model, draft, steps, list(faults), []
        self.dead, self.info, self.lock = False, info, threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def server_info(self) -> dict:
        return {"version": "0.5.23", "dtype": "float32", "max_req_input_len": CONTEXT, "startup_time": self.url,
                "launch_command": f"--model-path {self.model} --port {self.server_address[1]} --dtype float32",
                "speculative_algorithm": "EAGLE3" if self.steps else None, "speculative_num_steps": self.steps,
                "speculative_eagle_topk": 1, "speculative_num_draft_tokens": self.steps and self.steps + 1,
                "speculative_draft_model_path": self.draft} | self.info

    def answer(self, ids: list[int], limit: int, stops: list[int], fault=None) -> dict:
        """As an engine: a token by the prefill, then verifies until an end is out."""
        text, lengths = [follows(ids[-1])], []
        while len(text) < limit and not set(text) & set(stops):
            lengths.append(right(text[-1], self.steps))
            for _ in range(lengths[-1] + 1):
                text.append(follows(text[-1]))
        length = next((i + 1 for i, token in enumerate(text[:limit]) if token in stops), limit)
        ended = {"type": "stop" if text[length - 1] in stops else "length"}
        meta = {"finish_reason": ended, "completion_tokens": length}
        if self.steps and lengths and fault != "mute":
            meta |= {"spec_verify_ct": len(lengths), "spec_num_correct_drafts": sum(lengths),
                     "spec_num_proposed_drafts": self.steps * len(lengths),
                     "spec_correct_drafts_histogram": [lengths.count(n) for n in range(max(lengths) + 1)]}
        return {"output_ids": text[:length - (fault == "cut")], "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        pages = {"/health": None, "/server_info": self.server.server_info(),
                 "/model_info": {"model_path": self.server.model, "architectures": ["LlamaForCausalLM"]}}
        if self.path in pages:
            self.reply(200, pages[self.path])
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, sampling = body["input_ids"], body["sampling_params"]
        with self.server.lock:
            warming = not self.server.asked
            self.server.asked.append(ids)
            fault = self.server.faults.pop(0) if self.server.faults and not warming else None
            self.server.dead |= fault == "die"
        if fault == "drop" or self.server.dead:
            self.close_connection = True
            return
        if fault == "slow":
            select.select([self.connection], [], [], 600)  # readable once the client has closed it
            self.close_connection = True
            return
        if isinstance(fault, int):
            self.reply(fault, {"error": {"message": f"fault {fault}"}})
        else:
            self.reply(200, self.server.answer(ids, sampling["max_new_tokens"], sampling["stop_token_ids"], fault))

    def reply(self, status: int, value) -> None:
        text = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


def main() -> None:
    given = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    if "--fail" in given:
        print("2026-01-01 starting", flush=True)
        raise RuntimeError(given["--fail"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as a scheduler
    print("child", child.pid, flush=True)
    if "--slow" in given:
        time.sleep(600)
    with Fake(given["--model-path"], int(given["--port"]), int(given.get("--speculative-num-steps", 0)),
              given.get("--speculative-draft-model-path", "")):
        threading.Event().wait()


if __name__ == "__main__":
    main()
