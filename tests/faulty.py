"""For the probe's tests: an engine with no more than an engine must have, whose states can be spoilt on the way."""


class Bare:
    """`facts`, `layers`, `dir`, `dtype`, `engine`, `capture`, `logits`, `generate`, as SGLang's target, and no more.

    `change(i, ids, aux, last, every)` → (aux, last) of row i of a captured batch; `every`: the whole batch, unspoilt.
    """

    engine = "bare"

    def __init__(self, target, change=None):
        self._target, self._change = target, change
        self.facts, self.layers, self.dir, self.dtype = target.facts, target.layers, target.dir, target.dtype

    def capture(self, rows):
        states = self._target.capture(rows)
        if not self._change:
            return states
        return [self._change(i, ids, *states[i], states) for i, ids in enumerate(rows)]

    def logits(self, last):
        return self._target.logits(last)

    def generate(self, prompts, *, max_new_tokens, stop_ids=()):
        return self._target.generate(prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
