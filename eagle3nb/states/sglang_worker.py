"""The process that holds SGLang's Engine: python -m eagle3nb.states.sglang_worker

One JSON object a line comes in, one goes out for each: first the Engine's arguments, then requests
{"id", "rows": [[ids]], "sampling": {…}, "states": bool}. States never pass here: the plugin writes them as files, whose
paths are in the answer. When the input ends, however its writer ended, the engine and its folder of states go too.
"""

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from eagle3nb.states.sglang_plugin import FOLDER

GRACE = 20  # seconds that an engine has for its own end


def main() -> int:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SGLang prints belongs to the log

    def reply(**values) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    arguments, requests = json.loads(sys.stdin.readline()), queue.SimpleQueue()
    threading.Thread(target=listen, args=(requests,), daemon=True).start()
    try:
        import sglang

        engine = sglang.Engine(**arguments)
        longest = engine._scheduler_init_result.scheduler_infos[0]["max_req_input_len"] - 1
        reply(id=0, version=sglang.__version__, longest=longest)
    except Exception as error:
        reply(id=0, error=said(error))
        return 1
    for request in iter(requests.get, None):
        try:
            reply(id=request["id"], rows=run(engine, **request))
        except Exception as error:
            reply(id=request["id"], error=said(error))
    engine.shutdown()
    sweep(engine.port_args.instance_id, engine.get_all_child_pids())
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)  # after all that could write into it
    return 0


def run(engine, *, id: int, rows, sampling: dict, states: bool) -> list[dict]:
    """Each row's {"ids": new tokens, "states": "path …" or "error …", "refused": why or None}, in the rows' order."""
    found = engine.generate(input_ids=rows, sampling_params=sampling, return_hidden_states=states,
                            rid=[f"{id}-{i}" for i in range(len(rows))])
    answers = []
    for one in found:
        ended = one["meta_info"].get("finish_reason") or {}
        kept = (one["meta_info"].get("hidden_states") or [None])[0]
        answers.append({"ids": one["output_ids"], "refused": ended.get("message") if ended.get("type") == "abort"
                        else None, "states": kept if isinstance(kept, str) else "error no plugin"})
    return answers


def sweep(instance: str, pids: list[int]) -> None:
    """Remove the shared memory of an engine that has ended. SGLang ends its processes by a kill, which leaves it: 16 KB
    an engine, 25 MB where it is tensor-parallel. The names are those of 0.5.23."""
    for pattern in (f"sglang_loads_{instance}_*", *(f"sgl_shm_*_{pid}_*" for pid in pids)):
        for left in Path("/dev/shm").glob(pattern):
            left.unlink(missing_ok=True)


def listen(requests: queue.SimpleQueue) -> None:
    """Lines into the queue; after the last one, if need be by force, the end of this process and of all its own."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)
    time.sleep(GRACE)
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    if os.getpgrp() == os.getpid():  # as it is started by sglang_process; in a group of others', none of them
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def said(error: Exception) -> str:
    """The error in one line; its traceback goes to the log."""
    traceback.print_exc()
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
