"""SGLang's bookkeeping of drafts and verifies, in plain PyTorch: chains and trees of drafted tokens.

R requests, n tokens a verify: the newest token, which no draft model had to guess, and n − 1 drafted ones. A request's
tokens are nodes 0..n−1 of a tree whose root is the newest token; a chain is a tree without siblings. `table` int32
[requests, positions] says where in the KV cache a request's positions lie. What is filled is the caller's tensor.
"""

import ctypes

import torch


def build_tree_kernel_efficient_cpu(parent_list, selected, lengths, mask, positions, places, child, sibling,
                                    topk: int, depth: int, n: int, mode: int) -> None:
    """Links, positions and visibility of R trees.

    selected [R, n − 1]: which of all candidates were kept, best `topk` of each expanded node side by side: candidate c
    was drafted behind the c // topk-th expanded node, which is the root for 0 and candidate parent_list[c // topk]
    else. Filled: places [R, n] (rows of the verify), child [R, n] (first child) and sibling [R, n] (next one; −1:
    none), positions [R n] (`lengths` and the depth), mask bool [R, n, n] (a node sees its ancestors and itself).
    """
    if mode != 1:
        raise NotImplementedError("the CPU's attention takes a mask of the verify's own tokens (mode 1)")
    R = len(lengths)
    mask, positions = mask.view(R, n, n), positions.view(R, n)
    places.copy_(torch.arange(R * n).view(R, n))
    for r in range(R):
        kept, expanded = selected[r].tolist(), parent_list[r].tolist()
        parents = [0]
        for candidate in kept:
            group = candidate // topk
            parents.append(kept.index(expanded[group]) + 1 if group else 0)
        for node in range(n - 1, 0, -1):  # backwards, so that the first of the siblings comes to stand first
            sibling[r, node] = child[r, parents[node]]
            child[r, parents[node]] = node
        mask[r] = False
        for node in range(n):
            path = [node]
            while path[-1]:
                path.append(parents[path[-1]])
            mask[r, node, path] = True
            positions[r, node] = lengths[r] + len(path) - 1


def verify_tree_greedy_cpu(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
                           retrive_next_sibling, target_predict) -> None:
    """Follow the target's own choices from the root down, as far as drafts agree with them. (SGLang's spelling.)

    candidates [R, n] ids, the root's included; target_predict [R n] the target's choice behind each of them. Filled:
    accept_index [R, steps + 1] the rows of the path (the root's first), accept_token_num [R] drafts on it, predicts
    [R n] the target's choice at each row of the path.
    """
    chosen = target_predict.flatten()
    for r in range(len(candidates)):
        node, accepted = 0, 0
        while True:
            row = int(retrive_index[r, node])
            accept_index[r, accepted], predicts[row] = row, chosen[row]
            if accepted + 1 == accept_index.shape[1]:
                break
            node = int(retrive_next_token[r, node])
            while node != -1 and candidates[r, node] != chosen[row]:
                node = int(retrive_next_sibling[r, node])
            if node == -1:
                break
            accepted += 1
        accept_token_num[r] = accepted


def assign_draft_cache_locs_contiguous_cpu(slots, table, lengths, out, width: int, topk: int, steps: int) -> None:
    """Where the drafts' keys and values go: the topk · steps places behind each request's text, into out."""
    rows = out.view(len(slots), topk * steps)
    for row, slot, length in zip(rows, slots.tolist(), lengths.tolist(), strict=True):
        row.copy_(table[slot, length:length + topk * steps])


def build_draft_decode_metadata_cpu(table, slots, lengths, topk: int, steps: int, width: int):
    """A table [R topk, width] in which every branch is a request of its own: the text's places, then the branch's."""
    branches = torch.zeros(len(slots) * topk, width, dtype=table.dtype)
    for i, branch in enumerate(branches):
        r, k = divmod(i, topk)
        slot, length = int(slots[r]), int(lengths[r])
        branch[:length] = table[slot, :length]
        branch[length:length + steps] = table[slot, length + k * steps:length + (k + 1) * steps]
    return branches


def assign_extend_cache_locs_cpu(slots, table, starts, ends, out, width: int) -> None:
    """The places of positions starts[i] to ends[i] of every request, one request after another, into out."""
    places = [table[slot, a:b] for slot, a, b in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)]
    places = torch.cat(places) if places else table[0, :0]
    out[:len(places)] = places


def fill_bonus_tokens_cpu(tokens, lengths, out, stride: int) -> None:
    """The last of each request's accepted tokens: `lengths` [R] of them, root or bonus included, in rows of stride."""
    out.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index, places, out, size=None) -> None:
    """The cache's places of the accepted rows, without the gaps (−1), into the front of out."""
    rows = accept_index.flatten()
    rows = rows[rows >= 0].long()
    out[:len(rows)] = places[rows]


def rotate_input_ids_cpu(ids, starts, lengths, last, where=None) -> None:
    """The drafter's input: each request's tokens one to the left, `last` [R] behind them (or at rows `where`)."""
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length:
            ids[start:start + length - 1] = ids[start + 1:start + length].clone()
            ids[start + length - 1 if where is None else int(where.flatten()[i])] = last.flatten()[i]


def copy_all_layer_kv_cache_cpu(buffers, strides, targets, sources) -> None:
    """Rows of every layer's cache to other places; all are read before one is written. buffers: int64 addresses."""
    for address, stride in zip(buffers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in sources.tolist()]
        for row, data in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + row * stride, data, stride)
