class SchedulerBatchResultProcessor:
    def _append_prefill_hidden_states(self, *, req, logits_output, hidden_state_offset, capture_hidden_mode,
                                      extend_input_len, store=True):
        raise NotImplementedError
