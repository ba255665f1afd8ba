from types import SimpleNamespace

rank = 0


def get_parallel():
    return SimpleNamespace(pp_rank=0, attn_tp_rank=rank, attn_cp_rank=0)
