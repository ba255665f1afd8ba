"""Where a corpus comes from: prompts out of templates, answers out of the target."""
