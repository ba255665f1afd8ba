"""What eagle3nb uses of SGLang, around a model of one line: for tests of the two processes, their files and their ends.

The model: after token x comes (3x + 1) mod 256; the residual stream after layer output L is x + 1000 L in every column,
the last hidden state 2x. Its states go through the project's plugin, rank after rank, as SGLang's do. What a row begins
with makes trouble: 200 the engine's death, 201 no answer until somebody removes the file `busy` from the folder of
states, where it then puts it, 202 a refusal. tests/sglang has the real one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.5.23"


class Engine:
    def __init__(self, *, model_path, tp_size, context_length, return_aux_hidden_state_layer_ids, dtype, fail="",
                 without_plugin=False, narrow=0, **other):
        print("loading", model_path)  # must not end up between the answers
        if fail == "scheduler":
            print("[TP0] Scheduler hit an exception: Traceback …\ntorch.OutOfMemoryError: 9 GiB", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if fail:
            raise ValueError(f"{fail}\nand more")
        if hasattr(sys.modules["__main__"], "GRACE"):  # the worker's: no machine is so slow that it ends this by force
            sys.modules["__main__"].GRACE = 300
        self.config = json.loads((Path(model_path) / "config.json").read_text())
        self.width, self.dtype = self.config["hidden_size"] - narrow, dtype
        self.layers, self.ranks, self.without_plugin = return_aux_hidden_state_layer_ids, tp_size, without_plugin
        self.child = subprocess.Popen(["sleep", "600"])
        self.port_args = SimpleNamespace(instance_id=f"fake{os.getpid()}")
        Path(f"/dev/shm/sglang_loads_fake{os.getpid()}_0.shm").touch()
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_req_input_len": context_length - 6}])

    def generate(self, *, input_ids, sampling_params, return_hidden_states, rid):
        if any(row[0] == 200 for row in input_ids):
            print("ValueError: a row of 200", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if any(row[0] == 201 for row in input_ids):
            busy = Path(os.environ["EAGLE3NB_SGLANG_STATES"]) / "busy"
            busy.touch()
            while busy.exists():
                time.sleep(0.01)
        states = self.states(input_ids, rid) if return_hidden_states else [None] * len(input_ids)
        return [{"output_ids": self.answer(row, **sampling_params), "meta_info": {
            "finish_reason": {"type": "abort", "message": "too much\nof it"} if row[0] == 202 else {"type": "length"},
            **({"hidden_states": kept} if kept else {})}} for row, kept in zip(input_ids, states, strict=True)]

    def answer(self, row, *, temperature, max_new_tokens, stop_token_ids=(), ignore_eos=False):
        assert temperature == 0
        ids = []
        while len(ids) < max_new_tokens:
            ids.append((3 * (ids or row)[-1] + 1) % 256)
            if not ignore_eos and ids[-1] in {*stop_token_ids, self.config["eos_token_id"]}:
                break
        return ids

    def states(self, rows, rid):
        import torch

        from eagle3nb.states.sglang_plugin import append
        from sglang.srt import runtime_context

        if self.without_plugin:
            return [[[0.5] * self.width] for _ in rows]
        x = torch.tensor([i for row in rows for i in row], dtype=getattr(torch, self.dtype))[:, None]
        batch = SimpleNamespace(hidden_states=torch.cat([(x + 1000 * layer).expand(-1, self.width)
                                                         for layer in self.layers], dim=-1),
                                last_hidden_states=(2 * x).expand(-1, self.width))
        for rank in range(self.ranks):
            runtime_context.rank = rank
            requests = [SimpleNamespace(rid=name, hidden_states=[], return_hidden_states=True) for name in rid]
            offset = 0
            for req, row in zip(requests, rows, strict=True):
                offset = append(original, self, req=req, logits_output=batch, hidden_state_offset=offset,
                                capture_hidden_mode=SimpleNamespace(is_full=lambda: True), extend_input_len=len(row))
            if rank == 0:
                found = [req.hidden_states for req in requests]
            else:
                assert not any(req.hidden_states for req in requests)
        return found

    def get_all_child_pids(self):
        return [self.child.pid]

    def shutdown(self):
        self.child.kill()


def original(self, *, req, hidden_state_offset, extend_input_len, store, **other):
    assert not store  # SGLang's own would turn the states into JSON
    return hidden_state_offset + extend_input_len
